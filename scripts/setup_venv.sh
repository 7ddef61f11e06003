#!/usr/bin/env bash
# usage: setup_venv.sh VENV PYTHON TORCH EXTRA...
# Makes the virtual environment VENV from PYTHON with torch==TORCH, what the build needs and the given
# extras of pyproject.toml. A second run does nothing unless pyproject.toml or the arguments changed.
set -euo pipefail
venv=$1 python=$2 torch=$3
shift 3
scripts=$(cd "$(dirname "$0")" && pwd)

fail() {
  echo "$1" >&2
  exit 1
}

# One stamp for each extra: `make test` needs what `make lint` needs and more.
missing=()
for extra in "$@"; do
  stamp=$venv/.installed-$extra-torch-$torch
  [[ -e $stamp && $stamp -nt $scripts/../pyproject.toml ]] || missing+=("$extra")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

if [[ ! -x $venv/bin/python ]]; then
  command -v "$python" > /dev/null ||
    fail "No Python at '$python'. On Debian or Ubuntu: sudo apt-get install python3 python3-venv python3-dev"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "torchium needs Python 3.10 or newer, but '$python' is $("$python" -V). Pass PYTHON=path/to/python3."
  "$python" -c 'import ensurepip, venv' 2> /dev/null ||
    fail "'$python' cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv"
  "$python" -m venv "$venv"
fi
# A virtual environment without pip is what is left when its making was interrupted.
"$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$venv/bin/python" -m ensurepip > /dev/null

tools=$("$scripts/build_tools.sh")
extras=$("$venv/bin/python" "$scripts/requirements.py" "${missing[@]}")
mapfile -t requirements <<< "torch==$torch
$tools
$extras"
echo "Installing into $venv: ${requirements[*]}"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
for extra in "${missing[@]}"; do
  touch "$venv/.installed-$extra-torch-$torch"
done
