"""Figure 8: the test error along a path of weight decays, from scratch and from one kernel.

The paper (Caltech-256) trains from scratch at five weight decays and compares with fine-tuning a solution
from one weight decay to another: the errors are alike, since the optimum is unique. Here the optimum at
each ridge ρ = N λ comes from one kernel, so a path costs no more than a point of it; marked are the
ridges that leave-one-out, generalized cross-validation and evidence would choose without a test set.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import linnet
from experiments.figures import COLORS, figure, save
from experiments.lqf.tasks import Pair, accuracy, linear_model, load
from experiments.study import Study, parser
from experiments.tables import markdown, mean_and_error, with_error
from linnet.fitting import Dual

PAIR = Pair("resnet20", "flowers_64", 32, 20)
FULL_PAIR = Pair("resnet56", "flowers_64", 64, 100)
DECADES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)  # log₁₀ of ρ over the kernel's mean diagonal
CRITERIA = ("loo", "gcv", "evidence")


def path(pair: Pair, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy at each ridge, and what the criteria choose.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        data_dir: Folder of the data.

    Returns:
        Ridges, test accuracies, leave-one-out accuracies, and each criterion's ridge with its test accuracy.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir)
    lin = linear_model(model, train)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "kernel.npy")  # the kernel is formed once and read again by every fit
        chosen = {c: linnet.fit(lin, train, ridge=c, solver=Dual(file)) for c in CRITERIA}
        # K's mean diagonal, from its definition: ‖J‖² / (N C)
        rows = len(train[1]) * (int(train[1].max()) + 1)
        scale = float(linnet.spectrum.gram(lin, train[0], file=file).reshape(rows, rows).diagonal().mean())
        ridges = [scale * 10**decade for decade in DECADES]
        fits = [linnet.fit(lin, train, ridge=ridge, solver=Dual(file)) for ridge in ridges]
    along = chosen["loo"].path(torch.tensor(ridges, dtype=torch.float64))
    taken = {c: {"ridge": f.ridge, "accuracy": accuracy(f.predict(xt), yt)} for c, f in chosen.items()}
    return {
        "scale": scale,
        "accuracy": [accuracy(f.predict(xt), yt) for f in fits],
        "loo": along.loo_accuracy.tolist() if along.loo_accuracy is not None else [],
        "degrees": along.degrees_of_freedom.tolist(),
        "chosen": taken,
    }


def main(argv: Sequence[str] | None = None, pair: Pair | None = None) -> None:
    """Run the study."""
    given = parser(__doc__ or "").parse_args(argv)
    study = Study("lqf/weight_decay", given)
    pair = pair or (FULL_PAIR if given.full else PAIR)
    cells = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "seed": seed},
            lambda seed=seed: path(pair, seed, given.data_dir),
        )
        for seed in study.seeds
    ]
    columns = {
        name: list(zip(*(c[name] for c in cells), strict=True)) for name in ("accuracy", "loo", "degrees")
    }
    rows = [
        [f"10^{decade:g}", with_error((1 - a for a in columns["accuracy"][i]), scale=100),
         with_error((1 - a for a in columns["loo"][i]), scale=100), with_error(columns["degrees"][i], 0)]
        for i, decade in enumerate(DECADES)
    ]  # fmt: skip
    for c in CRITERIA:
        ratio = [cell["chosen"][c]["ridge"] / cell["scale"] for cell in cells]
        errors = [1 - cell["chosen"][c]["accuracy"] for cell in cells]
        rows.append([f"chosen by {c}: {with_error(ratio, 3)}", with_error(errors, scale=100), "", ""])
    header = [
        "ridge / mean diagonal of the kernel",
        "test error, %",
        "leave-one-out error, %",
        "degrees of freedom",
    ]
    study.publish(markdown(header, rows), cells, network=pair.name)
    drawn, axes = figure()
    for color, name, label in ((COLORS[0], "accuracy", "test"), (COLORS[1], "loo", "leave-one-out")):
        points = [mean_and_error(100 * (1 - a) for a in column) for column in columns[name]]
        axes.errorbar([10**d for d in DECADES], [m for m, _ in points], [e for _, e in points], color=color,
                      label=label, capsize=2)  # fmt: skip
    for color, c in zip(COLORS[2:], CRITERIA, strict=False):
        axes.axvline(mean_and_error(cell["chosen"][c]["ridge"] / cell["scale"] for cell in cells)[0],
                     color=color, linestyle=":", label=f"chosen by {c}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("ridge / mean diagonal of the kernel")
    axes.set_ylabel("error, %")
    axes.legend()
    save(drawn, study.out / "weight_decay.svg")


if __name__ == "__main__":
    main()
