#!/usr/bin/env bash
# run.sh TEST.py [unittest arguments]: with PYTHON, or the environment that scripts/setup.sh makes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/../../build/venv/bin/python}
"$python" -c 'import numpy' || { echo "no NumPy in $python -> run scripts/setup.sh, or set PYTHON" >&2; exit 1; }
export PYTHONDONTWRITEBYTECODE=1
exec "$python" "$here/$1" "${@:2}"
