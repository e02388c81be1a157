"""The same fit, started by Ray: TorchTrainer makes the process group, and linnet finds it.

pip install "ray[train]"; python deploy/ray_fit.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def work(settings: dict[str, Any]) -> None:
    """What every worker does; the group is there already.

    Args:
        settings: The folder of the fit, which all machines share.
    """
    from fit import fit

    fit(Path(settings["out"]))


if __name__ == "__main__":
    TorchTrainer(
        work,
        train_loop_config={"out": "/shared/runs/fit"},
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
    ).fit()
