#!/bin/bash
# On a machine with two GPUs: calibrate over one and two of them through NCCL, compare everything, break some runs.
#
#   INPUTS=.gpu/nccl OUT=out scripts/gpu_nccl.sh
#
# INPUTS: what `gpu_nccl.py pack` wrote. OUT: gets nccl.md, nccl.json and the log. PY: a Python with torch (CUDA),
# onnxruntime or onnxruntime-gpu, PyCUDA, pydantic, numba and onnx [python3]. GPUS: how many [2]. SAMPLES [1024].
# NVLink multicast stays off. Takes about four minutes; exit status 1 when something differs that should not.
set -uo pipefail
cd "$(dirname "$0")/.."
py=${PY:-python3}
out=${OUT:-.}
gpus=${GPUS:-2}
samples=${SAMPLES:-1024}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
run() { "$py" -m torch.distributed.run --standalone --nproc-per-node "$1" scripts/gpu_nccl.py measure --at "$work" "${@:2}"; }
{
  "$py" -c 'import torch; print("torch", torch.__version__, "NCCL", torch.cuda.nccl.version(), torch.cuda.device_count(), "x", torch.cuda.get_device_name())'
  "$py" -c 'import torch, onnxruntime, pycuda, numba, pydantic, onnx; print("onnxruntime", onnxruntime.__version__, onnxruntime.get_available_providers())'
  "$py" scripts/gpu_nccl.py inputs --from "${INPUTS:-.gpu/nccl}" --at "$work" --samples "$samples" || exit 1
  # The kernels are compiled once, before the clock of any rank runs.
  "$py" -c 'import torch; from plugins.statistics import GpuStatistics; GpuStatistics(["x"]).close()' || exit 1
  for model in efficientnet-lite0 resnet50; do
    for n in $(seq 1 "$gpus"); do
      start=$(date +%s)
      run "$n" --model "$model" --samples "$samples" --out "$work/$model-$n" ${RUNTIME:+--runtime "$RUNTIME"} 2>&1 | tail -25
      echo "$model on $n GPUs: $(($(date +%s) - start)) s in all"
    done
  done
  # The faulty runs are small and run side by side.
  for fault in kill-batch kill-merge stop-batch hang other-order other-model delay; do
    [ "$gpus" -ge 2 ] || break
    (
      start=$(date +%s.%N)
      run "$gpus" --data few.npy --samples 256 --batch-size 16 --rank-timeout 15 --fault $fault --victim 1 --out "$work/$fault" \
        ${RUNTIME:+--runtime "$RUNTIME"} >"$work/$fault.log" 2>&1
      status=$?
      echo "$status $("$py" -c "import time; print(round(time.time() - $start, 1))")" >"$work/$fault.end"
    ) &
  done
  wait
  for fault in kill-batch kill-merge stop-batch hang other-order other-model delay; do
    [ -f "$work/$fault.log" ] && { echo "--- $fault"; grep -v "torch/distributed" "$work/$fault.log" | head -12; }
  done
  "$py" scripts/gpu_nccl.py report --runs "$work" --gpus "$gpus" --out "$out"
} 2>&1 | tee "$out/nccl.log"
exit "${PIPESTATUS[0]}"
