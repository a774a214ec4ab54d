#!/usr/bin/env bash
# How much of the aggregation each schedule leaves exposed: two federation groups of one rank on two hosts (network
# namespaces), joined by a throttled link. Needs root. See streaming_exposed.py for what is measured.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../lib/two_hosts.sh"
usage="usage: scripts/bench/streaming_exposed.sh [--probe PATH] [--mbit N] [--repeats N]"
probe="" mbit=150 repeats=3
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) echo "$usage"; exit 0 ;;
    --probe | --mbit | --repeats) [ $# -ge 2 ] || die "$1 needs a value -> $usage"; printf -v "${1#--}" %s "$2"; shift 2 ;;
    *) die "unknown argument $1 -> $usage" ;;
  esac
done
mkdir -p "$ROOT/build"
python_environment
if [ -z "$probe" ]; then
  build default --target mesh_probe
  probe=$ROOT/build/default/tests/equivalence/mesh_probe
fi
two_hosts_up "$mbit"
"$PYTHON" "$ROOT/scripts/bench/streaming_exposed.py" prepare "$HOSTS_FOLDER" --repeats "$repeats"
two_hosts_mpiexec 2 "$probe" "$HOSTS_FOLDER/cases.json" 2>"$HOSTS_FOLDER/log" || { tail -5 "$HOSTS_FOLDER/log"; die "training failed"; }
echo "link of $mbit Mbit/s in each direction"
"$PYTHON" "$ROOT/scripts/bench/streaming_exposed.py" report "$HOSTS_FOLDER"
