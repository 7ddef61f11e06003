#!/usr/bin/env bash
# Prints what pip has to install before `pip install --no-build-isolation .`: PyPI has CMake and Ninja as
# programs, for machines where they are missing or old. Exits with a message if there is no C++ compiler.
set -euo pipefail

if ! command -v "${CXX:-g++}" > /dev/null; then
  echo "No C++ compiler '${CXX:-g++}'. On Debian or Ubuntu: sudo apt-get install g++" >&2
  exit 1
fi
echo "setuptools>=77,<82" # torch 2.11 to 2.15 ask for less than 82
if ! [[ $(cmake --version 2> /dev/null) =~ ([0-9]+)\.([0-9]+) ]] ||
  ((BASH_REMATCH[1] < 3 || (BASH_REMATCH[1] == 3 && BASH_REMATCH[2] < 25))); then
  echo "cmake>=3.25,<5"
fi
command -v ninja > /dev/null || echo "ninja"
