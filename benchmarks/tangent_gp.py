r"""The tangent Gaussian process against GPyTorch on the same kernel, and in parameter space at 10 million.

    python -m venv peer && peer/bin/pip install torch==2.13.0 gpytorch numpy scipy
    python benchmarks/tangent_gp.py --gp-python peer/bin/python --json tangent_gp.json

Function space: the network 784-512-512-1 on 5,000 random examples with scalar targets; means and variances of
1,000 new ones; noise and prior fixed. The peer is an exact Gaussian process of GPyTorch on the explicit Gram
matrix of the same kernel. Its Gram matrix is formed by ``torch.func``: the faster way, contraction of
Jacobians, on a share (``--share`` examples), the seconds of its Jacobians scaled by the number of examples,
those of its products by the number of entries, of which one of each symmetric pair is counted. GPyTorch
itself is given the whole matrix for nothing and is measured in full, by Cholesky and by its default for this
size (conjugate gradients). Claim: linnet, kernel included, at least 3 times as fast. Means and variances of
both are compared. Tuning is a table of its own: GPyTorch's takes one factorization and its derivative a step
(``--steps`` measured, 50 counted), linnet's one eigendecomposition.

Parameter space: 784-3072-2500-1, P = 10 million, 500 examples, means and variances of 20; conjugate gradients
and the variance cache with ``memory="6GB"``, in a process of its own. Claim: its peak resident memory, torch
and the network included, stays below 8 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from curvature_peers import peak_memory, run_child
from measure import Row, parser, publish, relative_error, resident, setup, timed
from torch import Tensor, nn
from torch_func_peer import TorchFunctionKernel

NOISE, PRECISION = 0.1, 1.0
COUNTED = 50  # steps of GPyTorch's tuning
PARTS = ("function", "tuning", "parameter")


def network(sizes: list[int]) -> nn.Sequential:
    """Linear layers with ReLU between, weights of variance 2 / inputs."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layer = nn.Linear(before, after)
        nn.init.normal_(layer.weight, std=(2 / before) ** 0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def problem(options: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """The network, examples, targets and new examples."""
    wide = options.child == "parameter"
    model = network([784, *(options.wide if wide else [512, 512]), 1])
    n, new = (options.few, 20) if wide else (options.examples, options.new)
    x = torch.randn(n + new, 784) / 28
    y = (20 * x[:n, :3]).sin().sum(1, keepdim=True) + NOISE**0.5 * torch.randn(n, 1)
    return model, x[:n], y, x[n:]


def by_linnet(options: argparse.Namespace) -> dict[str, Any]:
    """Fit, and predict means and variances; then tune."""
    import linnet

    model, x, y, new = problem(options)
    likelihood = linnet.likelihoods.Gaussian(variance=NOISE)
    few = linnet.TangentGP(model, likelihood, "function", PRECISION).fit(x[:32], y[:32])
    _ = few.predictive(new[:8]).variance
    record: dict[str, Any] = {}
    gp = linnet.TangentGP(model, likelihood, "function", PRECISION, solver=options.solver)
    with peak_memory(record):
        record["fit"], _ = timed(lambda: gp.fit(x, y))
        record["predict"], found = timed(lambda: moments(gp.predictive(new)))
    record["certificate"] = gp.summary()["certificate"]
    torch.save({"mean": found[0], "variance": found[1]}, options.save)
    if options.tune:
        record["tune"], _ = timed(lambda: gp.tune(least_noise=0))
        record["evidence"] = gp.log_evidence().mean
        record["found"] = [gp.prior_precision, gp.noise_scale * NOISE]
    return record


def moments(prediction: Any) -> tuple[Tensor, Tensor]:
    """Means and variances."""
    return prediction.mean[:, 0], prediction.variance[:, 0]


def gram_by_linnet(options: argparse.Namespace) -> dict[str, Any]:
    """The Gram matrix of all examples, old and new, for GPyTorch."""
    import linnet

    model, x, y, new = problem(options)
    whole = linnet.spectrum.gram(model, torch.cat([x, new]), form="full")
    torch.save(
        {"gram": whole[:, 0, :, 0].float(), "y": y[:, 0], "mean": outputs(model, x, new)}, options.save
    )
    return {}


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor, new: Tensor) -> Tensor:
    """f₀ of all examples."""
    found: Tensor = model(torch.cat([x, new]))[:, 0]
    return found


def gram_by_torch(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the Gram matrix by contraction of Jacobians, from a share."""
    model, x, _, new = problem(options)
    peer, m = TorchFunctionKernel(model), options.share
    peer.jacobian(x[:8])
    record: dict[str, Any] = {}
    with peak_memory(record):
        forming, left = timed(lambda: peer.jacobian(x[:m]))
        right = peer.jacobian(x[m : m + 8])
        contract = lambda a, b: sum(p[:, 0] @ q[:, 0].T for p, q in zip(a, b, strict=True))  # noqa: E731
        contract(left, right)
        multiplying, _ = timed(lambda: contract(left, left))
    n, t = len(x), len(new)
    entries = n * (n + 1) / 2 + n * t + t
    return record | {"jacobians": forming * (n + t) / m, "products": multiplying * entries / m**2}


def by_gpytorch(options: argparse.Namespace) -> dict[str, Any]:
    """Condition on the data and predict with the explicit matrix; tune for a few steps."""
    import gpytorch

    known = torch.load(options.save)
    gram, y, mean = known["gram"], known["y"], known["mean"]
    n = len(y)
    index = torch.arange(len(gram), dtype=torch.float32)[:, None]

    class Explicit(gpytorch.kernels.Kernel):  # type: ignore[misc]
        """Entries of a matrix."""

        def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
            """K at two sets of indices."""
            i, j = x1[..., 0].long(), x2[..., 0].long()
            return gram[i, j] if diag else gram[i][:, j]

    class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
        """The network as the mean, the matrix as the kernel."""

        def __init__(self, likelihood: Any) -> None:
            super().__init__(index[:n], y, likelihood)
            self.kernel = gpytorch.kernels.ScaleKernel(Explicit())

        def forward(self, x: Tensor) -> Any:
            """The prior."""
            return gpytorch.distributions.MultivariateNormal(mean[x[:, 0].long()], self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    process = Process(likelihood)
    likelihood.noise, process.kernel.outputscale = NOISE, 1 / PRECISION
    record: dict[str, Any] = {}
    by_cholesky = gpytorch.settings.max_cholesky_size(10**6 if options.solver == "cholesky" else 800)
    with by_cholesky, contextlib.ExitStack() as stack:
        process.eval()
        if not options.tune:
            stack.enter_context(peak_memory(record))
            with torch.no_grad():
                record["condition"], answer = timed(lambda: gaussian(process(index[n:])))
            errors = [relative_error(a, b) for a, b in zip(answer, reference(options), strict=True)]
            return record | {"errors": errors}
        process.train(), likelihood.train()
        optimizer = torch.optim.Adam(process.parameters(), lr=0.1)
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)

        def step() -> None:
            optimizer.zero_grad()
            loss = -evidence(process(index[:n]), y)
            loss.backward()
            optimizer.step()

        step()
        record["tune"], _ = timed(lambda: [step() for _ in range(options.steps)])
        record["tune"] *= COUNTED / options.steps
    return record


def gaussian(answer: Any) -> tuple[Tensor, Tensor]:
    """Means and variances."""
    return answer.mean, answer.variance


def reference(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """What linnet has predicted."""
    known = torch.load(options.reference)
    return known["mean"], known["variance"]


def wide(options: argparse.Namespace) -> dict[str, Any]:
    """Parameter space at ten million parameters."""
    import linnet

    model, x, y, new = problem(options)
    likelihood = linnet.likelihoods.Gaussian(variance=NOISE)
    gp = linnet.TangentGP(model, likelihood, "parameter", PRECISION, memory="6GB", rank=options.rank)
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    with peak_memory(record):
        record["fit"], _ = timed(lambda: gp.fit(x, y))
        record["means"], _ = timed(lambda: gp.predictive(new).mean)
        record["variances"], _ = timed(lambda: gp.predictive(new).variance)
    facts = gp.summary()
    return record | {
        "high": resident("VmHWM"), "steps": facts["work"].get("steps"), "certificate": facts["certificate"],
        "directions": facts.get("directions"), "preconditioner": facts.get("preconditioner"),
    }  # fmt: skip


RUNS = {"linnet": by_linnet, "gram": gram_by_linnet, "torch": gram_by_torch, "gpytorch": by_gpytorch,
        "parameter": wide}  # fmt: skip


def child(options: argparse.Namespace) -> None:
    """One measurement, printed as one line of JSON."""
    setup(options.threads)
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"load": os.getloadavg()[0]}
    with contextlib.redirect_stdout(sys.stderr):
        record |= RUNS[options.child](options)
    print(json.dumps(record))


def measured(options: argparse.Namespace, who: str, *more: str) -> dict[str, Any]:
    """One process."""
    words = ["--threads", str(options.threads), "--wide", *map(str, options.wide)]
    for name in ("examples", "new", "few", "share", "steps", "rank"):
        words += [f"--{name}", str(getattr(options, name))]
    python = options.gp_python if who in ("torch", "gpytorch") else sys.executable
    return run_child(python, Path(__file__), (who,), *words, *more, timeout=options.timeout)  # type: ignore[arg-type]


def function_space(options: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """The two solvers of this library, and GPyTorch's."""
    gram, mine = str(folder / "gram.pt"), str(folder / "linnet.pt")
    found: dict[str, Any] = {"gram": measured(options, "gram", "--save", gram)}
    tune = ["--tune"] if "tuning" in options.parts else []
    found["cg"] = measured(options, "linnet", "--solver", "cg", "--save", mine)
    found["cholesky"] = measured(options, "linnet", "--solver", "cholesky", "--save", mine, *tune)
    found["kernel"] = measured(options, "torch")
    for solver in ("cholesky", "cg"):
        words = ["--solver", solver, "--save", gram, "--reference", mine]
        found[f"gpytorch {solver}"] = measured(options, "gpytorch", *words)
    if tune:
        words = ["--solver", "cholesky", "--save", gram]
        found["gpytorch tuning"] = measured(options, "gpytorch", *words, "--tune")
    return function_rows(options, found), found


def function_rows(options: argparse.Namespace, found: dict[str, Any]) -> list[Row]:
    """The table."""
    broken = [Row(name, note=record["error"]) for name, record in found.items() if "error" in record]
    if any(name in ("cholesky", "kernel") and "error" in found[name] for name in found):
        return broken
    size = f"n = {options.examples}, {options.new} new"
    ours = {name: found[name] for name in ("cholesky", "cg") if "error" not in found[name]}
    seconds = {name: record["fit"] + record["predict"] for name, record in ours.items()}
    kernel = found["kernel"]["jacobians"] + found["kernel"]["products"]
    rows = list(broken)
    for solver in ("cholesky", "cg"):
        record = found[f"gpytorch {solver}"]
        if "error" in record:
            continue
        total = kernel + record["condition"]
        note = f"Gram {kernel:.3g} s (from {options.share} examples), GPyTorch {record['condition']:.3g} s, "
        note += f"differences of mean {record['errors'][0]:.0e}, variance {record['errors'][1]:.0e}"
        ratio = total / seconds["cholesky"]
        rows.append(Row(f"{size}: torch.func and GPyTorch, {solver}", total, ratio, ">=", 3.0, note))
    for name, record in ours.items():
        note = f"fit {record['fit']:.3g} s, predict {record['predict']:.3g} s, "
        note += f"peak {record['peak_bytes'] / 1e9:.2f} GB"
        rows.append(
            Row(f"{size}: linnet, {name}", seconds[name], 1.0 if name == "cholesky" else None, note=note)
        )
    if "tune" in found["cholesky"] and "tune" in found.get("gpytorch tuning", {}):
        theirs, mine = found["gpytorch tuning"]["tune"], found["cholesky"]["tune"]
        note = f"{COUNTED} steps, from {options.steps}"
        rows.append(
            Row(f"tuning, n = {options.examples}: GPyTorch, cholesky", theirs, theirs / mine, note=note)
        )
        rows.append(Row(f"tuning, n = {options.examples}: linnet", mine, 1.0, note="one eigendecomposition"))
    return rows


def parameter_space(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The peak of memory."""
    record = measured(options, "parameter")
    if "error" in record:
        return [Row("parameter space", note=record["error"])], record
    name = f"parameter space, P = {record['parameters']:,}, n = {options.few}"
    seconds = record["fit"] + record["means"] + record["variances"]
    note = f"fit {record['fit']:.3g} s in {record['steps']} steps ({record['preconditioner']}), "
    note += f"{record['directions']} directions, residual {record['certificate']:.0e}; ratio: peak in GiB"
    return [Row(name, seconds, record["high"] / 2**30, "<=", 8.0, note)], record


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=1)
    add = result.add_argument
    add(
        "--gp-python", default=os.environ.get("LINNET_GP_PEER"), help="python of an environment with gpytorch"
    )
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--examples", type=int, default=5000)
    add("--new", type=int, default=1000, help="examples that are predicted")
    add("--share", type=int, default=500, help="examples of the peer's Gram matrix")
    add("--steps", type=int, default=2, help="of GPyTorch's tuning that are measured")
    add("--few", type=int, default=500, help="examples in parameter space")
    add("--wide", type=int, nargs="+", default=[3072, 2500], help="hidden units there")
    add("--rank", type=int, default=50, help="directions of the variance cache there")
    add("--timeout", type=float, default=400.0, help="seconds for one measurement")
    for name in ("child", "save", "reference", "solver"):
        add(f"--{name}", default=None, help=argparse.SUPPRESS)
    add("--tune", action="store_true", help=argparse.SUPPRESS)
    options = result.parse_args()
    if not options.child and not options.gp_python and set(options.parts) != {"parameter"}:
        result.error("--gp-python is needed: the python of an environment with gpytorch")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options)
        return
    rows: list[Row] = []
    details: dict[str, Any] = {}
    if set(options.parts) & {"function", "tuning"}:
        with tempfile.TemporaryDirectory() as folder:
            more, details["function"] = function_space(options, Path(folder))
            rows += more
    if "parameter" in options.parts:
        more, details["parameter"] = parameter_space(options)
        rows += more
    publish("Tangent Gaussian process; ratios are to linnet by Cholesky", rows, options.json, cells=details)


if __name__ == "__main__":
    main()
