#!/usr/bin/env bash
#SBATCH --job-name=linnet
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
# Several machines: one torchrun on each, which meet at the first. The script is started by every process.
#   sbatch deploy/slurm.sh deploy/fit.py
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=4

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" "$@"
