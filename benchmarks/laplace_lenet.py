r"""Laplace's method on LeNet and MNIST, from fit to probabilities, against laplace-torch: 5 times as fast.

    python benchmarks/laplace_lenet.py --peer-python peer/bin/python --data-dir DATA --json laplace_lenet.json

The environment of the peer is described in ``curvature_peers.py``. LeNet (50-50-120-84) is trained on
10,000 digits by this script; every process gets its weights. Timed are the three steps of a posterior N(θ*,
(G + λI)⁻¹): the fit on these digits, λ by the marginal likelihood, and the class probabilities ("glm",
probit) of 10,000 test digits. Posteriors: "kron", Kronecker factors of all layers with all columns of Λ,
every position of a convolution an example of its own (KFAC-expand: laplace-torch with curvlinops or ASDL);
"reduce", the same with gradients summed over positions first (KFAC-reduce: with BackPACK); "last", the last
layer alone.

linnet does everything in full. For "kron" and "reduce" the peer, whose predictions form Jacobians (N, C,
P), fits and predicts a share, from which its seconds are extrapolated; for "last" it does everything. Of
several backends the fastest fit and the fastest prediction are combined, as if one configuration had both.
Both sides warm up on 8 digits; with ``--repeats`` all processes run so often, in turns, and of
each step the fastest counts. The peer's search of λ is its own default (100 steps of Adam), for one λ.
The NLL of both is compared on the same test digits, those that the peer has predicted, its curvature of
``--fit-share`` digits scaled up to all of them, since it is a sum over digits. The peer keeps weights and
biases in factors of their own, linnet joins them: the posteriors are not quite the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curvature_networks import lenet
from curvature_peers import add_curvature_peers, peak_memory, run_child
from measure import Row, parser, publish, setup, timed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BACKENDS = {
    "kron": ("curvlinops", "asdl"),
    "reduce": ("backpack",),
    "last": ("curvlinops", "backpack", "asdl"),
}
STEPS = ("fit", "tune", "predict")
FIT_BATCH = 128
# images of a prediction: Jacobians of all weights take 5 MB an image, those of the last layer 34 kB
PREDICT_BATCH = {"kron": 10, "reduce": 10, "last": 500}


def digits(folder: Path, examples: int, test: int) -> dict[str, Tensor]:
    """The first digits of both parts of MNIST, pixels in [0, 1]."""
    found: dict[str, Tensor] = {}
    with np.load(folder / "mnist.npz", allow_pickle=False) as file:
        for part in ("train", "test"):
            count = examples if part == "train" else test
            x = torch.from_numpy(file[f"x_{part}"][:count]).float() / 255
            found[f"x_{part}"] = x[:, None]
            found[f"y_{part}"] = torch.from_numpy(file[f"y_{part}"][:count].astype(np.int64))
    return found


def trained(data: dict[str, Tensor], epochs: int) -> nn.Module:
    """LeNet by Adam, its rate annealed to zero."""
    torch.manual_seed(0)
    model = lenet()
    x, y = data["x_train"], data["y_train"]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // 128))
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def nll(p: Tensor, y: Tensor) -> float:
    """Mean negative logarithm of the probability of the labels."""
    return float(-p.double().gather(1, y[: len(p), None]).clamp_min(1e-300).log().mean())


def by_linnet(model: nn.Module, data: dict[str, Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """The three steps in full."""
    import linnet

    chosen: dict[str, Any] = {"last": {"params": "last-layer"}, "reduce": {"sharing": "reduce"}}.get(
        options.posterior, {}
    )
    few = linnet.Laplace(model, linnet.likelihoods.Categorical(), "kfac", **chosen)
    few.fit((data["x_train"][:8], data["y_train"][:8])).tune("evidence").predictive(data["x_test"][:2])
    la = linnet.Laplace(model, linnet.likelihoods.Categorical(), "kfac", **chosen)
    record: dict[str, Any] = {}
    with peak_memory(record):
        record["fit"], _ = timed(lambda: la.fit((data["x_train"], data["y_train"])))
        record["tune"], _ = timed(lambda: la.tune("evidence"))
        record["predict"], p = timed(lambda: la.predictive(data["x_test"]).probs)
    return record | {"precision": la.prior_precision, "nll": nll(p, data["y_test"])} | scored(p, data)


def scored(p: Tensor, data: dict[str, Tensor]) -> dict[str, Any]:
    """NLL after 100, 200, ... test digits, to be compared with another's."""
    cuts = [n for n in (20, 50, 100, 200, 500, 1000, 10_000) if n <= len(p)]
    return {"nlls": {str(n): nll(p[:n], data["y_test"]) for n in cuts}}


def by_laplace_torch(
    model: nn.Module, data: dict[str, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """The three steps, on shares."""
    from laplace import Laplace
    from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN

    backend = {"curvlinops": CurvlinopsGGN, "backpack": BackPackGGN, "asdl": AsdlGGN}[options.backend]
    subset = "last_layer" if options.posterior == "last" else "all"
    x, y = (data[f"{name}_train"][: options.fit_share] for name in "xy")
    test = data["x_test"][: options.predict_share]
    few = Laplace(copy.deepcopy(model), "classification", subset, "kron", backend=backend)
    few.fit(DataLoader(TensorDataset(x[:8], y[:8]), 8))
    few.optimize_prior_precision(pred_type="glm", prior_structure="scalar", n_steps=2)
    predicted(few, test[:2], 2)
    la = Laplace(model, "classification", subset, "kron", backend=backend)
    record: dict[str, Any] = {}
    with peak_memory(record):
        record["fit"], _ = timed(lambda: la.fit(DataLoader(TensorDataset(x, y), FIT_BATCH)))
        grow(la, len(data["x_train"]) / len(x))
        record["tune"], _ = timed(
            lambda: la.optimize_prior_precision(pred_type="glm", prior_structure="scalar")
        )
        size = PREDICT_BATCH[options.posterior]
        record["predict"], p = timed(lambda: predicted(la, test, size))
    return (
        record
        | {"precision": float(la.prior_precision.mean()), "nll": nll(p, data["y_test"])}
        | scored(p, data)
    )


def predicted(la: Any, x: Tensor, batch: int) -> Tensor:
    """Class probabilities, a batch at a time."""
    return torch.cat([la(part, pred_type="glm", link_approx="probit").detach() for part in x.split(batch)])


def grow(la: Any, times: float) -> None:
    """Let a fit on a share stand for all data: curvature, loss and number of data times as large."""
    if times == 1:
        return
    decomposed = la.H
    # (Q_A ⊗ Q_B) diag(a ⊗ b) (...)ᵀ of each layer: the eigenvalues of one factor carry the number of data
    for values in decomposed.eigenvalues:
        values[0].mul_(times)
    la.loss, la.n_data = la.loss * times, round(la.n_data * times)


def child(options: argparse.Namespace) -> None:
    """One measurement, printed as one line of JSON."""
    setup(options.threads)
    warnings.simplefilter("ignore")
    known = torch.load(options.problem, weights_only=True)
    model = lenet()
    model.load_state_dict(known["weights"])
    run = {"linnet": by_linnet, "laplace-torch": by_laplace_torch}[options.child]
    record = {"load": os.getloadavg()[0]}
    with contextlib.redirect_stdout(sys.stderr):
        record |= run(model.eval(), known["data"], options)
    print(json.dumps(record))


def measured(options: argparse.Namespace, who: str, problem: Path, **given: Any) -> dict[str, Any]:
    """One process."""
    words = ["--threads", str(options.threads), "--problem", str(problem)]
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    python = sys.executable if who == "linnet" else options.peer_python
    return run_child(python, Path(__file__), (who,), *words, timeout=options.timeout)  # type: ignore[arg-type]


def fastest(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of several runs of one process with the fewest seconds of each step."""
    good = [record for record in records if "error" not in record]
    if not good:
        return records[0]
    return good[0] | {step: min(record[step] for record in good) for step in STEPS}


def compare(options: argparse.Namespace, posterior: str, problem: Path) -> tuple[list[Row], dict[str, Any]]:
    """This library and every backend of the peer."""
    totals = {"fit": options.examples, "predict": options.test}
    shares = {} if posterior == "last" else {"fit": options.fit_share, "predict": options.predict_share}
    scale = {step: total / shares.get(step, total) for step, total in totals.items()} | {"tune": 1.0}
    mine: list[dict[str, Any]] = []
    others: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS[posterior]}
    for _ in range(options.repeats):  # in turns
        mine.append(measured(options, "linnet", problem, posterior=posterior))
        for backend, records in others.items():
            given = {f"{step}_share": shares.get(step, total) for step, total in totals.items()}
            given |= {"posterior": posterior, "backend": backend}
            records.append(measured(options, "laplace-torch", problem, **given))
    ours, theirs = fastest(mine), {backend: fastest(records) for backend, records in others.items()}
    details = {"linnet": ours, "laplace-torch": theirs}
    if "error" in ours:
        return [Row(f"{posterior}, linnet", note=ours["error"])], details
    total = sum(ours[step] for step in STEPS)
    rows, fair = [], {name: record for name, record in theirs.items() if "error" not in record}
    for name, record in theirs.items():
        label = f"{posterior}, laplace-torch with {name}"
        if "error" in record:
            rows.append(Row(label, note=record["error"]))
            continue
        seconds = {step: record[step] * scale[step] for step in STEPS}
        rows.append(
            Row(label, sum(seconds.values()), sum(seconds.values()) / total, note=split(seconds, record))
        )
    if fair:
        best = {step: min(record[step] * scale[step] for record in fair.values()) for step in STEPS}
        common = max(set(ours["nlls"]) & set(next(iter(fair.values()))["nlls"]), key=int)
        lowest = min(record["nlls"][common] for record in fair.values())
        note = f"NLL of {common} digits: linnet {ours['nlls'][common]:.4f}, the peer {lowest:.4f}"
        rows.append(
            Row(f"{posterior}, laplace-torch, best of each step", sum(best.values()),
                sum(best.values()) / total, ">=", 5.0, note)
        )  # fmt: skip
    rows.append(Row(f"{posterior}, linnet", total, 1.0, note=split(ours, ours) + f", NLL {ours['nll']:.4f}"))
    return rows, details


def split(seconds: dict[str, float], record: dict[str, Any]) -> str:
    """The three steps, λ and the peak of memory."""
    steps = ", ".join(f"{step} {seconds[step]:.3g} s" for step in STEPS)
    return f"{steps}, λ = {record['precision']:.3g}, peak {record['peak_bytes'] / 1e6:.0f} MB"


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=1)
    add_curvature_peers(result)
    result.add_argument("--data-dir", type=Path, default=os.environ.get("LINNET_DATA"))
    result.add_argument("--posteriors", nargs="+", choices=list(PREDICT_BATCH), default=list(PREDICT_BATCH))
    result.add_argument("--examples", type=int, default=10_000, help="digits that are fitted")
    result.add_argument("--test", type=int, default=10_000, help="digits that are predicted")
    result.add_argument("--epochs", type=int, default=5, help="of training")
    result.add_argument("--fit-share", type=int, default=1000, help="digits that the peer fits, but for last")
    result.add_argument(
        "--predict-share", type=int, default=100, help="digits that it predicts, but for last"
    )
    result.add_argument("--timeout", type=float, default=600.0, help="seconds for one measurement")
    for name in ("child", "problem", "posterior", "backend"):
        result.add_argument(f"--{name}", default=None, help=argparse.SUPPRESS)
    options = result.parse_args()
    if not options.child and (not options.peer_python or not options.data_dir):
        result.error("--peer-python and --data-dir are needed")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options)
        return
    setup(options.threads)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = digits(options.data_dir, options.examples, options.test)
        model = trained(data, options.epochs)
        problem = Path(folder, "problem.pt")
        torch.save({"weights": model.state_dict(), "data": data}, problem)
        with torch.no_grad():
            outputs = model(data["x_test"])
        rows.append(Row("the network alone", note=f"NLL {nll(outputs.softmax(1), data['y_test']):.4f}"))
        for posterior in options.posteriors:
            more, details[posterior] = compare(options, posterior, problem)
            rows += more
            print(json.dumps(details[posterior]), file=sys.stderr, flush=True)
    publish("Laplace on LeNet, MNIST; ratios are to linnet", rows, options.json, cells=details)


if __name__ == "__main__":
    main()
