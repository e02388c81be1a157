"""``linnet.adapt(tune=True)`` and its rivals, each with a search: fine-tuning, LoRA, biases, pairs.

``python -m experiments.adapt.rivals --networks minilm6 --tasks news --shots 8 20 --tested 400``
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.adapt.depth import MOST, resampled
from experiments.adapt.kernels import SETS, suited
from experiments.adapt.nested import drawn as shots_of
from experiments.adapt.tasks import NETWORKS, Network, Task, pools, samples, stored
from experiments.sources import Images
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.fitting.descent import CLIP, HEAD_SCALE, WARM_UP, held_out_splits, loss_of, outputs_of
from linnet.fitting.last_layer import last_linear, replace_module
from linnet.tangent.batch import Inputs, on_device, split, take
from linnet.tangent.functional import copied
from linnet.training import cosine, stream, train

RANK = 8  # of LoRA, as in its paper's tables
BATCH = 16  # samples a step, as SetFit has it
STEPS, EPOCHS = (50, 150), 10  # lengths tried; the longer one sees every sample so often at least
PENALTIES = (1.0, 10.0, 100.0)  # C of the regression on trained features
FOLDS, FEW_FOLDS = 5, 3  # the second where a class has fewer samples than the first
SCORED = 10  # samples on which settings are judged before any drops out
RATES = {  # of Adam, for texts and for images: about the best of trials on two development tasks
    "fine-tuning": ((1e-5, 3e-5, 1e-4, 3e-4), (1e-4, 3e-4, 1e-3, 3e-3)),
    "LoRA": ((3e-4, 1e-3, 3e-3, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2)),
    "biases": ((1e-3, 3e-3, 1e-2, 3e-2), (3e-3, 1e-2, 3e-2, 1e-1)),
    "pairs": ((3e-5, 1e-4, 3e-4, 1e-3), (1e-4, 3e-4, 1e-3, 3e-3)),
}
# What the names of the parameters trained beside the head end in.
ENDS: dict[str, str | tuple[str, ...]] = {"fine-tuning": "", "LoRA": (".a", ".b"), "biases": "bias"}
FROZEN = {"probe": "fine-tuning", "regression": "pairs"}  # what two of them are after no steps
OURS = {"adapt": False, "tune": True}  # whether the lower layers are trained
METHODS = (*FROZEN, *OURS, *RATES)
DRAW = f"{shots_of.__module__}.{shots_of.__name__}"
Setting = tuple[float, int]  # rate, steps
Data = tuple[Inputs, Tensor]


# -- networks --------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A linear layer or a 1 × 1 convolution, with a trained product of two thin matrices beside it.

    W + B A: A starts at random, B at zero, so that the outputs start as they are.

    Args:
        layer: The layer, which keeps its weights.
        rank: Rows of A.
        generator: Source of A.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape[:2]
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        self.layer, self.ones = layer, layer.weight.shape[2:]  # the sides of a convolution's filters
        self.a = nn.Parameter(a.to(layer.weight))
        self.b = nn.Parameter(layer.weight.new_zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives and B A x."""
        found: Tensor = self.layer(x)
        if not self.ones:
            return found + F.linear(F.linear(x, self.a), self.b)
        a, b = (part.view(*part.shape, 1, 1) for part in (self.a, self.b))
        return found + F.conv2d(F.conv2d(x, a), b)


def low_rank(model: nn.Module, rank: int, generator: torch.Generator) -> nn.Module:
    """The network with ``LowRank`` in the place of every linear layer and 1 × 1 convolution but the head."""
    head, _ = last_linear(model)
    for name, layer in list(model.named_modules()):
        pixels = (
            isinstance(layer, nn.Conv2d) and (*layer.kernel_size, *layer.stride, layer.groups) == (1,) * 5
        )
        if name != head and (pixels or isinstance(layer, nn.Linear)):
            replace_module(model, name, LowRank(layer, rank, generator))
    return model


class Lean(nn.Module):
    """A network with the same outputs for less work: no padding behind the longest text, channels last.

    Args:
        body: The network.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        for parameter in body.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def forward(self, *images: Tensor, **texts: Tensor) -> Tensor:
        """Images (N, 3, H, W), or tokens and their mask (N, T), to outputs."""
        if texts:
            length = int(texts["attention_mask"].sum(1).max())
            found: Tensor = self.body(**{name: part[:, :length] for name, part in texts.items()})
            return found
        found = self.body(images[0].contiguous(memory_format=torch.channels_last))
        return found


# -- training --------------------------------------------------------------------------------------


def pair_loss(features: Tensor, labels: Tensor) -> Tensor:
    """Squared error of the cosines of all pairs, against one within a class and zero between classes.

    SetFit's loss; both kinds of pairs weigh the same, as it draws equally many of each.

    Args:
        features: (N, D).
        labels: (N,).
    """
    unit = F.normalize(features)
    cosines = unit @ unit.T
    above = torch.ones_like(cosines, dtype=torch.bool).triu(1)
    same = labels[:, None] == labels
    parts = (1 - cosines[same & above]).square(), cosines[~same & above].square()
    return torch.stack([part.mean() for part in parts if len(part)]).mean()


def pair_batches(labels: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Positions of samples in random order and, for each of them, of another of its class; without end."""
    labels = labels.cpu()
    orders = stream(len(labels), BATCH // 2, lambda _: torch.randperm(len(labels), generator=generator))
    for anchors in orders:
        partners = (labels[anchors, None] == labels).double()
        partners[torch.arange(len(anchors)), anchors] = 1e-9  # itself, where the class has no other
        yield torch.cat([anchors, torch.multinomial(partners, 1, generator=generator)[:, 0]])


def descended(
    model: nn.Module,
    names: Callable[[str], bool],
    data: Data,
    batches: Iterator[Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    setting: Setting,
    dropout: bool = False,
) -> nn.Module:
    """Train a network in its place, as plain fine-tuning of the library does; a run that diverges ends.

    Args:
        model: The network; BatchNorm keeps its running statistics.
        names: Whether the parameter of a name is trained.
        data: Samples and labels.
        batches: Positions of the samples of each step.
        loss_of: Loss of outputs and labels.
        setting: Rate and steps.
        dropout: Whether dropout is on.
    """
    (x, y), (rate, steps) = data, setting
    for module in model.modules():
        module.train(dropout and isinstance(module, nn.Dropout))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names(name))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0, fused=True)

    def gradient(rows: Tensor) -> Tensor:
        rows = rows.to(y.device)
        loss = loss_of(outputs_of(model, take(x, rows)), y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        return loss.detach()

    def rate_at(step: int) -> float:
        return rate * min(1.0, (step + 1) / (WARM_UP * steps)) * cosine(step, steps)

    for _, loss in train(optimizer, islice(batches, steps), gradient, rate_at):
        if not loss.isfinite():
            break
    return model.requires_grad_(False)


@torch.no_grad()
def answers(model: nn.Module, x: Inputs) -> Tensor:
    """What a network returns for many samples."""
    return torch.cat([outputs_of(model, part) for part in split(x, 100)]).double().cpu()


def regressed(phi: Tensor, y: Tensor, query: Tensor, classes: int) -> Tensor:
    """Probabilities (penalties, T, classes) of logistic regression on features of length one."""
    found = phi.new_zeros(len(PENALTIES), len(query), classes)
    if not (phi.isfinite().all() and query.isfinite().all()):
        return found * math.nan
    rows, others = (F.normalize(part).numpy() for part in (phi, query))
    for probabilities, penalty in zip(found, PENALTIES, strict=True):
        fitted = LogisticRegression(C=penalty, max_iter=2000).fit(rows, y.cpu().numpy())
        probabilities[:, torch.from_numpy(fitted.classes_)] = torch.from_numpy(fitted.predict_proba(others))
    return found


def run(
    method: str, start: nn.Module, setting: Setting, data: Data, query: Inputs, classes: int, seed: int
) -> Tensor:
    """Train a rival on some samples for its probabilities of others.

    Args:
        method: One of ``RATES``.
        start: The network behind the linear probe of the samples.
        setting: Rate and steps.
        data: Samples and labels.
        query: T samples.
        classes: Number of classes.
        seed: Seed of the batches and of LoRA's first weights.

    Returns:
        (heads, T, classes): of each penalty for pairs, else of the one head.
    """
    model, (head, _) = copied(start), last_linear(start)
    generator = torch.Generator().manual_seed(seed)
    y = data[1]
    if method == "pairs":
        replace_module(model, head, nn.Identity())
        model = Lean(model)
        descended(model, lambda name: True, data, pair_batches(y, generator), pair_loss, setting)
        return regressed(answers(model, data[0]), y, answers(model, query), classes)
    if method == "LoRA":
        model = low_rank(model, RANK, generator)
    model = Lean(model)
    batches = stream(len(y), BATCH, lambda _: torch.randperm(len(y), generator=generator))

    def taken(name: str) -> bool:
        return name.endswith(ENDS[method]) or name.startswith(f"body.{head}.")

    descended(model, taken, data, batches, loss_of, setting)
    return answers(model, query).softmax(1)[None]


# -- the search ------------------------------------------------------------------------------------


def settings_of(method: str, text: bool, count: int) -> list[Setting]:
    """Rates and steps that a rival is tried with on so many samples."""
    if method in FROZEN:
        return [(0.0, 0)]
    longest = max(STEPS[-1], -(-EPOCHS * count // BATCH))
    lengths = [longest * steps // STEPS[-1] for steps in STEPS]
    return [(rate, steps) for rate in RATES[method][not text] for steps in lengths]


def scores(probabilities: Tensor, y: Tensor) -> Tensor:
    """Which samples each head has right, and squared errors, the worst if not finite: (heads, N, 2)."""
    truth = F.one_hot(y.cpu(), probabilities.shape[-1])
    right = probabilities.argmax(-1) == y.cpu()
    errors = (probabilities - truth).square().sum(-1)
    lost = ~errors.isfinite()
    return torch.stack([right.double().masked_fill(lost, 0.0), errors.masked_fill(lost, 2.0)], -1)


def raced(
    settings: Sequence[Setting], score: Callable[[int, Setting], Tensor], folds: int, finalists: int
) -> dict[Setting, Tensor]:
    """Scores of settings on folds, of which the worse half drops out after each.

    The squared error of the probabilities says which half: on the few samples of a fold it tells settings
    apart that have the same ones right.

    Args:
        settings: Rates and steps.
        score: ``scores`` of a setting on the fold of a number.
        folds: Number of folds.
        finalists: Settings that stay to the last fold; with one, the race ends where two are compared.

    Returns:
        Scores (heads, N, 2) of each setting on the folds that it took part in.
    """
    found = {setting: torch.zeros(0) for setting in settings}
    left = list(settings)
    for fold in range(folds):
        for setting in left:
            found[setting] = torch.cat([*([found[setting]] if fold else []), score(fold, setting)], 1)
        left.sort(key=lambda setting: float(found[setting][..., 1].mean(1).min()))
        if found[left[0]].shape[1] >= SCORED:
            left = left[: max(finalists, -(-len(left) // 2))]
        if len(left) == 1:
            break
    return found


def best(found: dict[Setting, Tensor]) -> tuple[Setting, int]:
    """The setting and head with most samples right, then the least squared error, of those raced longest."""
    longest = max(part.shape[1] for part in found.values())
    means = {
        (setting, head): row
        for setting, part in found.items()
        if part.shape[1] == longest
        for head, row in enumerate(part.mean(1).tolist())
    }
    return max(means, key=lambda key: (means[key][0], -means[key][1]))


def searched(
    method: str, model: nn.Module, data: Data, query: Inputs, classes: int, seed: int, finalists: int
) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (T, classes) of a rival at its best setting, and what the search found and took."""
    x, y = data
    fewest = int(y.bincount()[y.unique()].min())
    splits = held_out_splits(y, seed, FOLDS if fewest >= FOLDS else FEW_FOLDS)
    kind = FROZEN.get(method, method)

    def headed(rows: Tensor) -> tuple[nn.Module, Data]:
        own = take(x, rows), y[rows]
        return linnet.with_head(model, classes, linnet.Probe(scale=HEAD_SCALE), data=own), own

    starts = lru_cache(maxsize=1)(lambda fold: headed(splits[fold][0]))

    def score(fold: int, setting: Setting) -> Tensor:
        start, own = starts(fold)
        held = splits[fold][1]
        return scores(run(kind, start, setting, own, take(x, held), classes, seed), y[held])

    clocks = [(time.perf_counter(), time.process_time())]
    found = raced(settings_of(method, isinstance(x, dict), len(y)), score, len(splits), finalists)
    setting, head = best(found)
    clocks.append((time.perf_counter(), time.process_time()))
    start, own = headed(torch.arange(len(y)))
    probabilities = run(kind, start, setting, own, query, classes, seed)[head]
    clocks.append((time.perf_counter(), time.process_time()))
    (search, search_cpu), (last, last_cpu) = (
        (b - a for a, b in zip(*pair, strict=True)) for pair in (clocks[:2], clocks[1:])
    )
    tried = [[*key, part.shape[1], *part.mean(1).mT.tolist()] for key, part in found.items()]
    return probabilities, {
        "rate": setting[0],
        "steps": setting[1],
        "penalty": PENALTIES[head] if kind == "pairs" else None,
        "held out": float(found[setting][head, :, 0].mean()),
        "tried": tried,  # rate, steps, samples, shares right of the heads, squared errors
        "search seconds": search,
        "search CPU seconds": search_cpu,
        "last seconds": last,
        "last CPU seconds": last_cpu,
    }


def ours(
    method: str, model: nn.Module, data: Data, query: Inputs, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (T, classes) of ``linnet.adapt`` and what it chose."""
    clock = time.perf_counter(), time.process_time()
    fit = linnet.adapt(model, data, seed=seed, tune=OURS[method])
    seconds, cpu = time.perf_counter() - clock[0], time.process_time() - clock[1]
    return fit.predictive(query).probs.double().cpu(), {
        "trained": fit.trained,
        "shares": [fit.body_weight, fit.earlier],
        "rungs": [[rung.name, rung.error, rung.accuracy, rung.taken] for rung in fit.rungs],
        "search seconds": seconds,
        "search CPU seconds": cpu,
    }


# -- the study -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def loaded(network: Network, data_dir: str | None, device: str) -> tuple[nn.Module, Any]:
    """A network and what prepares its samples."""
    model, prepared = network.load(data_dir)
    return model.to(device), prepared


@lru_cache(maxsize=1)
def found_of(task: Task, data_dir: str | None) -> Images:
    """What a task has stored."""
    return stored(task, data_dir)


def cell(
    network: Network, task: Task, shots: int, seed: int, method: str, given: argparse.Namespace
) -> dict[str, Any]:
    """A rival on a draw."""
    model, prepared = loaded(network, given.data_dir, given.device)
    found = found_of(task, given.data_dir)
    pool, test = pools(found, given.pool, given.tested)
    at = pool[shots_of(found.train_y[pool], shots, seed)]
    x, xt = (
        on_device(samples(part[rows.numpy()], network, prepared), torch.device(given.device))
        for part, rows in ((found.train_x, at), (found.test_x, test))
    )
    truth = found.test_y[test]
    data = x, found.train_y[at].to(given.device)
    if method in OURS:
        probabilities, facts = ours(method, model, data, xt, seed)
    else:
        probabilities, facts = searched(method, model, data, xt, found.classes, seed, given.finalists)
    right = probabilities.argmax(1) == truth
    taken = probabilities[torch.arange(len(truth)), truth].clamp_min(1e-12)
    return {
        "accuracy": float(right.double().mean()),
        "log loss": float(-taken.log().mean()),
        "confidence": float(probabilities.max(1).values.mean()),
        "right": "".join(str(int(one)) for one in right),
        "samples": len(at),
        **facts,
    }


def _groups(cells: Sequence[Cell], *keys: str) -> Iterator[tuple[tuple[Any, ...], dict[str, list[Cell]]]]:
    """The cells that agree in some keys, by method, in the order in which they were made."""
    for where in dict.fromkeys(tuple(cell[key] for key in keys) for cell in cells):
        own = [cell for cell in cells if tuple(cell[key] for key in keys) == where]
        yield where, {method: part for method in METHODS if (part := chosen_cells(own, method))}


def chosen_cells(cells: Sequence[Cell], method: str) -> list[Cell]:
    """Those of a method."""
    return [cell for cell in cells if cell["method"] == method]


def ahead(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[float, float]:
    """Points by which one is ahead of another on the same draws, with the error over draws and samples."""
    pairs = [(a["right"], b["right"]) for a in first for b in second if a["seed"] == b["seed"]]
    mine, theirs = (
        torch.tensor([[int(one) for one in right] for right in part]) for part in zip(*pairs, strict=True)
    )
    return resampled(mine, theirs)


def best_rival(by_method: dict[str, list[Cell]]) -> str:
    """The rival with the highest accuracy on the test samples."""
    return max((name for name in by_method if name in RATES), key=lambda name: accuracy(by_method[name]))


def accuracy(cells: Sequence[Cell]) -> float:
    """Mean accuracy in percent."""
    return 100 * sum(cell["accuracy"] for cell in cells) / len(cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network, task and number of shots; accuracies, and how far tuning is ahead."""
    names = [name for name in METHODS if chosen_cells(cells, name)]
    header = ("network", "task", "a class", "draws", *names, "tune less the best rival", "trained")
    rows = []
    for where, own in _groups(cells, "network", "task", "shots"):
        if "tune" not in own or not own.keys() & RATES.keys():
            continue
        values = [f"{accuracy(own[name]):.1f}" if name in own else "–" for name in names]
        gain, error = ahead(own["tune"], own[best_rival(own)])
        trained = [cell["trained"] for cell in own["tune"]]
        told = f"{gain:.1f} ± {error:.1f}", f"{sum(trained)} of {len(trained)}"
        rows.append([*map(str, where), str(len(trained)), *values, *told])
    return markdown(header, rows)


def curve(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network, task and number of samples; the accuracies of the methods that were run."""
    names = [name for name in METHODS if chosen_cells(cells, name)]
    rows = []
    for where, own in _groups(cells, "network", "task", "samples"):
        values = [f"{accuracy(own[name]):.1f}" if name in own else "–" for name in names]
        rows.append([*map(str, where), *values])
    return markdown(("network", "task", "samples", *names), rows)


def means(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network, number of shots and method; over tasks, and how far tuning is ahead."""
    rows = []
    for where, own in _groups(cells, "network", "shots"):
        for name, part in own.items():
            tasks = [by for _, by in _groups([*own["tune"], *part], "task") if name in by and "tune" in by]
            gains = [accuracy(by["tune"]) - accuracy(by[name]) for by in tasks]
            seconds = sum(cell["search CPU seconds"] + cell.get("last CPU seconds", 0.0) for cell in part)
            mean = sum(accuracy(by[name]) for by in tasks) / len(tasks)
            told = (f"{mean:.1f}", "" if name == "tune" else with_error(gains), f"{seconds / len(part):.0f}")
            rows.append([*map(str, where), name, str(len(tasks)), *told])
    header = ("network", "a class", "method", "tasks", "accuracy", "tune is ahead by", "CPU seconds")
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    options = parser(__doc__ or "")
    options.add_argument("--sets", nargs="+", default=["development"], choices=list(SETS))
    options.add_argument("--networks", nargs="+", default=["minilm6", "lite0"], choices=list(NETWORKS))
    options.add_argument("--tasks", nargs="+", default=None, help="names of tasks (default: all)")
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options.add_argument("--shots", nargs="+", type=int, default=[5, 20])
    options.add_argument("--pool", type=int, default=MOST, help="samples to draw from (default %(default)s)")
    options.add_argument("--tested", type=int, default=2000, help="test samples (default %(default)s)")
    options.add_argument(
        "--finalists", type=int, default=2, help="settings that are tried on all folds (default %(default)s)"
    )
    options.add_argument("--first-seed", type=int, default=0, help="first draw (default %(default)s)")
    given = options.parse_args(arguments)
    study, cells = Study("adapt/rivals", given), []
    for seed in study.seeds[given.first_seed :]:  # a draw of everything before the next one
        for key in given.networks:
            network = NETWORKS[key]
            tasks = [(part, task) for part in given.sets for task in suited(part, network)]
            for shots in given.shots:
                for part, task in tasks:
                    if given.tasks and task.name not in given.tasks:
                        continue
                    where = {"set": part, "network": network.name, "task": task.name}
                    what = {**where, "shots": shots, "seed": seed, "pool": given.pool, "tested": given.tested}
                    what |= {"batch": BATCH, "finalists": given.finalists, "draw": DRAW}
                    for method in given.methods:
                        compute = partial(cell, network, task, shots, seed, method, given)
                        rates = [*RATES[method][not network.text]] if method in RATES else []
                        cells.append(study.cell({**what, "method": method, "rates": rates}, compute))
    study.publish(f"{means(cells)}\n\n{table(cells)}", cells)


if __name__ == "__main__":
    main()
