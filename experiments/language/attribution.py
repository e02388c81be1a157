"""Which training texts raise or lower a loss: predictions of influence against training on halves of them.

    python -m experiments.language.attribution
    python -m experiments.language.attribution --of peers    # with kronfluence and dattri installed

A small causal transformer learns word by word from news, and is then trained further on other news. Fifty
times it is trained on a random half of these, and so is its linear model. The linear datamodelling score
(Park et al. 2023) is the rank correlation, over the halves, of the loss of a text that was not seen with the
sum of the influences that a method ascribes to the texts of the half: its mean over such texts. The network's
own losses are told by influence functions along all weights and along few directions, by those of other
libraries, and the linear model's by its own influence.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import linnet
from experiments.language import peers
from experiments.locate import find_data_dir
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.audit.gradient_store import LossGradients
from linnet.fitting import CG

WORDS, LENGTH, WIDTH = 800, 20, 48
BEFORE, TEXTS, QUERIES, HALVES = 800, 400, 24, 50
RATE, BATCH, FIRST, EPOCHS = 2e-3, 32, 12, 6  # of Adam: epochs on the news before, and on those in question
DAMPING, CG_DAMPING = 0.1, 10.0  # of the mean eigenvalue of the curvature: each the best on another seed
PULL, SHARE = (
    1000.0,
    0.1,
)  # ridge towards the start, as chosen by unseen texts of another seed; its share
STEPS = 12  # of conjugate gradients, a product with the curvature each
AGAIN = 5  # networks over which a method's influences are averaged, trained on the same texts in other orders
DIRECTIONS = (64, 256, 1024)
PARAMS, RIDGE = r"second\.linear[12]\..*", 30.0  # the ridge of least loss of the texts before, among 1 and 30
LIKELIHOOD = linnet.likelihoods.Categorical(axis=-1)
Data = tuple[Tensor, Tensor]  # words and the words after them


class Decoder(nn.Module):
    """Two blocks of a causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2))
        self.first, self.second = layers
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next word, (N, T, words)."""
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        h = self.words(ids) + self.places(torch.arange(t, device=ids.device))
        logits: Tensor = self.head(self.second(self.first(h, src_mask=mask), src_mask=mask))
        return logits


def news(data_dir: str | None) -> tuple[Data, Data, Data]:
    """Texts before, texts in question, texts that are not seen."""
    folder = find_data_dir(data_dir, require=["agnews_sample.npz"])
    with np.load(folder / "agnews_sample.npz", allow_pickle=False) as file:
        parts = [[str(text).lower().split() for text in file[f"text_{part}"]] for part in ("train", "test")]
    counts = Counter(word for text in parts[0] for word in text)
    known = {word: i for i, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}  # 0 ends, 1 is unknown

    def data(texts: Sequence[Sequence[str]]) -> Data:
        ids = torch.zeros(len(texts), LENGTH + 1, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            found = [known.get(word, 1) for word in text[: LENGTH + 1]]
            row[: len(found)] = torch.tensor(found)
        return ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)

    return data(parts[0][:BEFORE]), data(parts[0][BEFORE : BEFORE + TEXTS]), data(parts[1][:QUERIES])


def trained(net: Decoder, data: Data, epochs: int, seed: int) -> Decoder:
    """A copy after some epochs of Adam."""
    draw, own = torch.Generator().manual_seed(seed), Decoder()
    own.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(own.parameters(), RATE)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[0]), generator=draw).split(BATCH):
            optimizer.zero_grad()
            losses(own, (data[0][rows], data[1][rows])).mean().backward()
            optimizer.step()
    return own.eval()


def losses(net: nn.Module, data: Data) -> Tensor:
    """Σ −log p over the words of each text, (N,)."""
    return LIKELIHOOD.nll(net(data[0]), data[1])


def halves(seed: int) -> Tensor:
    """Which texts are in each half, (halves, N)."""
    draw = torch.Generator().manual_seed(1000 + seed)
    ranks = torch.rand(HALVES, TEXTS, generator=draw).argsort(1).argsort(1)
    return ranks < TEXTS // 2


def score(influence: Tensor, parts: Tensor, truth: Tensor) -> list[float]:
    """The linear datamodelling score of each text that was not seen, (Q,)."""
    # influence (N, Q): its loss with a training text less without; truth (halves, Q)
    told = parts.double() @ influence.double()
    return [float(spearmanr(told[:, q], truth[:, q]).statistic) for q in range(truth.shape[1])]


# -- the network -----------------------------------------------------------------------------------


def timed(make: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """An influence (N, Q), and the seconds that it took."""
    begin = time.perf_counter()
    found = make()
    return found, time.perf_counter() - begin


def of_network(
    net: Decoder, data: Data, queries: Data, pull: float | None = None
) -> dict[str, tuple[Tensor, float]]:
    """Influences on the network's losses, by several methods; it may be the optimum with a ridge."""
    lin = linnet.linearize(net)
    rows = LossGradients(lin.function, LIKELIHOOD)
    begin = time.perf_counter()
    g, q = rows.rows(*data), rows.rows(*queries)
    both = time.perf_counter() - begin
    begin = time.perf_counter()
    curvature = ekfac(net, data)
    mean = float(curvature.trace()) / lin.space.dim
    damping, exact_damping = DAMPING * mean, CG_DAMPING * mean
    if pull is not None:
        damping, exact_damping = SHARE * pull, pull
    damped = curvature.damped(damping)
    summed = time.perf_counter() - begin

    def by_cg() -> Tensor:
        exact = linnet.curvature(net, data, LIKELIHOOD, structure="matrix-free").damped(exact_damping)
        inverse = curvature.damped(exact_damping).inverse()
        return -g @ linnet.solvers.cg(exact, q.T, inverse, tolerance=1e-2, max_steps=STEPS).value

    found = {
        "dot product of gradients": timed(lambda: -g @ q.T),
        "cosine of gradients": timed(lambda: -nn.functional.normalize(g) @ nn.functional.normalize(q).T),
        "EKFAC": timed(lambda: -g @ damped.inverse().mm(q.T)),
        "EKFAC and conjugate gradients": timed(by_cg),
    }
    for name, (one, seconds) in found.items():
        found[name] = one, seconds + both + summed * ("EKFAC" in name)
    for dim in DIRECTIONS:
        with tempfile.TemporaryDirectory() as folder:

            def stored(dim: int = dim, folder: str = folder) -> Tensor:
                small = linnet.with_sketch(net, curvature, dim=dim)
                store = linnet.audit.GradientStore(Path(folder) / "rows", small, LIKELIHOOD).add(data)
                return -store.scores(queries, damping=damping).T

            one, seconds = timed(stored)
            found[f"gradient store, {dim} directions"] = one, seconds + summed
    return found


def ekfac(net: Decoder, data: Data) -> Any:
    """The curvature of a network on the texts that it is trained on."""
    return linnet.curvature(net, data, LIKELIHOOD, structure="ekfac", expectation="mc")


def by_ekfac(net: Decoder, data: Data, queries: Data) -> Tensor:
    """Influence (N, Q) by EKFAC."""
    rows, curvature = LossGradients(linnet.linearize(net).function, LIKELIHOOD), ekfac(net, data)
    damping = DAMPING * float(curvature.trace()) / sum(p.numel() for p in net.parameters())
    return -rows.rows(*data) @ curvature.damped(damping).inverse().mm(rows.rows(*queries).T)


@cache
def retrained(seed: int, data_dir: str | None) -> tuple[list[Decoder], Decoder, Tensor, Tensor]:
    """Networks of all texts, the one before; halves, and losses of two networks of each, (2, halves, Q)."""
    before, data, queries = news(data_dir)
    torch.manual_seed(seed)
    start = trained(Decoder(), before, FIRST, seed)
    nets = [trained(start, data, EPOCHS, seed + 10_000 * again) for again in range(AGAIN)]
    parts, truth = halves(seed), torch.zeros(2, HALVES, len(queries[0]))
    for k, part in enumerate(parts):
        for again in range(2):
            own = trained(start, (data[0][part], data[1][part]), EPOCHS, 100 * k + again)
            with torch.no_grad():
                truth[again, k] = losses(own, queries)
    return nets, start, parts, truth


def told(found: dict[str, tuple[Tensor, float]], parts: Tensor, truth: Tensor) -> dict[str, Any]:
    """Scores and seconds of influences by method."""
    return {name: {"scores": score(one, parts, truth), "took": took} for name, (one, took) in found.items()}


def network_cell(seed: int, data_dir: str | None) -> dict[str, Any]:
    """Scores of every method against the network trained on halves."""
    _, data, queries = news(data_dir)
    nets, start, parts, truth = retrained(seed, data_dir)
    with torch.no_grad():
        counts = (queries[1] != -100).sum()
        first, last = (float(losses(one, queries).sum() / counts) for one in (start, nets[0]))
    found = of_network(nets[0], data, queries)
    several = timed(lambda: torch.stack([by_ekfac(net, data, queries) for net in nets]).mean(0))
    found[f"EKFAC, {AGAIN} networks"] = several
    again = [float(spearmanr(*truth[:, :, q]).statistic) for q in range(truth.shape[2])]
    return {
        "loss before": first, "loss after": last,
        "methods": told(found, parts, truth.mean(0)) | {"the other training of each half": {"scores": again}},
        "losses": [[round(float(one), 3) for one in row] for row in truth.mean(0)],
    }  # fmt: skip


def optimum(start: Decoder, data: Data) -> Decoder:
    """A copy at the optimum of the texts' losses with a ridge towards the start, by L-BFGS."""
    own = Decoder()
    own.load_state_dict(start.state_dict())
    origin = [p.detach().clone() for p in own.parameters()]
    optimizer = torch.optim.LBFGS(
        own.parameters(), max_iter=200, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=0.1
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        away = sum((p - q).square().sum() for p, q in zip(own.parameters(), origin, strict=True))
        loss = losses(own, data).sum() + 0.5 * PULL * away
        loss.backward()
        return loss

    optimizer.step(objective)
    return own.eval()


def optimum_cell(seed: int, data_dir: str | None) -> dict[str, Any]:
    """Scores of every method against the network at its optimum for each half."""
    before, data, queries = news(data_dir)
    torch.manual_seed(seed)
    start = trained(Decoder(), before, FIRST, seed)
    net, parts = optimum(start, data), halves(seed)
    refits = [optimum(start, (data[0][part], data[1][part])) for part in parts]
    with torch.no_grad():
        truth = torch.stack([losses(one, queries) for one in refits])
        first, last = (float(losses(one, queries).sum() / (queries[1] != -100).sum()) for one in (start, net))
    found = of_network(net, data, queries, PULL)
    return {"loss before": first, "loss after": last, "methods": told(found, parts, truth)}


def peers_cell(seed: int, data_dir: str | None) -> dict[str, Any]:
    """Scores of other libraries' influences against the same."""
    _, data, queries = news(data_dir)
    nets, _, parts, truth = retrained(seed, data_dir)
    found = {
        "EKFAC by kronfluence": timed(lambda: peers.by_kronfluence(nets[0], data, queries)),
        "TRAK by dattri": timed(lambda: peers.by_trak(nets[:1], data, queries)),
        f"TRAK by dattri, {AGAIN} networks": timed(lambda: peers.by_trak(nets, data, queries)),
    }
    return {"methods": told(found, parts, truth.mean(0))}


# -- the linear model ------------------------------------------------------------------------------


def linear_cell(seed: int, data_dir: str | None) -> dict[str, Any]:
    """The score of the linear model's own influence against its fits of halves."""
    before, data, queries = news(data_dir)
    torch.manual_seed(seed)
    lin = linnet.linearize(trained(Decoder(), before, FIRST, seed), params=PARAMS)

    def fitted(part: Tensor) -> Any:
        own = data[0][part], data[1][part]
        return linnet.fit(lin, own, "cross-entropy", axis=-1, ridge=RIDGE, solver=CG(tolerance=1e-3))

    begin = time.perf_counter()
    fit = fitted(torch.ones(TEXTS, dtype=torch.bool))
    solved = time.perf_counter() - begin
    influence, seconds = timed(lambda: fit.influence(queries))
    parts = halves(seed)
    truth = torch.stack([fitted(part).losses(queries) for part in parts])
    counts = (queries[1] != -100).sum()
    begin_loss = float(losses(lin.model, queries).sum().detach() / counts)
    own = {"scores": score(influence, parts, truth), "took": seconds + solved}
    after = float(fit.losses(queries).sum() / counts)
    return {"loss before": begin_loss, "loss after": after, "methods": {"linear model's own": own}}


# -- the study -------------------------------------------------------------------------------------


LOSSES = {  # of what the influences of a kind of cell are
    "network": "network",
    "peers": "network",
    "optimum": "network at an optimum",
    "linear model": "linear model",
}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a method."""
    rows = []
    for of, losses_of in LOSSES.items():
        own = [cell for cell in cells if cell["of"] == of]
        for name in own[0]["methods"] if own else ():
            found = [cell["methods"][name] for cell in own]
            values = [value for one in found for value in one["scores"]]
            took = [one["took"] for one in found if "took" in one]
            seconds = f"{sum(took) / len(took):.1f}" if took else "–"
            rows.append((losses_of, name, with_error(values, 2), seconds))
    return markdown(("losses of", "influence by", "linear datamodelling score", "seconds"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    kinds = {
        "linear model": linear_cell,
        "network": network_cell,
        "peers": peers_cell,
        "optimum": optimum_cell,
    }
    options = parser(__doc__ or "")
    options.add_argument(
        "--of", nargs="+", choices=kinds, default=[kind for kind in kinds if kind != "peers"], help="parts"
    )
    given = options.parse_args(arguments)
    if "peers" in given.of:
        peers.need("kronfluence", "dattri")
    study = Study("language/attribution", given)
    sizes = {"texts": TEXTS, "queries": QUERIES, "halves": HALVES}
    own = {"network": {"damping": [DAMPING, CG_DAMPING]}, "optimum": {"pull": PULL}}
    cells = [
        study.cell(
            {"of": of, "seed": seed, **sizes, **own.get(of, {})}, partial(kinds[of], seed, given.data_dir)
        )
        for seed in study.seeds
        for of in given.of
        for compute in (partial(kinds[of], seed, given.data_dir),)
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
