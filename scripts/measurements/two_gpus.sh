#!/usr/bin/env bash
# Two GPUs of one host, most wanted first, within nine minutes: the fused matmul and all-reduce
# checked, timed and tuned; the 57B step at TP=2, fused and not; the tests of ranks on GPUs.
#
#   scripts/measurements/two_gpus.sh OUT_DIR
#
# Needs torch, triton, pydantic, PyYAML, safetensors, Pillow and pytest; fa3-fwd for the fast
# attention. Nothing is installed here. Each part has its own time limit and writes its result at
# once, so that a failure costs no other part; summary.txt says how each of them ended.
#
# NVLink multicast stays off throughout: all sums are peer to peer.
set -uo pipefail
out=$(realpath -m "${1:?usage: two_gpus.sh OUT_DIR}")
cd "$(dirname "$0")/../.."
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
: >"$out/summary.txt"

part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 began=$SECONDS code
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  tail -n "${LINES_SHOWN:-14}" "$out/$name.log" | cut -c1-400
  return $code
}

step() { # NAME LIMIT_S FLAG=VALUE ...: the 57B step of two ranks
  local name=$1 limit=$2 overrides=()
  shift 2
  for flag in "$@"; do overrides+=(--set "optimizations.$flag"); done
  part "$name" "$limit" "$python" -m characters_serve.bench.tensor_parallel \
    --config configs/characters-57b.yaml --ranks 2 --seconds 8 --set engine.rank_timeout_s=120 --out "$out/$name.json" \
    "${overrides[@]}"
}

if part gemm_all_reduce_2xh200 165 "$python" -m characters_serve.cli bench kernels \
  --op gemm_all_reduce --config configs/characters-57b.yaml --ranks 2 --seconds 1.5 \
  --sweep-seconds 75 --out "$out/gemm_all_reduce_2xh200.json"; then
  step step_2xh200_tp2 170 fused_gemm_all_reduce=true
else
  step step_2xh200_tp2_unfused 120
fi
part multi_gpu_tests 165 "$python" -m pytest -q --maxfail=3 -c /dev/null --rootdir . \
  -p no:cacheprovider tests/kernels/test_multi_gpu.py
cat "$out/summary.txt"
