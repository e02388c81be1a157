"""The demo: adapt to digits, find wrong labels, and forget them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import TaskData, load_data
from linnet.app.models import load_model
from linnet.app.options import AdaptOptions
from linnet.app.runs import demo_net
from linnet.app.runs.adaptation import Adaptation, adapt
from linnet.app.runs.changes import Change, forget, report_change
from linnet.app.runs.folder import keep_fit, save_run
from linnet.app.runs.results import keep_adaptation, write
from linnet.examples import load_digits
from linnet.files import save, write_atomic
from linnet.fitting.descent import nearest_class_mean
from linnet.plots.measures import ranking
from linnet.progress import track
from linnet.report.reading import contradiction
from linnet.report.records import Comparison
from linnet.training import train

Array = np.ndarray[Any, Any]
SHOTS = 10
FLIPPED = 5
_STEPS, _BATCH = 300, 64


@dataclass(frozen=True)
class Files:
    """The files that the demo writes before it begins."""

    weights: Path  # the pretrained network
    digits: Path  # the digits 5 to 9
    flipped: Path  # the few training digits with some labels flipped, and the same test digits


@dataclass(frozen=True, eq=False)
class Recall:
    """Recall of wrong labels."""

    wrong: tuple[str, ...]  # ids of the samples with flipped labels
    inspected: tuple[str, ...]  # ids of as many training samples, the most doubtful first

    @property
    def found(self) -> int:
        """The number of wrong labels among those inspected."""
        return len(set(self.wrong) & set(self.inspected))


def prepare(out: Path, seed: int) -> tuple[Files, dict[str, float]]:
    """Pretrain on the digits 0 to 4 and write the data of the digits 5 to 9."""
    images, labels = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    images, labels = images[order], labels[order]
    start = time.perf_counter()
    old = labels < 5
    held = np.flatnonzero(old)[::5]
    train = np.setdiff1d(np.flatnonzero(old), held)
    network = _pretrain(_pixels(images[train]), torch.from_numpy(labels[train]), seed)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = network(_pixels(images[held])).argmax(1) == torch.from_numpy(labels[held])
    new = np.flatnonzero(~old)
    test, pool = new[: len(new) // 2], new[len(new) // 2 :]
    out.mkdir(parents=True, exist_ok=True)
    files = Files(out / "pretrained.safetensors", out / "digits.npz", out / "digits-flipped.npz")
    save(out, files.weights.stem, network.state_dict())
    _write_digits(files.digits, (images[pool], labels[pool] - 5), (images[test], labels[test] - 5))
    return files, {"accuracy": float(right.double().mean()), "seconds": seconds}


def _pixels(images: Array) -> Tensor:
    """Images as the network takes them."""
    return torch.from_numpy(images)[:, None].float() / 255


def _pretrain(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Train the small network."""
    torch.manual_seed(seed)
    network = demo_net.digit_net()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    batches = (torch.randint(len(x), (_BATCH,), generator=generator) for _ in range(_STEPS))

    def gradient(rows: Tensor) -> None:
        nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()

    for _ in track(train(optimizer, batches, gradient), "pretraining on the digits 0 to 4", _STEPS):
        pass
    return network.eval().requires_grad_(False)


def _write_digits(path: Path, train: tuple[Array, Array], test: tuple[Array, Array]) -> None:
    """Write a data set."""
    names = np.array([str(digit) for digit in range(5, 10)])
    write_atomic(
        path,
        lambda temporary: np.savez_compressed(
            temporary, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1], class_names=names
        ),
    )


def adapt_digits(files: Files, out: Path, seed: int) -> dict[str, Any]:
    """The first act: a few samples of the new digits."""
    found = adapt(_options(files, files.digits, SHOTS, seed), out, partial(keep_fit, out))
    row = _frozen(found, files)
    scores = (*found.scores, row)
    return keep_adaptation(replace(found, scores=scores), out, "Digits 5 to 9 from a network for 0 to 4")


def _options(files: Files, data: Path, shots: int | None, seed: int) -> AdaptOptions:
    """An adaptation of the small network."""
    network = f"{demo_net.__file__}:digit_net"
    options = AdaptOptions(model=network, weights=files.weights, data=data, shots=shots, seed=seed)
    return options if shots is None else replace(options, compare="finetune")


def _frozen(found: Adaptation, files: Files) -> Comparison:
    """The frozen features, without any training."""
    start = time.perf_counter()
    x, y = found.task.tensors("train")
    test, answers = found.task.tensors("test")
    network = load_model(found.run.origin.spec, files.weights)
    scores = nearest_class_mean(network, (x, y), test)
    accuracy = float((scores.argmax(1) == answers).double().mean())
    note = "nearest class mean of the frozen features, nothing trained"
    return Comparison("frozen network", accuracy, seconds=time.perf_counter() - start, note=note)


def flip_labels(task: TaskData, path: Path, seed: int) -> tuple[int, ...]:
    """Write the task with some training labels flipped."""
    rng = np.random.default_rng(seed)
    y = task.train.y.copy()
    wrong = np.sort(rng.choice(len(y), FLIPPED, replace=False))
    y[wrong] = (y[wrong] + rng.integers(1, 5, FLIPPED)) % 5
    _write_digits(path, (task.train.x[..., 0], y), (task.test.x[..., 0], task.test.y))
    return tuple(int(i) for i in wrong)


def forget_flipped(files: Files, out: Path, seed: int) -> tuple[Recall, dict[str, Any]]:
    """The second act: wrong labels are found by leave-one-out, and forgotten."""
    task = load_data(files.digits).shots(SHOTS, seed)
    wrong = flip_labels(task, files.flipped, seed)
    place = out / "flipped"
    place.mkdir(exist_ok=True)
    found = adapt(_options(files, files.flipped, None, seed), place, partial(keep_fit, place))
    keep_adaptation(found, place, f"Digits 5 to 9, {FLIPPED} of {len(task.train)} labels wrong")
    change, recall = _forget_doubtful(found, wrong)
    result, page = report_change(change, "forget", out / "forgotten", "Probable label errors, forgotten")
    assert page.train is not None
    told = tuple(replace(s, flipped=s.sample in wrong) for s in page.train.suspects)
    page = replace(page, train=replace(page.train, suspects=told, flipped=FLIPPED))
    save_run(out / "forgotten", change.after)
    write(out / "forgotten", result, page)
    return recall, result


def _forget_doubtful(found: Adaptation, wrong: tuple[int, ...]) -> tuple[Change, Recall]:
    """Forget as many of the most doubtful samples as labels were flipped."""
    order, ids = ranking(contradiction(found.run.fit).cpu().numpy()), found.run.samples.ids
    recall = Recall(tuple(ids[i] for i in wrong), tuple(ids[i] for i in order[:FLIPPED]))
    return forget(found.run, recall.inspected, verify=True), recall
