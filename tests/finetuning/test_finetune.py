"""The recipes of fine-tuning: what they are made of, that they learn, repeat, resume and are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.errors import DataError, FileFormatError, InputError, ModelError, NumericalError, WeightsError
from linnet.finetuning.recipes import RECIPES
from linnet.surgery import leaky_relu
from linnet.tangent.linearized import Linearized
from linnet.tangent.surgery import report
from tests.finetuning.by_name import finetune, recover
from tests.fitting.problems import near
from tests.grids import grid
from tests.hangs import HANGS
from tests.refusals import refused


class Net(nn.Module):
    """Two convolutions with BatchNorm, ReLU spelled in two ways, global pooling, a head for five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.act, self.conv2, self.fc = nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.norm(self.conv1(x)))
        return self.fc(nn.functional.relu(self.conv2(z)).mean((2, 3)))


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
        model.train()
        for _ in range(3):
            model(torch.randn(16, 1, 8, 8))
    return model.eval()


def images(n: int = 60, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Stripes in three directions under noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    waves = torch.stack([row, column, row + column]).mul(1.7).sin()
    return (waves[y] + 0.7 * torch.randn(n, 8, 8, generator=g))[:, None].to(dtype), y


def accuracy(tuned: Any, data: tuple[Tensor, Tensor]) -> float:
    return float((tuned.predict(data[0]).argmax(1) == data[1]).double().mean())


SHORT: dict[str, Any] = {"steps": 12, "batch_size": 16, "log_every": 1}


def weights(tuned: Any) -> dict[str, Tensor]:
    return tuned.module.state_dict()


def same(a: Any, b: Any) -> bool:
    pairs = zip(weights(a).items(), weights(b).items(), strict=True)
    return all(n == m and torch.equal(s, t) for (n, s), (m, t) in pairs)


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.thinned(4)
def test_every_recipe_learns_in_one_call(method: str) -> None:
    model = net().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    tuned = finetune(model, images(), method, validation=images(30, 2), steps=60, head="random")
    assert accuracy(tuned, images(90, 3)) > (0.4 if method == "fc" else 0.6)
    assert tuned.history[-1].keys() >= {"step", "validation_accuracy"} or "loss" in tuned.history[-1]
    losses = [h["loss"] for h in tuned.history if "loss" in h]
    assert losses[-1] < losses[0]
    assert 0 <= tuned.validation["accuracy"] <= 1
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training
    assert isinstance(tuned.module, Linearized) == (method != "nlft")
    assert tuned.notes
    assert tuned.summary()["recipe"] == method
    leaky = "lqf" in method
    network = tuned.module.model if isinstance(tuned.module, Linearized) else tuned.module
    if leaky:
        assert len(report(network).replaced) == 2
    else:
        refused(InputError, lambda: report(network), "no report")


@pytest.mark.long
def test_lqf_reaches_the_closed_form() -> None:
    x, y = images(dtype=torch.float64)
    model, decay = net().double(), 3000.0
    for part in ("kfac", "ekfac", "none"):
        rate = None if part == "none" else 1.0
        run = finetune(
            model,
            (x, y),
            weight_decay=decay,
            steps=150,
            batch_size=60,
            preconditioner=part,
            learning_rate=rate,
        )
        lin = linnet.linearize(run.module.model)
        exact = linnet.fit(lin, (x, y), ridge=60 * decay).predict(x)
        moved = (exact - lin.base(x)).abs().max()
        gap = (run.predict(x) - exact).abs().max() / moved
        assert gap < 1e-3, f"{part}: {gap}"
        assert any("closed form" in note for note in run.notes)


def test_recovery_learns_from_the_network_as_it_was_or_from_labels() -> None:
    x, y = images()
    model = net()
    leaky = leaky_relu(model, 0.4)
    state = {name: t.clone() for name, t in leaky.state_dict().items()}
    taught = recover(leaky, (x, y), model, steps=150, learning_rate=0.05)
    distance = [(m(x) - model(x)).norm().item() for m in (leaky, taught)]
    assert distance[1] < 0.7 * distance[0]
    assert all(torch.equal(t, state[name]) for name, t in leaky.state_dict().items())
    assert report(taught) == report(leaky)
    assert not torch.equal(taught.norm.running_mean, leaky.norm.running_mean)
    labeled = recover(leaky, (x, y), steps=60, training_mode=False)
    assert torch.equal(labeled.norm.running_mean, leaky.norm.running_mean)
    loss = [nn.functional.cross_entropy(m(x), y).item() for m in (leaky, labeled)]
    assert loss[1] < loss[0]
    refused(InputError, lambda: recover(leaky, (x, x.mean((1, 2, 3)))), "no teacher")
    refused(InputError, lambda: recover("net", (x, y)), "model")


def test_training_the_last_layer_on_kept_features_changes_nothing() -> None:
    class Opaque(nn.Module):
        """A head whose input is no plain feature vector, so that features are not kept."""

        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.body.fc = nn.Identity()
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x)) * 1.0  # features() wants the layer's own result; so it is refused

    x, y = images()
    kept = net()
    kept.fc = nn.Linear(8, 3)
    opaque = Opaque()
    opaque.fc.load_state_dict(kept.fc.state_dict())
    options: dict[str, Any] = {**SHORT, "head": "keep", "preconditioner": "none", "learning_rate": 0.01}
    for method in ("lqf-fc", "fc"):
        a = finetune(kept, (x, y), method, **options)
        b = finetune(opaque, (x, y), method, **options)
        assert list(a.module.delta) == ["fc.weight", "fc.bias"]
        near(a.predict(x), b.predict(x), 1e-4)
        assert (a.predict(x) - a.module.base(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"loss": "cross-entropy"}, "loss"),
        ({"preconditioner": "none"}, "preconditioner"),
        ({"preconditioner": "ekfac"}, "preconditioner"),
        ({"preconditioner": "diagonal"}, "preconditioner"),
        ({"activation": "relu"}, "activation"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"activation": nn.LeakyReLU(0.5)}, "slope"),
        ({"scale": 5.0}, "scale"),
        ({"head": "random"}, "head"),
    ],
)
@pytest.mark.thinned(6)
def test_each_part_of_lqf_can_be_changed(change: dict[str, Any], what: str) -> None:
    plain = finetune(net(), images(), **SHORT)
    changed = finetune(net(), images(), **SHORT, **change)
    asked = 0.5 if what == "slope" else change[what]
    assert changed.settings.parts[what] == asked != plain.settings.parts[what]
    assert not torch.equal(changed.predict(images()[0]), plain.predict(images()[0]))
    if what == "optimizer":
        assert changed.settings.parts["preconditioner"] == "none"


def test_rates_follow_the_batch_size_and_the_task_does_not_matter() -> None:
    found = {}
    for b in (8, 16):
        values = finetune(net(), images(), steps=2, batch_size=b).settings.values
        found[b] = values["learning_rate"], values["effective_learning_rate"]
    assert found[16][0] == pytest.approx(2 * found[8][0])
    assert found[16][1] == pytest.approx(found[8][1])
    x, y = images()
    other = finetune(net(), (3 * x, y), steps=2, batch_size=16).settings.values
    assert other["learning_rate"] == found[16][0]


@pytest.mark.parametrize("method", ["lqf", "gaf", "nlft"])
@pytest.mark.parametrize("kind", ["random-crop", "resized-crop"])
@pytest.mark.thinned(4)
def test_same_seed_same_bits(method: str, kind: str) -> None:
    mode = method == "nlft"
    options = {**SHORT, "augmentation": kind, "training_mode": mode}
    state = torch.get_rng_state()
    a = finetune(net(), images(), method, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    b = finetune(net(), images(), method, **options)
    assert same(a, b)
    assert a.history == b.history
    assert not same(a, finetune(net(), images(), method, **options, seed=1))
    x, y = images()
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    assert same(a, finetune(net(), loader, method, **options))


class Interrupt(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("method", grid(("lqf", "lqf-fc", "nlft"), ("lqf", "nlft")))
@pytest.mark.parametrize("optimizer", grid(("sgd", "adam"), ("sgd",)))
@pytest.mark.thinned(2)
@pytest.mark.long
def test_resumed_runs_have_the_same_bits(method: str, optimizer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SHORT, "optimizer": optimizer, "augmentation": "random-crop", "keep": "best",
                               "validation": images(30, 2), "training_mode": method == "nlft"}  # fmt: skip
    whole = finetune(net(), images(), method, **options)

    def stop(values: dict[str, float], step: int) -> None:
        if step == 7:
            raise Interrupt

    kept: dict[str, Any] = {**options, "checkpoint": tmp_path, "save_every": 3}
    with pytest.raises(Interrupt):
        finetune(net(), images(), method, **kept, log=stop)
    steps: list[int] = []
    resumed = finetune(net(), images(), method, **kept, log=lambda _, step: steps.append(step))
    assert min(steps) == 6
    assert same(whole, resumed)
    assert whole.history == resumed.history
    again = finetune(net(), images(), method, **kept, log=lambda _, step: steps.append(-step))
    assert min(steps) == 6
    assert same(again, whole)
    refused(InputError, lambda: finetune(net(), images(), method, **kept, seed=3), "other settings")
    refused(InputError, lambda: finetune(net(), images(57), method, **kept), "other settings")
    path = tmp_path / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    refused(FileFormatError, lambda: finetune(net(), images(), method, **kept), "training.safetensors")


SCRIPT = """
import sys, time
from tests.finetuning.by_name import finetune
from tests.finetuning.test_finetune import images, net
def log(values, step):
    print(step, flush=True)
    if sys.argv[2] == "slow":
        time.sleep(0.05 if step < 10 else 3600)  # until it is killed
tuned = finetune(net(), images(), steps=40, batch_size=16, log_every=1, log=log, save_every=1,
                 augmentation="random-crop", checkpoint=sys.argv[1])
tuned.save(sys.argv[1])
"""


@pytest.mark.long
def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    places = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def start(speed: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), speed]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)

    first = start("slow")
    assert first.stdout is not None
    for line in first.stdout:
        if int(line) == 9:
            break
    time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "finetuned.safetensors").exists()
    second = start("fast")
    lines = second.communicate(timeout=HANGS)[0].split()
    assert second.returncode == 0
    assert 8 <= int(lines[0]) <= 12
    here = finetune(net(), images(), steps=40, batch_size=16, log_every=1, augmentation="random-crop")
    assert same(here, linnet.load(tmp_path, net()))


def test_a_search_takes_the_best_and_trains_on_everything() -> None:
    search = {"learning_rate": [1e-7, 0.1, 1e30]}
    tuned = finetune(net(), images(), "nlft", search=search, head="random", **{**SHORT, "steps": 40})
    assert [c["taken"] for c in tuned.candidates] == [False, True, False]
    assert tuned.settings.values["learning_rate"] == 0.1
    assert "failed" in tuned.candidates[2]
    whole = finetune(net(), images(), "nlft", learning_rate=0.1, head="random", **{**SHORT, "steps": 40})
    assert same(tuned, whole)
    chosen = finetune(
        net(), images(), "nlft", images(30, 2), search=search, head="random", **{**SHORT, "steps": 40}
    )
    assert same(chosen, whole)  # with validation data nothing is held out
    assert chosen.validation["accuracy"] == chosen.candidates[1]["scores"]["accuracy"]
    heard: list[dict[str, float]] = []
    finetune(
        net(), images(), "fc", search={"weight_decay": [0.1, 0.2]}, log=lambda v, _: heard.append(v), **SHORT
    )
    assert {v.get("candidate") for v in heard} == {0, 1, None}
    every = {"learning_rate": [1e30, 1e31]}
    refused(
        NumericalError,
        lambda: finetune(net(), images(), "nlft", search=every, **SHORT),
        "all 2 sets of values",
    )


@pytest.mark.long
def test_grids_share_what_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sys.modules["linnet.finetuning.finetune"]  # the package's attribute of this name is the function
    made: list[int] = []
    plain = runs.frozen_curvature
    monkeypatch.setattr(runs, "frozen_curvature", lambda *a: made.append(1) or plain(*a))
    tuned = finetune(net(), images(), "lqf-fc", images(30, 2), search="paper", augmentation="center", **SHORT)
    assert len(tuned.candidates) == 9
    assert len(made) == 1


@pytest.mark.long
def test_results_are_kept(tmp_path: Path) -> None:
    x = images()[0]
    for method in ("lqf", "lqf-fc", "nlft", "b-lqf"):
        options = {"pooling": linnet.surgery.Bilinear(channels=4)} if method == "b-lqf" else {}
        tuned = finetune(net(), images(), method, augmentation="center", **SHORT, **options)
        tuned.save(tmp_path / method)
        loaded = linnet.load(tmp_path / method, net())
        torch.testing.assert_close(loaded.predict(x), tuned.predict(x))
        assert loaded.settings == tuned.settings
        assert loaded.history == tuned.history
        assert loaded.notes == tuned.notes
    refused(InputError, lambda: linnet.load(tmp_path / "none", net()), "none")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    refused(WeightsError, lambda: linnet.load(tmp_path / "nlft", other), "does not fit")


def test_values_instead_of_classes() -> None:
    x = images(dtype=torch.float64)[0]
    t = torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3))], 1)
    tuned = finetune(net().double(), (x, t), validation=(x, t), steps=40)
    assert tuned.predict(x).shape == (60, 2)
    assert "accuracy" not in tuned.validation
    refused(InputError, lambda: finetune(net().double(), (x, t), "gaf"), "cross-entropy")


def test_networks_that_return_objects() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.body(x)}

    y = images()[1].clone()
    y[0] = 4
    for method in ("gaf", "nlft"):
        tuned = finetune(Named(), (images()[0], y), method, output="scores", head="keep", **SHORT)
        assert tuned.predict(images()[0]).shape == (60, 5)
    assert any("no training example" in note for note in tuned.notes)


class Slow(Dataset):  # type: ignore[type-arg]
    """The images, read one by one."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return images()[0][i], i % 3


def test_data_sets_that_are_read_as_they_are_needed() -> None:
    lazy = finetune(net(), Slow(), **SHORT)
    near(lazy.predict(images()[0]), finetune(net(), images(), **SHORT).predict(images()[0]).double(), 1e-3)


@pytest.mark.parametrize("method", ["lqf", "lqf-fc", "fc", "nlft"])
@pytest.mark.parametrize("kind", [tuple, dict])
@pytest.mark.thinned(2)
def test_inputs_of_any_structure(method: str, kind: type) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.fc = nn.Linear(3, 6), nn.Linear(2, 6), nn.Linear(6, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(torch.relu(self.left(a) + self.right(b)))

    a, b, y = torch.randn(20, 3), torch.randn(20, 2), torch.arange(20) % 2
    x = (a, b) if kind is tuple else {"a": a, "b": b}
    tuned = finetune(Two(), (x, y), method, validation=(x, y), **SHORT)
    assert tuned.predict(x).shape == (20, 2)
    assert tuned.history


def test_a_fitted_head_is_kept_and_frozen_networks_are_trained() -> None:
    model = linnet.with_head(net(), 3, "random", seed=torch.Generator().manual_seed(0))
    tuned = finetune(model.requires_grad_(False), images(), **SHORT)
    assert "the network's own head was kept" in tuned.notes
    assert len(tuned.module.delta) == 8
    part = finetune(net(), images(), params="^conv2", **SHORT)
    assert list(part.module.delta) == ["conv2.weight", "conv2.bias"]
    plain = finetune(net(), images(), "nlft", params="^conv2", **SHORT)
    assert torch.equal(plain.module.conv1.weight, net().conv1.weight)
    assert not torch.equal(plain.module.conv2.weight, net().conv2.weight)
    model = net()
    assert list(finetune(model, images(), params=model.conv2, **SHORT).module.delta) == list(
        part.module.delta
    )


def test_a_head_with_outputs_for_more_classes_is_kept() -> None:
    wide = linnet.with_head(net(), 6, data=images())
    tuned = finetune(wide, images(), **SHORT)
    assert tuned.predict(images()[0]).shape == (60, 6)
    assert "the network's own head was kept" in tuned.notes
    assert any("3 of 6 classes" in note for note in tuned.notes)


def test_a_linearization_says_what_varies_and_epochs_how_long() -> None:
    whole = finetune(net(), images(), **SHORT)
    assert same(whole, finetune(linnet.linearize(net()), images(), **SHORT))
    plain = finetune(linnet.linearize(net()), images(), "nlft", **SHORT)
    assert same(plain, finetune(net(), images(), "nlft", **SHORT))
    assert same(
        whole, finetune(net(), images(), epochs=3, batch_size=16, log_every=1)
    )  # 3 · 60/16, rounded up


def test_single_examples_and_empty_classes() -> None:
    one = finetune(net(), images(), "nlft", steps=3, batch_size=1)
    assert one.settings.values["batch_size"] == 1
    refused(
        InputError,
        lambda: finetune(net(), images(), "nlft", steps=3, batch_size=1, training_mode=True),
        "batch_size=1",
    )
    x, y = images()
    refused(DataError, lambda: finetune(net(), (x, 0 * y)), "one class only")
    refused(DataError, lambda: finetune(net(), (x, y - 1)), "negative")
    refused(DataError, lambda: finetune(net(), (x[:0], y[:0])), "empty")
    refused(
        ModelError,
        lambda: finetune(net(), (x, torch.arange(60) % 7), head="keep", **SHORT),
        "5 outputs",
        "7 outputs",
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"training": "newton"}, "training="),
        ({"training_mode": True}, "training_mode"),
        ({"keep": "best"}, "validation="),
        ({"search": {"learning_rate": 0.1}}, "search"),
        ({"recipe": "nlft", "pooling": linnet.surgery.Bilinear()}, "bilinear pooling"),
        ({"recipe": "b-lqf", "head": "keep"}, "bilinear pooling"),
        ({"recipe": "nlft", "preconditioner": "kfac"}, "linear model"),
        ({"steps": 3, "epochs": 3}, "epochs=3"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], word: str) -> None:
    refused(InputError, lambda: finetune(net(), images(), **{**SHORT, **options}), word)


def test_networks_that_are_refused() -> None:
    refused(ModelError, lambda: finetune(nn.Tanh(), images()), "Tanh", "no parameter")
    refused(InputError, lambda: finetune(None, images()), "model")
    refused(InputError, lambda: linnet.finetune(net(), images(), training=linnet.Run()), "training")
    refused(InputError, lambda: linnet.finetune(net(), images(), run=linnet.Training()), "run")
    refused(ModelError, lambda: finetune(net(), (images()[0].flatten(1), images()[1]), **SHORT), "cannot run")
    refused(
        NumericalError,
        lambda: finetune(net(), images(), "nlft", learning_rate=1e30, **SHORT),
        "learning_rate=",
    )
