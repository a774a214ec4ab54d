# Shared by the scripts: sourced, not run. Gives ROOT, say, die, and the set-up steps.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONDONTWRITEBYTECODE=1
# Compilers and tests at once; asked before OMP_NUM_THREADS is set, which nproc would answer with.
CORES=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
# MPI refuses neither root nor more ranks than cores with MPICH; threads stay at one unless a config says otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# install_packages build|test: installs what is missing with apt; without root says exactly what to install.
install_packages() {
  local wanted=() missing=() p
  mapfile -t wanted < <(awk -v kind="$1" '$1 == "build" || $1 == kind {print $2}' \
                        "$ROOT/third_party/packages-debian.txt")
  command -v dpkg-query >/dev/null || { echo "not a Debian system: install the equivalents of: ${wanted[*]}"; return 0; }
  for p in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
  done
  if [ ${#missing[@]} -eq 0 ]; then echo "packages: all ${#wanted[@]} are installed"; return 0; fi
  if [ "$(id -u)" -ne 0 ]; then
    die "packages are missing -> ask an administrator to run: apt-get install --no-install-recommends ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  apt-get -o DPkg::Lock::Timeout=300 update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
}

# python_environment: the data tools' virtual environment in build/venv, made again when its requirements change.
python_environment() {
  local venv="$ROOT/build/venv" wanted="$ROOT/data_tools/requirements.txt"
  if [ ! -f "$venv/requirements.txt" ] || ! cmp -s "$venv/requirements.txt" "$wanted"; then
    say "Python environment for the data tools in build/venv"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" "$venv/requirements.txt"
  fi
  PYTHON="$venv/bin/python"
}

# build PRESET [TARGET...]: configures and builds the targets, or everything.
build() {
  local preset=$1 targets=()
  shift
  [ $# = 0 ] || targets=(--target "$@")
  (cd "$ROOT" && cmake --preset "$preset" >"$ROOT/build/$preset-configure.log" 2>&1) ||
    { cat "$ROOT/build/$preset-configure.log"; die "configuring $preset failed"; }
  grep -E '^-- CUDA:' "$ROOT/build/$preset-configure.log" || true
  (cd "$ROOT" && cmake --build --preset "$preset" --parallel "$CORES" "${targets[@]}")
}
