#!/bin/bash
# On a machine with two GPUs: calibrate over one and two of them through NCCL, compare everything, break some runs.
#
#   INPUTS=.gpu/nccl OUT=out scripts/gpu_nccl.sh
#
# INPUTS: what `gpu_nccl.py pack` wrote. OUT: gets nccl.log, nccl.md and nccl.json, which are written anew after every
# step, and details.tar.gz. PY: a Python with torch (CUDA), onnxruntime-gpu, PyCUDA, onnx-ir, pydantic, numba [python3].
# DEVICE: cuda, or cpu for a rehearsal over gloo. GPUS: how many [2]. SAMPLES [2048]. TIMEOUT: seconds without progress
# in the faulty runs [15]. SIDE_BY_SIDE: faulty runs at a time [5]. LIMIT: seconds for a calibration of both models [100].
# NVLink multicast stays off. A step that fails does not stop the next ones; exit status 1 when something differs that
# should not, or was not run.
set -uo pipefail
cd "$(dirname "$0")/.."
py=${PY:-python3}
out=${OUT:-.}
gpus=${GPUS:-2}
samples=${SAMPLES:-2048}
device=${DEVICE:-cuda}
inputs=${INPUTS:-.gpu/nccl}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
out=$(realpath "$out")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
[ "$device" = cpu ] && export CUDA_VISIBLE_DEVICES=
began=$SECONDS
script() { "$py" scripts/gpu_nccl.py "$@"; }
launch() { # limit in seconds, ranks, arguments
  timeout -k 5 "$1" "$py" -m torch.distributed.run --standalone --nproc-per-node "$2" scripts/gpu_nccl.py "${@:3}"
}
say() { echo "[$((SECONDS - began)) s] $*"; }
report() { script report --at "$work" --gpus "$gpus" --out "$out" >"$work/report.txt" 2>&1; }
calibrate() { # ranks, further arguments
  launch "${LIMIT:-100}" "$1" ranks --at "$work" --samples "$samples" --device "$device" "${@:2}" 2>&1
}
break_one() { # kind, ranks
  local start status
  start=$(date +%s.%N)
  launch 75 "$2" fault --kind "$1" --at "$work" --device "$device" --rank-timeout "${TIMEOUT:-15}" >"$work/$1.log" 2>&1
  status=$?
  echo "$status $start $(date +%s.%N)" >"$work/$1.end"
}
{
  "$py" -c 'import torch, onnxruntime; print("torch", torch.__version__, "onnxruntime", onnxruntime.__version__)
if torch.cuda.is_available(): print("NCCL", torch.cuda.nccl.version(), torch.cuda.device_count(), "x", torch.cuda.get_device_name())'
  script images --from "$inputs" --at "$work" --samples "$samples" &
  # The kernels are compiled once, before the clock of any rank runs.
  { [ "$device" = cpu ] || "$py" -c 'import torch
from plugins.statistics import GpuStatistics
GpuStatistics(["x"]).close()'; } &
  script models --from "$inputs" --at "$work"
  wait
  say "inputs are ready"
  for n in $(seq "$gpus" -1 1); do
    calibrate "$n"
    [ $? = 124 ] || [ -f "$work/resnet50-$n.json" ] || calibrate "$n" --model resnet50
    say "calibrated on $n"
    report
  done
  (
    script compare --at "$work" --gpus "$gpus" >"$work/compare.log" 2>&1
    nice -n 10 "$py" scripts/gpu_nccl.py cpu --at "$work" --samples "$samples" >"$work/cpu.log" 2>&1
  ) &
  cpu_pass=$!
  if [ "$gpus" -ge 2 ]; then
    running=()
    for kind in none kill-batch kill-merge other-image other-order other-model stop-batch hang delay; do
      break_one "$kind" "$([ "$kind" = none ] && echo 1 || echo 2)" &
      running+=($!)
      if [ ${#running[@]} -ge "${SIDE_BY_SIDE:-5}" ]; then
        wait "${running[@]}"
        running=()
        say "up to $kind the faulty runs have ended"
        report
      fi
    done
    [ ${#running[@]} = 0 ] || wait "${running[@]}"
    say "all faulty runs have ended"
    report
  fi
  wait "$cpu_pass"
  tail -5 "$work/cpu.log"
  say "calibrated on the CPU"
  script compare --at "$work" --gpus "$gpus" >"$work/compare.log" 2>&1 || tail -5 "$work/compare.log"
  report
  status=$?
  cat "$work/report.txt"
  for log in "$work"/*.log; do
    echo "--- $(basename "$log")"
    grep -v "torch/distributed" "$log" | head -30
  done >"$work/logs.txt"
  tar czf "$out/details.tar.gz" -C "$work" --exclude='*.npz' --exclude='*.npy' --exclude='*.onnx' --exclude='*.data' .
  say "done"
  exit "$status"
} 2>&1 | tee "$out/nccl.log"
exit "${PIPESTATUS[0]}"
