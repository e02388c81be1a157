#!/usr/bin/env bash
# One machine: as many processes as it has GPUs. All fit together, the first writes runs/first.
# Without GPUs: --nproc-per-node 2 and --device cpu, with the cores divided by OMP_NUM_THREADS.
set -euo pipefail

torchrun --standalone --nproc-per-node "${GPUS:-8}" -m linnet adapt \
    --model "$1" --data "$2" --out runs/first --device cuda --memory 40GB
