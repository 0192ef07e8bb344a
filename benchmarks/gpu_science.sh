#!/usr/bin/env bash
# SFT, GRPO with beta = 0 and 1e-6, and GTPO: SmolLM2-135M on word problems, side by side on one NVIDIA GPU, in under
# 12 minutes, with the page, its tables and its figures in FOLDER. Started again after a stop, it goes on.
#   bash benchmarks/gpu_science.sh [FOLDER]        PYTHON=python3 for another environment than .venv, JOBS=1 for turns
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${1:-benchmarks/results/gpu_science}
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

"$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu_science.sh: torch sees no GPU")'
mkdir -p "$folder"
SECONDS=0
"$python" main.py ablate -c configs/ablation_smollm2.yaml -c benchmarks/gpu_science.yaml --jobs "${JOBS:-4}" || failed=$?
"$python" main.py report runs/gpu_science --output "$folder/report.html"
"$python" - "$folder/machine.json" "$SECONDS" <<'PYTHON'
import json
import sys

import lightning
import torch
import transformers

versions = {package.__name__: package.__version__ for package in (torch, lightning, transformers)}
content = {"command": "bash benchmarks/gpu_science.sh", "gpu": torch.cuda.get_device_name(), "seconds": int(sys.argv[2])}
with open(sys.argv[1], "w") as file:
    json.dump(content | {"versions": versions}, file, indent=1)
PYTHON
exit "${failed:-0}"
