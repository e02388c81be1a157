"""Curvature for recurrent networks, attention, convolutions, which Botev (2020, chapter 6) leaves for later.

MNIST images are read row by row, 28 tokens of 28 numbers, by a tanh network of ``nn.RNN``, by the same
network with the same weights unrolled (``nn.Linear`` used at each step), and by a small transformer;
as images they are read by two convolutions and a linear layer.
``GaussNewton`` with ``structure="kfac"`` and its defaults gets Kronecker factors of every matrix of weights:
where the layer is a linear map, of its inputs and output gradients, with several uses taken as independent;
of the weights inside ``nn.RNN``, for which there is no such rule, from the moments of their gradients of each
example.

Adam and SGD with momentum have a rate from ten, chosen on another seed: once for as many updates,
and once, with or without decay, for about as many seconds.

    python -m experiments.optimizer.sequences --threads 1
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import Transformer
from experiments.optimizer.training import (
    RATES,
    Task,
    decades,
    ended,
    first_order,
    grid,
    loss_at,
    second_order,
)
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet import curvature
from linnet.likelihoods import Categorical

FIRST = {"Adam": (2.0**-4, 2.0**-5, *RATES), "SGD with momentum": tuple(2.0**-k for k in range(-1, 9))}
FACTORS = {"nn.RNN": 45, "transformer": 5, "convolutions": 7}  # lengths of the first-order methods' long runs
SECOND = {  # what is compared with first
    "nn.RNN": ("unrolled", "nn.RNN"),
    "transformer": ("transformer",),
    "convolutions": ("convolutions",),
}
LONG = {"unrolled": 8}  # with curvature, where it takes about as many seconds
AFTER = {"update": "as many updates", "clock": "as many seconds"}
ANOTHER = 100  # the seed that rates are chosen on


class Recurrent(nn.Module):
    """The last state of a tanh ``nn.RNN``, classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(28, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.rnn(x)[0][:, -1])
        return scores


class Unrolled(nn.Module):
    """The same function of the same weights, written with linear layers."""

    def __init__(self, other: Recurrent) -> None:
        super().__init__()
        width = other.rnn.hidden_size
        self.input, self.state, self.head = (
            nn.Linear(28, width),
            nn.Linear(width, width),
            nn.Linear(width, 10),
        )
        with torch.no_grad():
            for name, layer in (("ih", self.input), ("hh", self.state)):
                layer.weight.copy_(getattr(other.rnn, f"weight_{name}_l0"))
                layer.bias.copy_(getattr(other.rnn, f"bias_{name}_l0"))
        self.head.load_state_dict(other.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        state = x.new_zeros(len(x), self.state.in_features)
        for row in self.input(x).unbind(1):
            state = torch.tanh(row + self.state(state))
        scores: Tensor = self.head(state)
        return scores


class Convolutional(nn.Sequential):
    """Two strided convolutions and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 28)),
            nn.Conv2d(1, width // 4, 5, 2),
            nn.Tanh(),
            nn.Conv2d(width // 4, width // 2, 5, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(width // 2 * 16, 10),
        )


def network(name: str, width: int, seed: int) -> nn.Module:
    """One of the networks at its first weights; the transformer has half the width."""
    torch.manual_seed(seed)
    if name == "convolutions":
        return Convolutional(width)
    if name == "transformer":
        return Transformer(28, 28, width // 2)
    recurrent = Recurrent(width)
    return recurrent if name == "nn.RNN" else Unrolled(recurrent)


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=3)
    found.add_argument("--networks", nargs="+", choices=tuple(SECOND), default=list(SECOND))
    found.add_argument("--width", type=int, default=64)
    found.add_argument("--images", type=int, default=4000)
    found.add_argument("--test", type=int, default=2000)
    found.add_argument("--batch", type=int, default=250)
    found.add_argument("--updates", type=int, default=40, help="with curvature")
    found.add_argument("--factor", type=int, default=None, help="first-order updates for each of these")
    return found


class Sequences:
    """All runs."""

    def __init__(self, study: Study, args: argparse.Namespace) -> None:
        self.study, self.args = study, args
        self._data: tuple[Tensor, ...] | None = None

    def data(self) -> tuple[Tensor, ...]:
        """Images as rows, and labels, for training and testing."""
        if self._data is None:
            args, found = self.args, images("mnist", self.args.data_dir)
            x, t = pixels(found.train_x[: args.images]), pixels(found.test_x[: args.test])
            parts = x.flatten(1), found.train_y[: args.images], t.flatten(1), found.test_y[: args.test]
            x, y, t, z = (part.to(args.device) for part in parts)
            self._data = x.view(-1, 28, 28), y, t.view(-1, 28, 28), z
        return self._data

    def run(self, name: str, seed: int, train: Callable[[Task], Any]) -> dict[str, Any]:
        """One run, with its accuracy on test images at the end."""
        x, y, t, z = self.data()
        model = network(name, self.args.width, seed)
        found: dict[str, Any] = train(Task(lambda: model, x, y, Categorical(), self.args.batch, seed))
        with torch.no_grad():
            right = [
                model(part).argmax(1) == label for part, label in zip(t.split(500), z.split(500), strict=True)
            ]
        return found | {"test": float(torch.cat(right).double().mean())}

    def layers(self, name: str) -> list[dict[str, Any]]:
        """How the curvature of each layer is kept."""
        x, y, *_ = self.data()
        model = network(name, self.args.width, 0)
        found = curvature(model, (x[:20], y[:20]), Categorical(), structure="kfac", expectation="mc")
        return [
            {"layer": part.layer.name, "size": part.layer.size, "kept": part.structure, "note": part.note}
            for part in found.parts
        ]

    def _what(self, name: str, method: str, seed: int, updates: int) -> dict[str, Any]:
        """What all runs depend on."""
        args, part = self.args, "tuning" if seed == ANOTHER else "run"
        size = {"width": args.width, "images": args.images, "tested": args.test, "batch": args.batch}
        return {"part": part, "network": name, "method": method, "seed": seed, "updates": updates, **size}

    def second(self, name: str) -> Iterator[Cell]:
        """Runs with curvature, of each length."""
        for updates in dict.fromkeys((self.args.updates, self.args.updates * LONG.get(name, 1))):
            for seed in self.study.seeds:

                def compute(seed: int = seed, updates: int = updates) -> dict[str, Any]:
                    run = self.run(name, seed, lambda task: second_order(task, "KFAC", updates))
                    return run | ({"layers": self.layers(name)} if seed == 0 else {})

                yield self.study.cell(self._what(name, "GaussNewton", seed, updates), compute)

    def first(self, name: str, method: str) -> Iterator[Cell]:
        """Runs on another seed that choose a rate, and those of the chosen rates, for each length."""
        updates = self.args.updates
        long = updates * (self.args.factor or FACTORS[name])

        def one(seed: int, count: int, rate: float, period: float) -> Cell:
            what = self._what(name, method, seed, count) | {"rate": rate, "period": period}
            return self.study.cell(
                what,
                lambda: self.run(name, seed, lambda task: first_order(task, method, rate, period, count)),
            )

        screened = [one(ANOTHER, updates, rate, 1.0) for rate in FIRST[method]]
        settings = grid(False, [(cell["rate"], cell["final"]) for cell in screened])
        tried = [one(ANOTHER, long, rate, period) for rate, period in settings]
        yield from (*screened, *tried)
        for runs, count in ((screened, updates), (tried, long)):
            best = min(runs, key=ended)
            for seed in self.study.seeds:
                yield one(seed, count, best["rate"], best["period"])


def table(cells: Sequence[Cell]) -> str:
    """Markdown: losses after as many updates and seconds, and their ratio to ``GaussNewton``'s, by seed."""
    rows, done = [], [cell for cell in cells if cell["part"] == "run"]
    for base, forms in SECOND.items():
        names = {(form, "GaussNewton"): "GaussNewton" + f", {form}" * (len(forms) > 1) for form in forms}
        names |= {(base, method): method for method in FIRST}
        for key, choose in (("update", min), ("clock", max)):
            curved: dict[int, Cell] = {}
            for (form, method), name in names.items():
                own = [c for c in done if (c["network"], c["method"]) == (form, method)]
                if not own:
                    continue
                count = choose(cell["updates"] for cell in own)
                runs = [cell for cell in own if cell["updates"] == count]
                curved = curved or {cell["seed"]: cell for cell in runs}
                pairs = [
                    (loss_at(cell, key, curved[cell["seed"]][key][-1]), curved[cell["seed"]]["final"])
                    for cell in runs
                ]
                rows.append([base, AFTER[key], name, setting(runs[0]), f"{count:,}", *shown(runs, pairs)])
    header = ["network", "compared after", "method", "setting", "updates", "CPU s", "loss", "test %"]
    return markdown([*header, "log₁₀ loss less the first row's"], rows)


def shown(runs: Sequence[Cell], pairs: Sequence[tuple[float, float]]) -> list[str]:
    """The seconds, losses and accuracies of some runs, and their losses beside those of ``GaussNewton``."""
    ratios = [decades(one, other) for one, other in pairs]
    return [
        with_error((cell["clock"][-1] for cell in runs), 1),
        with_error((one for one, _ in pairs), 4),
        with_error((cell["test"] for cell in runs), 1, 100),
        with_error(ratios, 2) if any(ratios) else "",
    ]


def setting(cell: Cell) -> str:
    """A rate and its decay."""
    if "rate" not in cell:
        return "defaults"
    decay = "" if cell["period"] == 1 else f", halved every {cell['period']:.0%}"
    return f"rate 2^{round(math.log2(cell['rate']))}{decay}"


def layers(cells: Sequence[Cell]) -> str:
    """Markdown: how the curvature of each layer is kept."""
    rows = [
        [cell["network"], f"`{one['layer']}`", f"{one['size']:,}", one["kept"], one["note"]]
        for cell in {cell["network"]: cell for cell in cells if "layers" in cell}.values()
        for one in cell["layers"]
    ]
    return markdown(["network", "layer", "parameters", "kept as", "remark"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/sequences", args)
    sequences, cells = Sequences(study, args), list[Cell]()
    for name in args.networks:
        for form in SECOND[name]:
            cells += sequences.second(form)
        for method in FIRST:
            cells += sequences.first(name, method)
    study.publish(f"{table(cells)}\n\n{layers(cells)}", cells)
    draw(cells, study)


def draw(cells: Sequence[Cell], study: Study) -> None:
    """Training losses of seed 0 against time and updates."""
    names = [name for name in SECOND if any(cell["network"] == name for cell in cells)]
    picture, axes = figure(2, len(names))
    for line, name in zip(axes.reshape(-1, 2), names, strict=True):
        longest: dict[str, Cell] = {}
        for cell in cells:
            if cell["part"] == "run" and cell["seed"] == 0 and cell["network"] in (name, *SECOND[name]):
                form = "" if cell["network"] == name else f", {cell['network']}"
                longest[cell["method"] + form] = cell  # the long run comes last
        for axis, key in zip(line, ("clock", "update"), strict=True):
            for color, (label, cell) in zip(COLORS, longest.items(), strict=False):
                axis.plot(cell[key], cell["loss"], color=color, label=label)
            axis.set(title=name, xscale="log", yscale="log", ylabel="loss of a batch")
            axis.set(xlabel="CPU seconds" if key == "clock" else "updates")
        line[0].legend(fontsize=7)
    save(picture, study.out / "sequences.svg")


if __name__ == "__main__":
    main()
