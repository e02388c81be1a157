"""Zenke, Poole and Ganguli 2017: synaptic intelligence on ten permutations of MNIST.

The authors' program trains 784-2000-2000-10 with rectified linear units by Adam at 1e-3 (one optimizer for
all tasks, its state kept), batches of 256, 20 epochs a task, ξ = 0.1; it gives a mean test accuracy over the
ten tasks of 96.94 % with c = 0.1 and of 57.41 % with c = 0 (read from its stored results). ``--full`` is that
protocol. By default the network is 784-500-500-10 and there are 2 epochs; images, tasks, steps and the rest
are the protocol's. A network that is smaller and learns for less time is less accurate on every task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import tables
from experiments.continual.networks import multilayer
from experiments.continual.streams import mnist, permuted
from experiments.continual.training import METHODS, Training, run_stream, tell
from experiments.figures import figure, save
from experiments.study import Study, parser

PAPER = {0.1: 96.94, 0.0: 57.41}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=1)
    make.add_argument("--tasks", type=int, default=10, help="permutations (default 10, the protocol's)")
    make.add_argument("--train", type=int, default=None, help="training images (default all)")
    make.add_argument("--test", type=int, default=None, help="test images (default 2,000; all if full)")
    make.add_argument("--epochs", type=int, default=None, help="passes over a task (default 2; 20 if full)")
    make.add_argument(
        "--hidden", type=int, default=None, help="units of a hidden layer (default 500; 2000 if full)"
    )
    make.add_argument("--strengths", type=float, nargs="*", default=[0.1, 0.0], help="values of c")
    options = make.parse_args(arguments)
    sizes = (None, 20, 2000) if options.full else (2_000, 2, 500)
    for name, size in zip(("test", "epochs", "hidden"), sizes, strict=True):
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    study = Study("continual/si_reference", options)
    parts = mnist(options.data_dir, options.train, options.test)
    how = Training(epochs=options.epochs, batch=256, keep=True, measured=1, device=options.device)
    cells = []
    for strength in options.strengths:
        for seed in study.seeds:
            what = {
                "c": strength, "seed": seed, "tasks": options.tasks, "hidden": options.hidden,
                "train": len(parts["train"][0]), "test": len(parts["test"][0]), **how.words(),
            }  # fmt: skip

            def compute(strength: float = strength, seed: int = seed) -> dict[str, Any]:
                net = multilayer([options.hidden] * 2, parts["train"][0].shape[1], seed=seed)
                stream = permuted(parts, options.tasks, seed)
                return run_stream(net, stream, METHODS["SI"], strength, how, seed, told=tell)

            cells.append(study.cell(what, compute))
    drawn, axis = figure()
    lines = []
    for strength in options.strengths:
        mine = [c for c in cells if c["c"] == strength and c["finite"]]
        final = [[100 * value for value in c["rows"][-1][1]] for c in mine]
        axis.plot(range(1, options.tasks + 1), [sum(v) / len(v) for v in zip(*final, strict=True)], "o-",
                  label=f"c = {strength:g}")  # fmt: skip
        paper = f"{PAPER[strength]:.2f}" if strength in PAPER else "–"
        average = tables.with_error((c["average"] for c in mine), 2, 100)
        first = tables.with_error((c["rows"][-1][1][0] for c in mine), 1, 100)
        last = tables.with_error((c["rows"][-1][1][-1] for c in mine), 1, 100)
        learned = tables.with_error((c["rows"][0][1][0] for c in mine), 1, 100)
        lines.append([f"{strength:g}", average, paper, learned, first, last])
    axis.set(xlabel="task", ylabel="test accuracy after the last task, %")
    axis.legend()
    save(drawn, study.out / "si_reference.svg")
    header = [
        "c", "mean test accuracy, %", "authors, %", "first task when learned", "first task at the end",
        "last task",
    ]  # fmt: skip
    study.publish(tables.markdown(header, lines), cells, paper={str(c): v for c, v in PAPER.items()})


if __name__ == "__main__":
    main()
