#!/usr/bin/env bash
# The step, the decoders and all their benches, most wanted first, within nine minutes of one GPU.
#
#   scripts/measurements/step_h200.sh OUT_DIR [PART ...]
#
# Parts, with their limits; without a name those of the first line run, in its order:
#   step_tp4 50 s, step_tp3 50, step_tp2 60, decode 60, waterfall 215, kernels 45, tests_decoder 60
#   tests_step 85, tests_kernels 80, beside 75 (decoding beside a rank of four, on a second GPU
#   where there is one), tests_fused 90 and fused 120 (the fused matmul and all-reduce: its sums on
#   two to four ranks that share the GPU; what its matmul costs, by plan)
# Needs torch, triton, pydantic, PyYAML, safetensors, Pillow and pytest; fa3-fwd for the fast
# attention. Nothing is installed here. Each part writes its result at once, so that a failure costs
# no other part; summary.txt says how each of them ended, last run last.
set -uo pipefail
out=$(realpath -m "${1:?usage: step_h200.sh OUT_DIR [PART ...]}")
shift
cd "$(dirname "$0")/../.."
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0

part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  tail -n "${LINES_SHOWN:-14}" "$out/$name.log" | cut -c1-220
}

bench() { # NAME LIMIT_S WHAT RANKS ...
  local name=$1 limit=$2 what=$3 ranks=$4
  shift 4
  part "$name" "$limit" "$python" -m characters_serve.cli bench "$what" \
    --config configs/characters-57b.yaml --shard-of "$ranks" --out "$out/$name.json" "$@"
}

decoders() { # NAME LIMIT_S ...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$python" -m characters_serve.bench.decode \
    --config configs/characters-57b.yaml --out "$out/$name.json" "$@"
}

tests() { # NAME LIMIT_S: without the project's settings, which want plug-ins of their own
  part "$1" "$2" "$python" -m pytest -q --maxfail=5 --durations=5 -c /dev/null --rootdir . \
    -p no:cacheprovider "tests/kernels/test_$1.py"
}

[ $# -gt 0 ] || set -- step_tp4 step_tp3 step_tp2 decode waterfall kernels tests_decoder
for wanted in "$@"; do
  case $wanted in
    step_tp4) bench step_tp4 50 step 4 --seconds 8 --profile "$out/step_tp4_trace.json" ;;
    step_tp3) bench step_h200_tp3_shard 50 step 3 --seconds 8 ;;
    step_tp2) bench step_h200_tp2_shard 60 step 2 --seconds 8 ;;
    decode) decoders decode_h200 60 --seconds 2.5 ;;
    waterfall)
      bench step_h200_tp4_shard 215 waterfall 4 --seconds 8 --rung-seconds 2 \
        --picture "$out/waterfall_tp4.png"
      ;;
    kernels) bench kernels_tp4 45 kernels 4 ;;
    tests_decoder) tests gpu_decoder 60 ;;
    tests_step) tests gpu_step 85 ;;
    tests_kernels) tests gpu_kernels 80 ;;
    tests_fused) tests gpu_gemm_all_reduce 90 ;;
    fused)
      part gemm_all_reduce_1xh200 120 "$python" -m characters_serve.cli bench kernels \
        --op gemm_all_reduce --config configs/characters-57b.yaml --ranks 1 --seconds 1.5 \
        --sweep-seconds 60 --out "$out/gemm_all_reduce_1xh200.json"
      ;;
    beside) decoders decode_beside_h200 75 --seconds 3 --shard-of 4 ;;
    *) echo "no part $wanted" | tee -a "$out/summary.txt" ;;
  esac
done
gzip -f "$out"/*_trace.json 2>/dev/null
cat "$out/summary.txt"
