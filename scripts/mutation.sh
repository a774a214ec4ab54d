#!/usr/bin/env bash
# Plants every fault of tests/cuda/mutations.py in the kernels, one at a time, shows that the emulated tests see it, and
# writes which mode saw which to docs/mutations.md. Takes about half an hour on 2 cores. Arguments go to tests/cuda/mutate.py.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
"$ROOT/scripts/cuda_headers.sh"
[ $# -gt 0 ] || set -- --write "$ROOT/docs/mutations.md"
exec python3 "$ROOT/tests/cuda/mutate.py" "$@"
