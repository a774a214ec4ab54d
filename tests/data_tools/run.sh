#!/usr/bin/env bash
# Tests the Python data tools, in the data tools' virtual environment.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib/common.sh"
mkdir -p "$ROOT/build"
python_environment
here="$ROOT/tests/data_tools"
installed="$ROOT/build/venv/test-requirements.txt"
if ! cmp -s "$here/requirements.txt" "$installed"; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$installed"
fi
exec "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 "$here" "$@"
