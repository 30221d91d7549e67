#!/bin/bash
# Run the tests that need a GPU with TensorRT and PyCUDA, several at a time, and print a summary.
#
#   scripts/gpu_tests.sh [pytest arguments]
#
# PY: the Python to use [python3]. OUT: where gpu-tests.log and gpu-tests.xml go [.]. LIMIT_S: stop after so many seconds
# [none]. Exit status: pytest's, 124 where the limit was reached.
# Only files that carry the marker are collected, so that packages which other tests import need not be there.
set -uo pipefail
cd "$(dirname "$0")/.."
py=${PY:-python3}
out=${OUT:-.}
mkdir -p "$out"
mapfile -t files < <(grep -rlE "^pytestmark = GPU|pytest\.mark\.gpu" tests --include='test_*.py' | sort)
[ ${#files[@]} -gt 0 ] || { echo "no test carries the marker gpu"; exit 1; }
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$py" - <<'END'
from pipeline.engine.device import describe_device, no_device_reason
print("card:", describe_device() or no_device_reason())
END
"$py" scripts/gpu_tests.py --out "$out" ${LIMIT_S:+--limit-s "$LIMIT_S"} "${files[@]}" -- "$@"
status=$?
echo "gpu tests: exit status $status; log in $out/gpu-tests.log"
exit "$status"
