"""Features and label-free kernels of every network and task, computed once: every draw is a submatrix.

``python -m experiments.adapt.kernels --networks mobilenet lite --out FOLDER``
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import linnet
from experiments.adapt.tasks import DEVELOPMENT, MANY, MORE, NETWORKS, REPORTED, Network, Task, drawn
from linnet.files import save
from linnet.fitting.last_layer import features, last_linear, replace_module
from linnet.tangent.batch import Inputs, concatenate

HEADS = 4  # random heads averaged
SETS = {"development": DEVELOPMENT, "many": MANY, "more": MORE, "reported": REPORTED}


def suited(part: str, network: Network) -> list[Task]:
    """The tasks of a set that a network can take."""
    return [task for task in SETS[part] if task.text == network.text]


def body_kernels(model: nn.Module, x: Inputs, late: tuple[str, ...], heads: int = HEADS) -> dict[str, Tensor]:
    """Tangent kernels of random heads on the features, without the heads' own weights.

    Args:
        model: The network; its head is replaced.
        x: N samples.
        late: Start of the names of the last stage's parameters.
        heads: Number of random heads, whose kernels are averaged.

    Returns:
        "early" and "late", (N, N) each: the parts of the lower layers and of the last stage.
    """
    name, old = last_linear(model)
    generator = torch.Generator().manual_seed(0)
    new = nn.Linear(old.in_features, heads, bias=False)
    with torch.no_grad():
        new.weight.copy_(torch.randn(new.weight.shape, generator=generator) * old.in_features**-0.5)
    replace_module(model, name, new)
    body = [n for n, _ in model.named_parameters() if not n.startswith(f"{name}.")]
    parts = {
        "early": [n for n in body if not n.startswith(late)],
        "late": [n for n in body if n.startswith(late)],
    }
    found = {}
    for part, names in parts.items():
        found[part] = linnet.linearize(model, params=names).kernel(x, form="trace") / heads
    return found


def compute(network: Network, task: Task, out: Path, most: int, tested: int, data_dir: str | None) -> None:
    """The cache of one network and task."""
    file = f"{network.name} {task.name}".replace(" ", "-").lower()
    if (out / f"{file}.safetensors").exists():
        return
    begin = time.perf_counter()
    model, prepared = network.load(data_dir)
    x, y, xt, yt = drawn(task, network, prepared, most, tested, data_dir)
    every = concatenate([x, xt])
    phi = features(model, every)
    kernels = body_kernels(model, every, network.late)
    tensors = {"features": phi, "pool": y, "test": yt, **kernels}
    save(out, file, {**tensors, "seconds": time.perf_counter() - begin, "heads": HEADS})
    print(f"{file}: {len(y)} + {len(yt)} samples, {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    """Compute what is missing."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    arguments.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    arguments.add_argument("--most", type=int, default=600, help="samples in the pool (default %(default)s)")
    arguments.add_argument("--tested", type=int, default=300, help="test samples (default %(default)s)")
    arguments.add_argument("--data-dir", default=None)
    arguments.add_argument("--out", type=Path, default=Path("runs/experiments/adapt/kernels"))
    given = arguments.parse_args()
    for part in given.sets:
        for key in given.networks:
            for task in suited(part, NETWORKS[key]):
                compute(NETWORKS[key], task, given.out, given.most, given.tested, given.data_dir)


if __name__ == "__main__":
    main()
