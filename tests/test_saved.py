"""``linnet.load`` reads whatever linnet saved, of every kind and every way to solve; nothing is lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
from mktestdocs import grab_code_blocks

import linnet
from linnet.errors import FileFormatError, InputError
from linnet.files import save
from linnet.fitting import CG, Nystrom, Shared, Sketch
from linnet.fitting.fitted import Fitted
from linnet.laplace.laplace import Laplace
from linnet.likelihoods import Gaussian
from linnet.saved import READERS
from tests.fitting.problems import near, network, problem, real
from tests.laplace.laplace_problems import classes, fitted, numbers
from tests.refusals import refused
from tests.tangent_gp.tangent_gp_cases import WAYS, dense

P = problem(tests=2)
S = problem(n=5, outputs=2, hidden=2, tests=2)
NAN = float("nan")
HELD = torch.tensor([[1.0, NAN], [NAN, 3.0]], dtype=torch.float64)


def adapted(**options: Any) -> Any:
    return linnet.adapt(P.model, (P.x, P.y), **options)


def small_relu() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def finetuned() -> Any:
    return linnet.finetune(small_relu(), (P.x.float(), P.y), training=linnet.Training(steps=2, batch_size=4))


FITS: dict[str, Callable[[], Any]] = {
    "dual": lambda: P.fit(ridge="loo", solver="dual"),
    "primal": lambda: P.fit(ridge=0.3, solver="primal"),
    "shared": lambda: P.fit(ridge="loo", solver=Shared(2)),
    "sketch": lambda: P.fit(ridge=0.3, solver=Sketch(dim=5)),
    "cg": lambda: S.fit(ridge=0.3, solver=CG(1e-10, 300, Nystrom(3))),
    "sgd": lambda: S.fit(ridge=3.0, solver="sgd"),
    "forgotten": lambda: P.fit(ridge=0.3).forget([1, 4]),
    "updated": lambda: P.fit(ridge=0.3).update((P.x[:2], P.y[:2])),
    "held outputs": lambda: S.fit(ridge=0.3, solver="dual").constrain(real(2, 3, seed=11), HELD),
    "held outputs, cg": lambda: S.fit(ridge=0.3, solver="cg").constrain(
        real(2, 3, seed=11), HELD, weight=2.0
    ),
    "float32, solved in float64": lambda: linnet.fit(
        linnet.linearize(network().float()), (P.x.float(), P.y), ridge=1e-6
    ),
    "last layer": lambda: linnet.fit(linnet.linearize(P.model, params="last-layer"), (P.x, P.y), ridge=0.3),
    "cross-entropy": lambda: P.fit(ridge=0.3, loss="cross-entropy"),
    "cross-entropy, primal": lambda: P.fit(ridge=0.3, loss="cross-entropy", solver="primal"),
    "cross-entropy, cg": lambda: S.fit(ridge=3.0, loss="cross-entropy", solver=CG(1e-8)),
    "cross-entropy, forgotten": lambda: P.fit(ridge=0.3, loss="cross-entropy").forget([2]),
    "adapt": adapted,
    "adapt, lower layers": lambda: adapted(weight=0.5, ridge=0.1).forget([1]),
    "finetuned": finetuned,
}
STRUCTURES = ["full", "block", "diagonal", "low-rank", "kfac", "ekfac", "kfra", "last-layer"]
POSTERIORS: dict[str, Callable[[], Any]] = {
    **{f"laplace {kind}": lambda kind=kind: fitted(kind)[0] for kind in STRUCTURES},
    "laplace by layers": lambda: fitted({"0": "kfac", "2": "full"})[0],
    "laplace tuned": lambda: fitted("kfac", data_scale=1.5)[0].tune("evidence", prior="layer"),
}
PROCESSES: dict[str, Callable[[], Any]] = {
    f"process {name}": lambda way=way: linnet.TangentGP(
        dense().model, Gaussian(variance=0.2), prior_precision=0.7, **way
    ).fit(dense().x, dense().y)
    for name, way in WAYS.items()
}
MODELS = {**FITS, **POSTERIORS, **PROCESSES}


def network_of(name: str) -> torch.nn.Module:
    """The network that it was made of."""
    if name in POSTERIORS:
        return classes()[0]
    if name in PROCESSES:
        return dense().model
    if name == "finetuned":
        return small_relu()
    if "float32" in name:
        return network().float()
    return S.model if "cg" in name or name in ("sgd", "held outputs") else P.model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    net = network_of(name)
    x = P.x_test.to(next(net.parameters()).dtype)
    model.save(tmp_path)
    again: Any = linnet.load(tmp_path, net)
    assert type(again) is type(model)
    # memory layouts differ, and so may the last bit of what is computed
    near(again.predict(x), model.predict(x), exact := 1e-6 if "float32" in name else 1e-9)
    if name != "finetuned":
        near(again.predictive(x).variance, model.predictive(x).variance, exact)
    if isinstance(model, linnet.LinearFit | linnet.NestedFit):
        near(again.loo(), model.loo(), exact)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_what_was_used_is_pickled(name: str) -> None:
    """What answers keep for the next ones goes along, or is made again."""
    model = MODELS[name]()
    x = P.x_test.to(next(network_of(name).parameters()).dtype)
    found = model.predict(x)
    if name != "finetuned":
        model.predictive(x)
    if name in POSTERIORS:
        model.log_evidence()
    if isinstance(model, Fitted):
        model.loo()
        model.influence(x)
    near(pickle.loads(pickle.dumps(model)).predict(x), found, 1e-6)


def test_likelihoods_of_ones_own_are_passed_again(tmp_path: Path) -> None:
    model, x, y = numbers()
    own = linnet.likelihoods.Custom(
        lambda f, t: 0.5 * ((f - t) ** 2).sum(1), moments=lambda f: (f, torch.ones_like(f))
    )
    la = Laplace(model, own, "full").fit((x, y))
    la.save(tmp_path)
    refused(InputError, lambda: linnet.load(tmp_path, model), "likelihood is missing")
    near(
        linnet.load(tmp_path, model, likelihood=own).predictive(x).variance, la.predictive(x).variance, 1e-12
    )


@pytest.mark.parametrize("content", [{}, 3, None, {"ridge": "large"}, {"ridge": {"a": [None]}}])
@pytest.mark.parametrize("kind", sorted(READERS))
def test_whole_files_that_say_nothing(kind: str, content: Any, tmp_path: Path) -> None:
    """Checksums say that a file is as it was written, not that linnet wrote it."""
    save(tmp_path, kind, content)
    with pytest.raises(FileFormatError, match=kind):
        linnet.load(tmp_path, P.model)


def test_the_recipe_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows makes a private repository and reads it, by the client's own signatures."""
    page = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "share-a-fit.md"
    (recipe,) = grab_code_blocks(page.read_text(encoding="utf-8"), lang="py")
    hub, client = tmp_path / "hub", create_autospec(huggingface_hub.HfApi, instance=True)

    def upload(repo_id: str, folder_path: str, **_: str) -> None:
        hub.mkdir()
        for path in Path(folder_path).iterdir():
            (hub / path.name).symlink_to(path.resolve())  # as the client's cache has them

    client.upload_folder.side_effect = upload
    download = create_autospec(huggingface_hub.snapshot_download, return_value=str(hub))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    posterior, _, _ = fitted("kfac")
    known: dict[str, Any] = {"linnet": linnet, "posterior": posterior, "net": classes()[0]}
    exec(recipe, known)
    client.create_repo.assert_called_once_with("user/digits-posterior", private=True, exist_ok=True)
    near(known["again"].predict(P.x_test), posterior.predict(P.x_test), 1e-9)


def test_load_fit_of_another_kind_names_load(tmp_path: Path) -> None:
    layers = torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    net = torch.nn.Sequential(*layers)
    linnet.adapt(net, torch.randn(9, 2), [0, 1, 0] * 3).save(tmp_path)
    with pytest.raises(InputError, match=r"holds nested-fit\.safetensors.*linnet\.load"):
        linnet.load_fit(tmp_path, net)
