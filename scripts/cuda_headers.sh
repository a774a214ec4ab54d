#!/usr/bin/env bash
# Makes sure that the CUDA headers which the CPU emulation of the kernels compiles against are there: the toolkit's where
# one is installed, else those of NVIDIA's PyPI packages, in build/cuda_headers. Says what it found or did.
# --force gets the packages even where a toolkit is installed.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
version=13.0
folder="$ROOT/build/cuda_headers"
packages=("nvidia-cuda-runtime==$version.*" "nvidia-cuda-crt==$version.*" "nvidia-cuda-cccl==$version.*")

toolkit_include() {
  local nvcc candidate
  nvcc=$(command -v nvcc || true)
  [ -z "$nvcc" ] || nvcc=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  for candidate in "$nvcc" "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr; do
    if [ -n "$candidate" ] && [ -f "$candidate/include/cuda_runtime.h" ] && [ -f "$candidate/include/cuda_bf16.h" ]; then
      echo "$candidate/include"
      return
    fi
  done
}

case "${1:-}" in
  "" | --force) ;;
  *) die "unknown argument $1 -> scripts/cuda_headers.sh [--force]" ;;
esac
found=$(toolkit_include)
if [ -n "$found" ] && [ "${1:-}" != --force ]; then
  echo "CUDA headers: the toolkit's, in $found"
  exit 0
fi
if [ -f "$folder/include/cuda_runtime.h" ] && [ "$(cat "$folder/packages.txt" 2>/dev/null)" = "${packages[*]}" ]; then
  echo "CUDA headers: already in $folder/include (${packages[*]})"
  exit 0
fi
say "getting the CUDA headers from PyPI: ${packages[*]}"
rm -rf "$folder"
mkdir -p "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/packages" "${packages[@]}" ||
  die "pip could not get them -> install a CUDA toolkit, or configure with -DSTRATA_CUDA_HEADERS=<folder of cuda_runtime.h>"
mv "$folder"/packages/nvidia/cu*/include "$folder/include"
rm -rf "$folder/packages" "$folder/venv"
echo "${packages[*]}" >"$folder/packages.txt"
echo "CUDA headers: put in $folder/include"
