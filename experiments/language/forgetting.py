"""Facts that a language model's adapter learns and forgets: in the linear model exactly, by rivals nearly.

    python -m experiments.language.forgetting --persons 200

SmolLM2-135M-Instruct with LoRA in its last layers learns five facts of each of some made-up persons, and is
then to forget a tenth of the persons. The linear model of the adapter is fitted to all of them, made to
forget, and compared with the fit that never saw them, once and again at the weights that it ends with; the
adapter itself is trained on all, and on the rest, and forgets by gradient ascent (Maini et al. 2024) and by
negative preference optimization (Zhang et al. 2024). Scores are those of TOFU: probabilities of answers,
their truth ratios, and the two-sample test of these against the model that never saw the facts.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ks_2samp
from torch import Tensor

import linnet
from experiments.adapt.encoders import package, smollm
from experiments.language.facts import Fact, made
from experiments.locate import find_data_dir
from experiments.study import Study, parser
from experiments.tables import markdown
from linnet.fitting import CG
from linnet.tangent.batch import take

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16
FORGOTTEN = 0.1  # of the persons
BATCH, RATE, STEPS = 32, 1e-3, 500  # of Adam, on the adapter itself
# of rivals, rates of Adam and steps after which they are looked at: the best of all is taken by hindsight
UNLEARNING, LOOKED_AT = (1e-4, 3e-4, 1e-3), (2, 5, 10, 20)
BETA = 0.1  # of NPO
COMPARED = 20  # facts of either kind whose outputs are compared, one for each word of the vocabulary
WORDS, GENERAL = 48, 100  # tokens and number of texts on which the rest of the model is judged


class Language:
    """The network with its adapter, its tokenizer, and the facts."""

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        hub: Any = importlib.import_module("transformers")
        package("peft", "peft")
        peft: Any = importlib.import_module("peft")
        torch.manual_seed(seed)
        decoder, self.tokenizer = smollm()
        network = hub.LlamaForCausalLM(decoder.config)
        network.model = decoder
        network.lm_head.weight = decoder.embed_tokens.weight
        last = decoder.config.num_hidden_layers
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES),
            layers_to_transform=list(range(last - given.layers, last)),
        )  # fmt: skip
        self.model = peft.get_peft_model(network, config).eval()
        self.facts = made(given.persons, seed)
        gone = range(max(1, int(FORGOTTEN * given.persons)))
        self.gone = [i for i, fact in enumerate(self.facts) if fact.person in gone]
        self.rest = [i for i in range(len(self.facts)) if i not in set(self.gone)]

    def batch(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
        """Prompts and answers as tokens, with labels on the answers."""
        rows = [
            [self.tokenizer(part)["input_ids"] for part in (prompt, f" {answer}")] for prompt, answer in pairs
        ]
        length = max(len(a) + len(b) for a, b in rows)
        ids = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, (a, b) in enumerate(rows):
            end = len(a) + len(b)
            ids[i, :end], mask[i, :end], labels[i, len(a) : end] = torch.tensor(a + b), 1, torch.tensor(b)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def asked(
        self, facts: Sequence[Fact], wording: str = "question", wrong: int | None = None
    ) -> dict[str, Tensor]:
        """Questions and their answers, or one of the wrong ones."""
        return self.batch(
            [(getattr(f, wording), f.answer if wrong is None else f.wrong[wrong]) for f in facts]
        )

    def general(self, data_dir: str | None) -> dict[str, Tensor]:
        """Texts of news, every token of which is a label."""
        folder = find_data_dir(data_dir, require=["agnews_sample.npz"])
        with np.load(folder / "agnews_sample.npz", allow_pickle=False) as file:
            texts = [str(text) for text in file["text_test"][:GENERAL]]
        rows = [self.tokenizer(text)["input_ids"][:WORDS] for text in texts]
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


Losses = Callable[[dict[str, Tensor]], Tensor]  # of sequences, Σ −log p over their labels, (N,)


def probabilities(losses: Losses, data: dict[str, Tensor]) -> Tensor:
    """Of answers, each the geometric mean over its tokens, (N,)."""
    return (-losses(data) / (data["labels"] != -100).sum(1)).exp()


def reworded(losses: Losses, language: Language, facts: Sequence[Fact]) -> dict[str, Any]:
    """Of answers to questions in other words: mean probability, mean nats a token, and truth ratios."""
    right = probabilities(losses, language.asked(facts, "paraphrase"))
    wrong = [probabilities(losses, language.asked(facts, "paraphrase", k)) for k in range(5)]
    ratios = (torch.stack(wrong).mean(0) / right.clamp_min(1e-12)).tolist()
    return {
        "paraphrase": float(right.mean()),
        "held-out loss": float(-right.log().mean()),
        "truth ratios": ratios,
    }


def scores(losses: Losses, language: Language, news: dict[str, Tensor]) -> dict[str, Any]:
    """What TOFU looks at, of one model."""
    facts, found = language.facts, dict[str, Any]()
    parts = {
        "gone": [facts[i] for i in language.gone],
        "rest": [facts[i] for i in language.rest][: len(language.gone)],
    }
    for name, own in parts.items():
        found[f"{name}: answer"] = float(probabilities(losses, language.asked(own)).mean())
        found |= {f"{name}: {key}": value for key, value in reworded(losses, language, own).items()}
    counts = (news["labels"][:, 1:] != -100).sum()
    found["general loss"] = float(losses(news).sum() / counts)
    return found


# -- the adapter itself ----------------------------------------------------------------------------


class Adapter:
    """The adapter as it is, trained on what the network makes of the sequences before its first block."""

    def __init__(self, language: Language, data: dict[str, Tensor]) -> None:
        from linnet.fitting.position_fit import position_problem
        from linnet.tangent.data import Data

        lin = linnet.linearize(language.model, params="lora")
        x, y = Data.of(data, lin.function).pair
        self.function, self.y = lin.function, y
        self.problem = position_problem(lin.function, x, y, -1, None)
        self.losses_of: Any = self.problem.likelihood

    def start(self) -> dict[str, Tensor]:
        """Its first weights."""
        return {name: t.clone() for name, t in self.problem.function.theta.items()}

    def losses(self, weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Of some sequences, with gradients."""
        x = take(self.problem.x, rows)
        states = self.problem.function(weights, x)
        return self.losses_of.nll(states, self.y[rows])

    def elsewhere(self, weights: dict[str, Tensor]) -> Losses:
        """Losses of other sequences."""
        from linnet.tangent.data import Data

        @torch.no_grad()
        def found(data: dict[str, Tensor]) -> Tensor:
            x, y = Data.of(data, self.function).pair
            inputs = self.losses_of.inputs(x)
            places = torch.arange(len(y)).split(64)
            return torch.cat(
                [self.losses_of.nll(self.problem.function(weights, take(inputs, at)), y[at]) for at in places]
            )

        return found

    def trained(
        self,
        weights: dict[str, Tensor],
        rows: Tensor,
        rate: float,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Iterator[dict[str, Tensor]]:
        """The weights after each step of Adam on what ``loss_of`` makes of losses and places."""
        own = {name: t.clone().requires_grad_() for name, t in weights.items()}
        optimizer, draw = torch.optim.Adam(list(own.values()), lr=rate), torch.Generator().manual_seed(0)
        while True:
            for at in rows[torch.randperm(len(rows), generator=draw)].split(BATCH):
                optimizer.zero_grad()
                loss_of(self.losses(own, at), at).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                yield {name: t.detach().clone() for name, t in own.items()}


def adapter_cells(language: Language, data: dict[str, Tensor], news: dict[str, Tensor]) -> dict[str, Any]:
    """The adapter trained on all and on the rest, and what two rivals make of the first."""
    adapter = Adapter(language, data)
    every, gone, rest = (
        torch.tensor(rows) for rows in (range(len(language.facts)), language.gone, language.rest)
    )
    found, weights = {}, {}

    def mean(losses: Tensor, _: Tensor) -> Tensor:
        return losses.mean()

    for name, rows in (("adapter, all facts", every), ("adapter, never saw them", rest)):
        begin = time.perf_counter()
        weights[name] = next(islice(adapter.trained(adapter.start(), rows, RATE, mean), STEPS - 1, None))
        seconds = time.perf_counter() - begin
        found[name] = {**scores(adapter.elsewhere(weights[name]), language, news), "took": seconds}
    start, wanted = weights["adapter, all facts"], found["adapter, never saw them"]
    with torch.no_grad():
        before = torch.cat([adapter.losses(start, at) for at in gone.split(64)])
    known = dict(zip(gone.tolist(), before.tolist(), strict=True))

    def ascent(losses: Tensor, _: Tensor) -> Tensor:
        return -losses.mean()

    def preference(losses: Tensor, at: Tensor) -> Tensor:
        reference = torch.tensor([known[i] for i in at.tolist()], dtype=losses.dtype)
        return -2 / BETA * torch.nn.functional.logsigmoid(BETA * (losses - reference)).mean()

    facts = [language.facts[i] for i in language.gone]
    for name, loss_of in (("gradient ascent", ascent), ("NPO", preference)):
        best: tuple[float, dict[str, Any]] = -1.0, {}
        begin = time.perf_counter()
        for rate in UNLEARNING:
            for step, at in enumerate(islice(adapter.trained(start, gone, rate, loss_of), LOOKED_AT[-1]), 1):
                if step in LOOKED_AT:
                    ratios = reworded(adapter.elsewhere(at), language, facts)["truth ratios"]
                    p = quality({"gone: truth ratios": ratios}, wanted)
                    best = max(best, (p, {"at": at, "rate": rate, "steps": step}), key=lambda one: one[0])
        seconds, one = time.perf_counter() - begin, best[1]
        own = scores(adapter.elsewhere(one.pop("at")), language, news)
        found[f"adapter, {name}"] = {**own, **one, "took": seconds}
    return found


# -- the linear model ------------------------------------------------------------------------------


class Linear:
    """The linear model of the adapter, its fits kept in files, so that a run goes on where it was."""

    def __init__(
        self,
        language: Language,
        data: dict[str, Tensor],
        given: argparse.Namespace,
        folder: Path,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.language, self.data, self.given, self.folder = language, data, given, folder
        self.model = language.model if model is None else model
        # at its start an adapter's B is zero, so that the derivative in A vanishes
        self.lin = linnet.linearize(self.model, params="lora_B" if model is None else "lora")

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A fit from its file, or made and written."""
        place = self.folder / name
        if place.exists():
            return linnet.load(place, self.model)
        fit = make()
        fit.save(place)
        return fit

    def again(self, fit: Any, name: str) -> Linear:
        """The linear model at the weights that a fit ends with."""
        own = {key for key, _ in self.model.named_parameters() if "lora_" in key}
        shared = {id(p): p for key, p in self.model.named_parameters() if key not in own}
        model = copy.deepcopy(self.model, shared)
        for key, moved in fit.module.delta.items():
            model.get_parameter(key).data.add_(moved.detach())
        return Linear(self.language, self.data, self.given, self.folder.parent / name, model)

    def fitted(self, rows: Sequence[int]) -> Any:
        """The optimum of some facts."""
        data = {name: part[torch.tensor(rows)] for name, part in self.data.items()}
        solver = CG(tolerance=self.given.tolerance, preconditioner="none")
        return linnet.fit(self.lin, data, "cross-entropy", axis=-1, ridge=self.given.ridge, solver=solver)

    @cached_property
    def all(self) -> Any:
        """Of all facts."""
        return self.kept("all", lambda: self.fitted(range(len(self.language.facts))))

    @cached_property
    def less(self) -> Any:
        """Without those that are to be forgotten."""
        return self.kept("forgotten", lambda: self.all.forget(self.language.gone))

    @cached_property
    def never(self) -> Any:
        """Of a fit that never saw them."""
        return self.kept("never", lambda: self.fitted(self.language.rest))


def told_of(fit: Any, language: Language, news: dict[str, Tensor]) -> dict[str, Any]:
    """Scores of a fit, its seconds, and its steps."""
    took = fit.record.seconds.get("change", fit.record.seconds["solve"])
    return {**scores(fit.losses, language, news), "took": took, "newton": fit.record.reasons["newton"]}


def linear_cells(linear: Linear, news: dict[str, Tensor]) -> dict[str, Any]:
    """The linear model of all facts, after forgetting, and of a fit that never saw them."""
    language, found = linear.language, {}
    fits = {
        "linear, all facts": linear.all,
        "linear, forgotten": linear.less,
        "linear, never saw them": linear.never,
    }
    for name, fit in fits.items():
        found[name] = {**told_of(fit, language, news), "certificate": fit.summary()["certificate"]}
    facts = [language.facts[i] for i in (*language.gone[:COMPARED], *language.rest[:COMPARED])]
    asked = language.asked(facts)
    one, other = (
        fit.predict({k: v for k, v in asked.items() if k != "labels"}) for fit in (linear.less, linear.never)
    )
    whole = linear.all.predict({k: v for k, v in asked.items() if k != "labels"})
    counted = torch.cat([asked["labels"][:, 1:] != -100, torch.zeros(len(facts), 1, dtype=torch.bool)], 1)
    one, other, whole = (part[counted] - part[counted].mean(-1, keepdim=True) for part in (one, other, whole))
    found["linear, forgotten"]["distance"] = float((one - other).norm() / (whole - other).norm())
    found["linear, forgotten"]["largest"] = float((one - other).abs().max())
    return found


def relinearized_cells(linear: Linear, news: dict[str, Tensor], times: int) -> dict[str, Any]:
    """The linear model at the weights that the last one ends with: of all facts, and of those that stay."""
    # What the first has learned stays in its weights when the second forgets.
    language, found = linear.language, {}
    fit, less = linear.all, linear.never
    one = other = linear
    for k in range(1, times + 1):
        folder = f"{linear.folder.name}-again-{k}"
        one, other = one.again(fit, f"{folder}-all"), other.again(less, f"{folder}-rest")
        fit, less = one.all, other.never
        fits = {"all facts": fit, "forgotten": one.less, "never saw them": less}
        for name, own in fits.items():
            found[f"linearized {k + 1} times, {name}"] = told_of(own, language, news)
    return found


# -- the study -------------------------------------------------------------------------------------


def quality(one: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Forget quality: p of the two-sample test of truth ratios of what is to be forgotten."""
    return float(ks_2samp(one["gone: truth ratios"], wanted["gone: truth ratios"]).pvalue)


SCORES = ("gone: answer", "gone: paraphrase", "rest: answer", "rest: paraphrase")
HELD = ("gone: held-out loss", "rest: held-out loss")


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a model, means over seeds, and the p-value of each."""
    header = ["model", "forgotten answers", "reworded", "kept answers", "reworded", "reworded, nats a token"]
    header += ["forget quality p", "general loss", "seconds"]
    known: dict[str, list[tuple[dict[str, Any], dict[str, Any] | None]]] = {}
    for cell in cells:
        models = cell["models"]
        for name, one in models.items():
            wanted = models.get(f"{name.split(',')[0]}, never saw them")
            known.setdefault(name, []).append((one, wanted))
    rows = []
    for name, every in known.items():
        mean = {
            key: sum(one[key] for one, _ in every) / len(every)
            for key in (*SCORES, *HELD, "general loss", "took")
            if key in every[0][0]
        }
        tested = [quality(one, wanted) for one, wanted in every if wanted is not None and wanted is not one]
        rows.append([
            name,
            *(f"{100 * mean[key]:.1f}" for key in SCORES),
            f"{sum(mean[key] for key in HELD) / 2:.2f}" if HELD[0] in mean else "–",
            " and ".join(f"{p:.2g}" for p in tested) or "–",
            f"{mean['general loss']:.3f}",
            f"{mean['took']:.0f}" if "took" in mean else "–",
        ])  # fmt: skip
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--persons", type=int, default=200)
    options.add_argument(
        "--layers", type=int, default=1, help="last layers with an adapter (default %(default)s)"
    )
    kinds = ("start", "adapter", "linear", "relinearized")
    options.add_argument("--of", nargs="+", default=list(kinds), choices=kinds, help="parts (default: all)")
    options.add_argument("--ridge", type=float, default=0.1)
    options.add_argument("--times", type=int, default=2, help="linear models after the first")
    options.add_argument(
        "--tolerance", type=float, default=1e-5, help="of the gradient (default %(default)s)"
    )
    given = options.parse_args(arguments)
    study = Study("language/forgetting", given)
    cells = [cell for seed in study.seeds for cell in computed(study, given, seed)]
    study.publish(table(cells), cells)


def computed(study: Study, given: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The cells of a seed."""
    language = Language(given, seed)
    news, data = language.general(given.data_dir), language.asked(language.facts)
    linear = Linear(language, data, given, study.out / f"seed-{seed}")

    def start() -> dict[str, Any]:
        adapter = Adapter(language, take(data, torch.arange(2)))  # its B is zero
        return {"as it comes": scores(adapter.elsewhere(adapter.start()), language, news)}

    sizes = {"persons": given.persons, "layers": given.layers, "seed": seed, "rank": RANK}
    trained = {"rate": RATE, "steps": STEPS, "unlearning": UNLEARNING, "looked at": LOOKED_AT}
    solved = {"ridge": given.ridge, "tolerance": given.tolerance}
    parts: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
        ("start", {}, start),
        ("adapter", trained, lambda: adapter_cells(language, data, news)),
        ("linear", solved, lambda: linear_cells(linear, news)),
        (
            "relinearized",
            {**solved, "times": given.times},
            lambda: relinearized_cells(linear, news, given.times),
        ),
    ]
    return [
        study.cell({**sizes, "of": of, **more}, lambda make=make: {"models": make()})  # type: ignore[misc]
        for of, more, make in parts
        if of in given.of
    ]


if __name__ == "__main__":
    main()
