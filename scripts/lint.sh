#!/usr/bin/env bash
# Formatting, lint, include order and types; changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(find include src python tests examples benchmarks \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -not -path '*/build*/*' | sort)
echo "clang-format: ${#sources[@]} files"
clang-format --dry-run --Werror "${sources[@]}"
python scripts/check_includes.py
python scripts/check_imports.py
ruff check .
ruff format --check .
mypy
