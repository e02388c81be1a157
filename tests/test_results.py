"""The numbers in tables of pages are those of the stored cells, as ``experiments.pages`` makes them."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from scipy import stats

from experiments import pages
from experiments.tables import mean_and_error, with_error

PAGES = pages.pages()
NAMES = [str(page.relative_to(pages.ROOT)) for page in PAGES]


def numbers(page: Path) -> list[tuple[int, int]]:
    """Where the numbers of the tables that are made from cells begin and end."""
    text = page.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return [
        found.span()
        for name, lines in pages.blocks(text.splitlines())
        if name in PAGES[page]
        for i in lines
        for found in pages.NUMBER.finditer(text, starts[i], starts[i + 1])
        if not text.startswith("|---", starts[i])
    ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_pages_are_those_of_the_cells(page: Path) -> None:
    """``python -m experiments.pages`` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert pages.made(text, PAGES[page]).splitlines() == text.splitlines()


def test_every_table_of_results_is_made() -> None:
    for page in pages.RESULTS.glob("*.md"):
        text = page.read_text(encoding="utf-8").splitlines()
        bare = {
            name for name, lines in pages.blocks(text) if pages.NUMBER.search("".join(text[i] for i in lines))
        }
        assert bare <= PAGES[page].keys(), page


def test_what_has_no_cells_says_why() -> None:
    every = [table for tables in PAGES.values() for table in tables.values() if "table of" not in table]
    assert all(table["groups"] or table["without cells"] for table in every)
    body = [one for table in every for row in table["rows"] for one in row.split()]
    assert sum(one.startswith("=") for one in body) < 0.5 * len(body)  # with the labels of rows and columns


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_any_changed_number_is_found(page: Path) -> None:
    """The last digit of numbers drawn at random, and the numbers come out as they were."""
    text, draw = page.read_text(encoding="utf-8"), random.Random(0)
    places = numbers(page)
    for _, end in draw.sample(places, min(8, len(places))):
        digit = str((int(text[end - 1]) + draw.randint(1, 9)) % 10)
        changed = text[: end - 1] + digit + text[end:]
        assert pages.made(changed, PAGES[page]) == text


def test_other_cells_make_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.RESULTS / "laplace.md"
    before, leaf = page.read_text(encoding="utf-8"), pages.leaf
    monkeypatch.setattr(pages, "leaf", lambda tree, path: 1.1 * leaf(tree, path))
    assert (
        sum(a != b for a, b in zip(pages.made(before, PAGES[page]).split(), before.split(), strict=True))
        > 200
    )


@cache
def claims() -> Mapping[str, str]:
    """What sentences of several pages say of the study of new tasks, from its cells."""
    found = {}
    ladder = [c for c in pages.stored("adapt/ladder-resnet20.json")["cells"] if c["set"] == "reported"]
    for name in ("ladder", "nested"):
        ahead = [100 * (cell[name] - cell["fine-tuning"]) for cell in ladder]
        found[name] = with_error(ahead)
        found[f"{name}, p"] = format(stats.ttest_1samp(ahead, 0).pvalue, ".2f")
    draws: dict[tuple[bool, str, str, int], list[tuple[float, float]]] = {}
    for cell in pages.stored("adapt/nested-reported.json")["cells"]:
        key = (cell["network"] == "ResNet-20", cell["network"], cell["task"], cell["shots"])
        draws.setdefault(key, []).append((100 * (cell["adapt"] - cell["probe"]), cell["probe"]))
    for narrow, kind in ((True, "narrow"), (False, "wide")):
        rows = [zip(*own, strict=True) for (own_kind, *_), own in draws.items() if own_kind == narrow]
        gains = [(*mean_and_error(gain), len(set(probe)) > 1) for gain, probe in rows]
        found[f"{kind}, rows"] = str(len(gains))
        found[f"{kind}, median"] = format(statistics.median(mean for mean, _, _ in gains), ".1f")
        found[f"{kind}, ahead"] = str(sum(mean > error + 1e-9 and several for mean, error, several in gains))
        found[f"{kind}, behind"] = str(sum(mean < -error - 1e-9 for mean, error, _ in gains))
    return found


AHEAD = r"it is (\S+ ± \S+) points ahead of plain fine-tuning on the nine tasks \(p = (\S+)\)"
GAINS = r"gains (\S+) points on its linear probe in the median of (\d+) rows"
SEEN = r"the median gain is (\S+) \(.*? and (\d+) of (\d+) rows are behind"
CHOICE = r"gain (\S+) in the median and are behind by more than the error in (\d+) of (\d+)"
LADDER = r"ladder is (\S+ ± \S+) points ahead of fine-tuning \(.*?: p = (\S+),"
SAID = [
    ("results/adapt.md", LADDER, "ladder", "ladder, p"),
    ("results/adapt.md", r"\(\*nested\*\) (\S+ ± \S+) \(p = (\S+)\);", "nested", "nested, p"),
    ("results/adapt.md", r"and (\d+) of (\d+) are ahead by more, beside", "narrow, ahead", "narrow, rows"),
    ("results/adapt.md", r"single draw; the median gain is (\S+) points", "narrow, median"),
    ("results/adapt.md", GAINS, "narrow, median", "narrow, rows"),
    ("results/adapt.md", r"in the median, and (\d+) of (\d+) rows are behind", "wide, behind", "wide, rows"),
    ("results.md", GAINS, "narrow, median", "narrow, rows"),
    ("results.md", SEEN, "wide, median", "wide, behind", "wide, rows"),
    ("results.md", AHEAD, "ladder", "ladder, p"),
    ("how-to-choose.md", r"fine-tuning by (\S+ ± \S+) points \(p = (\S+)\)", "ladder", "ladder, p"),
    ("how-to-choose.md", r"ResNet-20 gains (\S+) points in the median", "narrow, median"),
    ("how-to-choose.md", CHOICE, "wide, median", "wide, behind", "wide, rows"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "sentence", "names"), [(p, s, n) for p, s, *n in SAID])
def test_sentences_say_what_the_cells_say(page: str, sentence: str, names: list[str]) -> None:
    text = " ".join((pages.RESULTS.parent / page).read_text(encoding="utf-8").split())
    said = re.findall(sentence, text)
    assert said, sentence
    for one in said:
        assert ([one] if isinstance(one, str) else list(one)) == [claims()[name] for name in names]
