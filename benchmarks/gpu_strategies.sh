#!/usr/bin/env bash
# Three steps of GTPO on SmolLM2-135M under each strategy, on one NVIDIA GPU, in about ten minutes: whether each runs at
# all, seconds a step and peak memory, as a table in FOLDER. It has not been run on a GPU yet. A strategy whose package
# is missing is a line of the table, too: pip install 'gtpo-lightning[peft,smollm2,qlora,deepspeed]'.
#   bash benchmarks/gpu_strategies.sh [FOLDER]     PYTHON=python3 for another environment than .venv; --list shows commands
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
runs=runs/gpu_strategies
dense=$runs/dense # SmolLM2 as a folder, which can be read into 4 bits
only_list=
if [ "${1:-}" = --list ]; then only_list=1 && shift; fi
folder=${1:-benchmarks/results}
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
names=()

# run NAME WORDS…: one process of one strategy, in a folder of its own; a failure is noted and stops nothing
run() {
  local name=$1 words=(main.py fit -c configs/gtpo.yaml -c configs/models/smollm2-135m.yaml -c configs/data/arithmetic.yaml)
  shift
  words+=(-c benchmarks/gpu_strategies.yaml "$@" "--trainer.default_root_dir=$runs/$name" --trainer.devices=1)
  names+=("$name")
  if [ -n "$only_list" ]; then echo "${words[*]}" && return; fi
  echo "$name …"
  timeout 600 "$python" "${words[@]}" >"$runs/$name.txt" 2>&1 || echo "$name failed, see $runs/$name.txt"
}

if [ -z "$only_list" ]; then
  "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu_strategies.sh: torch sees no GPU")'
  rm -rf "$runs"
  mkdir -p "$runs"
  "$python" -c "
from gtpo_lightning.models import load_model, load_tokenizer
load_model('smollm2-135m').save_pretrained('$dense')
load_tokenizer('smollm2-135m').save_pretrained('$dense')"
fi

mixed=--trainer.precision=bf16-mixed
run one_gpu -c configs/trainer/gpu.yaml
run one_gpu_bf16_weights -c configs/trainer/gpu.yaml --model.dtype=bfloat16 --trainer.precision=32-true
run lora -c configs/trainer/gpu.yaml -c configs/options/lora.yaml --model.dtype=bfloat16
run qlora -c configs/trainer/gpu.yaml -c configs/options/qlora.yaml "--model.model=$dense"
run ddp -c configs/trainer/ddp.yaml $mixed
run fsdp2 -c configs/trainer/fsdp2.yaml $mixed --trainer.strategy.init_args.data_parallel_size=1
run fsdp -c configs/trainer/fsdp.yaml $mixed
run deepspeed_stage_2 -c configs/trainer/deepspeed_stage_2.yaml $mixed
run deepspeed_stage_3 -c configs/trainer/deepspeed_stage_3.yaml $mixed
if [ -n "$only_list" ]; then exit; fi

mkdir -p "$folder"
"$python" - "$runs" "$folder/gpu_strategies.md" "${names[@]}" <<'PYTHON'
import sys
from pathlib import Path

import lightning
import torch
import transformers

from benchmarks.step_meter import table

runs, output, *names = sys.argv[1:]
versions = ", ".join(f"{package.__name__} {package.__version__}" for package in (torch, lightning, transformers))
head = f"# Strategies on one GPU\n\n`bash benchmarks/gpu_strategies.sh` on {torch.cuda.get_device_name()}; {versions}.\n\n"
Path(output).write_text(head + table(Path(runs), names), encoding="utf-8")
PYTHON
cat "$folder/gpu_strategies.md"
