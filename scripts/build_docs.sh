#!/usr/bin/env bash
# Builds the documentation into docs/_build/html; a warning is an error. Needs an importable torchium.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v doxygen >/dev/null || echo "doxygen is not installed: the C++ API reference will be left out"
sphinx-build --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
echo "docs/_build/html/index.html"
