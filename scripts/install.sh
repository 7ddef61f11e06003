#!/usr/bin/env bash
# usage: install.sh PYTHON TORCH
# Builds torchium against the torch that PYTHON has (TORCH, if it has none) and installs it there.
set -euo pipefail
python=$1 torch=$2
cd "$(dirname "$0")/.."

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "torchium needs Python 3.10 or newer; '$python' does not run or is older." >&2
  exit 1
fi
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
requirements=$(scripts/build_tools.sh)
mapfile -t requirements <<< "$requirements"
"$python" -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null ||
  requirements+=("torch==$torch")
pip install --quiet "${requirements[@]}"
pip install --no-build-isolation .
cd / && "$python" -c 'import torchium; print(torchium.show_config(), end="")'
