#!/usr/bin/env bash
# Installs what building (and, with --test, testing) needs: Debian packages and a Python environment in build/venv.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
kind=build
[ "${1:-}" = --test ] && kind=test
mkdir -p "$ROOT/build"
install_packages $kind
python_environment
