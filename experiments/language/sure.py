"""How sure a language model is of a class: adapters, their posteriors and their linear models.

    python -m experiments.language.sure --seeds 1

SmolLM2-135M-Instruct is asked for the class of a text: the logits of the words that name the classes, behind
a prompt, are its outputs. Twenty texts a class are learned by LoRA in the last two blocks, from there by
temperature, dropout at test time (Gal and Ghahramani 2016), five adapters together (Lakshminarayanan et al.
2017) and a Kronecker-factored Laplace posterior of the adapter (Yang et al. 2024); and by the linear model of
the adapter at its start, and by ``linnet.adapt``. Rate and temperature of training are those of a held-out
fifth. Texts of another task, asked for the same classes, are out of distribution.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.adapt.encoders import package, smollm
from experiments.adapt.nested import drawn as shots_of
from experiments.adapt.rivals import descended
from experiments.adapt.tasks import Task, pools, stored
from experiments.language.forgetting import ALPHA, MODULES, RANK
from experiments.selection.criteria import find
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.fitting.descent import held_out_split
from linnet.predictive.noise import fit_temperature
from linnet.tangent.batch import split, take
from linnet.tangent.functional import copied
from linnet.training import stream

BLOCKS = 2  # that have an adapter
WORDS = 40  # tokens of a text that are read
BATCH, STEPS, RATES = 16, 60, (3e-4, 1e-3, 3e-3)  # of Adam
DROPOUT, PASSES, MEMBERS = 0.1, 10, 5
SHOTS, POOL, TESTED = 20, 3000, 200
METHODS = (
    "as it comes", "LoRA", "LoRA, temperature", "LoRA, dropout", "five of LoRA", "LoRA, Laplace by evidence",
    "LoRA, Laplace by leave-one-out", "linear model of LoRA", "linnet.adapt",
)  # fmt: skip
Batch = dict[str, Tensor]  # "states" (N, T, D) before the last blocks, "mask" (N, T), padded on the left
Predict = Callable[[Mapping[str, Tensor]], Tensor]  # probabilities (N, C)


@dataclass(frozen=True)
class Asked:
    """A task as the network is asked for it."""

    task: Task
    prompt: str
    words: tuple[str, ...]  # for the classes, in their order


TASKS = (
    Asked(find("news"), "Topic of the article:", (" World", " Sports", " Business", " Science")),
    Asked(find("film reviews"), "Sentiment of the review:", (" negative", " positive")),
    Asked(
        find("question types"),
        "The answer to the question is a",
        (" abbreviation", " description", " thing", " person", " place", " number"),
    ),
    Asked(find("emotions"), "Emotion of the writer:", (" anger", " joy", " optimism", " sadness")),
)


# -- the network -----------------------------------------------------------------------------------


class Last(nn.Module):
    """The last blocks of the decoder, and the logits of some words at the last position.

    Args:
        decoder: The network.
        words: The tokens, (C,).
    """

    def __init__(self, decoder: Any, words: Tensor) -> None:
        super().__init__()
        self.blocks, self.norm = copied(decoder.layers[-BLOCKS:]), copied(decoder.norm)
        self.angles = copied(decoder.rotary_emb)
        self.head = nn.Linear(decoder.config.hidden_size, len(words), bias=False)
        self.head.weight.data = decoder.embed_tokens.weight[words].detach().clone()

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Logits (N, C)."""
        states = through(self.blocks, self.angles, states, mask)
        logits: Tensor = self.head(self.norm(states[:, -1]))
        return logits


def through(blocks: Any, angles: nn.Module, states: Tensor, mask: Tensor) -> Tensor:
    """States behind some blocks, (N, T, D), in which a position looks at itself and at tokens before it."""
    places = (mask.cumsum(1) - 1).clamp_min(0)
    length = mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    seen = before & (mask[:, None, :].bool() | torch.eye(length, dtype=torch.bool, device=mask.device))
    blocked = torch.zeros_like(seen, dtype=states.dtype).masked_fill(~seen, torch.finfo(states.dtype).min)
    turned = angles(states, places)
    for block in blocks:
        out = block(states, attention_mask=blocked[:, None], position_embeddings=turned)
        states = out[0] if isinstance(out, tuple) else out
    return states


class Language:
    """The decoder, and what it makes of texts below its last blocks."""

    def __init__(self) -> None:
        package("peft", "peft")
        self.decoder, self.tokenizer = smollm()

    def word(self, word: str) -> int:
        """The first token of a word."""
        return int(self.tokenizer(word)["input_ids"][0])

    @torch.no_grad()
    def below(self, texts: Sequence[str], prompt: str) -> Batch:
        """Texts with a prompt behind them."""
        ending = self.tokenizer(f"\n{prompt}")["input_ids"]
        rows = [[*self.tokenizer(text)["input_ids"][:WORDS], *ending] for text in map(str, texts)]
        length = WORDS + len(ending)
        ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length).long()
        for i, row in enumerate(rows):
            ids[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
        first, angles = self.decoder.layers[:-BLOCKS], self.decoder.rotary_emb
        parts = zip(ids.split(25), mask.split(25), strict=True)
        found = [through(first, angles, self.decoder.embed_tokens(part), own) for part, own in parts]
        return {"states": torch.cat(found), "mask": mask}

    def network(self, asked: Asked, dropout: float = 0.0, seed: int | None = None) -> nn.Module:
        """The last blocks, with a fresh adapter if there is a seed."""
        model = Last(self.decoder, torch.tensor([self.word(word) for word in asked.words])).eval()
        if seed is None:
            return model
        peft: Any = importlib.import_module("peft")
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), lora_dropout=dropout)
        made: nn.Module = peft.inject_adapter_in_model(config, model)
        return made.eval()


@torch.no_grad()
def outputs(model: nn.Module, x: Any) -> Tensor:
    """Logits of many texts."""
    return torch.cat([model(**part) for part in split(x, 100)])


def trained(start: nn.Module, x: Batch, y: Tensor, rate: float, seed: int) -> nn.Module:
    """An adapter after Adam with a warm-up and a cosine schedule, dropout on where it has some."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of dropout
    batches = stream(len(y), BATCH, lambda _: torch.randperm(len(y), generator=draw))
    setting, loss = (rate, STEPS), nn.functional.cross_entropy
    return descended(
        copied(start), lambda name: "lora_" in name, (x, y), batches, loss, setting, dropout=True
    ).eval()


# -- ways to be sure -------------------------------------------------------------------------------


class Ways:
    """The methods of one draw, which share what they can.

    Args:
        language: The decoder.
        asked: The task.
        data: Texts and labels.
        seed: Of adapters, batches and the held-out fifth.
    """

    def __init__(self, language: Language, asked: Asked, data: tuple[Batch, Tensor], seed: int) -> None:
        self.language, self.asked, self.seed = language, asked, seed
        self.x, self.y = data

    @lru_cache(maxsize=2)  # noqa: B019  (a draw lives as long as its methods)
    def searched(self, dropout: float) -> tuple[float, Tensor, Tensor]:
        """The rate of least loss on the held-out fifth, and its logits and labels there."""
        rest, held = held_out_split(self.y, self.seed)
        start, found = self.language.network(self.asked, dropout, self.seed), {}
        for rate in RATES:
            model = trained(start, take(self.x, rest), self.y[rest], rate, self.seed)
            logits = outputs(model, take(self.x, held))
            found[rate] = float(nn.functional.cross_entropy(logits, self.y[held])), logits
        rate = min(found, key=lambda one: found[one][0])
        return rate, found[rate][1], self.y[held]

    @lru_cache(maxsize=MEMBERS + 1)  # noqa: B019
    def adapter(self, member: int, dropout: float) -> nn.Module:
        """An adapter trained on all texts; members differ in their first weights and batches."""
        seed = self.seed + 1000 * member
        start = self.language.network(self.asked, dropout, seed)
        return trained(start, self.x, self.y, self.searched(dropout)[0], seed)

    def way(self, method: str) -> Predict:
        """A method, fitted."""
        single = partial(self.adapter, 0, 0.0)
        if method == "as it comes":
            return self.plain(self.language.network(self.asked))
        if method == "LoRA":
            return self.plain(single())
        if method == "LoRA, temperature":
            _, logits, labels = self.searched(0.0)
            return self.plain(single(), fit_temperature(logits, labels))
        if method == "LoRA, dropout":
            model = self.adapter(0, DROPOUT)
            for module in model.modules():
                module.train(isinstance(module, nn.Dropout))
            return lambda x: torch.stack([outputs(model, x).softmax(1) for _ in range(PASSES)]).mean(0)
        if method == "five of LoRA":
            models = [self.adapter(member, 0.0) for member in range(MEMBERS)]
            return lambda x: torch.stack([outputs(one, x).softmax(1) for one in models]).mean(0)
        if method.startswith("LoRA, Laplace"):
            likelihood = linnet.likelihoods.Categorical()
            posterior = linnet.Laplace(single(), likelihood, "kfac", params="lora").fit((self.x, self.y))
            if method.endswith("evidence"):
                posterior.tune("evidence")
            else:
                posterior.tune("loo", (self.x, self.y))
            return lambda x: posterior.predictive(x).probs
        if method == "linear model of LoRA":
            lin = linnet.linearize(self.language.network(self.asked, 0.0, self.seed), params="lora")
            fit = linnet.fit(lin, (self.x, self.y), "cross-entropy", ridge="loo")
            return lambda x: fit.predictive(x).probs
        adapted = linnet.adapt(self.language.network(self.asked), (self.x, self.y), seed=self.seed)
        return lambda x: adapted.predictive(x).probs

    @staticmethod
    def plain(model: nn.Module, temperature: float = 1.0) -> Predict:
        """Probabilities of a network."""
        return lambda x: (outputs(model, x) / temperature).softmax(1)


def judged(predict: Predict, test: tuple[Batch, Tensor], others: Batch) -> dict[str, Any]:
    """Scores on test texts, and how well the entropy tells other texts from them."""
    inside, outside = predict(test[0]), predict(others)
    report = linnet.evaluate(lambda at: inside[at], (torch.arange(len(inside)), test[1]))
    every = torch.cat([inside, outside])
    places = torch.arange(len(every)).split([len(inside), len(outside)])
    apart = linnet.ood(lambda at: every[at], *places)
    return {
        "accuracy": report.accuracy, "log loss": report.nll, "ece": report.ece, "brier": report.brier,
        "auroc": apart.auroc,
    }  # fmt: skip


# -- the study -------------------------------------------------------------------------------------


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a method, means over tasks and draws, then each task's log loss."""
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    trained_loss = chosen(cells, "log loss", method="LoRA")
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [chosen(cells, name, method=method) for name in ("accuracy", "log loss", "ece", "auroc")]
        scaled = zip(own, (100, 1, 100, 100), (1, 3, 1, 1), strict=True)
        seconds = chosen(cells, "seconds", method=method)
        each = [chosen(cells, "log loss", method=method, task=task) for task in tasks]
        rows.append([
            method,
            *(with_error(values, digits, scale) for values, scale, digits in scaled),
            with_error([a - b for a, b in zip(own[1], trained_loss, strict=True)], 3),
            *(with_error(values, 3) for values in each),
            f"{sum(seconds) / len(seconds):.0f}",
        ])  # fmt: skip
    header = ["method", "accuracy %", "log loss", "ECE %", "AUROC %", "log loss less LoRA's"]
    header += [f"{task}: log loss" for task in tasks]
    return markdown([*header, "seconds"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--tasks", nargs="*", default=[one.task.name for one in TASKS])
    options.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    given = options.parse_args(arguments)
    study, cells = Study("language/sure", given), []
    language = lru_cache(maxsize=1)(Language)
    tasks = [one for one in TASKS if one.task.name in given.tasks]
    for asked in tasks:
        prepared = lru_cache(maxsize=1)(lambda asked=asked: texts_of(language(), asked, given))
        for seed in study.seeds:
            ways = lru_cache(maxsize=1)(
                lambda asked=asked, seed=seed, p=prepared: Ways(language(), asked, draw(p(), seed), seed)
            )
            for method in given.methods:
                what = {
                    "task": asked.task.name, "method": method, "seed": seed, "shots": SHOTS, "blocks": BLOCKS,
                    "steps": STEPS, "tested": TESTED,
                }  # fmt: skip

                def compute(method: str = method, ways: Any = ways, p: Any = prepared) -> Mapping[str, Any]:
                    return judged(ways().way(method), p().test, p().others)

                cells.append(study.cell(what, compute))
    study.publish(table(cells), cells)


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts of a task below the last blocks."""

    x: Batch  # of the pool
    y: Tensor
    at: Mapping[int, Tensor]  # places of each draw in the pool
    test: tuple[Batch, Tensor]
    others: Batch  # of another task


def texts_of(language: Language, asked: Asked, given: argparse.Namespace) -> Texts:
    """The texts of all draws, those to test on, and as many of the next task."""
    found = stored(asked.task, given.data_dir)
    pool, test = pools(found, POOL, TESTED)
    draws = {seed: pool[shots_of(found.train_y[pool], SHOTS, seed)] for seed in range(given.seeds)}
    every = torch.cat(list(draws.values())).unique()
    places = {seed: torch.searchsorted(every, at) for seed, at in draws.items()}
    other = stored(TASKS[(TASKS.index(asked) + 1) % len(TASKS)].task, given.data_dir)
    _, outside = pools(other, POOL, TESTED)
    return Texts(
        language.below(found.train_x[every.numpy()], asked.prompt),
        found.train_y[every],
        places,
        (language.below(found.test_x[test.numpy()], asked.prompt), found.test_y[test]),
        language.below(other.test_x[outside.numpy()], asked.prompt),
    )


def draw(texts: Texts, seed: int) -> tuple[Batch, Tensor]:
    """The texts of a draw."""
    at = texts.at[seed]
    return take(texts.x, at), texts.y[at]


if __name__ == "__main__":
    main()
