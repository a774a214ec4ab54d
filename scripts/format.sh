#!/usr/bin/env bash
# Formats our C++ and CUDA sources; --check only says which files differ.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$ROOT"
mapfile -t files < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
[ ${#files[@]} -gt 0 ] || exit 0
if [ "${1:-}" = --check ]; then
  clang-format --dry-run -Werror "${files[@]}"
else
  clang-format -i "${files[@]}"
fi
