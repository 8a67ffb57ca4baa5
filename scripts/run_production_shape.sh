#!/usr/bin/env bash
# Times the step of the production shape on 2, 3, 4, 7 and 8 GPUs, as many as this machine has, and
# writes scripts/measurements/step_<ranks>x<gpu>_tp<ranks>.json. Arguments go to the benchmark:
#
#   scripts/run_production_shape.sh --seconds 20
#
# The same with another model, and with ranks that are processes on CPUs:
#
#   CONFIG=configs/tiny.yaml RANKS="2 3" OUT=/tmp scripts/run_production_shape.sh --set engine.device=cpu
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
CONFIG=${CONFIG:-configs/characters-57b.yaml}
OUT=${OUT:-scripts/measurements}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"  # also where nothing is installed
read -r gpus gpu <<<"$("$PYTHON" -c 'import torch
count = torch.cuda.device_count()
print(count, torch.cuda.get_device_name().split()[-1].lower() if count else "cpu")')"

if [[ -z ${RANKS:-} ]]; then
  RANKS=
  for ranks in 2 3 4 7 8; do
    if ((ranks <= gpus)); then RANKS+=" $ranks"; else echo "$ranks ranks: not run, $gpus GPUs" >&2; fi
  done
fi
[[ -n $RANKS ]] || { echo "nothing was run: two GPUs are needed, or RANKS and CPUs" >&2; exit 1; }

for ranks in $RANKS; do
  "$PYTHON" -m characters_serve.bench.tensor_parallel --config "$CONFIG" --ranks "$ranks" \
    --out "$OUT/step_${ranks}x${gpu}_tp${ranks}.json" "$@"
done
