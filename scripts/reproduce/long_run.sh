#!/usr/bin/env bash
# FSDP against FL+FSDP, FL+HSDP and DiLoCo over more than 1,000 steps at equal tokens, validated once an epoch.
# Writes docs/long_run.md and docs/long_run.png. A run that is done already is not repeated.
source "$(dirname "${BASH_SOURCE[0]}")/prepare.sh"
say "training"
"$PYTHON" "$ROOT/scripts/reproduce/long_run.py" --trainer "$TRAINER" --shards "$SHARDS" --vocab-size $VOCAB_SIZE \
  --runs "$ROOT/build/reproduce/long_run" --out "$ROOT/docs" "$@"
