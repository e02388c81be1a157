"""Membership attacks after forgetting: can samples that were forgotten be told from samples never seen?

An encoder's features are fitted by ``linnet.adapt`` to 200 samples; 40 of them are then to be forgotten. An
attack gives every sample a score, and its area under the ROC curve over the 40 and over 40 samples that no
fit has seen says how well it tells them apart: 50 % is chance. Three attacks:

- "loss": minus the log loss of the sample's label (Yeom et al., CSF 2018);
- "calibrated": the same less its mean over eight reference fits on other samples, which takes out how hard a
  sample is (Watson et al., ICLR 2022);
- "weights": the attacker knows the weights and all samples that stay. The weights of a linear fit lie in the
  span of the features it has used, so that what they do to the part of a sample's features outside the span
  of those that stay is large where the sample was used as well.

They are tried on the fit as it is, on ``fit.forget`` of the 40, and on other ways to forget from the same
weights: gradient ascent on the 40 until half of them are wrong, training on the rest for as many steps, and
subtracting first-order influences. The last rows are about what a fit stands on: the same, where the features
come from a small network that was trained on all 200 before (``forget`` then removes the samples from the
fit, and not from the network).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.labels.flipped import area
from experiments.selection.criteria import TASKS as SETS
from experiments.selection.criteria import kept as encoded
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error

# subjectivity has too few samples
TASKS = [name for names in SETS.values() for name in names if name != "subjectivity"]
MEMBERS, FORGOTTEN, REFERENCES, REFERENCE = 200, 40, 8, 150
ATTACKS = ("loss", "calibrated", "weights")
STEPS, RATE = 100, 0.5  # of gradient ascent and of training on, over the largest eigenvalue
TRAINED = 300  # steps of Adam of the small network
WIDTH = 128
Outputs = Callable[[Tensor], Tensor]


# -- attacks ---------------------------------------------------------------------------------------


def losses(outputs: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Log loss of each sample's label."""
    return F.cross_entropy(outputs / temperature, y, reduction="none")


def with_one(x: Tensor) -> Tensor:
    """Features with a 1 for the bias."""
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


def outside(x: Tensor, stay: Tensor) -> Tensor:
    """What of each sample's features, with a 1 for the bias, is outside the span of those that stay."""
    own, basis = with_one(x), torch.linalg.svd(with_one(stay), full_matrices=False)
    kept = basis.Vh[1e-10 * basis.S[0] < basis.S]
    return own - own @ kept.T @ kept


def areas(
    outputs: Outputs,
    temperature: float,
    two: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    references: Tensor,
    stay: Tensor | None,
) -> dict[str, float | None]:
    """Areas under the ROC curve, in percent; ``two`` are what was to go and what was never seen."""
    x, y = (torch.cat([one, other]) for one, other in zip(*two, strict=True))
    gone = torch.arange(len(y)) < len(two[0][1])
    own = -losses(outputs(x), y, temperature)
    scores = {"loss": own, "calibrated": own - references}
    if stay is not None:
        apart = outside(x, stay)
        # linear outputs: W (part) = f(part without the bias) - f(0) + its share of the bias
        zero = outputs(torch.zeros_like(x[:1]))
        moved = outputs(apart[:, :-1]) - zero + apart[:, -1:] * zero
        scores["weights"] = moved.norm(dim=1) / apart.norm(dim=1).clamp_min(1e-12)
    return {name: round(100 * float(area(score, gone) or 0), 3) for name, score in scores.items()}


# -- other ways to forget, from the weights of the linear fit ----------------------------------------


def linear_weights(fit: Any, phi: Tensor) -> Tensor:
    """W (D + 1, C) of a fit that is linear in its features, by its outputs on the unit vectors."""
    zero = fit.predict(torch.zeros_like(phi[:1]))
    return torch.cat([fit.predict(torch.eye(phi.shape[1], dtype=phi.dtype)) - zero, zero])


def ascended(w: Tensor, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """Gradient ascent on the squared loss of what must go, until half of it is wrong."""
    rows = with_one(x)
    step = RATE / float(torch.linalg.matrix_norm(rows, 2) ** 2)
    for _ in range(STEPS):
        if float(((rows @ w).argmax(1) == y).double().mean()) <= 0.5:
            break
        w = w + step * rows.T @ (rows @ w - t)
    return w


def trained_on(w: Tensor, x: Tensor, t: Tensor, ridge: float) -> Tensor:
    """Gradient descent on the rest from the weights that have seen all."""
    rows = with_one(x)
    step = RATE / (float(torch.linalg.matrix_norm(rows, 2) ** 2) + ridge)
    for _ in range(STEPS):
        w = w - step * (rows.T @ (rows @ w - t) + ridge * w)
    return w


# -- a draw ------------------------------------------------------------------------------------------


def small_network(x: Tensor, y: Tensor, classes: int, seed: int) -> nn.Module:
    """A network of one hidden layer, trained on samples by Adam until it knows them."""
    torch.manual_seed(seed)
    scale = x.std(0, keepdim=True).mean().item()
    net = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes)).to(x)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3 / max(scale, 1e-3))
    for _ in range(TRAINED):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def attacked(kept: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """Areas of each attack on each way to forget, and how far ``forget`` is from a new fit."""
    generator = torch.Generator().manual_seed(seed)
    phi = F.normalize(kept["pool"].double())
    labels = kept["pool labels"]
    order = torch.randperm(len(labels), generator=generator)
    member, never = order[:MEMBERS], order[MEMBERS : MEMBERS + FORGOTTEN]
    others = order[MEMBERS + FORGOTTEN :]
    classes = int(labels.max()) + 1
    x, y = phi[member], labels[member]
    going, stays = torch.arange(FORGOTTEN), torch.arange(FORGOTTEN, MEMBERS)
    two = (x[going], y[going]), (phi[never], labels[never])
    head = nn.Sequential(nn.Identity(), nn.Linear(phi.shape[1], classes)).double()

    def fitted(net: nn.Module, rows: Tensor, ridge: Any = "loo") -> Any:
        return linnet.adapt(net, (phi[rows], labels[rows]), ridge=ridge, weight=0.0)

    whole = fitted(head, member)
    both = torch.cat([two[0][0], two[1][0]])
    both_y = torch.cat([two[0][1], two[1][1]])
    reference = []
    for _ in range(REFERENCES):
        some = others[torch.randperm(len(others), generator=generator)[:REFERENCE]]
        one = fitted(head, some, whole.ridge)
        reference.append(-losses(one.predict(both), both_y, float(one.point_temperature)))
    references = torch.stack(reference).mean(0)

    def tried(outputs: Outputs, stay: Tensor | None = x[stays]) -> dict[str, float | None]:
        return areas(outputs, float(whole.point_temperature), two, references, stay)

    forgotten = whole.forget(going)
    again = fitted(head, member[stays], whole.ridge)
    apart = (forgotten.predict(both) - again.predict(both)).norm() / again.predict(both).norm()
    w = linear_weights(whole, x)
    t = whole.targets.to(w)
    first = whole.influence(both)[going].sum(0)  # of each alone, added up

    def by(weights: Tensor) -> Outputs:
        return lambda rows: with_one(rows) @ weights

    ways = {
        "nothing": tried(whole.predict),
        "linnet: forget": tried(forgotten.predict),
        "gradient ascent": tried(by(ascended(w, x[going], t[going], y[going]))),
        "training on": tried(by(trained_on(w, x[stays], t[stays], whole.ridge))),
        "influences": tried(lambda rows: whole.predict(rows) - first, None),
    }
    trained = small_network(x, y, classes, seed)
    on_trained = linnet.adapt(trained, (x, y), weight=0.0)
    ways["trained network: nothing"] = tried(on_trained.predict, None)
    ways["trained network: forget"] = tried(on_trained.forget(going).predict, None)
    return {"ways": ways, "apart": float(apart), "ridge": whole.ridge}


# -- tables ------------------------------------------------------------------------------------------


def table(cells: list[Cell]) -> str:
    """Markdown: a row a way to forget, the areas of the attacks with errors over tasks."""
    rows = []
    for way in cells[0]["ways"]:
        row = [way]
        for attack in ATTACKS:
            found: dict[str, list[float]] = {}
            for cell in cells:
                if attack in cell["ways"][way]:
                    found.setdefault(cell["task"], []).append(cell["ways"][way][attack])
            if not found:
                row.append("–")
                continue
            mean, error = mean_and_error([sum(draws) / len(draws) for draws in found.values()])
            row.append(f"{mean:.1f} ± {error:.1f}")
        rows.append(row)
    return markdown(["what was done", *(f"{attack}, %" for attack in ATTACKS)], rows)


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "", seeds=10)
    make.add_argument("--features", type=Path, default=Path("runs/features"), help="where features are kept")
    arguments = make.parse_args()
    study, cells = Study("forgetting/membership", arguments), []

    def cell(name: str, seed: int) -> Cell:
        return study.cell(
            {"task": name, "seed": seed},
            lambda: attacked(encoded(name, arguments.features, arguments.data_dir), seed),
        )

    for name in TASKS:
        cells += [cell(name, seed) for seed in study.seeds]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
