"""Section 5: what the uses that a linear model is named for are worth.

Achille et al. name compatibility with an older model, counterfactuals, forgetting, privacy and fairness among
what a linear model makes easy. Here each is measured, and not whether it is exact, which tests do:

- *compatibility*: right answers of a fit that its update takes back, on test images, where other images are
  held at the old outputs, or the labels of these images are used for the update instead;
- *fairness*: the gap between two groups, images as they are and blurred ones, where nine of ten images of
  half of the classes are blurred, and one of ten of the others, and mean outputs are made equal;
- *forgetting* and *counterfactuals*: whether the linear model predicts what a network is that was fine-tuned
  without some images, or with other labels for them;
- *privacy*: accuracy of a private release (δ = 10⁻⁵) on two classes made of the first and the second half.

    python -m experiments.lqf.uses --threads 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.lqf.informative import part_of
from experiments.lqf.tasks import (
    PAIRS,
    Data,
    Pair,
    accuracy,
    finetune,
    first_classes,
    linear_model,
    load,
    place_in_class,
)
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.audit.private_release import gaussian_noise

PARAMS = r"layer3\.2|fc|linear"  # last block and head
ALPHA = 15.0  # of one-hot targets
TRAINED, HELD, TESTED = 20, 10, 1000  # images a class to train and to hold; test images of all classes
WEIGHTS = (0.1, 1.0, 10.0)  # of the penalty for leaving the old outputs
SHARES = (0.25, 0.5, 0.75)  # of the old outputs in a mean with the new ones
# rate and steps of plain fine-tuning: what `plain_loss.py` chose on another draw for each of three tasks
PLAIN = {"loss": "squared", "learning_rate": 0.1, "steps": 40, "batch_size": 16, "clip": 1.0,
         "schedule": "cosine", "head": "probe"}  # fmt: skip
EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
DELTA = 1e-5
LARGE = ("fashion_mnist", "notmnist_test10k", "mnist")  # sets with enough images to release
COUNTS = (100, 300, 1000, 2000)  # images that are released
RIDGES = (0.0625, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # over κ², the squared limit of Jacobians
DRAWS = 10  # of the noise, for each set of images
PUBLIC, VALIDATED = 200, 50  # images a class to choose the ridge with, none of which are released


def parted(train: Data, *counts: int) -> list[Data]:
    """The first images of each class, the next ones, and so on."""
    x, y = train
    place = place_in_class(y)
    edges = [0, *torch.tensor(counts).cumsum(0).tolist()]
    masks = [(low <= place) & (place < high) for low, high in pairwise(edges)]
    return [(x[mask], y[mask]) for mask in masks]


def drawn(pair: Pair, seed: int, data_dir: str | None, per_class: int) -> tuple[nn.Module, Data, Data]:
    """The network and the images of the first classes, to train and to test."""
    model, *both = load(pair, seed, data_dir, per_class, TESTED)
    train, test = map(first_classes, both)
    return model, train, test


def linearized(model: nn.Module, train: Data, seed: int) -> linnet.Linearized:
    """Last block and head, a random one: it has seen no label."""
    return part_of(linear_model(model, train, head="random", seed=seed), PARAMS)


def compatibility(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Accuracy and flips on test images of each way to update a fit with as many images again."""
    model, train, (xt, yt) = drawn(pair, seed, data_dir, TRAINED + HELD)
    first, second, (x, y) = parted(train, TRAINED // 2, TRAINED // 2, HELD)
    old = linnet.fit(linearized(model, first, seed), first, ridge="loo")
    new = old.update(second, ridge="loo")
    compatible, before = linnet.audit.compatible, old.predict(x)
    held: dict[str, Callable[[], Any]] = {
        "updated": lambda: new,
        "flips of the held images taken back": lambda: compatible(new, x, before, y).fit,
        **{
            f"right answers held, weight {weight:g}": partial(_held_right, new, (x, y), before, weight)
            for weight in WEIGHTS
        },
        "right answers held exactly": partial(_held_right, new, (x, y), before, None),
        "labels of the held images used": lambda: new.update((x, y), ridge="loo"),
    }
    was, now = (fit.predict(xt) for fit in (old, new))
    outputs = {way: make().predict(xt) for way, make in held.items()}
    outputs |= {f"mean with {share:g} of the old outputs": now + share * (was - now) for share in SHARES}
    found = {way: linnet.audit.flips(was, value, xt, yt) for way, value in outputs.items()}
    return {
        "before": accuracy(was, yt),
        "ways": {
            way: {
                "accuracy": one.accuracy_after,
                "negative": one.negative_rate,
                "positive": one.positive_rate,
            }
            for way, one in found.items()
        },
    }


def _held_right(new: Any, data: Data, before: Tensor, weight: float | None) -> Any:
    """The fit with the old right answers held."""
    return linnet.audit.compatible(new, data[0], before, data[1], weight, pin="correct").fit


def blurred(x: Tensor) -> Tensor:
    """Images as a worse camera takes them: smoothed, and of half the contrast."""
    return 0.5 * F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def grouped(data: Data, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Images of which a share of each class is blurred, and which ones are."""
    x, y = data
    place = (place_in_class(y) + 0.5) / torch.bincount(y, minlength=len(shares))[y]
    group = place < shares[y]
    return torch.where(group[:, None, None, None], blurred(x), x), group.long()


def fairness(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Gaps between the groups, and accuracy, with and without equal means."""
    model, images, (xt, yt) = drawn(pair, seed, data_dir, TRAINED + HELD)
    classes = int(yt.max()) + 1
    train, pool = parted(images, TRAINED, HELD)
    shares = torch.where(torch.arange(classes) < classes // 2, 0.9, 0.1)
    (x, group), (xp, pooled) = grouped(train, shares), grouped(pool, torch.full((classes,), 0.5))
    y = train[1]
    lin = linearized(model, (x, y), seed)
    fit = linnet.fit(lin, (x, y), ridge="loo")
    sizes = torch.bincount(2 * y + group, minlength=2 * classes).clamp_min(1)
    weight = 1.0 / sizes[2 * y + group]
    fits = {
        "none": fit,
        "equal means of the training images": fit.constrain(x, groups=group),
        "equal means of other images": fit.constrain(xp, groups=pooled),
        "each class and group weighs the same": linnet.fit(
            lin, (x, y), ridge="loo", sample_weight=weight * len(y) / weight.sum()
        ),
    }
    return {"ways": {way: disparity(one, (xt, yt), shares) for way, one in fits.items()}}


def disparity(fit: Any, test: Data, shares: Tensor) -> dict[str, float]:
    """Gaps between test images as they are and blurred, each of which is in both groups."""
    x, y = test
    outputs = [fit.predict(part) for part in (x, blurred(x))]
    means = linnet.audit.group_means(
        torch.cat(outputs), torch.cat([x, x]), torch.arange(2).repeat_interleave(len(y))
    )
    answers = [F.one_hot(one.argmax(1), len(shares)).double().mean(0) for one in outputs]
    right = [(one.argmax(1) == y).double() for one in outputs]
    blur = shares[y].double()
    return {
        "means": float(means.gaps.mean()) / ALPHA,
        "answers": 0.5 * float((answers[0] - answers[1]).abs().sum()),
        "accuracy": float(torch.cat(right).mean()),
        "worse group": min(float(one.mean()) for one in right),
        "accuracy as trained": float((blur * right[1] + (1 - blur) * right[0]).mean()),
    }


CHANGES = {  # training sets before and after
    "forgotten, labels right": ("right", "without"),
    "forgotten, labels wrong": ("wrong", "without"),
    "labels corrected": ("wrong", "right"),
}


def forgetting(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """The linear model's changes beside those of a network that is fine-tuned again, twice."""
    model, train, (xt, yt) = drawn(pair, seed, data_dir, TRAINED)
    x, y = train
    classes = int(yt.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    gone = torch.randperm(len(y), generator=generator)[: len(y) // 10]
    other = y.clone()
    other[gone] = (y[gone] + torch.randint(1, classes, (len(gone),), generator=generator)) % classes
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[gone] = False
    sets = {"right": (x, y), "wrong": (x, other), "without": (x[keep], y[keep])}
    points = torch.cat([x[gone], xt])
    fit = linnet.fit(linearized(model, train, seed), (x, other), ridge="loo")
    right = linnet.audit.counterfactual(fit, gone, y[gone]).fit
    without = fit.forget(gone)
    again = linnet.fit(linearized(model, train, seed), sets["without"], ridge=fit.ridge).predict(points)
    linear = {
        "wrong": fit.predict(points),
        "right": right.predict(points),
        "without": without.predict(points),
    }
    plain = {
        which: [
            finetune(model, data, "nlft", seed=run, **PLAIN).predict(points) for run in (seed, seed + 1000)
        ]
        for which, data in sets.items()
    }
    kinds = {"linear": {which: [outputs] for which, outputs in linear.items()}, "plain": plain}
    found: dict[str, Any] = {}
    here, there = slice(len(gone)), slice(len(gone), None)  # these images, and test images
    for name, (before, after) in CHANGES.items():
        moved = linear[after] - linear[before]
        runs = [*zip(plain[before], plain[after], strict=True)]
        changes = [b - a for a, b in runs]
        target = ALPHA * F.one_hot(y[gone] if before == "right" else other[gone], classes)
        found[name] = {
            "correlation": _mean(correlation(moved[there], one[there]) for one in changes),
            "of two": correlation(changes[0][there], changes[1][there]),
            "correlation, these images": _mean(correlation(moved[here], one[here]) for one in changes),
            "of two, these images": correlation(changes[0][here], changes[1][here]),
            "agreement": {
                "before": _mean(_same(a[there], b[there]) for a, b in runs),
                "before and linear change": _mean(_same((a + moved)[there], b[there]) for a, b in runs),
                "linear": _mean(_same(linear[after][there], b[there]) for _, b in runs),
                "of two": _same(*(b[there] for _, b in runs)),
            },
            "loss of their labels": {
                kind: [_mean(loss(one[here], target) for one in outputs[which]) for which in (before, after)]
                for kind, outputs in kinds.items()
            },
            "accuracy": {
                kind: [_mean(accuracy(one[there], yt) for one in outputs[which]) for which in (before, after)]
                for kind, outputs in kinds.items()
            },
        }
    exact = float((linear["without"] - again).abs().max() / again.abs().max())
    return {"changes": found, "forget against a fit without": exact}


def _mean(values: Any) -> float:
    """Mean of numbers."""
    listed = [*values]
    return math.fsum(listed) / len(listed)


def _same(one: Tensor, other: Tensor) -> float:
    """Share of equal answers."""
    return float((one.argmax(1) == other.argmax(1)).double().mean())


def loss(outputs: Tensor, target: Tensor) -> float:
    """Half the mean squared error over α²."""
    return 0.5 * float((outputs - target).double().square().sum(1).mean()) / ALPHA**2


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's correlation of all numbers; 0 where nothing changes."""
    both = torch.stack([one.double().flatten(), other.double().flatten()])
    return float(torch.corrcoef(both)[0, 1].nan_to_num())


@lru_cache(maxsize=1)
def halves(pair: Pair, data_dir: str | None) -> tuple[nn.Module, list[Data], Data]:
    """A network, public images to fit and to validate, private ones, and test images; classes are ±1."""
    model, train, (xt, yt) = load(pair, 0, data_dir, 1000, TESTED)
    classes = int(train[1].max()) + 1
    parts = parted(train, PUBLIC, VALIDATED, 1000)
    signed = [(x, torch.where(y < classes // 2, -1.0, 1.0)[:, None]) for x, y in (*parts, (xt, yt))]
    return model, signed[:3], signed[3]


@lru_cache(maxsize=1)
@torch.no_grad()
def features(pair: Pair, data_dir: str | None) -> tuple[linnet.Linearized, list[Data]]:
    """The head as a linear model, at zero, and the features that it is given; no label is seen."""
    model, parts, test = halves(pair, data_dir)
    network = linnet.surgery.leaky_relu(model, 0.2).eval()
    found: list[Tensor] = []
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_hook(lambda module, given, out: found.append(given[0].double()))
    data = []
    for x, y in (*parts, test):
        found.clear()
        for piece in x.split(500):
            network(piece)
        data.append((torch.cat(found), y.double()))
    hook.remove()
    head = nn.Linear(data[0][0].shape[1], 1).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return linnet.linearize(nn.Sequential(head), "all"), data


def some(data: Data, count: int, seed: int) -> Data:
    """As many of either sign."""
    x, y = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    index = torch.cat([order[y[order, 0] == sign][: count // 2] for sign in (-1.0, 1.0)])
    return x[index], y[index]


def limit(lin: linnet.Linearized, data: Data) -> float:
    """κ, the median norm of Jacobians on public images."""
    rows = linnet.fit(lin, some(data, 100, 0), ridge=1.0, solver="dual").system.dual.kernel
    return float(rows.diagonal().sqrt().median())


def at_each(fit: Any, x: Tensor, clip: tuple[float, float], seed: int) -> dict[float, Tensor]:
    """Outputs of releases by ε, (DRAWS, N): one release, from which its noise is taken and put on anew.

    The outputs are linear in the weights, and so in the noise, whose size follows from ε.
    """
    generators = [torch.Generator().manual_seed(DRAWS * seed + draw) for draw in range(DRAWS)]
    made = linnet.audit.release(fit, EPSILONS[-1], DELTA, clip=clip, generator=generators[0])
    generators[0].manual_seed(DRAWS * seed)
    size = fit.module.space.dim
    noises = [torch.randn(size, generator=one, dtype=torch.float64) for one in generators]
    moved = torch.stack([fit.module.jvp(x, noise)[:, 0] for noise in noises])
    found = made.certificate
    optimum = made.predict(x)[:, 0] - found.noise * moved[0]
    sensitivity = found.constants["sensitivity"]
    return {e: optimum + gaussian_noise(sensitivity, e, DELTA) * moved for e in EPSILONS}


def right_signs(outputs: Tensor, y: Tensor) -> float:
    """Share of right signs, over draws of the noise."""
    return float((outputs.sign() == y[:, 0]).double().mean())


def ridge_of(pair: Pair, count: int, data_dir: str | None) -> dict[str, Any]:
    """The ridge for each ε, by public images alone, and the limit of Jacobians."""
    lin, (fitted, validation, *_) = features(pair, data_dir)
    kappa = limit(lin, fitted)
    scores: dict[float, dict[float, float]] = {epsilon: {} for epsilon in EPSILONS}
    for ridge in RIDGES:
        fit = linnet.fit(lin, some(fitted, count, 0), ridge=ridge * kappa**2, solver="dual")
        for epsilon, outputs in at_each(fit, validation[0], (kappa, 1.0), 0).items():
            scores[epsilon][ridge] = right_signs(outputs, validation[1])
    best = {f"{epsilon:g}": max(found, key=found.__getitem__) for epsilon, found in scores.items()}
    return {"ridges": best, "jacobian": kappa}


def privacy(
    pair: Pair, count: int, seed: int, given: Mapping[str, Any], data_dir: str | None
) -> dict[str, Any]:
    """Test accuracy of a release by ε, and of the fit itself with the ridge of leave-one-out."""
    lin, (*_, private, (xt, yt)) = features(pair, data_dir)
    train, kappa = some(private, count, seed), given["jacobian"]
    ridges = {float(epsilon): ridge for epsilon, ridge in given["ridges"].items()}
    found = {}
    for ridge in sorted(set(ridges.values())):
        fit = linnet.fit(lin, train, ridge=ridge * kappa**2, solver="dual")
        for epsilon, outputs in at_each(fit, xt, (kappa, 1.0), 100 + seed).items():
            if ridges[epsilon] == ridge:
                found[f"{epsilon:g}"] = right_signs(outputs, yt)
    open_fit = linnet.fit(lin, train, ridge="loo")
    return {"accuracy": found, "open": right_signs(open_fit.predict(xt)[:, 0], yt)}


def of_use(cells: Sequence[Cell], use: str) -> list[Cell]:
    """The cells of one use."""
    return [cell for cell in cells if cell["use"] == use]


def flips_table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a way to update, over tasks and draws."""
    own = of_use(cells, "compatibility")
    before = with_error((cell["before"] for cell in own), scale=100)
    rows = [["old fit", before, "–", "–", "–", "–"]]
    taken_back = sum(cell["ways"]["updated"]["negative"] for cell in own)
    for way in own[0]["ways"]:
        ways = [(cell["ways"][way], cell["ways"]["updated"]) for cell in own]
        avoided = 100 * (1 - sum(one["negative"] for one, _ in ways) / max(taken_back, 1e-12))
        less = [with_error((b[key] - a[key] for a, b in ways), scale=100) for key in ("negative", "accuracy")]
        found = [with_error((one[key] for one, _ in ways), scale=100) for key in ("accuracy", "negative")]
        compared = ["–"] * 3 if way == "updated" else [f"{avoided:.0f}", *less]
        rows.append([way, *found, *compared])
    header = [
        "way",
        "accuracy %",
        "negative flips %",
        "share avoided, %",
        "negative flips less",
        "accuracy less",
    ]
    return markdown(header, rows)


def groups_table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a way to make groups alike, over tasks and draws."""
    own, rows = of_use(cells, "fairness"), []
    for way in own[0]["ways"]:
        ways = [(cell["ways"][way], cell["ways"]["none"]) for cell in own]
        apart = [
            with_error((one["means"] for one, _ in ways), 3),
            with_error((one["answers"] for one, _ in ways), scale=100),
            with_error((one["accuracy"] for one, _ in ways), scale=100),
        ]
        more = [
            with_error((a[key] - b[key] for a, b in ways), scale=100)
            for key in ("accuracy", "worse group", "accuracy as trained")
        ]
        rows.append([way, *apart, *(["–"] * 3 if way == "none" else more)])
    header = ["equations", "gap of mean outputs", "answers apart, %", "accuracy %", "accuracy more",
              "of the worse group", "with groups as trained"]  # fmt: skip
    return markdown(header, rows)


def changes_table(cells: Sequence[Cell]) -> str:
    """Markdown: a column a change of the training set, over tasks and draws."""
    own, rows = of_use(cells, "forgetting"), []
    for name in CHANGES:
        ones = [cell["changes"][name] for cell in own]
        places = ("correlation", "of two", "correlation, these images", "of two, these images")
        correlations = [with_error((one[key] for one in ones), 2) for key in places]
        agreement = [with_error((one["agreement"][key] for one in ones), scale=100)
                     for key in ("before", "before and linear change", "linear", "of two")]  # fmt: skip
        moved = [
            with_error((one[what][kind][1] - one[what][kind][0] for one in ones), digits, scale)
            for what, digits, scale in (("loss of their labels", 3, 1), ("accuracy", 1, 100))
            for kind in ("linear", "plain")
        ]
        rows.append([name, *correlations, *agreement, *moved])
    kinds = ("linear", "network")
    columns = [
        *(f"correlation of changes on test images, {of}" for of in ("linear and network", "two networks")),
        *(f"on these images, {of}" for of in ("linear and network", "two networks")),
        "same answers as the network after, %, network before",
        *("network before and linear change", "linear after", "another network after"),
        *(f"loss of their labels more by, {kind}" for kind in kinds),
        *(f"test accuracy more by, {kind}" for kind in kinds),
    ]
    header = ["training set", *(row[0] for row in rows)]
    return markdown(header, [[name, *(row[i + 1] for row in rows)] for i, name in enumerate(columns)])


def privacy_table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a number of released images, over tasks and draws."""
    own, rows = [cell for cell in of_use(cells, "privacy") if "open" in cell], []
    for count in dict.fromkeys(cell["images"] for cell in own):
        these = [cell for cell in own if cell["images"] == count]
        places = [(one["open"], [one["accuracy"][f"{epsilon:g}"] for epsilon in EPSILONS]) for one in these]
        found = [with_error(column, scale=100) for column in zip(*(of for _, of in places), strict=True)]
        lost = [[bare - one for one in of] for bare, of in places]
        less = [with_error(column, scale=100) for column in zip(*lost, strict=True)]
        rows.append([f"{count}", *found, with_error((bare for bare, _ in places), scale=100)])
        rows.append([f"{count}, points lost", *less, "–"])
    return markdown(["images", *(f"ε = {epsilon:g}" for epsilon in EPSILONS), "not private"], rows)


TABLES = {
    "compatibility": flips_table,
    "fairness": groups_table,
    "forgetting": changes_table,
    "privacy": privacy_table,
}


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--uses", nargs="*", choices=[*TABLES], default=[*TABLES])
    given = arguments.parse_args(argv)
    study, directory = Study("lqf/uses", given), given.data_dir
    large = pairs or [replace(PAIRS[2], target=name) for name in LARGE]
    pairs = pairs or PAIRS[:3]
    measures = {"compatibility": compatibility, "fairness": fairness, "forgetting": forgetting}
    cells = [
        study.cell({"use": use, "pair": pair.name, "seed": seed}, partial(measure, pair, seed, directory))
        for use, measure in measures.items()
        if use in given.uses
        for seed in study.seeds
        for pair in pairs
    ]
    for pair in large if "privacy" in given.uses else []:
        for count in COUNTS:
            where = {"use": "privacy", "pair": pair.name, "images": count}
            tuned = study.cell(
                {**where, "ridges tried": [*RIDGES]}, partial(ridge_of, pair, count, directory)
            )
            known = {"ridges": tuned["ridges"], "jacobian": tuned["jacobian"]}
            cells.append(tuned)
            cells += [
                study.cell({**where, "seed": seed}, partial(privacy, pair, count, seed, known, directory))
                for seed in study.seeds
            ]
    study.publish("\n\n".join(TABLES[use](cells) for use in given.uses), cells)


if __name__ == "__main__":
    main()
