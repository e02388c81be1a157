"""Texts, questions with answers, and conversations as the batches that language models take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError
from linnet.params import integer, optional, refuse
from linnet.tangent.batch import IGNORED, MASK

# What data sets call a question and its answer; those of the second kind are joined by a space.
PAIRS = (("prompt", "completion"), ("question", "answer"))
OTHERS = ("system", "developer", "user", "tool", "function")  # roles in conversations but for the model's own
RECORDS = 'records with "text", with "prompt" and "completion" or "question" and "answer", or with "messages"'


def tokenized(examples: Iterable[Any], tokenizer: Any, length: int | None = None) -> dict[str, Tensor]:
    """Texts as one batch of tokens, their mask and their labels.

    Labels are the tokens themselves, as causal networks of Hugging Face take them, and −100 where a token is
    not to be learned: in a question, in what the user says, in padding. ``linnet.fit`` and everything else
    that takes data moves them to the position before, once, and says so. Each example ends with the token
    that ends texts, if the tokenizer has one.

    Args:
        examples: N of them, each a text, all of whose tokens are learned; a pair of a question and its
            answer; a conversation, a list of messages with "role" and "content", of which what the model says
            is learned, which is all but the roles system, developer, user, tool and function; or a record of
            these: with "text", with "prompt" and "completion" or "question" and "answer", texts or messages,
            or with "messages". Answers stand right behind their questions, but a space behind those of
            "question" and "answer".
        tokenizer: What turns a text into a mapping with ``input_ids``, such as ``AutoTokenizer`` makes; for
            conversations with ``apply_chat_template``.
        length: Most tokens of an example; what is longer is cut. By default none is.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, (N, T) each, padded on the right.

    Raises:
        DataError: If there is no example, or nothing of one is to be learned.
        InputError: If an example is none of these, or ``length`` is not positive.

    Example:
        >>> words = {"<end>": 0, "where": 1, "is": 2, "Oslo?": 3, "Norway": 4}
        >>> class Words:
        ...     eos_token_id = pad_token_id = 0
        ...     def __call__(self, text):
        ...         return {"input_ids": [words[word] for word in text.split()]}
        >>> tokenized([("where is Oslo?", " Norway")], Words())["labels"]
        tensor([[-100, -100, -100,    4,    0]])
    """
    optional(integer, "length", length)
    if tokenizer is None or isinstance(tokenizer, str | type | nn.Module):
        refuse(
            "tokenizer", tokenizer, "a tokenizer of transformers", "pass AutoTokenizer.from_pretrained(name)"
        )
    rows = [_row(example, tokenizer, place) for place, example in enumerate(_listed(examples))]
    if not rows:
        raise DataError("examples is empty", "at least one text", "check the file that they come from")
    for place, (_, labels) in enumerate(rows):
        if all(label == IGNORED for label in labels):
            raise DataError(
                f"examples[{place}] has nothing to learn: no answer",
                expected="a text, a question and its answer, or a conversation with one",
                remedy="leave it out, or add the answer",
            )
        if all(label == IGNORED for label in labels[:length]):
            raise DataError(
                f"examples[{place}] has {len(labels)} tokens, none of which up to length={length} is learned",
                expected="an answer that is not cut off",
                remedy="raise length=, or shorten what comes before the answer",
            )
    longest = min(max(len(ids) for ids, _ in rows), length or 2**31)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    found = {
        "input_ids": torch.full((len(rows), longest), pad),
        MASK: torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), IGNORED),
    }
    for place, (ids, labels) in enumerate(rows):
        end = min(len(ids), longest)
        for name, values in (("input_ids", ids), (MASK, [1] * end), ("labels", labels)):
            found[name][place, :end] = torch.tensor(values[:end])
    return found


def _listed(examples: Any) -> Iterable[Any]:
    """The examples one by one; a single text or record is none."""
    if isinstance(examples, str | Mapping) or not isinstance(examples, Iterable):
        raise InputError(
            f"examples is {type(examples).__name__}",
            expected="several texts, pairs, conversations or records",
            remedy="pass a list, [examples] for a single one",
        )
    return examples


def _row(example: Any, tokenizer: Any, place: int) -> tuple[list[int], list[int]]:
    """Tokens of an example and their labels."""
    if isinstance(example, Mapping):
        example = unnamed(example)
    if isinstance(example, str):
        ids = _ended(_ids(example, tokenizer), tokenizer)
        return ids, ids
    parts = example if isinstance(example, tuple) and len(example) == 2 else ()
    if parts and all(isinstance(part, str) for part in parts):
        if not parts[1].strip():
            raise DataError(
                f"examples[{place}] has an empty answer",
                expected="an answer with a token to learn",
                remedy="leave the example out, or pass the whole as one text",
            )
        first, both = (_ids(text, tokenizer) for text in (parts[0], "".join(parts)))
        return _answered(first, both, tokenizer)
    if parts and all(map(_is_talk, parts)):
        return _spoken([*parts[0], *parts[1]], tokenizer, place, len(parts[0]))
    if _is_talk(example):
        return _spoken(example, tokenizer, place)
    shown = type(example).__name__
    if isinstance(example, tuple):
        shown = f"a tuple of {' and '.join(type(part).__name__ for part in example)}"
    raise InputError(
        f"examples[{place}] is {shown}",
        expected=f"a text, a pair of a question and an answer, a list of messages, or {RECORDS}",
        remedy="name the entries so",
    )


def unnamed(record: Mapping[str, Any]) -> Any:
    """What stands in a record: messages, a question with its answer, or a text; None if there is none."""
    if record.get("messages") is not None:  # of mixed records each has what others have, empty
        return record["messages"]
    for names in PAIRS:
        if all(record.get(name) is not None for name in names):
            first, second = (record[name] for name in names)
            spaced = names == PAIRS[0] or not (isinstance(first, str) and isinstance(second, str))
            between = "" if spaced or first[-1:].isspace() or second[:1].isspace() else " "
            return first, f"{between}{second}" if between else second
    return record.get("text")


def _is_talk(example: Any) -> bool:
    """Whether it is a list of messages."""
    if not isinstance(example, list) or not example:
        return False
    return all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in example)


def _ids(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text."""
    return list(tokenizer(text)["input_ids"])


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Tokens and the one that ends texts, where they do not end with it."""
    end = getattr(tokenizer, "eos_token_id", None)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _answered(first: list[int], both: list[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of a question and its answer, labels from where they differ from those of the question alone."""
    end = getattr(tokenizer, "eos_token_id", None)
    first = first[:-1] if first[-1:] == [end] and end is not None else first
    known = _alike(first, both)
    both = _ended(both, tokenizer)
    return both, [IGNORED] * known + both[known:]


def _alike(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _spoken(messages: list[Any], tokenizer: Any, place: int, first: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, labels on what the model says from some message on."""
    whole = written(messages, tokenizer, False)
    labels = [IGNORED] * len(whole)
    for count in range(first, len(messages)):
        if messages[count]["role"] in OTHERS:
            continue
        begun = written(messages[:count], tokenizer, True) if count else []
        done = written(messages[: count + 1], tokenizer, False)
        end = _alike(done, whole)
        if end < len(done) - 1:  # the last one may have been joined to what follows
            raise DataError(
                f"the tokenizer writes message {count} of examples[{place}] otherwise once others follow it",
                expected="a chat template that leaves what was said as it was",
                remedy="pass an example for each answer, a record with the messages before it as its "
                '"prompt" and the answer as its "completion"',
            )
        # tokens that cross from the heading into the answer are learned
        known = _alike(begun, done)
        labels[known:end] = whole[known:end]
    return whole, labels


def written(messages: list[Any], tokenizer: Any, opened: bool) -> list[int]:
    """Tokens of a conversation; with the heading of an answer that is to come where it is opened."""
    try:
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=opened)
    except (ValueError, AttributeError) as error:  # such as without a template
        raise InputError(
            f"tokenizer cannot write conversations: {error}",
            expected="a tokenizer with a chat template",
            remedy="set tokenizer.chat_template, or pass pairs of a question and an answer",
        ) from error
    return list(found["input_ids"] if isinstance(found, Mapping) else found)
