"""What to do next: for cause alone, with commands that a shell and linnet take as they are meant."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pytest

from linnet.app.parsing import Command
from linnet.report.records import (
    Content,
    DoubtedLabel,
    Explanation,
    Forgetting,
    HeldOutSet,
    Neighbor,
    NextStep,
    Notes,
    Samples,
    TrainingSet,
)
from linnet.report.steps import class_records, command, distrusted, next_steps
from tests.report.material import digits_run

CLASSES = ("a", "b", "c")


def with_tests(
    predicted: np.ndarray, labels: np.ndarray | None, sure: float = 0.8, folder: str = "runs/x"
) -> Content:
    """A run with test samples alone."""
    probs = np.full((len(predicted), 3), (1 - sure) / 2)
    probs[np.arange(len(predicted)), predicted] = sure
    samples = Samples(None, labels, tuple(f"test/{i}" for i in range(len(predicted))))
    test = HeldOutSet(samples, probs, uncertainty=np.arange(len(predicted)) / 1000, unit="%")
    return Content("x", CLASSES, test=test, folder=folder)


def titles(run: Content) -> list[str]:
    """What is to be done."""
    return [step.title for step in next_steps(run)]


def test_labels_to_look_at_are_named_with_the_command_that_forgets_them() -> None:
    run = digits_run()
    assert run.train is not None
    step = next_steps(run)[0]
    removed = set(run.train.forgetting.removed) if run.train.forgetting else set()
    left = [s.sample for s in run.train.suspects if s.sample not in removed][:5]
    assert list(step.training) == left  # those that were forgotten need no look
    words = shlex.split(step.command)
    assert words[:4] == ["linnet", "forget", "--run", "runs/digits"]
    assert words[5].split(",") == [run.train.samples.name(i) for i in left]
    assert words[-1] == "runs/digits-cleaned"


def test_as_many_as_by_chance_are_called_hard() -> None:
    suspects = tuple(DoubtedLabel(i, 0, 1, 0.9) for i in range(6))
    train = TrainingSet(Samples(labels=np.zeros(9, int)), suspects=suspects, by_chance=5.0)
    run = Content("x", ("a", "b"), train=train)
    assert "most may just be hard" in next_steps(run)[0].text
    assert "hard" not in next_steps(replace(run, train=replace(train, by_chance=0.1)))[0].text
    assert next_steps(run)[0].command == ""  # without a folder there is nothing to name
    assert next_steps(replace(run, train=replace(train, suspects=()))) == ()


def test_labels_worth_a_look_are_named_where_none_is_likely_wrong() -> None:
    limits = "few wrong labels can be told from hard samples: the 6 are worth a look"
    train = TrainingSet(Samples(labels=np.zeros(9, int)), limits=limits, unsure=(8, 1, 2, 3, 4, 5))
    (step,) = next_steps(Content("x", ("a", "b"), train=train))
    assert step.title == "Look at these 5 labels"
    assert step.text == f"No training label is likelier wrong than right, but {limits}."
    assert step.training == (8, 1, 2, 3, 4)
    assert step.command == ""
    doubted = replace(train, suspects=(DoubtedLabel(7, 0, 1, 0.9),))
    assert next_steps(Content("x", ("a", "b"), train=doubted))[0].training == (7,)
    forgotten = replace(train, forgetting=Forgetting((0,)))
    assert next_steps(Content("x", ("a", "b"), train=forgotten)) == ()


def test_new_samples_are_to_be_labeled_where_answers_are_missing() -> None:
    run = with_tests(np.zeros(30, int), None)
    (step,) = next_steps(run)
    assert step.title == "Label these 10 samples next"
    assert step.tested == tuple(range(29, 19, -1))
    assert step.command == "linnet update --run runs/x --data FOLDER --out runs/x-more"
    assert titles(with_tests(np.zeros(30, int), np.zeros(30, int))) == []


def test_classes_are_distrusted_where_the_test_shows_it() -> None:
    labels = np.repeat([0, 1, 2], 40)
    predicted = labels.copy()
    predicted[40:60] = 2  # half of b is taken for c
    run = with_tests(predicted, labels)
    (worst,) = distrusted(run)
    assert CLASSES[worst.index] == "c"
    assert (worst.predicted, worst.right, worst.tested) == (60, 40, 40)
    step = next_steps(run)[0]
    assert step.title == "Do not trust this class"
    assert shlex.split(step.command)[:2] == ["linnet", "explain"]
    assert all(predicted[i] == 2 != labels[i] for i in step.tested)
    assert sum(record.predicted for record in class_records(run)) == 120


def test_classes_are_not_distrusted_by_chance() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 50)
    named = 0
    for _ in range(200):  # every class is right with the same probability
        wrong = rng.uniform(size=150) < 0.3
        named += bool(
            distrusted(with_tests(np.where(wrong, (labels + rng.integers(1, 3, 150)) % 3, labels), labels))
        )
    assert named <= 20


def test_uncertain_predictions_go_to_a_person_where_they_are_wrong_more_often() -> None:
    labels = np.arange(100) % 3
    predicted = labels.copy()
    predicted[90:] = (labels[90:] + 1) % 3  # those of the highest uncertainty
    assert "Have a person check predictions below" in " ".join(titles(with_tests(predicted, labels)))
    assert titles(with_tests(labels, labels)) == []


@pytest.mark.parametrize("right", [np.linspace(1, 0.3, 200), np.full(200, 0.5)])
def test_a_person_checks_what_is_below_a_target(right: np.ndarray) -> None:
    rng, confidence = np.random.default_rng(0), np.linspace(1, 0.3, 200)
    correct, labels = rng.uniform(size=200) < right, np.arange(200) % 3
    predicted = np.where(correct, labels, (labels + 1) % 3)
    probs = np.full((200, 3), ((1 - confidence) / 2)[:, None])
    probs[np.arange(200), predicted] = confidence
    test = HeldOutSet(Samples(labels=labels), probs, uncertainty=1 - confidence)
    (step,) = (step for step in next_steps(Content("x", CLASSES, test=test)) if "person" in step.title)
    if right.min() == right.max():
        assert "every prediction" in step.title
        return
    edge = int(step.title.split("below ")[1].split("\u202f")[0]) / 100
    assert 0.88 < correct[confidence >= edge - 0.005].mean() < 0.93


@pytest.mark.parametrize(("worst", "target"), [(0.75, 0.95), (0.9, 0.99)])
def test_a_person_checks_what_is_below_a_higher_target_where_nine_in_ten_are_right(
    worst: float, target: float
) -> None:
    rng, confidence = np.random.default_rng(0), np.linspace(1, 0.3, 2000)
    correct, labels = rng.uniform(size=2000) < np.linspace(1.15, worst, 2000), np.arange(2000) % 3
    assert 0.9 < correct.mean() < target
    predicted = np.where(correct, labels, (labels + 1) % 3)
    probs = np.full((2000, 3), ((1 - confidence) / 2)[:, None])
    probs[np.arange(2000), predicted] = confidence
    test = HeldOutSet(Samples(labels=labels), probs, uncertainty=1 - confidence)
    (step,) = (step for step in next_steps(Content("x", CLASSES, test=test)) if "person" in step.title)
    edge = int(step.title.split("below ")[1].split("\u202f")[0]) / 100
    assert correct[confidence >= edge - 0.005].mean() == pytest.approx(target, abs=0.02)


def test_samples_behind_wrong_predictions_are_named() -> None:
    train = TrainingSet(Samples(labels=np.array([0, 1]), ids=("train/0", "train/1")))
    told = (Explanation(0, 1, (Neighbor(1, 2.0),)), Explanation(1, 1, (Neighbor(0, 2.0),)))
    test = HeldOutSet(Samples(labels=np.array([0, 1])), np.array([[0.1, 0.9], [0.1, 0.9]]), explanations=told)
    (step,) = next_steps(Content("x", ("a", "b"), train=train, test=test, folder="runs/x"))
    assert step.training == (1,)  # the second prediction is right
    assert step.command == "linnet forget --run runs/x --ids train/1 --out runs/x-cleaned"


def test_steps_of_the_run_come_last() -> None:
    assert titles(Content("x", notes=Notes(steps=(NextStep("Sleep"),)))) == ["Sleep"]


@pytest.mark.parametrize(
    "names",
    [
        ("train/1", "train/2"), ("a b.png",), ("a,b.png", "c.png"),
        ("'; rm -rf ~; '", "$(reboot)"), ("[x].png",),
        ("-out.png",), ('"quoted"', "ümlaut.png"), ("`id`,",),
    ],
)  # fmt: skip
def test_ids_reach_linnet_as_they_are(names: tuple[str, ...]) -> None:
    line = command("forget", "my runs/$HOME", list(names), out="b")
    words = shlex.split(line)  # as a shell reads it
    assert words[:5] == ["linnet", "forget", "--run", "my runs/$HOME", "--ids"]
    assert words[6:] == ["--out", "b"]
    assert tuple(Command.load("forget").parse(words[2:]).values["ids"]) == names


@pytest.mark.parametrize("name", ["a\nrm -rf ~", "a\x1b[201~b", "a\u202egnp.exe"])
def test_names_that_cannot_be_pasted_get_no_command(name: str) -> None:
    train = TrainingSet(Samples(labels=np.array([0]), ids=(name,)), suspects=(DoubtedLabel(0, 0, 1, 0.9),))
    (step,) = next_steps(Content("x", ("a", "b"), train=train, folder="runs/x"))
    assert step.command == ""
    assert step.text.endswith(".")
