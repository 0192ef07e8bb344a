#!/usr/bin/env bash
# A training step next to TRL's and the GPU's floor: random weights in the shape of Qwen2 models of 0.5, 1.5 and 3
# billion parameters, bf16, on one NVIDIA GPU with 80 GB, in under 8 minutes; one JSON file a model in FOLDER. It has not
# been run on a GPU yet. With the 3 B model TRL has one setting, the one that fits beside ours: layer checkpointing and 8
# completions in a backward. Needs the extra: pip install 'gtpo-lightning[bench]'.
#   bash benchmarks/gpu_step.sh [FOLDER]     PYTHON=python3 for another environment than .venv-bench; --list shows commands
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv-bench/bin/python}
only_list=
if [ "${1:-}" = --list ]; then only_list=1 && shift; fi
folder=${1:-benchmarks/results}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

# run NAME WORDS…: one workload; a failure is said and stops nothing, and none takes longer than its share of the time
run() {
  local words=(-m benchmarks.step --workload "$1" --device cuda --threads 4 --output "$folder/step_$1.json" "${@:2}")
  if [ -n "$only_list" ]; then echo "${words[*]}" && return; fi
  timeout 155 "$python" "${words[@]}" || echo "$1 failed"
}

if [ -z "$only_list" ]; then
  "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu_step.sh: torch sees no GPU")'
  mkdir -p "$folder"
fi
run gpu_0.5b
run gpu_1.5b
run gpu_3b --trl-settings on --trl-micro-batch 8
