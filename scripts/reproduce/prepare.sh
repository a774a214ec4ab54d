# Sourced by the experiments: sets up, builds the trainer, and makes Italian token shards of vocabulary 8192 in
# $SHARDS, unless they are there.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
VOCAB_SIZE=8192
SHARDS="$ROOT/build/reproduce/shards"
TRAINER="$ROOT/build/default/src/trainer"
corpus="$ROOT/build/corpus/italian.jsonl"
mkdir -p "$ROOT/build/reproduce"
install_packages build
python_environment
say "building trainer"
build default trainer
[ -s "$corpus" ] || { say "Italian corpus from Debian packages"; "$PYTHON" "$ROOT/data_tools/italian_corpus.py" --out "$corpus"; }
if [ ! -s "$SHARDS/validation.idx" ]; then
  say "tokenizer and token shards"
  tokenizer="$ROOT/build/reproduce/tokenizer.json"
  "$PYTHON" "$ROOT/data_tools/train_tokenizer.py" "$corpus" --vocab-size $VOCAB_SIZE --out "$tokenizer"
  "$PYTHON" "$ROOT/data_tools/prepare.py" "$corpus" --tokenizer "$tokenizer" --out "$SHARDS" \
    --validation-fraction 0.03 --overwrite
fi
