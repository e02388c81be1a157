"""The numbers in tables of pages are those of the stored cells, as ``experiments.pages`` makes them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments import pages, papers
from experiments.adapt import depth

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
    cells = pages.stored("adapt/depth-reported.json")["cells"]
    wide = [cell for cell in cells if cell["width"] >= 300]
    behind = [cell for cell in wide if cell["ahead"]["best"][0] < -2 * cell["ahead"]["best"][1]]
    found = {str(shots): depth.gain(cells, shots) for shots in depth.SHOTS}
    tasks = len({cell["task"] for cell in wide})
    excess, held, draws = re.findall(r"(.*) points.*in (\d+) % of (\d+) draws", depth.promise(cells))[0]
    told = {"excess": excess, "held": held, "draws": draws}
    return {**found, **told, "tasks": str(tasks), "rows": str(len(wide)), "behind": str(len(behind))}


THREE = r"by (\S+ ± \S+), (\S+ ± \S+) and (\S+ ± \S+) points"
SAID = [
    ("results/adapt.md", THREE, "5", "20", "50"),
    ("results/adapt.md", r"on (\d+) sets of images and texts", "tasks"),
    ("results/adapt.md", r"(\d+) of (\d+) rows are behind", "behind", "rows"),
    ("results/adapt.md", r"(\S+ ± \S+) points too many", "excess"),
    ("results/adapt.md", r"errors in (\d+) % of (\d+) draws", "held", "draws"),
    ("results.md", THREE, "5", "20", "50"),
    ("results.md", r"(\d+) of (\d+) rows are behind by more than two", "behind", "rows"),
    ("how-to-choose.md", THREE, "5", "20", "50"),
]


@pytest.mark.parametrize(("page", "sentence", "names"), [(p, s, n) for p, s, *n in SAID])
def test_sentences_say_what_the_cells_say(page: str, sentence: str, names: list[str]) -> None:
    text = " ".join((pages.RESULTS.parent / page).read_text(encoding="utf-8").split())
    said = re.findall(sentence, text)
    assert said, sentence
    for one in said:
        assert ([one] if isinstance(one, str) else list(one)) == [claims()[name] for name in names]


PERIODS, ITERATIVE = "iterative_linearization.md", "iterative linearization"
FACES, OWN = "Olivetti faces (app. E.2)", "sinusoids of the main text (app. E.2)"
RANDOM, OTHER = (f"fig. 3, from {start} weights" for start in ("random", "another task's"))
GOOD, STREAM = "fig. A.1, a good ε", "sec. 5 (vi), continual learning"
LEFT, OTHERS = "sec. 5 (iii), leave-one-out", "sec. 5 (v), counterfactuals"
PAIRED = [
    ("lqf.md", r"of the mean diagonal is (\S+ ± \S+) points", "lqf", "fig. 8", "low"),
    ("lqf.md", r"less at a thousandth: (\S+ ± \S+) points", "lqf", "fig. 8", "flat"),
    ("lqf.md", r"it is by (\S+ ± \S+) points at a tenth", "lqf", "fig. 8", "tenth"),
    ("lqf.md", r"at a tenth and by (\S+ ± \S+) points at 1", "lqf", "fig. 8", "one"),
    ("lqf.md", r"given back, is (\S+ ± \S+) points", "lqf", LEFT, "chosen"),
    ("lqf.md", r"less that where evidence does (\S+ ± \S+)\.", "lqf", LEFT, "evidence"),
    ("lqf.md", r"above the test error by (\S+ ± \S+) points", "lqf", LEFT, "told"),
    ("lqf.md", r"and by (\S+ ± \S+) where they are corrected", "lqf", OTHERS, "answers"),
    ("continual.md", r"less SI is (\S+ ± \S+) points", "curvature", "fig. 5.9, diagonal and SI", "less"),
    ("kernels.md", r"in the ResNet by (\S+ ± \S+) cycles", "kernels", "fig. 1", "first"),
    ("kernels.md", r"above that of u 256 by (\S+ ± \S+) points", "kernels", "fig. 1", "learned"),
    ("kernels.md", r"(\S+ ± \S+) in LeNet and", "kernels", "app. B, binarized eigenfunctions", "lenet"),
    ("kernels.md", r"LeNet and (\S+ ± \S+) in the", "kernels", "app. B, binarized eigenfunctions", "mlp"),
    ("lqf.md", r"after over before is (\S+ ± \S+);", "lqf", RANDOM, "ridge"),
    ("lqf.md", r"it rises, by (\S+ ± \S+) with a ridge", "lqf", OTHER, "ridge"),
    ("lqf.md", r"with a ridge and (\S+ ± \S+) without", "lqf", OTHER, "bare"),
    ("continual.md", r"KF's mean accuracy is (\S+ ± \S+) points", "lqf", STREAM, "kronecker"),
    ("continual.md", r"the diagonal's (\S+ ± \S+)\.", "lqf", STREAM, "diagonal"),
    (
        "fast_adaptation.md",
        r"by (\S+ ± \S+) nats",
        "fast adaptation",
        "fig. A.7, deep kernel's bands",
        "density",
    ),
    (
        "fast_adaptation.md",
        r"is (\S+ ± \S+) of the amplitude",
        "fast adaptation",
        "fig. A.7, deep kernel",
        "error",
    ),
    ("lqf.md", r"from scratch is (\S+ ± \S+) points after all", "lqf", "fig. 5", "four"),
    ("lqf.md", r"after all batches and (\S+ ± \S+) after three", "lqf", "fig. 5", "three"),
    ("lqf.md", r"it is at (\S+ ± \S+) points after all", "lqf", "fig. 5", "plain four"),
    ("lqf.md", r"fifth costs (\S+ ± \S+) points more", "lqf", "fig. 6 right, a fifth dropped", "least"),
    (
        "lqf.md",
        r"fifth, paired over draws, and (\S+ ± \S+)",
        "lqf",
        "fig. 6 right, a fifth dropped",
        "random",
    ),
    ("lqf.md", r"difference is (\S+ ± \S+) points at a", "lqf", "fig. 6 right, a fifth dropped", "within"),
    ("lqf.md", r"(\S+ ± \S+) at two fifths", "lqf", "fig. 6 right, most dropped", "b40"),
    (PERIODS, r"less that at K = 1 is (\S+ ± \S+) and", ITERATIVE, "fig. 2, full batches", "ten"),
    (
        PERIODS,
        r"and (\S+ ± \S+) points, but K = 100",
        ITERATIVE,
        "fig. 2, full batches",
        "hundred",
    ),
    (PERIODS, r"it is at (\S+ ± \S+) points in the best", ITERATIVE, "fig. 2, full batches", "thousand"),
    (PERIODS, r"less that at K = 1 is (\S+ ± \S+) points", ITERATIVE, "fig. 2, mini-batches", "thousand"),
    (PERIODS, r"without an update it is (\S+ ± \S+) points", ITERATIVE, "fig. 2, mini-batches", "never"),
    (PERIODS, r"K = 100 less K = 1 is (\S+ ± \S+)", ITERATIVE, "fig. 2, mini-batches", "last hundred"),
    (PERIODS, r"ends at (\S+ ± \S+) points", ITERATIVE, "fig. 3", "thousand"),
    (PERIODS, r"\((\S+ ± \S+) for K = 100\)", ITERATIVE, "fig. 3", "hundred"),
]
PAIRED += [
    (PERIODS, sentence, ITERATIVE, what, name)
    for sentence, what, name in (
        (r"above that at 10 by (\S+ ± \S+), that at 0.1", "fig. 6, smoothness", "smoother"),
        (r"that at 0\.1 by (\S+ ± \S+), paired", "fig. 6, smoothness", "smoother tenth"),
        (r"above that at 100 by (\S+ ± \S+)\.", "fig. 6, smoothness", "smoother last"),
        (r"below that at 0\.01 by (\S+ ± \S+), below", "fig. 6, error", "lower"),
        (r"below that at 0\.1 by (\S+ ± \S+) and", "fig. 6, error", "lower tenth"),
        (r"and below that at 1 by (\S+ ± \S+)\.", "fig. 6, error", "lower one"),
    )
]
PAIRED += [
    ("optimizer.md", sentence, "curvature", "fig. 4.1, KFRA and KFAC", name)
    for sentence, name in (
        (r"less KFAC's is (\S+ ± \S+) on CURVES", "curves"),
        (r"on CURVES, (\S+ ± \S+) on MNIST", "mnist"),
        (r"on MNIST and (\S+ ± \S+) on FACES", "faces"),
    )
]
PAIRED += [
    ("laplace.md", sentence, "curvature", what, name)
    for sentence, what, name in (
        (r"itself is (\S+ ± \S+) points, where Botev", "table 5.2, without dropout", "kronecker"),
        (r"closed form, has (\S+ ± \S+) points", "table 5.2, without dropout", "last"),
        (r"where it is wrong, by (\S+ ± \S+) nats", "fig. 5.5", "wrong"),
        (r"entropy of both, by (\S+ ± \S+) nats", "fig. 5.5", "right more"),
        (r"is right and by (\S+ ± \S+) where", "fig. 5.5", "wrong more"),
        (r"above that of HMC by (\S+ ± \S+), the", "fig. 5.1", "full"),
        (r"the diagonal's by (\S+ ± \S+) and that", "fig. 5.1", "diagonal"),
        (r"and that of Kronecker factors by (\S+ ± \S+), paired", "fig. 5.1", "kronecker"),
        (r"full matrix by (\S+ ± \S+) nats", "fig. 5.1, regularized", "full"),
        (r"nats, the diagonal by (\S+ ± \S+) and", "fig. 5.1, regularized", "diagonal"),
        (r"and Kronecker factors by (\S+ ± \S+); what", "fig. 5.1, regularized", "kronecker"),
        (r"density less its is (\S+ ± \S+) by sampling", "fig. 5.1, order", "sampled"),
        (r"sampling, and (\S+ ± \S+) linearized", "fig. 5.1, order", "linearized"),
        (r"where they are (\S+ ± \S+) below HMC", "fig. 5.1, order", "below"),
        (r"above that of MC dropout by (\S+ ± \S+) nats", "fig. 5.2", "dropout"),
        (r"above the diagonal's by (\S+ ± \S+)\.", "fig. 5.2", "diagonal"),
        (r"after (\S+ ± \S+) steps more", "fig. 5.4", "dropout"),
        (r"with dropout, and (\S+ ± \S+) more than with the network", "fig. 5.4", "network"),
    )
]
PAIRED += [
    ("fast_adaptation.md", sentence, "fast adaptation", what, name)
    for sentence, what, name in (
        (r"(\S+ ± \S+) above the retrained last layer", FACES, "last"),
        (r"(\S+ ± \S+) above the network with all", FACES, "all"),
        (r"features it is by (\S+ ± \S+),", FACES, "ablr"),
        (r"the process has (\S+ ± \S+) degrees more", FACES, "network error"),
        (r"costs (\S+ ± \S+) \(10", OWN, "f 10"),
        (r"and (\S+ ± \S+) \(100 points\) in RMSE", OWN, "f 100"),
        (r"less tanh is (\S+ ± \S+) \(10", "fig. A.5", "tuned 10"),
        (r"and (\S+ ± \S+) \(100 points\), and at", "fig. A.5", "tuned 100"),
        (r"differs by (\S+ ± \S+), paired", "fig. A.2, halves of MNIST", "halves"),
        (r"SVI is (\S+ ± \S+) points above the mode", "fig. A.3, methods", "svi"),
        (r"are off by (\S+ ± \S+) % before", GOOD, "start"),
        (r"before, (\S+ ± \S+) % after two epochs", GOOD, "second"),
        (r"two epochs and (\S+ ± \S+) % after eight", GOOD, "eighth"),
        (r"is higher by (\S+ ± \S+) for MNIST1", "fig. A.2, Fashion MNIST", "first hundredth"),
        (r"by (\S+ ± \S+) for MNIST2 than for", "fig. A.2, Fashion MNIST", "second hundredth"),
        (r"the 300th by (\S+ ± \S+) for MNIST1", "fig. A.2, Fashion MNIST", "first"),
        (r"by (\S+ ± \S+) for MNIST2\.", "fig. A.2, Fashion MNIST", "second"),
    )
]


@pytest.mark.parametrize(("page", "sentence", "paper", "what", "name"), PAIRED)
def test_sentences_say_what_the_page_of_papers_says(
    page: str, sentence: str, paper: str, what: str, name: str
) -> None:
    text = " ".join((pages.RESULTS / page).read_text(encoding="utf-8").split())
    (row,) = (row for row in papers.rows()[paper] if row["what"] == what)
    said = [one.replace("−", "-") for one in re.findall(sentence, text)]
    assert said == [papers.averaged(row["numbers"][name])]


RANKS = "rank correlation with leave-one-out residuals"
FAST, BARE, FULL = "fast_adaptation", "TangentGP, without f₀", "Laplace, full"


def uci(name: str, way: str = BARE, other: str = FULL) -> dict[str, Any]:
    """By how much one way's density is above another's on a set."""
    where = [{"set": name, "way": one} for one in (way, other)]
    return {"file": f"{FAST}/uci.json", "by": ["split"], "of": "density", "digits": 2,
            "cells": where[0], "less": where[1]}  # fmt: skip


def sinusoids(points: int) -> dict[str, Any]:
    """By how much the error of the process differs from that of the last layer alone, behind tanh."""
    where = {"activation": "tanh", "first": points}
    return {"file": f"{FAST}/sinusoids.json", "by": ["seed"], "digits": 2, "cells": where, "less": where,
            "of": "scores/Jacobian products, tuned, without f₀/error",
            "less of": "scores/last layer (ABLR)/error"}  # fmt: skip


def informative(of: str, within: bool, times: int = 100, digits: int = 1) -> dict[str, Any]:
    """A number of the study of informative samples on MNIST."""
    where = {"pair": "resnet20 → mnist 32", "within class": within}
    return {"file": "lqf/informative.json", "by": ["seed"], "of": of, "cells": where, "times": times,
            "digits": digits}  # fmt: skip


def attacked(of: str, method: str, times: int = 1, digits: int = 1) -> dict[str, Any]:
    """By how much MC dropout is ahead of a method under the untargeted attack."""
    where = [{"attack": "untargeted", "method": one} for one in ("MC dropout", method)]
    return {"file": "laplace/adversarial.json", "by": ["seed"], "of": of, "times": times, "digits": digits,
            "cells": where[0], "less": where[1]}  # fmt: skip


def cost(method: str, network: str) -> dict[str, Any]:
    """The accuracy on digits that a posterior costs."""
    return {"file": "laplace/out_of_distribution_seeds.json", "by": ["seed"], "of": "accuracy", "times": 100,
            "digits": 2, "cells": {"method": network}, "less": {"method": method}}  # fmt: skip


def output(way: str) -> dict[str, Any]:
    """By how much the accuracy of one way is higher with the network's output."""
    where = [{"domain": "CIFAR-10", "method": f"{name}, {way}"} for name in ("linearized NN", "finite NTK")]
    return {"file": f"{FAST}/classification.json", "by": ["seed"], "of": "accuracy", "times": 100,
            "cells": where[0], "less": where[1]}  # fmt: skip


LAPLACE = {"file": f"{FAST}/classification.json", "by": ["seed"], "of": "accuracy", "times": 100,
           "cells": {"domain": "CIFAR-10", "method": "linearized NN, map"},
           "less": {"domain": "CIFAR-10", "method": "linearized NN, laplace"}}  # fmt: skip


def bettered(of: str, method: str, times: int = 1, digits: int = 3) -> dict[str, Any]:
    """By how much a posterior lowers a score of the pretrained ResNet-20."""
    where = [{"network": "resnet20", "method": one} for one in ("deterministic", method)]
    return {"file": "laplace/pretrained.json", "by": ["seed"], "of": of, "times": times, "digits": digits,
            "cells": where[0], "less": where[1]}  # fmt: skip


def stream(curve: str, other: str) -> dict[str, Any]:
    """By how much one curve of on-line learning is above another after all batches."""
    return {"file": "lqf/online.json", "by": ["seed"], "of": f"{curve}/3", "less of": f"{other}/3",
            "times": 100, "cells": {"head": "random"}, "less": {"head": "random"}}  # fmt: skip


KRONECKER, PLAIN = "Kronecker Laplace", "deterministic, no dropout in training"
SAME, NEW = "linear, from scratch, same θ₀", "linear, from scratch, new head"
ANEW = ", ridge chosen anew"


def digits(way: str, other: str, less: str) -> dict[str, Any]:
    """By how much the area of one fit's leave-one-out is above another score's on the perceptron."""
    where = [{"network": "perceptron", "way": one} for one in (way, other)]
    return {"file": "labels/attributors.json", "by": ["seed"], "of": f"areas/{way}: leave-one-out",
            "less of": f"areas/{less}", "times": 100, "digits": 2,
            "cells": where[0], "less": where[1]}  # fmt: skip


FOLDS = digits("fit, untrained", "plain", "self-confidence, five folds")
LEARNED = digits("adapt, untrained", "adapt, trained", "adapt, trained: leave-one-out")
DIFFERENCES = [
    ("labels", r"ahead of five folds by (\S+ ± \S+) points", FOLDS),
    ("labels", r"of `adapt` is (\S+ ± \S+) points behind", LEARNED),
    (FAST, r"and Laplace (\S+ ± \S+) below it", LAPLACE),
    (FAST, r"the mode has (\S+ ± \S+) points less", output("map")),
    (FAST, r"points less, SVI (\S+ ± \S+) and", output("svi")),
    (FAST, r"SVI \S+ ± \S+ and Laplace (\S+ ± \S+)\)", output("laplace")),
    ("laplace", r"NLL falls, by (\S+ ± \S+) with all", bettered("nll", "Kronecker Laplace")),
    ("laplace", r"layers and by (\S+ ± \S+) with the last one", bettered("nll", "last layer")),
    ("laplace", r"calibration error by (\S+ ± \S+) and", bettered("ece", "Kronecker Laplace")),
    ("laplace", r"by \S+ ± \S+ and (\S+ ± \S+)\. With DenseNet", bettered("ece", "last layer")),
    ("laplace", r"error less by (\S+ ± \S+) points, five", bettered("ece", "Kronecker Laplace", 100, 1)),
    ("laplace", r"not decided \((\S+ ± \S+) and", bettered("accuracy", "Kronecker Laplace", 100, 1)),
    ("laplace", r"factors cost (\S+ ± \S+) points", cost(KRONECKER, PLAIN)),
    ("laplace", r"the diagonal costs (\S+ ± \S+) and", cost("diagonal Laplace", PLAIN)),
    ("laplace", r"and dropout (\S+ ± \S+) of the one", cost("MC dropout", "deterministic")),
    ("laplace", r"higher, by (\S+ ± \S+) nats at", attacked("entropy/2", KRONECKER, 1, 2)),
    ("laplace", r"factors have (\S+ ± \S+) points less", attacked("accuracy/2", KRONECKER, 100)),
    ("laplace", r"than dropout, the diagonal (\S+ ± \S+)\.", attacked("accuracy/2", "diagonal Laplace", 100)),
    ("laplace", r"factors have (\S+ ± \S+) points more", attacked("accuracy/10", KRONECKER, -100)),
    ("lqf", r"costs (\S+ ± \S+) points after all batches", stream(SAME, "linear, updated")),
    ("lqf", r"random head differs by (\S+ ± \S+) points", stream(f"linear, updated{ANEW}", NEW)),
    ("lqf", r"samples is ahead by (\S+ ± \S+) points", informative("most/3 - least/3", False)),
    ("lqf", r"and by (\S+ ± \S+) if every class", informative("most/3 - least/3", True)),
    ("lqf", r"residuals correlate at (\S+ ± \S+)", informative(RANKS, False, 1, 3)),
    (FAST, r"(\S+ ± \S+) above the process with f₀ on yacht", uci("yacht", other="TangentGP")),
    (FAST, r"(\S+ ± \S+) and \S+ ± \S+ above full Laplace on energy", uci("energy")),
    (FAST, r"(\S+ ± \S+) above full Laplace on energy", uci("wine")),
    (FAST, r"on boston \(ahead by (\S+ ± \S+)\)", uci("boston")),
    (FAST, r"errors of the difference \((\S+ ± \S+) and", sinusoids(10)),
    (FAST, r"and (\S+ ± \S+) behind tanh, with a first task", sinusoids(100)),
    (FAST, r"is ahead of it by (\S+ ± \S+)\. Its error", uci("concrete", FULL, BARE)),
]


@pytest.mark.parametrize(("page", "sentence", "number"), DIFFERENCES)
def test_sentences_say_what_pairs_of_cells_say(page: str, sentence: str, number: dict[str, Any]) -> None:
    text = " ".join((pages.RESULTS / f"{page}.md").read_text(encoding="utf-8").split())
    assert [one.replace("−", "-") for one in re.findall(sentence, text)] == [papers.averaged(number)]


VERDICTS = r"(holds(?: from .+ on)?|does not hold here|undecided|not run|not obtainable)"
PAPERS = pages.RESULTS / "papers.md"
LINK = re.compile(r"\]\(([^)#]*\.md)(?:#([^)]*))?\)")


@cache
def judged() -> list[list[str]]:
    """The rows of the tables of the page of papers, their cells without the bars."""
    lines = PAPERS.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in lines[i].strip("|").split(" | ")]
        for _, place in pages.blocks(lines)
        for i in place[2:]
    ]


def test_papers_have_the_verdicts_that_their_sentence_counts() -> None:
    text = " ".join(PAPERS.read_text(encoding="utf-8").split())
    found = [re.fullmatch(rf"\*\*{VERDICTS}\*\*", row[5]) for row in judged()]
    assert all(found)
    verdicts = [one[1] for one in found if one]
    counted = [len(verdicts), verdicts.count("holds"), sum(one.startswith("holds from") for one in verdicts)]
    counted += [
        verdicts.count(one) for one in ("does not hold here", "undecided", "not run", "not obtainable")
    ]
    said = re.search(
        r"Of (\d+) rows (\d+) hold, (\d+) hold from some number on, (\d+) do not hold here, "
        r"(\d+) are undecided, (\d+) were not run and (\d+) are not obtainable",
        text,
    )
    assert said
    assert [int(one) for one in said.groups()] == counted


def test_commands_of_papers_exist() -> None:
    commands = {row[6].strip("`").split()[0] for row in judged()} - {"–"}
    assert len(commands) > 20
    assert not [one for one in commands if not one.startswith("experiments.") or not find_spec(one)]
    assert all(row[6] != "–" for row in judged() if row[5].startswith(("**hold", "**undec", "**does")))


@pytest.mark.parametrize("page", [PAPERS, pages.RESULTS.parent / "results.md"], ids=["papers", "results"])
def test_links_lead_to_headings(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert links
    for name, anchor in links:
        text = (page.parent / name).read_text(encoding="utf-8")
        assert not anchor or anchor in {papers.anchor(one) for one in re.findall(r"^##* (.+)$", text, re.M)}


def test_numbers_of_papers_are_quoted() -> None:
    """What is said of our results has no decimal and no error that is not from a table or a cell."""
    rows = [row for paper in papers.rows().values() for row in paper]
    assert sum(len(papers.FIELD.findall(row["ours"])) for row in rows) > 150
    assert not [row["what"] for row in rows if re.search(r"\d\.\d|±", papers.FIELD.sub("", row["ours"]))]


def test_a_quotation_that_is_gone_is_found() -> None:
    text = papers.section("lqf.md#few-shots-figure-4")
    place = "resnet20 → flowers 32, 2 shots | nlft − lqf, points"
    assert papers.quoted(text, place) == "5.7 ± 1.1"
    with pytest.raises(AssertionError):
        papers.quoted(text.replace("flowers 32, 2 shots", "flowers 32, two shots"), place)
    with pytest.raises(AssertionError):
        papers.quoted(text, "=words that are not there")
