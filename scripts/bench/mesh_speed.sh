#!/usr/bin/env bash
# Tokens a second of meshes of one, two and eight ranks on the benchmark model, one thread a rank, in turns in one run.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
usage="usage: scripts/bench/mesh_speed.sh [--trainer PATH] [--repeats N] [--mesh FxRxS]..."
trainer="" repeats=3 meshes=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) echo "$usage"; exit 0 ;;
    --trainer | --repeats) [ $# -ge 2 ] || die "$1 needs a value -> $usage"; printf -v "${1#--}" %s "$2"; shift 2 ;;
    --mesh) [ $# -ge 2 ] || die "$1 needs a value -> $usage"; meshes+=("$2"); shift 2 ;;
    *) die "unknown argument $1 -> $usage" ;;
  esac
done
mkdir -p "$ROOT/build"
python_environment
if [ -z "$trainer" ]; then
  build default --target trainer
  trainer=$ROOT/build/default/src/trainer
fi
[ ${#meshes[@]} -gt 0 ] || meshes=(1x1x1 1x1x2 1x1x8)
exec "$PYTHON" "$ROOT/scripts/bench/mesh_speed.py" --trainer "$trainer" --repeats "$repeats" "${meshes[@]}"
