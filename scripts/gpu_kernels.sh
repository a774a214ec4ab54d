#!/usr/bin/env bash
# Builds the kernel tests for this machine's GPU, runs them on it, and times every kernel against its limits.
# --build-only: compiles and links, for a machine without a GPU. The table ends in build/gpu/kernels.md.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
build_only=0
case "${1:-}" in
  "") ;;
  --build-only) build_only=1 ;;
  -h | --help) echo "usage: scripts/gpu_kernels.sh [--build-only]"; exit 0 ;;
  *) die "unknown argument $1 -> scripts/gpu_kernels.sh [--build-only]" ;;
esac
[ -n "$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)" ] ||
  die "no nvcc -> install a CUDA toolkit, 12.4 or newer"

# One GPU's architecture is enough where there is one; else all.
architectures=()
if [ $build_only = 0 ]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n1 | tr -d .) || true
  [[ "$capability" =~ ^[0-9]+$ ]] ||
    die "no GPU here: nvidia-smi finds none -> run this on a machine with one, or with --build-only"
  [ "$capability" -ge 80 ] || die "this GPU has compute capability $capability -> 80 or newer is needed"
  architectures=("-DSTRATA_GPU_ARCHITECTURES=$capability")
fi

folder="$ROOT/build/gpu"
mkdir -p "$folder"
say "building for the device"
cmake -S "$ROOT" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSTRATA_CUDA=ON "${architectures[@]}" \
  >"$folder/configure.log" 2>&1 || { cat "$folder/configure.log"; die "configuring failed"; }
cmake --build "$folder" --parallel "$CORES" --target device_programs
if [ $build_only = 1 ]; then
  echo "built and linked; nothing was run"
  exit 0
fi

say "kernel tests on the device"
for program in "$folder"/tests/kernels/kernels_*_device; do
  echo "${program##*/}"
  "$program" || die "${program##*/} failed on the device"
done
say "times against the limits"
"$folder/tests/cuda/time_kernels" >"$folder/times.json" || die "timing failed"
python3 "$ROOT/scripts/bench/roofline.py" --measured "$folder/times.json" | tee "$folder/kernels.md"
