#!/usr/bin/env bash
#SBATCH --job-name=linnet-kernel
#SBATCH --array=0-63
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# The kernel of a network on a data set in 64 parts, which need not run at the same time, and the report.
#   job=$(sbatch --parsable deploy/slurm_array.sh nets.py:conv photos/)
#   sbatch --array=0 --dependency=afterany:$job --export=ALL,OUT=verdict deploy/slurm_array.sh nets.py:conv photos/
# Tasks that were killed are submitted again as they are (sbatch --array=3,17 deploy/slurm_array.sh ...); what
# they had finished is not computed again, and the report computes what is missing.
# The folder must be on a file system with coherent memory maps, such as Lustre or GPFS, and not NFS.
set -euo pipefail

parts=64 # SLURM_ARRAY_TASK_COUNT is less where some are submitted again
device=${DEVICE:-cuda}
what=(--model "$1" --data "$2" --kernel "${KERNEL:-$SCRATCH/kernel.npy}" --device "$device")

if [[ -n "${OUT:-}" ]]; then
    srun linnet spectrum "${what[@]}" --out "$OUT"
else
    srun linnet spectrum "${what[@]}" --part "$SLURM_ARRAY_TASK_ID/$parts"
fi
