#!/usr/bin/env bash
# The GPU tests of the step and all its benches, most wanted first, within nine minutes of one GPU.
#
#   scripts/measurements/step_h200.sh OUT_DIR
#
# Needs torch, triton, pydantic, PyYAML, safetensors, Pillow and pytest; fa3-fwd for the fast
# attention. Nothing is installed here. Each part has its own time limit and writes its result at
# once, so that a failure costs no other part; summary.txt says how each of them ended.
set -uo pipefail
out=$(realpath -m "${1:?usage: step_h200.sh OUT_DIR}")
cd "$(dirname "$0")/../.."
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_INTERPRET=0
: >"$out/summary.txt"

part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
  tail -n "${LINES_SHOWN:-14}" "$out/$name.log" | cut -c1-220
}

tests() { # NAME LIMIT_S FILE: without the project's settings, which want plug-ins of its own
  part "$1" "$2" "$python" -m pytest -q --maxfail=5 -c /dev/null --rootdir . -p no:cacheprovider "$3"
}

bench() { # NAME LIMIT_S WHAT RANKS ...
  local name=$1 limit=$2 what=$3 ranks=$4
  shift 4
  part "$name" "$limit" "$python" -m characters_serve.cli bench "$what" \
    --config configs/characters-57b.yaml --shard-of "$ranks" --out "$out/$name.json" "$@"
}

tests gpu_kernels 80 tests/kernels/test_gpu_kernels.py
bench step_tp4_first 60 step 4 --seconds 8 --profile "$out/step_tp4_trace.json"
tests gpu_step 85 tests/kernels/test_gpu_step.py
bench step_h200_tp4_shard 140 waterfall 4 --seconds 8 --rung-seconds 2 \
  --picture "$out/waterfall_tp4.png"
bench kernels_tp4 45 kernels 4
bench step_h200_tp3_shard 60 step 3 --seconds 8
bench step_h200_tp2_shard 70 step 2 --seconds 8
gzip -f "$out"/*_trace.json 2>/dev/null
cat "$out/summary.txt"
