"""Botev 2020, chapter 6: a batch size that adapts, beside fixed ones.

The thesis asks how large a batch curvature should be measured on: too large costs time, too small leaves
noise, and a size that adapts would make the method free of hyper-parameters. KFAC with the defaults of
``GaussNewton`` trains the reduced MNIST autoencoder of ``experiments.optimizer.autoencoders`` with batches of
50, 250 and 1,000 images and with a schedule that begins at 50 and doubles when the gradient's noise is larger
than the gradient (the norm test of Byrd, Chin, Nocedal and Wu, 2012, with θ = 1): the variance of a batch's
gradient is estimated from the difference of its halves' gradients, both averaged over ten updates. Losses are
of all images.

    python -m experiments.optimizer.batch_sizes --threads 1 --seeds 5
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from experiments.figures import COLORS, figure, save
from experiments.optimizer.problems import autoencoder, problem, reduced
from experiments.optimizer.training import loss_at
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import optim
from linnet.likelihoods import Bernoulli

IMAGES, UPDATES, EVERY = 6000, 500, 20
SIZES = (50, 250, 1000)
ADAPTED = "adapted"
LARGEST = 2000  # batch of the schedule
MEMORY = 10  # updates that noise and gradient are averaged over


class NormTest:
    """A batch size that doubles when the noise of the gradient outgrows it."""

    def __init__(self, size: int) -> None:
        self.size, self._noise, self._signal, self._seen = size, 0.0, 0.0, 0

    def observe(self, first: Tensor, second: Tensor) -> None:
        """Take in the gradients of a batch's two halves."""
        # halves are independent: E‖g₁ - g₂‖² = 4 tr Var(g); ‖g‖² exceeds the squared mean by that variance
        noise = float((first - second).square().sum()) / 4
        signal = float(((first + second) / 2).square().sum()) - noise
        self._noise, self._signal, self._seen = self._noise + noise, self._signal + signal, self._seen + 1
        if self._seen == MEMORY:
            if self._noise > self._signal and self.size < LARGEST:
                self.size = min(2 * self.size, LARGEST)
            self._noise, self._signal, self._seen = 0.0, 0.0, 0


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Of the mean loss of a batch."""
    loss = Bernoulli().nll(model(x), x).mean()
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor) -> float:
    """Over all images."""
    return float(Bernoulli().nll(model(x), x).double().mean())


def compute(size: int | str, x: Tensor, widths: Sequence[int], updates: int, seed: int) -> dict[str, Any]:
    """A run: losses, CPU seconds and examples at some updates, and batch sizes."""
    model = autoencoder(x.shape[1], widths, "tanh", seed).to(x.device)
    optimizer = optim.GaussNewton(model, Bernoulli(), "kfac")
    test = NormTest(SIZES[0]) if isinstance(size, str) else None
    generator = torch.Generator().manual_seed(1000 + seed)
    clock = time.perf_counter if x.device.type == "cuda" else time.process_time
    found: dict[str, Any] = {key: [] for key in ("update", "clock", "examples", "loss", "size")}
    spent, examples = 0.0, 0
    for update in range(1, updates + 1):
        now = test.size if test else int(size)
        chosen_images = torch.randperm(len(x), generator=generator)[:now].to(x.device)
        begin = clock()
        batch = x[chosen_images]
        if test:
            test.observe(*(gradient(model, half) for half in batch.chunk(2)))
        optimizer.step(batch, batch)
        spent, examples = spent + clock() - begin, examples + now
        if update % EVERY == 0 or update == updates:
            for key, value in zip(found, (update, spent, examples, mean_loss(model, x), now), strict=True):
                found[key].append(value)
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a size; losses after as many seconds are at the end of each seed's shortest run."""
    names = list(dict.fromkeys(cell["batch"] for cell in cells))
    seeds = list(dict.fromkeys(cell["seed"] for cell in cells))
    limits = {seed: min(clock[-1] for clock in chosen(cells, "clock", seed=seed)) for seed in seeds}
    at: dict[Any, list[float]] = {
        name: [loss_at(cell, "clock", limits[cell["seed"]]) for cell in cells if cell["batch"] == name]
        for name in names
    }
    rows = []
    for name in names:
        own = [cell for cell in cells if cell["batch"] == name]
        less = (a - b for a, b in zip(at[name], at[ADAPTED], strict=True))
        rows.append(
            [
                f"{name:,}"
                if isinstance(name, int)
                else f"{name}, {min(c['size'][-1] for c in own):,} at last",
                with_error((cell["loss"][-1] for cell in own), 1),
                f"{sum(c['examples'][-1] for c in own) / len(own):,.0f}",
                with_error((cell["clock"][-1] for cell in own), 1),
                with_error(at[name], 1),
                "" if name == ADAPTED else with_error(less, 1),
            ]
        )
    header = ["batch", "loss after all updates", "examples", "CPU s", "loss in the shortest run's seconds"]
    return markdown([*header, "less that of the adapted size"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--widths", type=int, nargs="+", default=list(reduced(False)))
    arguments.add_argument("--images", type=int, default=IMAGES)
    arguments.add_argument("--updates", type=int, default=UPDATES)
    args = arguments.parse_args(given)
    study = Study("optimizer/batch_sizes", args)
    data: list[Tensor] = []

    def run(size: int | str, seed: int) -> dict[str, Any]:
        if not data:
            data.append(problem("mnist", args.images, args.data_dir).x.to(args.device))
        return compute(size, data[0], args.widths, args.updates, seed)

    sizes = {"widths": args.widths, "images": args.images, "updates": args.updates}
    cells = [
        study.cell({"batch": size, "seed": seed, **sizes}, lambda size=size, seed=seed: run(size, seed))  # type: ignore[misc]
        for size in (*SIZES, ADAPTED)
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)
    picture, axis = figure()
    for color, size in zip(COLORS, (*SIZES, ADAPTED), strict=False):
        run_of_first = next(cell for cell in cells if cell["batch"] == size)
        axis.plot(run_of_first["clock"], run_of_first["loss"], color=color, label=str(size))
    axis.set(xlabel="CPU s", ylabel="loss of all images")
    axis.legend(title="batch")
    save(picture, study.out / "batch_sizes.svg")


if __name__ == "__main__":
    main()
