"""A fit that all processes make together; torchrun, SLURM and Ray start this.

torchrun --standalone --nproc-per-node 2 deploy/fit.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import linnet


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network and its data, the same on every process. Put your own here."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(300, 8)
    return network, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fit(out: Path) -> None:
    """Fit; the first process writes.

    Args:
        out: The folder of the fit.
    """
    network, x, y = problem()
    if torch.cuda.is_available():
        network, x, y = network.cuda(), x.cuda(), y.cuda()
    fitted = linnet.fit(linnet.linearize(network), (x, y), solver="cg", ridge=1.0)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        fitted.save(out)  # what is asked of a fit needs no other process
        right = (fitted.predict(x).argmax(1) == y).float().mean()
        print(f"accuracy on the training data: {right:.3f}")


def main() -> None:
    """Join the group, if there is one, and fit."""
    if "RANK" in os.environ:
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    try:
        fit(Path(os.environ.get("OUT", "runs/fit")))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
