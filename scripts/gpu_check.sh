#!/usr/bin/env bash
# usage: gpu_check.sh [BUILD [CHECK...]]   (default: build, and all; PYTHON=... chooses the Python, default python3)
# CHECK is one of pytest, zoo, gtest, memcheck, racecheck and benchmarks, where one call may not take as long as all.
# On a machine with a CUDA device: the Python tests marked `cuda`, the zoo, the C++ tests,
# compute-sanitizer and the benchmarks, over a build that may have been made elsewhere: BUILD/python and BUILD/tests/cpp are
# enough, and PYTHON may be of another version than the build's (there is no `_C` then). PYTHON needs the
# torch of the build and the packages of the extra `test`. Ends with a table; exits with 1 if a row failed.
# Logs: BUILD/gpu_check/*.log
set -uo pipefail
cd "$(dirname "$0")/.."
build=$(cd "${1:-build}" && pwd)
checks=("${@:2}")
((${#checks[@]})) || checks=(pytest zoo gtest memcheck racecheck benchmarks)
python=${PYTHON:-python3}
logs=$build/gpu_check
mkdir -p "$logs"

export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export JAX_PLATFORMS=cpu  # cola-ml imports JAX, which would take most of the memory of the device
if ! description=$("$python" - << 'PY'
import sys
import torch
import torchium

if not torch.cuda.is_available():
    sys.exit("no CUDA device")
print(f"GPU {torch.cuda.get_device_name()}")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
print(torchium.show_config(), end="")
PY
); then
  echo "gpu_check needs a CUDA device and a Python with the torch that $build was built against." >&2
  exit 1
fi

# The folder of torch's libraries, those of the NVIDIA packages beside it, and the toolkit's.
library_path=$("$python" - << 'PY'
from pathlib import Path
import torch

root = Path(torch.__file__).parent
print(":".join(map(str, [root / "lib", *sorted(root.parent.glob("nvidia/*/lib"))])))
PY
)
library_path=$build/python/torchium_cpp:$library_path:${CUDA_HOME:-/usr/local/cuda}/lib64

rows=()
failed=0
# check NAME COMMAND...: runs it with its output in NAME.log and adds a row to the table.
check() {
  local name=$1 start=$SECONDS result=passed
  shift
  echo "== $name: $*"
  "$@" > "$logs/$name.log" 2>&1 || { result=FAILED; failed=1; }
  [[ $result == passed ]] || tail -n 60 "$logs/$name.log"
  local summary
  summary=$(grep -E '^(=+ .*|[0-9]+ )(passed|failed|error|skipped)|^\[  (PASSED|FAILED) |ERROR SUMMARY|RACECHECK SUMMARY' \
    "$logs/$name.log" | tail -n 1 | tr -d '=|')
  rows+=("$(printf '%-22s %-8s %5ds  %s' "$name" "$result" $((SECONDS - start)) "$summary")")
}
# wanted CHECK: whether it was asked for.
wanted() { [[ " ${checks[*]} " == *" $1 "* ]]; }
# skip NAME REASON
skip() { rows+=("$(printf '%-22s %-8s %5s   %s' "$1" skipped "" "$2")"); }

# One after the other: the sanitizer, which keeps the device busy, slows down whatever runs beside it.
workers=()
if "$python" -c "import xdist" 2> /dev/null; then
  workers=(-n logical --maxprocesses=8 --dist loadgroup)
fi
# -v: the names of failed tests are known even if the run is stopped.
pytest=("$python" -m pytest -v -m cuda -p no:cacheprovider ${workers[@]+"${workers[@]}"})
wanted pytest && check pytest-cuda "${pytest[@]}" tests/python
wanted zoo && check zoo-cuda "${pytest[@]}" tests/zoo
if wanted gtest; then
  if [[ -x $build/tests/cpp/torchium_tests ]]; then
    check gtest env LD_LIBRARY_PATH="$library_path" GTEST_BRIEF=1 "$build/tests/cpp/torchium_tests"
  else
    skip gtest "$build/tests/cpp/torchium_tests was not carried"
  fi
fi
# cuBLAS's kernels hand over shared memory in ways that racecheck does not follow, and some of them stop where it
# skips kernels by name: it watches all, and a hazard counts if it names one of ours.
racecheck() {
  local report=$logs/racecheck-report.log result=0
  compute-sanitizer --tool racecheck --log-file "$report" "$python" scripts/gpu_smoke.py || result=1
  cat "$report"
  grep -q "Internal Sanitizer Error" "$report" && result=1
  grep -A 1 "Race reported" "$report" | grep -q torchium && result=1
  return $result
}
memcheck() {
  compute-sanitizer --tool memcheck --error-exitcode 1 "$python" scripts/gpu_smoke.py
}
for tool in memcheck racecheck; do
  if ! wanted $tool; then
    continue
  elif command -v compute-sanitizer > /dev/null; then
    check "sanitizer-$tool" $tool
  else
    skip "sanitizer-$tool" "compute-sanitizer is not on PATH"
  fi
done
# Exits with the number of targets that it missed.
if wanted benchmarks; then
  "$python" benchmarks/step.py --families ours adamw --models llama-103m mlp > "$logs/benchmarks.log" 2>&1
  missed=$?
  cat "$logs/benchmarks.log"
  rows+=("$(printf '%-22s %s targets missed' benchmarks $missed)")
fi

printf '\n%s\n\n' "$description"
printf '%s\n' "${rows[@]}"
exit $failed
