#!/usr/bin/env bash
# Installs what building needs: Debian packages and a Python environment in build/venv. --test: also what the tests need.
# --build: then builds trainer.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
kind=build
then_build=0
for argument in "$@"; do
  case "$argument" in
    --test) kind=test ;;
    --build) then_build=1 ;;
    -h | --help) echo "usage: scripts/setup.sh [--test] [--build]"; exit 0 ;;
    *) die "unknown argument $argument -> scripts/setup.sh [--test] [--build]" ;;
  esac
done
mkdir -p "$ROOT/build"
install_packages $kind
python_environment
[ $then_build = 0 ] || build default trainer
