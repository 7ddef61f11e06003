#!/usr/bin/env bash
# Formatting, lint, include order and types; changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(find include src python tests examples benchmarks \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -not -path '*/build*/*' | sort)
mypy & # takes as long as all others together
types=$!
trap 'kill $types 2> /dev/null || true' EXIT
echo "clang-format: ${#sources[@]} files"
printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -n 100 clang-format --dry-run --Werror
python scripts/check_includes.py
python scripts/check_imports.py
ruff check .
ruff format --check .
wait $types
