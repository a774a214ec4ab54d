#!/usr/bin/env bash
# Pre-trains a small Llama on Italian text, from an empty machine to a plot: packages, build, corpus, tokenizer, token
# shards, a run of configs/quickstart.json, and what its perplexity compares with. What is there and newer than what it is
# made from is not made again; every call trains in a run folder of its own, runs/quickstart/001, 002, ...
# --check: fail unless the validation perplexity is at least 16 times below the unigram's and 1.5 times below the
# bigram's.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
check=0
for argument in "$@"; do
  case "$argument" in
    --check) check=1 ;;
    -h | --help) echo "usage: scripts/quickstart.sh [--check]"; exit 0 ;;
    *) die "unknown argument $argument -> scripts/quickstart.sh [--check]" ;;
  esac
done
cd "$ROOT"
config=configs/quickstart.json
trainer=build/default/src/trainer
corpus=build/corpus/italian.jsonl
tokenizer=build/corpus/tokenizer.json
shards=build/corpus/shards
baseline=build/corpus/ngram.json
fp32_steps=2050
took=()

# timed NAME command...: runs a stage and remembers how long it took.
timed() {
  local name=$1 began=$SECONDS
  shift
  say "$name"
  "$@"
  took+=("$name $((SECONDS - began)) s")
}

# fresh FILE SOURCE...: whether FILE is there and no older than any of its sources.
fresh() {
  local file=$1 source
  shift
  [ -e "$file" ] || return 1
  for source in "$@"; do [ ! "$source" -nt "$file" ] || return 1; done
  echo "$file is up to date"
}

# from_json FILE EXPRESSION: a value computed from the object `c` in a JSON file.
from_json() {
  "$PYTHON" -c 'import json, sys; c = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"
}

set_up() {
  install_packages build
  python_environment
}

make_corpus() {
  fresh $corpus data_tools/italian_corpus.py || "$PYTHON" data_tools/italian_corpus.py --out $corpus
}

make_shards() {
  local vocabulary
  vocabulary=$(from_json $config 'c["model"]["vocab_size"]')
  # The configuration names the vocabulary's size, so the tokenizer is as old as the configuration.
  fresh $tokenizer $corpus $config data_tools/train_tokenizer.py data_tools/tokenizer_files.py ||
    "$PYTHON" data_tools/train_tokenizer.py $corpus --vocab-size "$vocabulary" --out $tokenizer
  fresh $shards/validation.idx $tokenizer $corpus data_tools/prepare.py data_tools/encode.py data_tools/shards.py ||
    "$PYTHON" data_tools/prepare.py $corpus --tokenizer $tokenizer --out $shards --validation-fraction 0.03 --overwrite
  fresh $baseline $shards/validation.idx data_tools/ngram_baseline.py || {
    "$PYTHON" data_tools/ngram_baseline.py --train $shards/train --validation $shards/validation --json >$baseline.partial
    mv $baseline.partial $baseline
  }
  cat $baseline
}

# Claims the next free number: a folder can be made only once.
new_run() {
  local number=1
  mkdir -p runs/quickstart
  while ! mkdir "$(printf 'runs/quickstart/%03d' $number)" 2>/dev/null; do
    [ $number -lt 999 ] || die "runs/quickstart is full or cannot be written -> remove old runs from it"
    number=$((number + 1))
  done
  run=$(printf 'runs/quickstart/%03d' $number)
}

# Without bf16 instructions a step takes twice as long: then the run is shorter, so that the whole stays under 12 minutes.
train() {
  local ranks steps precision
  ranks=$(from_json $config 'c["mesh"]["federate"] * c["mesh"]["replicate"] * c["mesh"]["shard"]')
  steps=$(from_json $config 'c["schedule"]["steps"]')
  precision=$($trainer --config $config --dry-run | sed -n 's/^ *"precision": "\(.*\)",\{0,1\}$/\1/p')
  [ "$precision" != fp32 ] || steps=$fp32_steps
  echo "$ranks ranks, $steps steps in $precision, log in $run/log.txt"
  mpiexec -n "$ranks" $trainer --config $config --set "run_dir=$run" --set "schedule.steps=$steps"
}

plot() {
  "$PYTHON" data_tools/plot.py "$run" --line "unigram=$(from_json $baseline 'c["unigram_perplexity"]')" \
    --line "bigram=$(from_json $baseline 'c["bigram_perplexity"]')"
}

mkdir -p build
timed "packages and Python environment" set_up
timed "building trainer" build default trainer
timed "Italian corpus from Debian packages" make_corpus
timed "tokenizer, token shards, n-gram baselines" make_shards
new_run
timed "training in $run" train
timed "plot" plot

say "done"
for stage in "${took[@]}"; do echo "  $stage"; done
options=()
[ $check = 0 ] || options=(--check)
"$PYTHON" scripts/lib/quickstart_summary.py "$run" $baseline "${options[@]}"
