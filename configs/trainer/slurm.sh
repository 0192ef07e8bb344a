#!/bin/bash
# Two nodes of eight GPUs. Lightning reads the processes, nodes and the meeting point from SLURM's own variables.
#   sbatch configs/trainer/slurm.sh -c configs/gtpo.yaml -c configs/models/qwen2.5-3b-instruct.yaml -c configs/data/gsm8k.yaml
# Sent again with --ckpt_path, the run goes on, also on another number of nodes.
#SBATCH --job-name=gtpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@120
set -euo pipefail
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a dead process ends the others
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" main.py fit "$@" -c configs/trainer/ddp.yaml \
  --trainer.devices="$SLURM_NTASKS_PER_NODE" --trainer.num_nodes="$SLURM_NNODES"
