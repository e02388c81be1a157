r"""A sketched fit of many examples: seconds in training epochs, growth in N, accuracy beside the exact fit.

    python benchmarks/sketch.py --data-dir DATA --sizes 12500 25000 50000 --json sketch.json
    python benchmarks/sketch.py --data-dir DATA --parts exact --examples 1000

LeNet on MNIST, N examples of ten classes: ``--pretrain`` digits train the network, all others may be fitted.
Timed are the fit along ``--dim`` directions with the ridge chosen by leave-one-out over 37 values, then on
the same fit all leave-one-out outputs, forgetting 10 examples, and the influence of every example on 100 test
digits. An epoch is one pass of stochastic gradients over the same examples in batches of 128, timed in the
same run before and after. Peak is the memory of the process above its start. The exponent of the growth is
the slope of log seconds in log N.

``exact`` compares accuracies on 10,000 test digits with the exact kernel's, N = ``--examples``. ``resnet``
does the same for ResNet-20 on EuroSAT, whose exact fit takes minutes: seconds of both in one run. Beside them
stand ``linnet.adapt``, one kernel for all outputs, and ``solver="shared"``, one of ``--combinations`` of the
outputs in all weights; each chooses its ridge by leave-one-out. With
``--exact-ridge`` it solves at that ridge alone, without the eigenvalues of all N·C equations.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curvature_networks import lenet
from eurosat import task
from measure import Row, parser, publish, setup, timed
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.fitting import Shared, Sketch

PARTS = ("growth", "exact", "resnet")
BATCH = 128
TESTS = 100  # digits whose influences are computed
FORGOTTEN = 10


def digits(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MNIST with pixels in [0, 1]: training images and labels, test images and labels."""
    with np.load(folder / "mnist.npz", allow_pickle=False) as file:
        names = ("x_train", "y_train", "x_test", "y_test")
        x, y, x_test, y_test = (torch.as_tensor(file[name]) for name in names)
    return x[:, None].float() / 255, y.long(), x_test[:, None].float() / 255, y_test.long()


def epoch(net: nn.Module, x: Tensor, y: Tensor, rate: float = 0.05) -> None:
    """One pass of stochastic gradients with momentum."""
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    net.train()
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    net.eval()


def accuracy(outputs: Any, x: Tensor, y: Tensor) -> float:
    """Share of right classes, in percent."""
    found = torch.cat([outputs(part).argmax(1) for part in x.split(1000)])
    return 100 * float((found == y).double().mean())


def pretrained(options: argparse.Namespace, x: Tensor, y: Tensor) -> nn.Module:
    """LeNet after two epochs on the last digits."""
    net = lenet()
    for _ in range(2):
        epoch(net, x[-options.pretrain :], y[-options.pretrain :])
    return net


def seconds_of_an_epoch(x: Tensor, y: Tensor) -> float:
    """Of a fresh LeNet."""
    net = lenet()
    epoch(net, x[: 20 * BATCH], y[: 20 * BATCH])
    return timed(lambda: epoch(net, x, y))[0]


def growth(options: argparse.Namespace) -> list[Row]:
    """Seconds of every question, in epochs, for growing N."""
    x, y, x_test, y_test = digits(options.data_dir)
    net, rows, totals = pretrained(options, x, y), [], {}
    lin = linnet.linearize(net)
    linnet.fit(lin, (x[:200], y[:200]), ridge="loo", solver=Sketch(64))  # warm up
    for n in options.sizes:
        data, before = (x[:n], y[:n]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first = seconds_of_an_epoch(*data)
        settings = Sketch(options.dim, examples=options.basis)
        fit_seconds, fit = timed(
            lambda data=data, settings=settings: linnet.fit(
                lin, data, ridge="loo", solver=settings, memory=options.memory
            )
        )
        loo_seconds, left_out = timed(fit.loo)
        forget_seconds, _ = timed(lambda fit=fit: fit.forget(range(FORGOTTEN)))
        influence_seconds, _ = timed(lambda fit=fit: fit.influence(x_test[:TESTS]))
        one = (first + seconds_of_an_epoch(*data)) / 2
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
        totals[n] = fit_seconds + loo_seconds + forget_seconds + influence_seconds
        right = 100 * float((left_out.argmax(1) == data[1]).double().mean())
        said = fit.summary()["reasons"]["sketch"]
        rows += [
            Row(f"N = {n}: an epoch", one),
            Row(f"N = {n}: fit and path of ridges", fit_seconds, fit_seconds / one, note=said),
            Row(f"N = {n}: leave-one-out", loo_seconds, loo_seconds / one, note=f"{right:.2f} % right"),
            Row(f"N = {n}: forgetting {FORGOTTEN}", forget_seconds, forget_seconds / one),
            Row(f"N = {n}: influence on {TESTS}", influence_seconds, influence_seconds / one),
            Row(
                f"N = {n}: all of it, in epochs", totals[n], totals[n] / one, "<=", 10.0,
                f"peak {peak:.2f} GB, test accuracy {accuracy(fit.predict, x_test, y_test):.2f} %, "
                f"of the network {accuracy(net, x_test, y_test):.2f} %",
            ),
        ]  # fmt: skip
    if len(totals) > 1:
        logs = [(math.log(n), math.log(seconds)) for n, seconds in totals.items()]
        slope = np.polyfit(*zip(*logs, strict=True), 1)[0]
        rows.append(Row("exponent of the growth in N", None, float(slope)))
    return rows


def exact(options: argparse.Namespace) -> list[Row]:
    """Accuracies beside the exact kernel, each at its own leave-one-out ridge."""
    x, y, x_test, y_test = digits(options.data_dir)
    return _compared(pretrained(options, x, y), (x, y), (x_test, y_test), options)


def resnet(options: argparse.Namespace) -> list[Row]:
    """The same for ResNet-20 on EuroSAT with a linear probe as head."""
    one = task(options.examples, 500)
    data, test = (one.x, one.y), (one.test_x, one.test_y)
    return _compared(one.model, data, test, options)


def _compared(
    net: nn.Module, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], options: argparse.Namespace
) -> list[Row]:
    """Seconds and accuracy of the exact fit and of sketches."""
    lin, few = linnet.linearize(net), (data[0][: options.examples], data[1][: options.examples])
    rows, whole = [], None
    if not options.only_sketch:
        ridge = options.exact_ridge or "loo"
        whole, fit = timed(lambda: linnet.fit(lin, few, ridge=ridge, solver="dual", memory="20GB"))
        right = accuracy(fit.predict, *test)
        rows.append(Row(f"exact, N = {options.examples}", whole, note=f"test accuracy {right:.2f} %"))
    seconds, adapted = timed(lambda: linnet.adapt(net, few, memory=options.memory))
    first, found = timed(lambda: adapted.predict(test[0]))
    again, _ = timed(lambda: adapted.predict(test[0][:-1]))
    right = 100 * float((found.argmax(1) == test[1]).double().mean())
    rows += [
        Row("adapt", seconds, whole and whole / seconds, note=f"test accuracy {right:.2f} %"),
        Row(f"its first {len(found)} predictions", first),
        Row(f"the next {len(found) - 1}", again),
    ]
    for count in options.combinations:
        seconds, fit = timed(
            lambda count=count: linnet.fit(lin, few, ridge="loo", solver=Shared(count), memory=options.memory)
        )
        said = fit.summary()["reasons"]["outputs"]
        note = f"test accuracy {accuracy(fit.predict, *test):.2f} %; {said}"
        rows.append(Row(f"shared kernel of {count}", seconds, whole and whole / seconds, note=note))
    for dim in options.dims:
        settings = Sketch(dim, examples=min(options.basis, options.examples))
        seconds, fit = timed(
            lambda settings=settings: linnet.fit(
                lin, few, ridge="loo", solver=settings, memory=options.memory
            )
        )
        said = fit.summary()["reasons"]["sketch"]
        note = f"test accuracy {accuracy(fit.predict, *test):.2f} %; {said}"
        rows.append(Row(f"sketch of {dim}", seconds, whole and whole / seconds, note=note))
    return rows


def main() -> None:
    """Run the parts."""
    arguments = parser(__doc__ or "")
    folder = os.environ.get("LINNET_DATA")
    arguments.add_argument(
        "--data-dir", type=Path, default=folder, required=not folder, help="folder with mnist.npz"
    )
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=["growth"])
    arguments.add_argument("--sizes", nargs="+", type=int, default=[12_500, 25_000, 50_000])
    arguments.add_argument("--examples", type=int, default=1000, help="N of the comparisons")
    arguments.add_argument("--pretrain", type=int, default=10_000, help="digits that train the network")
    arguments.add_argument("--dim", type=int, default=768)
    arguments.add_argument("--dims", nargs="+", type=int, default=[512, 768, 1024, 2048])
    arguments.add_argument(
        "--combinations", nargs="+", type=int, default=[1, 2, 4], help="of outputs, for shared kernels"
    )
    arguments.add_argument("--basis", type=int, default=1000, help="examples that the basis is made of")
    arguments.add_argument("--memory", default="3GB")
    arguments.add_argument("--exact-ridge", type=float, help="of the exact fit; leave-one-out by default")
    arguments.add_argument("--only-sketch", action="store_true")
    options = arguments.parse_args()
    setup(options.threads)
    started, rows = time.perf_counter(), []
    for part in options.parts:
        rows += {"growth": growth, "exact": exact, "resnet": resnet}[part](options)
    print(f"{time.perf_counter() - started:.0f} s in all")
    publish("Sketched fits", rows, options.json)


if __name__ == "__main__":
    main()
