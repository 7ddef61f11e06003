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
# pip hides what CMake says about the version of torch.
newest=$(sed -n 's/^set(TORCHIUM_NEWEST_TORCH \([0-9.]*\)).*/\1/p' CMakeLists.txt)
"$python" - "$newest" << 'PY'
import importlib.metadata
import sys

installed, newest = importlib.metadata.version("torch"), sys.argv[1]
if tuple(map(int, installed.split(".")[:2])) > tuple(map(int, newest.split("."))):
    print(
        f"torch {installed} is newer than {newest}, the newest that torchium is tested with. "
        f"If it does not compile: pip install 'torch=={newest}.*'",
        file=sys.stderr,
    )
PY
pip install --no-build-isolation .
cd / && "$python" -c 'import torchium; print(torchium.show_config(), end="")'
