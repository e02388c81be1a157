r"""Memory of a posterior over the last layer for 10 to 1,000 classes, beside laplace-torch's.

    python benchmarks/laplace_classes.py --peer-python peer/bin/python --json laplace_classes.json

Kronecker factors of the last layer of a small network (64-256-C, random weights, labels drawn from it) on
1,000 examples (32 for the peer), λ by the marginal likelihood, and class probabilities ("glm", probit) of
``--points`` examples at once. Every measurement is a process of its own; given is how far the resident
memory rose over what the process held before, beside what the answer itself takes: means, variances and
probabilities (3 N C numbers) and the factors of the layer with their eigenvectors. Claim for linnet: what
is left is flat, at 1,000 classes at most twice what it is at 10, both over a floor of 64 MB that first
calls take. The peer predicts one example; its Jacobian (C, C (d + 1)) grows with C², and a limit on its
memory keeps the machine alive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from curvature_peers import add_curvature_peers, peak_memory, run_child
from laplace_lenet import timed
from measure import Row, parser, publish, setup
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EXAMPLES = 256, 1000
PEER_EXAMPLES = 32  # its fit takes a backward pass for each class


def problem(classes: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs, and labels drawn from its probabilities."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))
    with torch.no_grad():
        model[2].weight.mul_(8)
    x = torch.randn(EXAMPLES, 64)
    with torch.no_grad():
        y = torch.multinomial(model(x).softmax(1), 1)[:, 0]
    return model.eval(), x, y


def by_linnet(classes: int, points: int) -> dict[str, Any]:
    """Fit, tune and predict."""
    import linnet

    model, x, y = problem(classes)
    la = linnet.Laplace(model, linnet.likelihoods.Categorical(), "kfac", params="last-layer")
    few = linnet.Laplace(model, linnet.likelihoods.Categorical(), "kfac", params="last-layer")
    few.fit((x[:8], y[:8])).predictive(x[:2])  # what the first call of any size loads
    record: dict[str, Any] = {}
    fitting: dict[str, Any] = {}
    with peak_memory(fitting):
        record["fit"], _ = timed(lambda: la.fit((x, y)).tune("evidence"))
    with peak_memory(record):
        record["predict"], p = timed(lambda: la.predictive(x[:points]).probs)
    return record | {"fit_bytes": fitting["peak_bytes"], "sum": float(p.sum(1).mean())}


def by_laplace_torch(classes: int, points: int) -> dict[str, Any]:
    """The same with its default backend."""
    from laplace import Laplace

    model, x, y = problem(classes)
    x, y = x[:PEER_EXAMPLES], y[:PEER_EXAMPLES]
    la = Laplace(model, "classification", "last_layer", "kron")
    record: dict[str, Any] = {}
    fitting: dict[str, Any] = {}
    with peak_memory(fitting):
        record["fit"], _ = timed(lambda: la.fit(DataLoader(TensorDataset(x, y), 128)))
    la.prior_precision = torch.tensor(1.0)
    with peak_memory(record):
        record["predict"], p = timed(lambda: la(x[:points], pred_type="glm", link_approx="probit"))
    return record | {"fit_bytes": fitting["peak_bytes"], "sum": float(p.sum(1).mean())}


def child(options: argparse.Namespace) -> None:
    """One measurement, printed as one line of JSON."""
    setup(options.threads)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
    run = {"linnet": by_linnet, "laplace-torch": by_laplace_torch}[options.child]
    record: dict[str, Any] = {"load": os.getloadavg()[0]}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            record |= run(options.count, options.points)
    except Exception as error:  # whatever a peer raises is what it cannot do
        lines = str(error).strip().splitlines() or [""]
        record["error"] = f"{type(error).__name__}: {lines[0]}"[:200]
    print(json.dumps(record))


def answer_bytes(classes: int, points: int) -> int:
    """Means, variances and probabilities of the points, and the two factors with their eigenvectors."""
    return 4 * (3 * points * classes + 2 * (classes**2 + (WIDTH + 1) ** 2) + classes * (WIDTH + 1))


def measured(options: argparse.Namespace, who: str, classes: int, points: int) -> dict[str, Any]:
    """One process."""
    words = ["--count", str(classes), "--points", str(points), "--threads", str(options.threads)]
    words += ["--limit", str(options.limit)]
    python = sys.executable if who == "linnet" else options.peer_python
    return run_child(python, Path(__file__), (who,), *words, timeout=options.timeout)  # type: ignore[arg-type]


def row(who: str, classes: int, points: int, record: dict[str, Any]) -> Row:
    """One line of the table."""
    name = f"{classes} classes, {who}, {points} at once"
    if "error" in record:
        return Row(name, note=record["error"])
    note = f"peak of the prediction {record['peak_bytes'] / 1e6:.0f} MB, "
    note += f"of the fit {record['fit_bytes'] / 1e6:.0f} MB"
    answer = f"the answer and the factors {answer_bytes(classes, points) / 1e6:.1f} MB"
    return Row(name, record["predict"], note=f"{note}; {answer}; fit {record['fit']:.2f} s")


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=1)
    add_curvature_peers(result)
    result.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    result.add_argument("--points", type=int, default=1000, help="examples that linnet predicts at once")
    result.add_argument("--peer-points", type=int, default=1)
    result.add_argument("--limit", type=int, default=12 << 30, help="bytes that a process may allocate")
    result.add_argument("--timeout", type=float, default=300.0, help="seconds for one measurement")
    result.add_argument("--child", default=None, help=argparse.SUPPRESS)
    result.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    options = result.parse_args()
    if not options.child and not options.peer_python:
        result.error("--peer-python is needed: the python of an environment with laplace-torch")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options)
        return
    rows: list[Row] = []
    details: dict[str, Any] = {}
    left: dict[int, float] = {}
    for classes in options.classes:
        ours = measured(options, "linnet", classes, options.points)
        theirs = measured(options, "laplace-torch", classes, options.peer_points)
        details[str(classes)] = {"linnet": ours, "laplace-torch": theirs}
        rows += [row("linnet", classes, options.points, ours)]
        rows += [row("laplace-torch", classes, options.peer_points, theirs)]
        if "error" not in ours:
            left[classes] = max(0.0, ours["peak_bytes"] - answer_bytes(classes, options.points))
    if len(left) > 1:
        first, last = min(left), max(left)
        ratio = (left[last] + 64e6) / (left[first] + 64e6)
        note = f"left at {last}: {left[last] / 1e6:.0f} MB, at {first}: {left[first] / 1e6:.0f} MB"
        rows.append(
            Row("linnet: what is left is flat in the number of classes", None, ratio, "<=", 2.0, note)
        )
    publish("Last-layer posterior, memory against classes", rows, options.json, cells=details)


if __name__ == "__main__":
    main()
