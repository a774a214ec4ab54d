#!/usr/bin/env bash
# Counts instructions a tile in the hot loops of the kernels as nvcc compiles them, and puts the table into
# docs/kernels.md. cuobjdump and nvdisasm come from NVIDIA's PyPI packages, into build/cuda_tools.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
tools="$ROOT/build/cuda_tools"
packages=(nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)
if ! compgen -G "$tools/nvidia/*/bin/cuobjdump" >/dev/null; then
  say "getting ${packages[*]} from PyPI"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools" "${packages[@]}" ||
    die "pip could not get them"
fi
PATH="$(dirname "$(compgen -G "$tools/nvidia/*/bin/cuobjdump")"):$PATH"
cmake --preset default -S "$ROOT" >/dev/null
cmake --build "$ROOT/build/default" --target strata_kernels_device
objects=$(find "$ROOT/build/default/cuda" -path '*strata_kernels_device/*.o')
[ -n "$objects" ] || die "nvcc has built no kernels -> install a CUDA toolkit"
for object in $objects; do cuobjdump -sass "$object"; done |
  python3 "$ROOT/scripts/bench/sass_counts.py" --only "${1:-attention_(forward|queries|keys)_kernel}" \
    --write "$ROOT/docs/kernels.md"
