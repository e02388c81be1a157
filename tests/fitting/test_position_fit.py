"""The cross-entropy at every position against dense algebra, in every form that makes the problem smaller."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError
from linnet.fitting import CG
from linnet.linear.positions import PositionLosses
from linnet.tangent.cut import STATES, Cut

WORDS, WIDTH, LENGTH, N = 7, 5, 6, 9
FINE = CG(tolerance=1e-12)


class Mixer(nn.Module):
    """Words and positions, mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.places = nn.Linear(WIDTH, WIDTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        h = torch.tanh(self.channels(hidden_states))
        return h + torch.tanh(self.places(h.mT).mT)


class Decoder(nn.Module):
    """A network of blocks between an embedding and a linear layer."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Mixer() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        for block in self.blocks:
            h = block(hidden_states=h) if h.sum() > 1e9 else block(h)
        return self.head(h)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, y = (torch.randint(WORDS, (N, LENGTH), generator=draw) for _ in range(2))
    y[:, 0], y[3, 2:4] = -100, -100
    return ids, y


def network() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double().eval()


class Oracle:
    """The same model by its whole Jacobian."""

    def __init__(self, lin: linnet.Linearized, data: tuple[Tensor, Tensor], ridge: float) -> None:
        (ids, self.y), self.ridge = data, ridge
        self.rows = lin.jacobian(ids).view(len(ids), LENGTH, WORDS, -1)
        self.base = lin.base(ids).view(len(ids), LENGTH, WORDS)

    def losses(self, delta: Tensor) -> Tensor:
        f = (self.base + self.rows @ delta).flatten(0, 1)
        every = nn.functional.cross_entropy(f, self.y.flatten(), ignore_index=-100, reduction="none")
        return every.view(self.y.shape).sum(1)

    def objective(self, delta: Tensor, keep: Tensor | slice = slice(None)) -> Tensor:
        return self.losses(delta)[keep].sum() + self.ridge / 2 * delta @ delta

    def solved(self, keep: Tensor | slice = slice(None)) -> Tensor:
        delta = torch.zeros(self.rows.shape[-1], dtype=torch.float64)
        for _ in range(20):
            slope = torch.func.grad(self.objective)(delta, keep)
            delta = delta - torch.linalg.solve(torch.func.hessian(self.objective)(delta, keep), slope)
        return delta


WAYS = {  # parameters: whether the head stands behind the problem, and whether the first block is cut off
    "blocks.1": (True, True),
    "blocks": (True, False),
    "words|blocks": (True, False),
    "head|blocks.1": (False, False),
}


@pytest.mark.parametrize("params", WAYS)
@pytest.mark.thinned(2)
def test_everything_is_that_of_dense_algebra(params: str, data: tuple[Tensor, Tensor]) -> None:
    lin = linnet.linearize(network(), params=params)
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    behind, cut = WAYS[params]
    losses = fit.system.problem.likelihood
    assert isinstance(losses, PositionLosses)
    assert (losses.layer is not None, losses.cut is not None) == (behind, cut)
    oracle = Oracle(lin, data, 0.3)
    delta = oracle.solved()
    assert torch.allclose(fit.system.delta, delta, atol=1e-9)
    assert torch.allclose(fit.predict(data[0]), oracle.base + oracle.rows @ delta, atol=1e-9)
    assert torch.allclose(fit.losses(data), oracle.losses(delta), atol=1e-9)

    hessian = torch.func.hessian(oracle.objective)(delta)
    slopes = torch.func.jacrev(oracle.losses)(delta)
    steps = []
    for i in range(N):
        own = torch.func.hessian(lambda d, i=i: oracle.losses(d)[i])(delta)
        steps.append(torch.linalg.solve(hessian - own, slopes[i]))
    left_out = torch.stack([oracle.losses(delta + step)[i] for i, step in enumerate(steps)])
    assert torch.allclose(fit.loo_losses(), left_out, atol=1e-8)
    outputs = torch.stack([oracle.base[i] + oracle.rows[i] @ (delta + step) for i, step in enumerate(steps)])
    assert torch.allclose(fit.loo(), outputs, atol=1e-8)
    assert torch.allclose(fit.influence(data), -torch.stack(steps) @ slopes.T, atol=1e-8)
    variance = (slopes * torch.linalg.solve(hessian, slopes.T).T).sum(1)
    assert torch.allclose(fit.loss_variance(data), variance, atol=1e-9)


@pytest.mark.parametrize("params", ["blocks.1", "head|blocks.1"])
def test_forgetting_and_updates_are_refits(params: str, data: tuple[Tensor, Tensor], tmp_path) -> None:
    net, keep = network(), torch.tensor([0, 1, 2, 4, 5, 6, 8])
    lin = linnet.linearize(net, params=params)
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    oracle, less = Oracle(lin, data, 0.3), fit.forget([3, 7])
    assert torch.allclose(less.system.delta, oracle.solved(keep), atol=1e-9)
    assert torch.equal(less.x, data[0][keep])
    back = less.update(tuple(part[[3, 7]] for part in data))
    assert torch.allclose(back.system.delta, fit.system.delta, atol=1e-9)
    assert back.n == N
    less.save(tmp_path)
    again = linnet.load(tmp_path, net)
    assert torch.equal(again.losses(data), less.losses(data))
    assert torch.allclose(again.loo_losses(), less.loo_losses(), atol=1e-12)
    merged = fit.merge()
    theta = dict(merged.network.named_parameters())["blocks.1.places.weight"]
    assert torch.allclose(theta, net.blocks[1].places.weight + fit.delta["blocks.1.places.weight"])


def test_leave_one_out_comes_near_refits(data: tuple[Tensor, Tensor]) -> None:
    lin = linnet.linearize(network(), params="blocks.1")
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=3.0, solver=FINE)
    for i in (0, 4):
        one = tuple(part[i : i + 1] for part in data)
        gone = float(fit.forget([i]).losses(one))
        kept, told = float(fit.losses(one)), float(fit.loo_losses()[i])
        assert abs(told - gone) < 0.1 * (gone - kept)


@pytest.mark.parametrize("name", ["kfac", "ekfac", "diagonal", "nystrom"])
@pytest.mark.thinned(2)
def test_preconditioners_change_no_answer(name: str, data: tuple[Tensor, Tensor]) -> None:
    lin = linnet.linearize(network(), params="blocks.1")
    plain = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    solver = CG(tolerance=1e-12, preconditioner=name)
    other = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=solver)
    assert other.system.preconditioner is not None
    assert torch.allclose(other.system.delta, plain.system.delta, atol=1e-9)


def test_pixels_have_their_classes_in_front() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, y = torch.randn(5, 2, 4, 4).double(), torch.randint(3, (5, 4, 4))
    fit = linnet.fit(linnet.linearize(net), (x, y), "cross-entropy", axis=1, ridge=0.5, solver=FINE)
    flat = linnet.fit(
        linnet.linearize(net, output=lambda f: f.movedim(1, -1)),
        (x, y), "cross-entropy", axis=-1, ridge=0.5, solver=FINE,
    )  # fmt: skip
    assert fit.predict(x).shape == (5, 3, 4, 4)
    assert torch.allclose(fit.losses((x, y)), flat.losses((x, y)))
    assert torch.allclose(fit.loo_losses(), flat.loo_losses())


@pytest.mark.long
def test_rows_that_do_not_fit_are_not_kept(data: tuple[Tensor, Tensor], monkeypatch) -> None:
    lin = linnet.linearize(network(), params="blocks.1")
    kept = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    assert kept.system.problem.rows is not None
    monkeypatch.setattr("linnet.linear.label_problem.MOST", 0)
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    assert fit.system.problem.rows is None
    assert torch.allclose(fit.loo_losses(), kept.loo_losses(), atol=1e-9)
    assert torch.allclose(fit.influence(data), kept.influence(data), atol=1e-9)
    assert torch.allclose(fit.loss_variance(data), kept.loss_variance(data), atol=1e-9)


def test_a_layer_behind_takes_positions_some_at_a_time(data: tuple[Tensor, Tensor], monkeypatch) -> None:
    lin = linnet.linearize(network(), params="blocks.1")
    whole = linnet.fit(lin, data, "cross-entropy", axis=-1, solver=FINE)
    monkeypatch.setattr("linnet.linear.positions.ROWS_BYTES", 1)
    parts = linnet.fit(lin, data, "cross-entropy", axis=-1, solver=FINE)
    assert torch.allclose(parts.system.delta, whole.system.delta, atol=1e-10)


def test_what_is_before_the_first_block_that_varies_runs_once(data: tuple[Tensor, Tensor]) -> None:
    net, runs = network(), []
    lin = linnet.linearize(net, params="blocks.1")
    first = lin.model.blocks[0]
    handle = first.register_forward_hook(lambda *_: runs.append(1))
    problem = linnet.fit(lin, data, "cross-entropy", axis=-1).system.problem
    before = len(runs)
    problem.push(torch.ones(lin.space.dim, dtype=torch.float64))
    assert len(runs) == before
    assert problem.x[STATES].shape == (N, LENGTH, WIDTH)
    handle.remove()


def test_only_a_run_of_blocks_is_cut(data: tuple[Tensor, Tensor]) -> None:
    for params in ("blocks.0", "words|blocks.1", "head|blocks.1", "words"):
        assert Cut.of(linnet.linearize(network(), params=params).function, data[0]) is None
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    function = linnet.linearize(layers, params=r"2|3").function
    x = torch.randn(5, 3)
    cut = Cut.of(function, x)
    assert cut is not None
    inside = cut.inputs(x)
    assert torch.allclose(inside[STATES], layers[1](layers[0](x)))
    assert torch.allclose(cut.function.flat(cut.function.theta, inside), layers(x))
    assert torch.equal(cut.original(inside), x)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ridge": "loo"}, "a number"),
        ({"solver": "dual"}, '"auto" or "cg"'),
        ({"axis": 0}, "axis"),
        ({"targets": torch.zeros(N, LENGTH, WORDS)}, "targets made from y"),
    ],
)
def test_what_does_not_go_together(options: dict, says: str, data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(InputError, match=says):
        linnet.fit(linnet.linearize(network()), data, "cross-entropy", **{"axis": -1, **options})


def test_labels_that_cannot_be(data: tuple[Tensor, Tensor]) -> None:
    lin, (ids, y) = linnet.linearize(network()), data
    empty = y.clone()
    empty[2] = -100
    for wrong, says in (
        (empty, r"-100 alone for 1 example\(s\), first 2"),
        (y.clamp_max(2) - 50, "out of range"),
        (torch.full_like(y, -100), "no position counts"),
    ):
        with pytest.raises(DataError, match=says):
            linnet.fit(lin, (ids, wrong), "cross-entropy", axis=-1)
    for wrong in (y.double(), y[:, 1:]):
        with pytest.raises(InputError, match="one integer class at every position"):
            linnet.fit(lin, (ids, wrong), "cross-entropy", axis=-1)
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=10.0)
    with pytest.raises(InputError, match="it is kept"):
        fit.update(data, ridge=2.0)
    with pytest.raises(DataError, match="out of range"):
        fit.losses((ids, y + 50))


def test_one_position_an_example_is_a_fit_of_classes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3
    lin = linnet.linearize(net)
    one = linnet.fit(lin, (x, y), "cross-entropy", axis=-1, ridge=0.3, solver=FINE)
    other = linnet.fit(lin, (x, y), "cross-entropy", ridge=0.3)
    assert torch.allclose(one.predict(x), other.predict(x), atol=1e-8)
    assert torch.allclose(one.loo(), other.loo(), atol=1e-7)
    assert one.forget([0]).record.warnings == one.record.warnings == ()


def test_changes_say_nothing_of_classes_without_an_example(data: tuple[Tensor, Tensor]) -> None:
    fit = linnet.fit(linnet.linearize(network(), params="blocks.1"), data, "cross-entropy", axis=-1)
    assert fit.forget([0]).record.warnings == fit.record.warnings
    assert fit.update(data).record.warnings == fit.record.warnings


def test_what_other_fits_have_is_named_and_what_there_is(data: tuple[Tensor, Tensor]) -> None:
    fit = linnet.fit(linnet.linearize(network(), "last-layer"), data, "cross-entropy", axis=-1)
    for one, name, has in ((fit, "predictive", "loss_variance"), (fit + fit, "save", "displacement")):
        assert not hasattr(one, name)
        with pytest.raises(AttributeError, match=f"other fits have; it has .*{has}"):
            getattr(one, name)
    with pytest.raises(AttributeError, match=r"no attribute 'another'$"):
        _ = fit.another


def test_held_out_losses_are_those_of_refits(data: tuple[Tensor, Tensor]) -> None:
    lin = linnet.linearize(network(), params="blocks.1")
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.01, solver=FINE)
    refits = [float(fit.forget([i]).losses(tuple(part[i : i + 1] for part in data))) for i in range(N)]
    assert torch.allclose(fit.held_out_losses(folds=N), torch.tensor(refits).double())
    found = fit.held_out_losses(folds=2)
    assert torch.allclose(found, fit.held_out_losses(folds=2))
    with pytest.raises(InputError, match="folds"):
        fit.held_out_losses(folds=1)
    copies = tuple(torch.cat([part[:4]] * 3) for part in data)
    same = linnet.fit(lin, copies, "cross-entropy", axis=-1, ridge=0.01, solver=FINE)
    assert any("are copies of others" in line for line in same.record.warnings)
    less = [
        float(same.forget([i, i + 4, i + 8]).losses(tuple(p[i : i + 1] for p in copies))) for i in range(4)
    ]
    assert torch.allclose(same.held_out_losses(folds=12), torch.tensor(less * 3).double())
    alone = linnet.fit(
        lin, tuple(part[:1] for part in data), "cross-entropy", axis=-1, ridge=0.01, solver=FINE
    )
    before = linnet.fit(lin, tuple(p[:2] for p in data), "cross-entropy", axis=-1, ridge=1e9, solver=FINE)
    for told in (alone.loo_losses(), alone.held_out_losses()):
        assert torch.allclose(told, before.losses(data)[:1], atol=1e-6)


def test_audits_of_one_class_an_example_name_what_there_is(data: tuple[Tensor, Tensor]) -> None:
    fit = linnet.fit(linnet.linearize(network(), params="head"), data, "cross-entropy", axis=-1, ridge=1.0)
    for audit in (linnet.audit.mislabeled, linnet.audit.accuracy):
        with pytest.raises(InputError, match=r"a class at every position.*held_out_losses"):
            audit(fit)
