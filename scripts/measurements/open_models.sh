#!/usr/bin/env bash
# The GPU tests of the open families and their streams with synthetic weights of full size, most
# wanted first, within nine minutes of one H200, or of two.
#
#   scripts/measurements/open_models.sh OUT_DIR
#
# Needs torch, triton, transformers, pydantic, PyYAML, safetensors, Pillow and pytest; fa3-fwd for
# the fast attention. Nothing is installed here. Each part has its own time limit and writes its
# result at once, so that a failure costs no other part; summary.txt says how each of them ended,
# and OUT_DIR/open_models_h200.json (on two GPUs open_models_h200_x2.json) holds all of its results
# by name, for scripts/measurements/.
set -uo pipefail
out=$(realpath -m "${1:?usage: open_models.sh OUT_DIR}")
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
  tail -n "${LINES_SHOWN:-6}" "$out/$name.log" | cut -c1-400
}

stream() { # NAME LIMIT_S CONFIG ...
  local name=$1 limit=$2 config=$3
  shift 3
  streams+=("$name")
  rm -f "$out/$name.json"
  part "$name" "$limit" "$python" -m characters_serve.cli bench step \
    --config "configs/$config.yaml" --seconds 10 --out "$out/$name.json" "$@"
}

# The TI2V-5B size drawn frame by frame, at the published report's picture size.
frame_wise=(
  --set model.width=1088 --set model.height=704
  --set model.latents_per_chunk=1 --set model.frames_per_chunk=4
  --set model.causal_wan.window_latents=7 --set model.causal_wan.sink_latents=1
)
streams=()
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -lt 2 ]; then
  whole=$out/open_models_h200.json
  part gpu_open 110 "$python" -m pytest -q --maxfail=5 -c /dev/null --rootdir . \
    -p no:cacheprovider tests/kernels/test_gpu_open.py
  stream ti2v_5b_frame_wise_taehv 65 longlive-5b "${frame_wise[@]}" --set model.decoder=taehv
  stream self_forcing_1_3b_taehv 60 self-forcing-1.3b --set model.decoder=taehv
  stream live_avatar_tp1_taehv 110 live-avatar-14b --set model.decoder=taehv
  # The published autoencoder on the same GPU, on its fast path.
  stream self_forcing_1_3b_wan21 55 self-forcing-1.3b --set optimizations.fast_decoder=true
  stream ti2v_5b_frame_wise_plain 60 longlive-5b "${frame_wise[@]}" --set model.decoder=taehv \
    --config configs/plain.yaml
  stream live_avatar_plain 80 live-avatar-14b --set model.decoder=taehv --config configs/plain.yaml
else
  whole=$out/open_models_h200_x2.json
  tp2=(--set engine.tensor_parallel=2 --set model.decoder=taehv)
  stream live_avatar_tp2_taehv 140 live-avatar-14b "${tp2[@]}"
  # Nothing is decoded while a step runs: what the two ranks do by themselves.
  stream live_avatar_tp2_steps 110 live-avatar-14b "${tp2[@]}" \
    --set optimizations.dedicated_decoder=false
  fast=(--set optimizations.fast_decoder=true)
  stream ti2v_5b_frame_wise_wan22 80 longlive-5b "${frame_wise[@]}" "${fast[@]}"
  stream live_avatar_decoder_apart 100 live-avatar-14b "${fast[@]}"
  stream live_avatar_tp2_wan21 110 live-avatar-14b --set engine.tensor_parallel=2 "${fast[@]}"
fi
"$python" - "$whole" "${streams[@]}" <<'PYTHON'
import json
import sys
from pathlib import Path

whole = Path(sys.argv[1])
files = [whole.with_name(f"{name}.json") for name in sorted(sys.argv[2:])]
results = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
whole.write_text(json.dumps(results, indent=2) + "\n")
for name, result in results.items():
    print(f"{name:28}{result['fps']:7.1f} fps of {result['fps_needed']}")
PYTHON
cat "$out/summary.txt"
