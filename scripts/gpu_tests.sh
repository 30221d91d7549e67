#!/bin/bash
# Run the tests that need a GPU with TensorRT and PyCUDA, and print a summary.
#
#   scripts/gpu_tests.sh [pytest arguments]
#
# PY: the Python to use [python3]. OUT: where gpu-tests.log and gpu-tests.xml go [.]. Exit status: pytest's.
# Only files that carry the marker are collected, so that packages which other tests import need not be there.
set -uo pipefail
cd "$(dirname "$0")/.."
py=${PY:-python3}
out=${OUT:-.}
mkdir -p "$out"
mapfile -t files < <(grep -rlE "^pytestmark = GPU|pytest\.mark\.gpu" tests --include='test_*.py' | sort)
[ ${#files[@]} -gt 0 ] || { echo "no test carries the marker gpu"; exit 1; }
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$py" - <<'EOF'
from pipeline.engine.device import describe_device, no_device_reason
print("card:", describe_device() or no_device_reason())
EOF
"$py" -m pytest -m gpu -p no:cacheprovider -ra --durations=8 --junitxml "$out/gpu-tests.xml" "$@" "${files[@]}" 2>&1 | tee "$out/gpu-tests.log"
status=${PIPESTATUS[0]}
echo "gpu tests: exit status $status; log in $out/gpu-tests.log"
exit "$status"
