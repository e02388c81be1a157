"""Curvature, variances and influence of a language model with 50,257 outputs a token. Claim: under 5 GB each.

    python benchmarks/wide_outputs.py --json wide_outputs.json
    python benchmarks/wide_outputs.py --only "K-FAC, sampled labels"

GPT-2 small from its configuration, random weights, the matrix of its last layer not that of its embedding
(163 million parameters), 2 sequences of 32 tokens. Every task runs in a process of its own; the peak is all
that the process ever held, interpreter, torch and network included. Columns of exact expectations would be
1.6 million for each sequence, so that labels are drawn, one for each token. Needs transformers, and Linux.

``--kernels`` measures the trace kernel of a small network with 128 and 512 outputs in this process instead,
with the tiles of one row an example and with those of one row an output, in turns; and that of a network
32-64-C beside C kernels of one output, which independent outputs would take.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import Row, parser, publish, setup, time_in_turns, timed
from networks import mlp
from torch import Tensor, nn

import linnet
from linnet.curvatures import Passes
from linnet.likelihoods import Categorical, Gaussian

BOUND = 5.0  # GB
TOKENS, SEQUENCES, CLASSES = 32, 2, 50_257
MEMORY = "1500MB"  # budget of each call; weights and what is kept of the curvature come on top
FASTER = 4.0  # how much faster tiles of one row an example are claimed to be


class Language(nn.Module):
    """GPT-2's logits: of every token, or of the next one."""

    def __init__(self, body: nn.Module, last: bool) -> None:
        super().__init__()
        self.body, self.last = body, last

    def forward(self, ids: Tensor) -> Tensor:
        """(N, T, C), or (N, 1, C) of the token that follows: the last layer's own result."""
        logits: Tensor = self.body(input_ids=ids, use_cache=False, logits_to_keep=int(self.last)).logits
        return logits


class Losses(nn.Module):
    """The loss of a sequence whose tokens are each predicted from those before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        """(N, 1)."""
        logits = self.body(input_ids=ids, use_cache=False).logits[:, :-1]
        log_p = logits.log_softmax(-1)
        return -log_p.gather(-1, ids[:, 1:, None]).sum(1)


def gpt2() -> nn.Module:
    """GPT-2 small with a last layer of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(tie_word_embeddings=False, attn_implementation="eager")
    return GPT2LMHeadModel(config).eval()


def sequences() -> Tensor:
    """Token numbers (N, T)."""
    return torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def curvature(structure: str, widest: int = Passes().widest) -> Callable[[], Any]:
    """The curvature of all parameters, from one label drawn for each token."""
    model, ids = Language(gpt2(), last=False), sequences()
    labels = torch.cat([ids[:, 1:], torch.full((SEQUENCES, 1), -100)], 1)
    options: dict[str, Any] = {"expectation": "mc", "passes": Passes(memory="4GB", widest=widest)}
    return lambda: linnet.curvature(model, (ids, labels), Categorical(axis=2), structure, **options)


def next_token() -> Callable[[], Any]:
    """Variances of the next token's 50,257 logits under a posterior over the last layer."""
    model, ids = Language(gpt2(), last=True), sequences()
    la = linnet.Laplace(model, Categorical(axis=2), "kfac", params="last-layer", passes=Passes(memory=MEMORY))
    la.fit((ids[:, :-1], ids[:, -1:]))
    return lambda: la.predictive(ids, memory=MEMORY).variance


def every_token() -> Callable[[], Any]:
    """The same for the logits of all tokens."""
    model, ids = Language(gpt2(), last=False), sequences()
    la = linnet.Laplace(model, Categorical(axis=2), "kfac", params="last-layer", passes=Passes(memory=MEMORY))
    la.fit((ids[:, :-1], ids[:, 1:]))
    return lambda: la.predictive(ids, memory=MEMORY).variance


def gradient_products() -> Callable[[], Any]:
    """Inner products of the loss gradients of the sequences, (N, N); no gradient is formed."""
    lin = linnet.linearize(Losses(gpt2()))
    return lambda: linnet.spectrum.gram(lin, sequences(), form="sum", memory=MEMORY)


def influence() -> Callable[[], Any]:
    """gᵀ (G + τI)⁻¹ g between the sequences: g of the losses, G the diagonal Σ g² of the empirical Fisher."""
    ids, lin = sequences(), linnet.linearize(Losses(gpt2()))

    def gradient(i: int) -> Tensor:
        return lin.function.space.to_flat(lin.vjp(ids[i : i + 1], torch.ones(1, 1)))

    def run() -> Tensor:
        G = linnet.curvature(lin, ids, Gaussian(), "diagonal", passes=Passes(memory=MEMORY)).damped(1e-3)
        solved = G.solve(gradient(0))
        return torch.stack([gradient(i) @ solved for i in range(SEQUENCES)])

    return run


TASKS: dict[str, Callable[[], Callable[[], Any]]] = {
    "K-FAC, sampled labels": lambda: curvature("kfac"),
    "EKFAC, sampled labels": lambda: curvature("ekfac"),
    "EKFAC, factors of at most 1024 rows": lambda: curvature("ekfac", 1024),
    "diagonal, sampled labels": lambda: curvature("diagonal"),
    "variance of the next token, last layer": next_token,
    "variance of every token, last layer": every_token,
    "products of loss gradients of the sequences": gradient_products,
    "influence between the sequences, diagonal": influence,
}


def child(name: str, threads: int) -> None:
    """Run one task and print what it took as JSON."""
    setup(threads)
    run = TASKS[name]()
    seconds, result = timed(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    about = result.coverage().splitlines()[-1].strip() if hasattr(result, "coverage") else str(result.shape)
    print(json.dumps({"seconds": seconds, "peak": peak, "about": about}))


def measure(name: str, threads: int) -> Row:
    """One task in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return Row(name, note=f"failed: {reason[:300]}", ratio=float("inf"), sense="<=", bound=BOUND)
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Row(name, facts["seconds"], facts["peak"] / 1e9, "<=", BOUND, f"peak in GB; {facts['about']}")


def kernels(repeats: int) -> list[Row]:
    """Trace kernels with either kind of tile, in turns."""
    module = importlib.import_module("linnet.tangent.gram")
    rows_of = module._product_rows
    rows = []
    for c in (128, 512):
        lin, x = linnet.linearize(mlp(64, 64, 64, c)), torch.randn(100, 64)

        def kernel(rows_each: Callable[[Any, int], int], lin: Any = lin, x: Tensor = x) -> Tensor:
            module._product_rows = rows_each  # type: ignore[attr-defined]
            return linnet.spectrum.gram(lin, x, form="trace", memory="4GB", progress=False)

        times = time_in_turns(
            {"example": lambda k=kernel: k(rows_of), "output": lambda k=kernel: k(lambda _, count: count)},
            repeats,
        )
        module._product_rows = rows_of  # type: ignore[attr-defined]
        ratio = times["output"].median / times["example"].median
        note = f"one row an output: {times['output'].median:.3g} s"
        rows.append(
            Row(f"trace kernel, N = 100, C = {c}", times["example"].median, ratio, ">=", FASTER, note)
        )
    return rows


def beside_one_output(repeats: int) -> list[Row]:
    """Trace kernels of more and more outputs, beside as many kernels of one output, in turns."""
    rows, x = [], torch.randn(100, 32)
    for c in (64, 512, 1024):
        calls = {
            name: lambda k=k: linnet.spectrum.gram(
                linnet.linearize(mlp(32, 64, k)), x, form="trace", memory="4GB", progress=False
            )
            for name, k in (("all", c), ("one", 1))
        }
        times = {name: timing.median for name, timing in time_in_turns(calls, repeats).items()}
        ratio, note = c * times["one"] / times["all"], f"one output: {1e3 * times['one']:.3g} ms"
        rows.append(Row(f"trace kernel of 32-64-C, C = {c}", times["all"], ratio, ">=", 1.0, note))
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "")
    result.add_argument("--only", nargs="*", choices=list(TASKS), default=list(TASKS))
    result.add_argument("--kernels", action="store_true", help="trace kernels instead of the language model")
    result.add_argument("--child", choices=list(TASKS), help=argparse.SUPPRESS)
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options.child, options.threads)
        return
    setup(options.threads)
    if options.kernels:
        found = kernels(options.repeats) + beside_one_output(options.repeats)
        publish("Trace kernels of many outputs", found, options.json)
        return
    rows = [measure(name, options.threads) for name in options.only]
    publish("GPT-2 small, 50,257 outputs a token", rows, options.json)


if __name__ == "__main__":
    main()
