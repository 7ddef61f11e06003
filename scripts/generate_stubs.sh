#!/usr/bin/env bash
# usage: generate_stubs.sh [FOLDER]
# Writes FOLDER/torchium_cpp/_C.pyi (default: python/) from the compiled module that Python imports.
# Run it after a change of the bindings; a test compares the result with the file in the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/python}
stub=$folder/torchium_cpp/_C.pyi

python -m pybind11_stubgen torchium_cpp._C --output-dir "$folder" --ignore-unresolved-names=".*"
ruff check --quiet --fix --select I,F401,UP --config "$root/pyproject.toml" "$stub"
ruff format --quiet --config "$root/pyproject.toml" "$stub"
