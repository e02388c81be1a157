"""Avalanche's consolidation of elastic weight consolidation; runs in an environment that has avalanche-lib.

    peer/bin/python benchmarks/continual_peer.py --inputs 784 --hidden 100 --examples 1000 --out fisher.pt

Started by ``continual_penalty.py --peer-python``. With batches of one example the squared gradients that
``EWCPlugin.compute_importances`` averages are the empirical Fisher matrix.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def network(inputs: int, hidden: int, classes: int = 10) -> nn.Sequential:
    """The same network in both processes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def task(inputs: int, examples: int, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """The same data in both processes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, inputs, generator=generator)
    return x, torch.randint(classes, (examples,), generator=generator)


def options() -> argparse.Namespace:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    result.add_argument("--inputs", type=int, default=784)
    result.add_argument("--hidden", type=int, default=100)
    result.add_argument("--examples", type=int, default=1000)
    result.add_argument("--repeats", type=int, default=3)
    result.add_argument("--out", type=Path, required=True)
    return result.parse_args()


def main() -> None:
    """Entry point."""
    given = options()
    warnings.simplefilter("ignore")
    from avalanche import __version__
    from avalanche.training.plugins import EWCPlugin

    torch.set_num_threads(1)
    net, (x, y) = network(given.inputs, given.hidden), task(given.inputs, given.examples)
    data = TensorDataset(x, y, torch.zeros(len(x), dtype=torch.long))
    plugin, optimizer = EWCPlugin(1.0), torch.optim.SGD(net.parameters(), lr=0.1)
    seconds = []
    for _ in range(given.repeats):
        begin = time.process_time()
        found = plugin.compute_importances(net, nn.CrossEntropyLoss(), optimizer, data, "cpu", 1)
        seconds.append(time.process_time() - begin)
    torch.save({name: part.data for name, part in found.items()}, given.out)
    print(json.dumps({"seconds": seconds, "version": __version__}))


if __name__ == "__main__":
    main()
