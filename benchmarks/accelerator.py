"""The whole on one accelerator: the tests of devices, speed beside peers, large networks, peaks beside plans.

    python benchmarks/accelerator.py --out results           # under 9 minutes on a GPU
    python benchmarks/accelerator.py --out results --full    # under 25 minutes, larger
    python benchmarks/accelerator.py --out results --device pretend

Without an accelerator everything runs at toy size on the pretend device of ``tests/device.py``, so that the
program is known to work where its numbers mean nothing. Every part is a process of its own with a share of
the time that is left; one that fails or takes longer is reported, and the next one starts.
``accelerator.json`` and ``accelerator.md`` are written.

- ``tests``: ``tests/test_device.py`` on the device.
- ``rates``: products of square matrices in each type, and what float64 costs in eigendecompositions.
- ``kernel``: ``lin.kernel`` in turns with ``torch.func``'s Jacobian contraction; share of the float32 rate.
- ``types``: kernel and K-FAC with gradients in float32, TF32 and bfloat16, in turns, each beside float64; the
  normal equations of a sketch with products in either type, and a ridge path with eigenvalues in either.
- ``curvature``: one pass over the data in turns with the plain forward and backward pass, and with
  curvlinops, laplace-torch and kronfluence where they are installed (see ``curvature_peers.py``).
- ``vision``: ViT-B from its configuration, random weights: kernel, KFAC, peak of memory beside the plan.
- ``language``: a Llama of a billion parameters from its configuration, random weights, with LoRA adapters:
  the fit by leave-one-out, and influence, peak beside the plan.
- ``tokens``: a Llama of the sizes of SmolLM2-135M, random weights: the fit of an adapter in its last block to
  every token, forgetting a tenth of the sequences, EKFAC of the down-projections beside the plain pass, and
  their gradients along 256 directions in a store. These three need transformers.
- ``many``: a sketched fit of 50,000 images on the host, of which one batch after the other is carried to the
  device; seconds in training epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from curvature_contestants import MAKERS
from curvature_networks import Problem, lenet, problem
from measure import Row, Timing, publish, relative_error, table, time_in_turns
from networks import deep_convolution
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torch_func_peer import TorchFunctionKernel

import linnet
from linnet.curvatures import Passes
from linnet.fitting import CG, Sketch
from linnet.likelihoods import Categorical

ROOT = Path(__file__).resolve().parents[1]
PRETEND = "pretend"
SECONDS = {"toy": 900, "quick": 510, "full": 1440}  # of all parts together
BATCH = 128
PEERS = ("curvlinops", "laplace", "kronfluence")


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        square: Side of the matrices.
        channels: Of the convolutional network whose kernel is computed.
        examples: Of that kernel.
        curved: Examples of a curvature.
        images: Examples of the vision network.
        vision: Its configuration.
        sequences: Examples of the language model.
        tokens: Of a sequence.
        language: Its configuration.
        small_language: That of the language model whose tokens are fitted.
        many: Examples of the sketched fit.
        dim: Directions of it.
        networks: Those whose curvature is computed.
        repeats: Timed calls of each contestant.
    """

    square: int
    channels: int
    examples: int
    curved: int
    images: int
    vision: dict[str, int]
    sequences: int
    tokens: int
    language: dict[str, int]
    small_language: dict[str, int]
    many: int
    dim: int
    networks: tuple[str, ...] = ("lenet", "resnet20", "transformer")
    repeats: int = 3


VIT_B = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LLAMA_1B = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 32_000,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152,
}  # fmt: skip
SHALLOW = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {
    "toy": Size(
        64, 4, 6, 16, 3,
        {**SHALLOW, "image_size": 32},
        6, 5,
        {**SHALLOW, "num_key_value_heads": 1, "vocab_size": 50},
        {**SHALLOW, "num_key_value_heads": 1, "vocab_size": 50},
        64, 8, ("lenet",), 1,
    ),
    "quick": Size(8192, 256, 512, 1000, 64, VIT_B, 64, 128, LLAMA_1B, SMOLLM2, 50_000, 2048),
    "full": Size(16_384, 256, 2048, 1000, 512, VIT_B, 256, 256, LLAMA_1B, SMOLLM2, 50_000, 8192),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where and how large.

    Args:
        device: The device.
        size: All sizes.
    """

    device: torch.device
    size: Size

    @property
    def module(self) -> Any:
        """What torch calls of the device's kind are in; the pretend device lacks most."""
        return torch.get_device_module(self.device)

    def wait(self) -> None:
        """Until everything that was started has ended."""
        if hasattr(self.module, "synchronize"):
            self.module.synchronize()

    def finished(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """A call that returns when the device is done."""

        def run() -> Any:
            result = call()
            self.wait()
            return result

        return run

    def turns(self, calls: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Seconds of several calls, in turns."""
        return time_in_turns(
            {name: self.finished(call) for name, call in calls.items()}, self.size.repeats, limit=60
        )

    def measured(self, call: Callable[[], Any]) -> tuple[float, int | None, Any]:
        """Seconds of one call, the peak of its memory above what was held, and its result."""
        known = hasattr(self.module, "reset_peak_memory_stats")
        if known:
            self.module.reset_peak_memory_stats()
        held = self.module.memory_allocated() if known else 0
        begin = time.perf_counter()
        result = self.finished(call)()
        seconds = time.perf_counter() - begin
        return seconds, self.module.max_memory_allocated() - held if known else None, result

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a product of square matrices."""
        n = self.size.square
        a, b = (torch.randn(n, n).to(self.device, dtype) for _ in range(2))
        return 2 * n**3 / self.turns({"product": lambda: a @ b})["product"].minimum


def planned(peak: int | None, plan: int | None) -> str:
    """A peak beside its plan, in words."""
    if peak is None:
        return "peak not known here"
    return f"peak {peak / 1e9:.2f} GB" + ("" if plan is None else f", planned {plan / 1e9:.2f} GB")


def rates(place: Place) -> list[Row]:
    """What the device can do."""
    rows, single = [], place.rate(torch.float32)
    rows.append(Row("float32 product", ratio=1.0, note=f"{single / 1e12:.3g} TFLOP/s"))
    for dtype in (torch.bfloat16, torch.float64):
        found = place.rate(dtype)
        rows.append(
            Row(
                f"{dtype} product".removeprefix("torch."),
                ratio=found / single,
                note=f"{found / 1e12:.3g} TFLOP/s",
            )
        )
    torch.set_float32_matmul_precision("high")
    found = place.rate(torch.float32)
    torch.set_float32_matmul_precision("highest")
    rows.append(Row("TF32 product", ratio=found / single, note=f"{found / 1e12:.3g} TFLOP/s"))
    n = place.size.square // 4
    half = torch.randn(n, n).to(place.device)
    matrix = half @ half.T / n
    both = place.turns(
        {str(d): lambda d=d: torch.linalg.eigh(matrix.to(d)) for d in (torch.float32, torch.float64)}
    )
    ratio = both["torch.float64"].median / both["torch.float32"].median
    rows.append(Row(f"eigh of {n} in float64", both["torch.float64"].median, ratio, note="times float32's"))
    return rows


def kernel(place: Place) -> list[Row]:
    """The kernel of a convolutional network."""
    torch.manual_seed(0)
    model = deep_convolution(place.size.channels).to(place.device)
    x = torch.randn(place.size.examples, place.size.channels, 4, 4).to(place.device)
    lin, peer = linnet.linearize(model), TorchFunctionKernel(model)
    few = x[: min(len(x), 64)]
    times = place.turns(
        {"linnet": lambda: lin.kernel(few), "torch.func": lambda: peer.by_contraction(few, few)}
    )
    error = relative_error(lin.kernel(few).cpu(), peer.by_contraction(few, few).cpu())
    plan = linnet.preflight(lin, x).memory.peak
    seconds, peak, _ = place.measured(lambda: lin.kernel(x))
    with FlopCounterMode(display=False) as counter:
        lin.kernel(x)
    share = counter.get_total_flops() / seconds / place.rate(torch.float32)
    ratio = times["torch.func"].median / times["linnet"].median
    beside = f"torch.func's time over this; differs by {error:.0e}"
    whole = f"share of the float32 rate; {planned(peak, plan)}"
    return [
        Row(f"kernel of {len(few)} examples", times["linnet"].median, ratio, note=beside),
        Row(f"kernel of {len(x)} examples", seconds, share, note=whole),
    ]


def types(place: Place) -> list[Row]:
    """Types of numbers in turns, and what they cost in digits."""
    torch.manual_seed(0)
    model = deep_convolution(place.size.channels).to(place.device)
    x = torch.randn(place.size.examples, place.size.channels, 4, 4).to(place.device)
    lin, few = linnet.linearize(model), x[: min(len(x), 64)]
    given = problem("lenet", examples=place.size.curved)
    net, data = given.model.to(place.device), (given.x.to(place.device), given.y.to(place.device))
    twins = linnet.linearize(deepcopy(model).double()), deepcopy(net).double()
    exact = twins[0].kernel(few.double())
    right = linnet.curvature(twins[1], (data[0].double(), data[1]), Categorical(), "kfac", "exact").diagonal()
    rows = []
    for title, part, truth, call in (
        ("kernel", few, exact, lambda: lin.kernel(few)),
        (
            "K-FAC", data[0], right,
            lambda: linnet.curvature(net, data, Categorical(), "kfac", "exact").diagonal(),
        ),
    ):  # fmt: skip
        calls = {kind: typed(call, capture=kind) for kind in ("float32", "tf32", "bfloat16")}
        times = place.turns(calls)
        for kind, run in calls.items():
            _, peak, found = place.measured(run)
            off = f"off by {relative_error(found.cpu().double(), truth.cpu()):.0e}; {planned(peak, None)}"
            ratio = times["float32"].median / times[kind].median
            name = f"{title} of {len(part)} examples in {kind}"
            rows.append(Row(name, times[kind].median, ratio, note=f"float32's time over this; {off}"))
    wide = linnet.linearize(lenet().to(place.device))
    n = place.size.curved // 4
    images, labels = torch.randn(n, 1, 28, 28), torch.arange(n) % 10
    for name, kinds, options in (
        ("sketched fit, normal equations", "sums", {"solver": Sketch(dim=place.size.dim)}),
        ("fit by a ridge path, eigenvalues", "decompositions", {"solver": "dual"}),
    ):
        fits = {
            kind: typed(
                lambda o=options: linnet.fit(wide, (images, labels), ridge="loo", **o), **{kinds: kind}
            )
            for kind in ("float64", "float32")
        }
        times = place.turns(fits)
        apart = relative_error(*(fits[kind]().predict(images[:50]).cpu() for kind in ("float32", "float64")))
        ratio = times["float64"].median / times["float32"].median
        note = f"float64's time over this; predictions differ by {apart:.0e}"
        rows.append(Row(f"{name} in float32", times["float32"].median, ratio, note=note))
    return rows


def typed(call: Callable[[], Any], **kinds: str) -> Callable[[], Any]:
    """A call in types of numbers."""

    def run() -> Any:
        with linnet.precision(**kinds):
            return call()

    return run


def curvature(place: Place) -> list[Row]:
    """Passes over the data of three networks, beside the plain pass and the peers."""
    rows, here = [], place.device
    for name in place.size.networks:
        given = problem(name, examples=place.size.curved)
        given = replace(given, model=given.model.to(here), x=given.x.to(here), y=given.y.to(here))
        for task in ("kfac-exact", "kfac-mc", "ekfac-mc", "diagonal-exact"):
            rows += task_rows(place, f"{name} {task}", task, given)
    return rows


def task_rows(place: Place, name: str, task: str, given: Problem) -> list[Row]:
    """One kind of curvature of one network."""
    structure, expectation = task.split("-")
    lin = linnet.linearize(given.model, params=list(given.names))
    options: dict[str, Any] = {"expectation": expectation, "passes": Passes(block=BATCH)}

    def plain() -> None:
        for x, y in given.batches(BATCH):
            torch.autograd.grad(given.loss(given.model(x), y), list(given.parameters.values()))

    calls: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "linnet": lambda: linnet.curvature(lin, (given.x, given.y), Categorical(), structure, **options),
    }
    notes = ["plain passes"]
    for peer in PEERS:
        try:
            job = MAKERS[peer](task, given, BATCH)
            job.run()
        except Exception as error:  # not installed, no such operation, or it does not run here
            notes.append(f"{peer}: {type(error).__name__}")
            continue
        calls[peer] = job.run
    times = place.turns(calls)
    ours = times["linnet"].median
    found = [peer for peer in PEERS if peer in times]
    return [
        Row(name, ours, ours / times["plain"].median, note="; ".join(notes)),
        *(Row(f"{name}: {p}", times[p].median, times[p].median / ours, note="over linnet's") for p in found),
    ]


def vision(place: Place) -> list[Row]:
    """ViT-B: kernel and KFAC in all weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(**place.size.vision, num_labels=10)
    model = ViTForImageClassification(config).eval().to(place.device)
    side = config.image_size
    x, y = torch.randn(place.size.images, 3, side, side), torch.arange(place.size.images) % 10
    lin = linnet.linearize(model)
    plan = linnet.preflight(lin, x[:2]).memory
    seconds, peak, _ = place.measured(lambda: lin.kernel(x, form="trace"))
    rows = [
        Row(f"ViT, P = {lin.space.dim:,}: trace kernel of {len(x)} images", seconds, note=planned(peak, None))
    ]
    pair = place.measured(lambda: lin.kernel(x[:2]))[1]
    rows.append(Row("its kernel of 2 images", note=planned(pair, plan.peak)))

    def step() -> None:
        for part, labels in zip(x.split(32), y.split(32), strict=True):
            F.cross_entropy(model(part.to(place.device)).logits, labels.to(place.device)).backward()
        model.zero_grad()

    def kfac() -> Any:
        return linnet.curvature(model, (x, y), Categorical(), "kfac", "mc", passes=Passes(block=32))

    step()
    plain = place.measured(step)[0]
    kfac()
    seconds, peak, _ = place.measured(kfac)
    rows.append(
        Row(f"KFAC of {len(x)} images", seconds, seconds / plain, note=f"plain passes; {planned(peak, None)}")
    )
    return rows  # fmt: skip


class Adapter(nn.Module):
    """A linear layer with a low-rank change W + B A (Hu et al., "LoRA", 2022); B is drawn, not zero."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.randn(layer.out_features, rank) / 100)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, changed."""
        changed: Tensor = self.layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return changed


def language(place: Place) -> list[Row]:
    """A language model with adapters: fit by leave-one-out, influence."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(**place.size.language, num_labels=2, pad_token_id=0)
    with torch.device(place.device if place.device.type != PRETEND else "cpu"):
        model = LlamaForSequenceClassification(config).eval().requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    model = model.to(place.device)
    n, t = place.size.sequences, place.size.tokens
    ids = torch.randint(1, config.vocab_size, (n, t), generator=torch.Generator().manual_seed(1))
    x, y = {"input_ids": ids}, torch.arange(n) % 2
    weights = sum(p.numel() for p in model.parameters())
    lin = linnet.linearize(model, params="lora")
    plan = linnet.preflight(lin, x).memory.peak
    seconds, peak, fit = place.measured(lambda: linnet.fit(lin, (x, y), ridge="loo"))
    asked, _, _ = place.measured(lambda: fit.influence({"input_ids": ids[: n // 2]}))
    what = f"{weights / 1e9:.2f}·10⁹ weights, P = {lin.space.dim:,}: fit of {n} sequences of {t} tokens"
    return [
        Row(what, seconds, note=planned(peak, plan)),
        Row(f"influence on {n // 2} sequences", asked),
    ]


class Logits(nn.Module):
    """A language model's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """(N, T) to (N, T, words)."""
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def tokens(place: Place) -> list[Row]:
    """A language model whose every token is a label: an adapter's fit, forgetting, EKFAC, a store."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = Logits(LlamaForCausalLM(LlamaConfig(**place.size.small_language))).eval().requires_grad_(False)
    last = model.model.model.layers[-1]
    for block, names in ((last.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
                         (last.mlp, ("gate_proj", "up_proj", "down_proj"))):  # fmt: skip
        for name in names:
            setattr(block, name, Adapter(getattr(block, name)))
    model = model.to(place.device)
    n, t = place.size.sequences, place.size.tokens
    vocabulary = place.size.small_language["vocab_size"]
    ids = torch.randint(vocabulary, (n, t + 1), generator=torch.Generator().manual_seed(1))
    data, gone = (ids[:, :-1], ids[:, 1:]), list(range(max(1, n // 10)))
    lin = linnet.linearize(model, params="lora")

    def fit() -> Any:
        return linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=1.0, solver=CG(tolerance=1e-3))

    seconds, peak, fitted = place.measured(fit)
    changed, _, _ = place.measured(lambda: fitted.forget(gone))
    params = [
        name for name, _ in model.named_parameters() if re.search(r"down_proj\.(layer\.)?weight$", name)
    ]
    for name in params:
        model.get_parameter(name).requires_grad_(True)
    likelihood, passes = Categorical(axis=-1), Passes(block=8)

    def plain() -> None:
        for x, y in zip(*(part.split(8) for part in data), strict=True):
            logits = model(x.to(place.device))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten().to(place.device))
            torch.autograd.grad(loss, [model.get_parameter(name) for name in params])

    def ekfac() -> Any:
        return linnet.curvature(model, data, likelihood, "ekfac", "mc", params=params, passes=passes)

    def stored() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            store = linnet.audit.GradientStore(folder, directions, likelihood)
            return store.add(list(zip(*(part.split(8) for part in data), strict=True)))

    plain()
    whole = place.measured(plain)[0]
    curved, above, matrix = place.measured(ekfac)
    directions = linnet.with_sketch(linnet.linearize(model, params=params), matrix, dim=256)
    rows = place.measured(stored)[0]
    size = sum(model.get_parameter(name).numel() for name in params)
    what = f"P = {lin.space.dim:,}: fit of {n} sequences of {t} tokens, {vocabulary:,} words"
    return [
        Row(what, seconds, note=planned(peak, None)),
        Row(f"forgetting {len(gone)} of them", changed, changed / seconds, note="of the fit's time"),
        Row(f"EKFAC of {size / 1e6:.1f} million weights", curved, curved / whole,
            note=f"plain passes; {planned(above, None)}"),
        Row("their gradients in a store", rows, rows / whole, note="plain passes"),
    ]  # fmt: skip


def many(place: Place) -> list[Row]:
    """A sketched fit of many images that stay on the host."""
    torch.manual_seed(0)
    model = lenet().to(place.device)
    x, y = torch.randn(place.size.many, 1, 28, 28), torch.arange(place.size.many) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def epoch() -> None:
        for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(part.to(place.device)), labels.to(place.device)).backward()
            optimizer.step()

    epoch()
    plain = place.measured(epoch)[0]
    lin = linnet.linearize(model.eval())
    seconds, peak, fit = place.measured(
        lambda: linnet.fit(lin, (x, y), ridge="loo", solver=Sketch(dim=place.size.dim))
    )
    asked = place.measured(lambda: fit.influence(x[:100]))[0]
    what = f"fit of {len(x)} images along {place.size.dim} directions"
    return [
        Row(what, seconds, seconds / plain, note=f"training epochs; {planned(peak, None)}"),
        Row("influence on 100 images", asked, asked / plain, note="training epochs"),
    ]


def device_tests(options: argparse.Namespace, limit: float) -> list[Row]:
    """The tests of devices, on this one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_device.py"]
    if options.size != "toy":
        command += ["-m", "", "--budget", str(int(0.8 * limit))]
    begin = time.perf_counter()
    named = {**os.environ, "LINNET_DEVICE": options.device}
    done = subprocess.run(command, cwd=ROOT, env=named, capture_output=True, text=True, timeout=limit)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return [Row("tests/test_device.py", time.perf_counter() - begin, note="; ".join([last, *failed]))]


PARTS: dict[str, Callable[[Place], list[Row]]] = {
    "rates": rates,
    "kernel": kernel,
    "types": types,
    "curvature": curvature,
    "vision": vision,
    "language": language,
    "tokens": tokens,
    "many": many,
}
SHARES = {
    "tests": 0.3,
    "rates": 0.1,
    "kernel": 0.2,
    "types": 0.2,
    "curvature": 0.4,
    "vision": 0.4,
    "language": 0.4,
    "tokens": 0.5,
    "many": 1.0,
}


def one_part(name: str, options: argparse.Namespace, path: Path, limit: float) -> dict[str, Any]:
    """A part in a process of its own."""
    command = [sys.executable, __file__, "--part", name, "--device", options.device, "--size", options.size]
    begin = time.perf_counter()
    try:
        if name == "tests":
            publish(name, device_tests(options, limit), path)
        else:
            done = subprocess.run(
                [*command, "--json", str(path)], stderr=subprocess.PIPE, text=True, timeout=limit
            )
            if done.returncode:
                return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than the {limit:.0f} s that were left for it"}
    return {**json.loads(path.read_text()), "seconds": time.perf_counter() - begin}


def everything(options: argparse.Namespace) -> int:
    """All parts, one JSON file, one page."""
    begin, found = time.perf_counter(), dict[str, Any]()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        left = SECONDS[options.size] - (time.perf_counter() - begin)
        path = options.out / f"accelerator-{name}.json"
        path.unlink(missing_ok=True)
        found[name] = one_part(name, options, path, max(SHARES[name] * left, 1))
        path.unlink(missing_ok=True)
    total = time.perf_counter() - begin
    head = (
        f"{described(options.device)}, torch {torch.__version__}, size {options.size}, {total:.0f} s in all"
    )
    (options.out / "accelerator.json").write_text(
        json.dumps({"device": head, "parts": found}, indent=2) + "\n"
    )
    lines = [
        "# On an accelerator",
        "",
        f"`python benchmarks/accelerator.py --device {options.device}`: {head}.",
    ]
    for name, part in found.items():
        rows = [Row(**{k: v for k, v in row.items() if k != "met"}) for row in part.get("rows", [])]
        lines += ["", f"## {name}", "", f"failed: {part['failed']}" if "failed" in part else table(rows)]
    (options.out / "accelerator.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if any("failed" in part for part in found.values()) else 0


def described(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return "the pretend device" if device == PRETEND else device


def main() -> int:
    """All parts, or one of them."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    arguments.add_argument("--device", default=PRETEND if accelerator is None else accelerator.type)
    arguments.add_argument("--out", type=Path, default=Path("results"), help="folder of the two files")
    arguments.add_argument("--full", action="store_true", help="the larger sizes, in under 25 minutes")
    arguments.add_argument("--size", choices=SIZES, default=None, help=argparse.SUPPRESS)
    arguments.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES), help="all by default")
    arguments.add_argument("--part", choices=PARTS, default=None, help=argparse.SUPPRESS)
    arguments.add_argument("--json", type=Path, default=None, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.size is None:
        options.size = "toy" if options.device == PRETEND else "full" if options.full else "quick"
    if options.part is None:
        return everything(options)
    if options.device == PRETEND:
        sys.path.insert(0, str(ROOT))
        from tests import device

        torch.Generator = device.Generator  # type: ignore[misc]
    place = Place(torch.device(options.device), SIZES[options.size])
    publish(options.part, PARTS[options.part](place), options.json, size=asdict(place.size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
