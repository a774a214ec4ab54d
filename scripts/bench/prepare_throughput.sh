#!/usr/bin/env bash
# How fast prepare.py is, end to end, against the tokenizers library alone on the same text and cores.
# prepare_throughput.sh [CORPUS.jsonl TOKENIZER.json]; without arguments: the Italian corpus, vocabulary 8192.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
mkdir -p "$ROOT/build"
python_environment
corpus=${1:-$ROOT/build/corpus/italian.jsonl}
tokenizer=${2:-$ROOT/build/bench/tokenizer-8192.json}
if [ $# -eq 0 ]; then
  [ -f "$corpus" ] || "$PYTHON" "$ROOT/data_tools/italian_corpus.py" --out "$corpus"
  [ -f "$tokenizer" ] || "$PYTHON" "$ROOT/data_tools/train_tokenizer.py" "$corpus" --vocab-size 8192 --out "$tokenizer"
fi
"$PYTHON" "$ROOT/scripts/bench/prepare_throughput.py" "$corpus" "$tokenizer"
