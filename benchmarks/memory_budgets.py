"""Peak resident memory of public calls beside the budget that they were given.

Claim: at most 1.1 times the budget, or the checks of a network where these take more, beside copies of its
weights and 64 MB of freed memory that the C library keeps for the next batch.

    python benchmarks/memory_budgets.py                      # the table of docs/reliability.md
    python benchmarks/memory_budgets.py --child fit mlp 300MB

Every call runs in a process of its own, which has imported everything and called the same on a small network;
then the high-water mark of its resident memory is reset, and what counts is how far the call raises it. Needs
Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import resident
from torch import Tensor, nn

import linnet
from linnet.curvatures import Passes
from linnet.errors import MemoryBudgetError
from linnet.likelihoods import Categorical
from linnet.memory import parse_bytes

BUDGETS = ("300MB", "1GB")
KEPT = 64_000_000  # of freed memory, see linnet.memory.reuse_freed_memory


def mlp(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """84 MB of weights at size 4096, in two layers."""
    net = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, min(size, 1000)))
    return net, torch.randn(8, size), torch.arange(8) % 4


class Inverted(nn.Module):
    """A block of MobileNet (Sandler et al. 2018) whose normalizations are folded into its convolutions."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        wide = 6 * fan_in
        self.inner = nn.Sequential(
            nn.Conv2d(fan_in, wide, 1), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.ReLU6(), nn.Conv2d(wide, fan_out, 1),
        )  # fmt: skip
        self.short = stride == 1 and fan_in == fan_out

    def forward(self, x: Tensor) -> Tensor:
        """(N, fan_in, H, W) to (N, fan_out, H / stride, W / stride)."""
        return x + self.inner(x) if self.short else self.inner(x)


def mobile(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """MobileNet-V2 without its normalizations, for 100 classes: 9 MB of weights, at 96 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6(), nn.Conv2d(32, 16, 1)]
    fan_in = 16
    blocks = ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))
    for fan_out, repeats, stride in blocks:
        for i in range(repeats):
            layers.append(Inverted(fan_in, fan_out, stride if i == 0 else 1))
            fan_in = fan_out
    layers += [
        nn.Conv2d(320, 1280, 1),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1280, 100),
    ]
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)  # activations keep their size without normalizations
    return net, torch.randn(10, 3, size, size), torch.arange(10) % 4


class Reader(nn.Module):
    """Two encoder layers over embedded tokens, their mean and a head of four classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, S) to (N, 4)."""
        found: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return found


def transformer(size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """2 MB of weights at size 128, 32 tokens."""
    return Reader(size), torch.randint(1000, (64, 32)), torch.arange(64) % 4


# the network, its size, and a smaller one that takes the same operations
NETWORKS: dict[str, tuple[Callable[[int], tuple[nn.Module, Tensor, Tensor]], int, int]] = {
    "mlp": (mlp, 4096, 8),
    "mobile": (mobile, 96, 32),
    "transformer": (transformer, 128, 16),
}


def calls() -> dict[str, Callable[[nn.Module, Tensor, Tensor, str], object]]:
    """Public calls on a network, its inputs and its labels, with a budget."""
    meaning = Categorical()

    def curvature(structure: str) -> Callable[[nn.Module, Tensor, Tensor, str], object]:
        return lambda net, x, y, memory: linnet.curvature(
            net, (x, y), meaning, structure=structure, passes=Passes(memory=memory)
        )

    def gram(form: str) -> Callable[[nn.Module, Tensor, Tensor, str], object]:
        return lambda net, x, y, memory: linnet.spectrum.gram(
            linnet.linearize(net), x, form=form, memory=memory
        )

    def fit(net: nn.Module, x: Tensor, y: Tensor, memory: str) -> Any:
        return linnet.fit(linnet.linearize(net), (x, y), memory=memory)

    def laplace(net: nn.Module, x: Tensor, y: Tensor, memory: str) -> object:
        model = linnet.Laplace(net, meaning, structure="kfac", passes=Passes(memory=memory)).fit((x, y))
        return model.predictive(x[:2], memory=memory)

    return {
        "preflight": lambda net, x, y, memory: linnet.preflight(net, x, memory=memory),
        "gram trace": gram("trace"),
        "gram diagonal": gram("diagonal"),
        "gram full": gram("full"),
        "fit": fit,
        "influence": lambda net, x, y, memory: linnet.audit.influence(
            fit(net, x, y, memory), x[:2], memory=memory
        ),
        "adapt": lambda net, x, y, memory: linnet.adapt(net, (x, y), memory=memory),
        "kfac": curvature("kfac"),
        "ekfac": curvature("ekfac"),
        "diagonal": curvature("diagonal"),
        "full": curvature("full"),
        "laplace": laplace,
    }


def said(what: str, net: nn.Module, budget: str) -> int:
    """Bytes that a call may take: docs/reliability.md says so beforehand."""
    sizes = [p.nbytes for p in net.parameters()]
    # linearize holds the network and a displacement, a fit another displacement; all others hold the network
    copies = 2 if what.startswith("gram") else 3 if what in ("fit", "influence") else 1
    return int(1.1 * max(parse_bytes(budget), 2 * max(sizes))) + copies * sum(sizes) + KEPT


def child(what: str, network: str, budget: str, limit: int) -> dict[str, Any]:
    """One call in this process: how it ended, and the bytes that it raised the peak by."""
    warnings.simplefilter("ignore")
    make, size, small = NETWORKS[network]
    torch.manual_seed(0)
    call = calls()[what]
    call(*make(small), "4GB")
    net, x, y = make(size)
    with torch.no_grad():
        net(x)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, outcome = resident("VmRSS"), "done"

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        call(net, x, y, budget)
    except MemoryBudgetError as error:
        outcome = f"refused: {error}"
    except TimeoutError:
        outcome = "stopped"
    signal.alarm(0)
    return {"peak": resident("VmHWM") - before, "outcome": outcome, "said": said(what, net, budget)}


def measure(what: str, network: str, budget: str, limit: int = 0) -> dict[str, Any]:
    """One call in a process of its own."""
    command = [sys.executable, __file__, "--child", what, network, budget, "--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"peak": 0, "outcome": "failed: " + (done.stderr.strip().splitlines() or ["?"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Entry point."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--child", nargs=3, metavar=("CALL", "NETWORK", "BUDGET"), help=argparse.SUPPRESS)
    options.add_argument(
        "--limit", type=int, default=0, help="seconds after which a call is stopped; 0: none"
    )
    options.add_argument("--only", nargs="*", default=list(calls()))
    options.add_argument("--networks", nargs="*", default=list(NETWORKS))
    given = options.parse_args()
    if given.child:
        print(json.dumps(child(*given.child, given.limit)))
        return
    columns = [(network, budget) for network in given.networks for budget in BUDGETS]
    print("| call |", " | ".join(f"{network}, {budget}" for network, budget in columns), "|")
    print("|---|" + "---:|" * len(columns))
    for what in given.only:
        cells = []
        for network, budget in columns:
            found = measure(what, network, budget, given.limit)
            word = found["outcome"].split(":")[0]
            over = " **over**" if found["peak"] > found.get("said", 0) else ""
            cells.append(f"{found['peak'] / 1e6:.0f}" + ("" if word == "done" else f" {word}") + over)
            print(what, network, budget, found, file=sys.stderr, flush=True)
        print(f"| {what} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
