#!/usr/bin/env bash
# The paper's learning experiment (Table 3, Figure 2) on 16 ranks: four meshes, three seeds, three precisions.
# Writes docs/table3_small.md and docs/table3_small.png. A run that is done already is not repeated.
source "$(dirname "${BASH_SOURCE[0]}")/prepare.sh"
say "training"
"$PYTHON" "$ROOT/scripts/reproduce/table3_small.py" --trainer "$TRAINER" --shards "$SHARDS" --vocab-size $VOCAB_SIZE \
  --runs "$ROOT/build/reproduce/table3_small" --out "$ROOT/docs" "$@"
