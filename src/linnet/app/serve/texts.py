"""What the page asks of a run on texts: an answer, its tokens, and the training texts behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from linnet.app.runs.adapter import AdapterRun, Texts, sides_of, without
from linnet.app.serve.server import Asked
from linnet.errors import DataError, InputError, LinnetError
from linnet.integrations.text import OTHERS, PAIRS, unnamed, written
from linnet.tangent.batch import IGNORED, MASK

_MOST = 24  # tokens of an answer of the network's own
_SPREAD = 40  # tokens of an answer that have a spread: each is a text of its own to `loss_variance`
_TOGETHER, _LONGEST = 4, 512  # such texts at once, and tokens of one
_BEHIND = 8  # training texts shown on each side of an answer
_OFFERED = 6  # training texts that may be asked about


@dataclass(frozen=True)
class Question:
    """A question, and the answer that is asked about; None for the network's own."""

    text: str
    answer: str | None


class TextSession(Asked[AdapterRun, Question]):
    """A run on texts."""

    def about(self) -> dict[str, Any]:
        """What the page shows before anything is asked."""
        return {"name": self.name, "kind": "text", "classes": None, **self._counts()}

    def samples(self) -> list[dict[str, Any]]:
        """Some of the training texts, by how they begin."""
        texts = self._original.texts
        before = _opening(texts)[0]
        halves = zip(texts.ids, (_halves(record, before) for record in texts.records), strict=True)
        told = ({"id": name, "question": both[0], "answer": both[1]} for name, both in halves if both)
        return list(islice(told, _OFFERED))

    def _ids(self, run: AdapterRun) -> tuple[str, ...]:
        return run.texts.ids

    def _without(self, run: AdapterRun, ids: Sequence[str]) -> AdapterRun:
        return without(run, ids)[0]

    def _read(self, name: str, content: bytes) -> Question:
        try:
            sent = json.loads(content)
            question, answer = sent["question"], sent["answer"]
        except (ValueError, RecursionError, LookupError, TypeError):
            question = answer = None
        if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
            raise InputError("no question was sent", "a text, and an answer, which may be empty", "write one")
        made = Question(question, answer if answer.strip() else None)
        try:  # an answer of the network's own is made once, when it is asked for
            _ = self._begun(self._run, made) if made.answer is None else self._batch(self._run, made)
        except LinnetError:
            raise
        except Exception as error:  # a tokenizer's own have no common type
            raise DataError(
                f"the tokenizer cannot read it: {error}", "words that it knows", "write others"
            ) from error
        return made

    @staticmethod
    def _batch(run: AdapterRun, asked: Question) -> dict[str, Tensor]:
        """The question with its answer; the likeliest tokens one by one where none is given."""
        if asked.answer is not None:
            told = _spoken(run, asked.text, asked.answer)
            return run.batch(Texts(("",), (unnamed(dict(zip(PAIRS[1], told, strict=True))),)))
        ids = TextSession._begun(run, asked)
        start, end = len(ids), getattr(run.tokenizer, "eos_token_id", None)
        most = min(start + _MOST, run.tokenizer.model_max_length)
        while len(ids) < most and ids[start:][-1:] != [end]:
            ids.append(int(_outputs(run, torch.tensor([ids]))[-1].argmax()))
        labels = [IGNORED] * start + ids[start:]
        row = torch.tensor([ids])
        return {"input_ids": row, MASK: torch.ones_like(row), "labels": torch.tensor([labels])}

    @staticmethod
    def _begun(run: AdapterRun, asked: Question) -> list[int]:
        """The tokens that an answer of the network's own follows."""
        (question,) = _spoken(run, asked.text)
        end, most = getattr(run.tokenizer, "eos_token_id", None), run.tokenizer.model_max_length
        if isinstance(question, list):
            ids = written(question, run.tokenizer, True)
        else:
            ids = list(run.tokenizer(question)["input_ids"])
            ids = ids[:-1] if end is not None and ids[-1:] == [end] else ids
        if not ids:
            raise DataError("the question has no token", "a text of one token at least", "write a longer one")
        if len(ids) >= most:
            raise DataError(f"it has {len(ids)} tokens", f"fewer than the network's {most}", "shorten it")
        return ids

    def _predicted(self, run: AdapterRun, new: Question, behind: bool = True) -> dict[str, Any]:
        batch = self._batch(run, new)
        ids, learned = batch["input_ids"][0], batch["labels"][0] != IGNORED
        at = learned.nonzero()[:, 0]
        log = _outputs(run, ids[None]).log_softmax(-1)[at - 1, ids[at]]
        words = [run.tokenizer.decode([token]) for token in ids[at].tolist()]
        each = zip(words, log.exp().tolist(), _spread(run, batch, at), strict=True)
        answer = run.tokenizer.decode(ids[at], skip_special_tokens=True)
        result = {
            "findings": [], "given": new.answer is not None, "answer": answer,
            "tokens": [{"text": word, "probability": p, "std": std} for word, p, std in each],
            "loss": float(-log.sum()), "std": float(run.fit.loss_variance(batch).sqrt()),
        }  # fmt: skip
        if behind:
            (sides,) = sides_of(run, batch, _BEHIND)
            for side, rows in sides.items():
                result[side] = [{**row, "label": row["text"], "picture": None} for row in rows]
        return result


def _spread(run: AdapterRun, batch: dict[str, Tensor], at: Tensor) -> list[float | None]:
    """Standard deviation of −log p of each token of an answer; of the first ones where it is long."""
    std: list[float | None] = []
    for some in at[: _SPREAD if batch["labels"].shape[1] <= _LONGEST else 0].split(_TOGETHER):
        alone = {name: rows.expand(len(some), -1) for name, rows in batch.items()}
        alone["labels"] = torch.full_like(alone["labels"], IGNORED)
        alone["labels"][range(len(some)), some] = batch["labels"][0, some]
        std += run.fit.loss_variance(alone).sqrt().tolist() if len(some) else []
    return std + [None] * (len(at) - len(std))


def _spoken(run: AdapterRun, *told: str) -> list[Any]:
    """A question, and its answer, as messages where the run's texts are conversations."""
    before, roles = _opening(run.texts)
    if not roles:
        return [*told]
    question, *answer = ([{"role": role, "content": text}] for role, text in zip(roles, told, strict=False))
    return [[*before, *question], *answer]


def _opening(texts: Texts) -> tuple[list[Any], tuple[str, ...]]:
    """What comes before the first question of the first conversation, and the roles of it and its answer."""
    talk = _talk(texts.records[0])
    if talk is None:
        return [], ()
    roles = [message["role"] for message in talk]
    for place, (asks, answers) in enumerate(pairwise(roles)):
        if asks in OTHERS and answers not in OTHERS:
            return talk[:place], (asks, answers)
    return [], ("user", roles[-1])


def _talk(record: Any) -> list[Any] | None:
    """The messages of a conversation, of which the last ones may stand apart; None of other texts."""
    talk = [*record[0], *record[1]] if isinstance(record, tuple) and isinstance(record[0], list) else record
    return talk if isinstance(talk, list) and isinstance(talk[-1], dict) else None


def _halves(record: Any, before: Sequence[Any] = ()) -> tuple[str, str] | None:
    """A question and an answer that together are the text; None where the page could not ask for it."""
    if isinstance(record, str):
        place = next((m.start() for m in re.finditer(r"\s", record) if m.start() >= len(record) // 2), 0)
        record = record[:place], record[place:]
    elif (talk := _talk(record)) is not None:
        told = [one.get("content") for one in talk[len(before) :]]
        begins = talk[: len(before)] == [*before]
        return (told[0], told[1]) if begins and len(told) == 2 and _is_asked(told) else None
    first, second = record
    if not _is_asked(record) or not (first[-1:].isspace() or second[:1].isspace()):
        return None
    return first, second


def _is_asked(parts: Sequence[Any]) -> bool:
    """Whether all are texts with something to read."""
    return all(isinstance(part, str) and part.strip() for part in parts)


def _outputs(run: AdapterRun, ids: Tensor) -> Tensor:
    """The outputs at every position of one text, (T, C)."""
    return run.fit.predict({"input_ids": ids, MASK: torch.ones_like(ids)})[0].double().cpu()
