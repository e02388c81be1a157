"""Botev 2020, figure 5.7 with all images: fifty permutations of MNIST, online Laplace.

``permuted_mnist`` compares the methods on a cut of the data; this script asks what the number of images and
of epochs do to the long stream, at the strength that was chosen there (λ = 3, the thesis' too). All 58,000
images that are not held out, batches of 250; Adam whose rate falls from task to task as rate / (1 + k t) and
to a tenth for the last quarter of a task. The thesis has 20 epochs (``--full``); 4 take minutes of one core.
``--precondition`` multiplies gradients by the inverse of the past's precision, damped: the penalty is then no
steeper than the loss in any direction, and the rate need not fall from task to task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import tables
from experiments.continual.networks import multilayer
from experiments.continual.streams import mnist, permuted
from experiments.continual.training import JOINT, METHODS, Training, laplace, run_stream, tell, train_jointly
from experiments.figures import figure, save
from experiments.study import Study, parser

THESIS = 90.0  # "over 90 %" after fifty tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=1)
    make.add_argument("--tasks", type=int, default=50, help="permutations (default %(default)s)")
    make.add_argument("--train", type=int, default=None, help="training images (default all)")
    make.add_argument("--test", type=int, default=2000, help="test images (default %(default)s)")
    make.add_argument("--epochs", type=int, nargs="+", default=None, help="default 4; 20 if full")
    make.add_argument("--methods", nargs="*", choices=[*METHODS, JOINT], default=["Online Laplace (KF)"])
    make.add_argument("--strength", type=float, default=3.0, help="λ (default %(default)s)")
    make.add_argument("--rate", type=float, default=5e-3, help="of Adam, in the first task")
    make.add_argument("--decay", type=float, default=0.05, help="k (default %(default)s)")
    make.add_argument("--merge", choices=("svd", "kl", "count"), default="svd", help="of Kronecker products")
    make.add_argument("--optimizer", choices=("adam", "momentum", "nesterov"), default="adam")
    make.add_argument(
        "--precondition", type=float, default=0.0, help="τ of (Λ / N + τ I)⁻¹ before the optimizer; 0: none"
    )
    make.add_argument("--batch", type=int, default=250, help="images a step (default %(default)s)")
    make.add_argument("--measured", type=int, default=10_000, help="images that a curvature is measured on")
    options = make.parse_args(arguments)
    if options.merge != "svd" and options.methods != ["Online Laplace (KF)"]:
        make.error(f"--merge {options.merge} is of Kronecker products: leave out --methods")
    study = Study("continual/long_stream", options)
    parts = mnist(options.data_dir, options.train, options.test)
    count = len(parts["train"][0])
    cells = []
    for method in options.methods:
        for epochs in options.epochs or [20 if options.full else 4]:
            steps = epochs * (count // options.batch)
            how = Training(
                epochs=epochs, batch=options.batch, rate=options.rate, decay=options.decay,
                drop=max(1, 3 * steps // 4), measured=min(options.measured, count), device=options.device,
                optimizer=options.optimizer, precondition=options.precondition,
            )  # fmt: skip
            for seed in study.seeds:
                what = {
                    "method": method, "strength": 0.0 if method == JOINT else options.strength,
                    "seed": seed, "tasks": options.tasks,
                    "train": count, "test": len(parts["test"][0]), **how.words(),
                    **({} if options.merge == "svd" else {"merge": options.merge}),
                }  # fmt: skip

                def compute(method: str = method, how: Training = how, seed: int = seed) -> dict[str, Any]:
                    net = multilayer((100, 100), parts["train"][0].shape[1], seed=seed)
                    stream, along = permuted(parts, options.tasks, seed), [0, *range(4, options.tasks, 5)]
                    if method == JOINT:
                        return train_jointly(net, parts, stream, how, seed)
                    maker = METHODS[method] if options.merge == "svd" else laplace("kfac", options.merge)
                    return run_stream(net, stream, maker, options.strength, how, seed, along=along, told=tell)

                cells.append(study.cell(what, compute))
    publish(study, cells)


def publish(study: Study, cells: list[dict[str, Any]]) -> None:
    """The figure and the table: the mean along the stream."""
    drawn, axis = figure(height=4.2)
    lines = []
    places = sorted({index for cell in cells for index, _ in cell["rows"]})
    for cell in cells:
        means = {index: 100 * sum(row) / len(row) for index, row in cell["rows"]}
        named = f"{cell['method']}, " if len({c["method"] for c in cells}) > 1 else ""
        letter = "c" if cell["method"] == "SI" else "λ"
        strength = "" if cell["method"] == JOINT else f"{letter} = {cell['strength']:g}, "
        label = f"{named}{cell['epochs']} epochs, {strength}{cell['optimizer']}"
        label += ", preconditioned" if cell.get("precondition") else ""
        label += f", merged by {cell['merge']}" if "merge" in cell else ""
        axis.plot([index + 1 for index in means], list(means.values()), "o-", label=label)
        row = [f"{means[index]:.1f}" if index in means else "–" for index in places]
        last = cell["rows"][-1][1]
        ends = [f"{100 * last[0]:.1f}", f"{100 * last[-1]:.1f}"]
        how = f"{cell['optimizer']}, {cell['rate']:g}" + (", Λ" if cell.get("precondition") else "")
        lines.append(
            [
                cell["method"],
                f"{cell['strength']:g}",
                f"{cell['epochs']}",
                how,
                f"{cell['seed']}",
                *row,
                *ends,
            ]
        )
    axis.axhline(THESIS, color="black", linestyle=":", label="thesis after fifty: over 90 %")
    axis.set(xlabel="tasks seen", ylabel="mean test accuracy, %")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    save(drawn, study.out / "long_stream.svg")
    places_of = [str(index + 1) for index in places]
    header = [
        "method",
        "λ or c",
        "epochs",
        "optimizer, rate",
        "seed",
        *places_of,
        "first task",
        "newest task",
    ]
    study.publish(tables.markdown(header, lines), cells, paper={"after fifty tasks": "over 90 %"})


if __name__ == "__main__":
    main()
