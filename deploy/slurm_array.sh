#!/usr/bin/env bash
#SBATCH --job-name=linnet-kernel
#SBATCH --array=0-63
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# A Gram matrix in 64 parts that need not run at the same time. Tasks that were killed are submitted again as
# they are (sbatch --array=3,17 deploy/slurm_array.sh); what they had finished is not computed again.
# The folder must be on a file system with coherent memory maps, such as Lustre or GPFS, and not NFS.
set -euo pipefail

srun python deploy/kernel.py --file "$SCRATCH/kernel.npy" --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
