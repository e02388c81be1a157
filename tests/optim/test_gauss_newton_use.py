"""The Gauss-Newton optimizer in its user's hands: groups, schedules, states, modes, failures, processes."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError, ModelError, NumericalError
from linnet.likelihoods import Bernoulli, Categorical
from linnet.optim.gauss_newton import GaussNewton
from linnet.optim.gauss_newton_settings import Damping
from tests.hangs import HANGS
from tests.optim.gauss_newton_cases import classes, classifier, flat, mlp, regressor, values, weight_of

ROOT = Path(__file__).resolve().parents[2]
STRUCTURES = ["kfac", "kfra", "ekfac", "diagonal", "full"]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.thinned(4)
def test_resumes_with_the_same_bits(structure: str) -> None:
    options: dict[str, Any] = {
        "structure": structure,
        "damping": Damping(zeta_period=3),
        "momentum": True,
        "inverse_period": 4,
    }
    net = mlp()
    optimizer = classifier(net, **options)
    for k in range(6):
        optimizer.step(*classes(seed=k))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    later = [optimizer.step(*classes(seed=k)) for k in range(6, 12)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = mlp(seed=5)
    twin.load_state_dict(saved["net"])
    resumed = classifier(twin, **options)
    resumed.load_state_dict(saved["optimizer"])
    again = io.BytesIO()
    torch.save(resumed.state_dict(), again)  # also before the first step
    reports = [resumed.step(*classes(seed=k)) for k in range(6, 12)]
    assert reports == later
    assert torch.equal(flat(net), flat(twin))


class _Routed(nn.Module):
    """Examples whose first input is positive go one way, the others another, into a head that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.ways, self.head = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]), nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) to (N, 3)."""
        way = x[:, :1] > 0
        states = [one(x).tanh() for one in self.ways if bool((way == (one is self.ways[0])).any())]
        own = states[0] if len(states) == 1 else torch.where(way, *states)
        outputs: Tensor = self.head(own)
        return outputs


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
def test_resumes_where_the_next_batch_shows_other_layers(structure: str) -> None:
    torch.manual_seed(0)
    net, (x, y) = _Routed(), (torch.randn(12, 3), torch.arange(12) % 3)
    there, back = x.clone(), x.clone()
    there[:, 0], back[:, 0] = x[:, 0].abs(), -x[:, 0].abs()
    optimizer = classifier(net, structure=structure)
    optimizer.step(there, y)
    twin = copy.deepcopy(net)
    other = classifier(twin, structure=structure)
    other.load_state_dict(optimizer.state_dict())
    for part in (there, there):
        optimizer.step(part, y)
        other.step(part, y)
    assert torch.equal(flat(net), flat(twin))
    third = copy.deepcopy(net)
    late = classifier(third, structure=structure)
    late.load_state_dict(optimizer.state_dict())
    late.step(back, y)  # whose layers are not those of the state
    assert bool(flat(third).isfinite().all())


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra"])
def test_layers_below_a_head_of_zeros_are_factored(structure: str) -> None:
    net = mlp()
    nn.init.zeros_(weight_of(net, "2"))
    optimizer, (x, y) = classifier(net, structure=structure), classes()
    optimizer.step(x, y)
    assert {part.structure for part in optimizer._running.curvature().parts} == {structure}
    before = float(nn.functional.cross_entropy(net(x), y).detach())
    for _ in range(5):
        optimizer.step(x, y)
    assert float(nn.functional.cross_entropy(net(x), y).detach()) < before


def test_parameters_unfrozen_later_are_not_trained_and_it_says_so() -> None:
    net = mlp()
    net.get_submodule("0").requires_grad_(False)
    optimizer, (x, y) = classifier(net), classes()
    optimizer.step(x, y)
    net.get_submodule("0").requires_grad_(True)
    with pytest.warns(UserWarning, match="was frozen or not there when the optimizer was made"):
        optimizer.step(x, y)


def test_states_without_layers_are_taken_and_damaged_ones_refused() -> None:
    net, (x, y) = mlp(), classes()
    optimizer = classifier(net)
    optimizer.step(x, y)
    state = optimizer.state_dict()
    for layers in (None, torch.zeros(4), torch.tensor(list(b"[1, 2]"), dtype=torch.uint8)):
        own = copy.deepcopy(state)
        saved = own["gauss_newton"]["curvature"]
        saved.pop("layers") if layers is None else saved.update(layers=layers)
        twin = copy.deepcopy(net)
        other = classifier(twin)
        other.load_state_dict(own)
        if layers is None:  # they are found on the batch
            other.step(x, y)
        else:
            with pytest.raises(InputError, match="holds no layers"):
                other.step(x, y)


def test_a_loss_of_zero_is_no_sum() -> None:
    net = nn.Linear(3, 2)
    net.bias.data = torch.tensor([300.0, -300.0])
    optimizer, x, y = (
        GaussNewton(net, Categorical(), damping=1.0),
        torch.randn(8, 3),
        torch.zeros(8, dtype=torch.long),
    )
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    assert optimizer.step(x, y, loss=loss).loss == 0.0


def test_a_sum_of_losses_is_refused() -> None:
    net, (x, y) = mlp(), classes()
    optimizer = classifier(net)
    loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
    loss.backward()
    with pytest.raises(InputError, match=f"a sum over {len(y)} examples"):
        optimizer.step(x, y, loss=loss)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    net = mlp()
    optimizer = classifier(net, damping=0.1, weight_decay=0.2)
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    optimizer.add_param_group({"params": biases, "weight_decay": 0.0, "lr": 0.0})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    before = [b.detach().clone() for b in biases]
    weight = weight_of(net, "0").clone()
    report = optimizer.step(*classes())
    assert all(torch.equal(a, b) for a, b in zip(before, biases, strict=True))
    assert not torch.equal(weight, weight_of(net, "0"))
    squares = sum(
        float(p.detach().square().sum()) for name, p in mlp().named_parameters() if "weight" in name
    )
    assert report.objective - report.loss == pytest.approx(0.5 * 0.2 * squares, rel=1e-10)
    with pytest.raises(InputError, match="not trained"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_scheduler_scales_the_step() -> None:
    net = mlp()
    optimizer = classifier(net, damping=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    first = optimizer.step(*classes())
    scheduler.step()
    before = flat(net)
    report = optimizer.step(*classes())
    assert report.step_norm == pytest.approx(0.1 * report.alpha * report.direction_norm, rel=1e-10)
    assert float((flat(net) - before).norm()) == pytest.approx(report.step_norm, rel=1e-10)
    assert first.step_norm == pytest.approx(first.alpha * first.direction_norm, rel=1e-10)


def test_closure_and_given_gradients_are_the_same_step() -> None:
    x, y = classes()
    weights = []
    for way in ("own", "closure", "given"):
        net = mlp()
        optimizer = classifier(net, damping=Damping(0.1, 0.1, tau_period=1))

        def closure(net: nn.Module = net, optimizer: GaussNewton = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            if way == "own":
                optimizer.step(x, y)
            elif way == "closure":
                optimizer.step(x, y, closure=closure)
            else:
                optimizer.step(x, y, loss=closure())
        weights.append(flat(net))
    assert torch.allclose(weights[0], weights[1], rtol=1e-9)
    assert torch.allclose(weights[0], weights[2], rtol=1e-9)


@pytest.mark.parametrize("way", ["before", "inside", "keyword", "parts", "no closure"])
@pytest.mark.thinned(2)
def test_step_of_a_closure_takes_the_batch_that_was_named(way: str) -> None:
    """As torch documents ``step(closure)``: the batch is named before the step or inside the closure."""
    x, y = classes()
    ends, calls = [], []
    for own in (True, False):
        net = mlp()
        optimizer = classifier(net, damping=Damping(0.1, 0.1, tau_period=1))

        def closure(net: nn.Module = net, optimizer: GaussNewton = optimizer) -> Tensor:
            if way in ("inside", "parts"):
                optimizer.accumulate(x[3:], y[3:]) if way == "parts" else optimizer.accumulate(x, y)
            calls.append(1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            if own:
                report = optimizer.step(x, y)
                continue
            if way == "parts":
                optimizer.accumulate(x[:3], y[:3])
            elif way != "inside":
                optimizer.accumulate(x, y)
            if way == "keyword":
                report = optimizer.step(closure=closure)
            elif way == "no closure":
                report = optimizer.step(None)
            else:
                report = optimizer.step(closure)
        ends.append((flat(net), report.loss, report.tau, report.examples))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=1e-9)
    assert ends[0][1:] == pytest.approx(ends[1][1:], rel=1e-9)
    assert len(calls) == {"inside": 3, "parts": 3, "no closure": 0}.get(way, 6)


def test_mixed_precision_touches_loss_and_gradient_alone() -> None:
    def run(enabled: bool) -> tuple[Any, Tensor]:
        net = mlp().float()
        optimizer = classifier(net, damping=0.1)
        x, y = classes()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            report = optimizer.step(x.float(), y)
        return report, flat(net)

    (plain, a), (mixed, b) = run(False), run(True)
    assert mixed.loss != plain.loss
    assert mixed.loss == pytest.approx(plain.loss, rel=0.02)
    assert a.dtype == b.dtype == torch.float32
    assert torch.allclose(a, b, atol=0.05)


def test_training_mode_belongs_to_the_loss() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    x, y = classes()
    x = x.float()
    optimizer = classifier(net, damping=Damping(0.1, 0.1, tau_period=1), lr=0.01)
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm1d)
    report = optimizer.step(x, y)
    assert net.training
    assert int(norm.get_buffer("num_batches_tracked")) == 1  # one pass moves it, measuring ρ does not
    assert report.rho is not None
    assert abs(report.rho) < 3  # with other units dropped the loss itself would move far more than this step
    net.eval()
    optimizer.step(x, y)
    assert int(norm.get_buffer("num_batches_tracked")) == 1


def test_frozen_half_way() -> None:
    net = mlp()
    optimizer = classifier(net, damping=0.1, weight_decay=0.1, momentum=True)
    optimizer.step(*classes())
    net.get_submodule("0").requires_grad_(False)
    kept, moved = weight_of(net, "0").clone(), weight_of(net, "2").clone()
    optimizer.step(*classes())
    assert torch.equal(kept, weight_of(net, "0"))
    assert not torch.equal(moved, weight_of(net, "2"))


def test_takes_back_a_step_that_went_wrong() -> None:
    x, y = classes()
    net = mlp()
    optimizer = classifier(net, damping=0.1)
    optimizer.step(x, y)
    good = flat(net)
    optimizer.step(x, y)
    with torch.no_grad():
        weight_of(net, "0").fill_(math.nan)
    report = optimizer.step(x, y)
    assert report.rejected
    assert report.zeta == pytest.approx(0.4)
    assert math.isfinite(report.loss)
    assert bool(flat(net).isfinite().all())
    assert float((flat(net) - good).norm()) < 10
    assert not optimizer.step(x, y).rejected


def test_weights_that_were_loaded_are_not_taken_back() -> None:
    x, y = values()
    net = mlp()
    optimizer = regressor(net, damping=1.0)
    for _ in range(3):
        optimizer.step(x, y)
    loaded = {name: 30 * value for name, value in mlp(seed=4).state_dict().items()}
    net.load_state_dict(loaded)
    twin = mlp()
    twin.load_state_dict(loaded)
    first = regressor(twin).step(x, y).loss
    report = optimizer.step(x, y)
    assert not report.rejected
    assert report.loss == pytest.approx(first, rel=1e-9)
    assert optimizer.step(x, y).loss < first


def test_weights_turned_around_are_not_taken_back() -> None:
    x, y = values()
    net = mlp()
    optimizer = regressor(net, damping=0.01)
    for _ in range(30):
        optimizer.step(x, y)
    with torch.no_grad():
        for p in net[2].parameters():
            p.mul_(-30)
    twin = copy.deepcopy(net)
    report = optimizer.step(x, y)
    assert not report.rejected
    assert report.loss == pytest.approx(regressor(twin).step(x, y).loss)


def test_an_absurd_step_is_taken_back_though_a_mask_was_put_on_it() -> None:
    x, y = values()
    net = mlp()
    optimizer = regressor(net, damping=Damping(1.0, 1.0, tau_period=0))
    mask = torch.arange(24).view(6, 4) % 3 > 0
    reports = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e4 if step == 2 else 1.0
        reports.append(optimizer.step(x, y))
        with torch.no_grad():
            net[0].weight.mul_(mask)
    assert [one.rejected for one in reports] == [False, False, False, True]
    assert reports[3].loss < 2 * reports[0].loss


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "full"])
def test_a_running_optimizer_goes_back_to_a_checkpoint_bit_by_bit(structure: str) -> None:
    x, y = values()
    net = mlp()
    optimizer = regressor(net, structure=structure)
    for _ in range(3):
        optimizer.step(x, y)
    optimizer.param_groups[0]["lr"] = 30.0
    optimizer.step(x, y)
    kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    found = []
    for _ in range(2):
        optimizer.param_groups[0]["lr"] = 1.0
        report = optimizer.step(x, y)
        found.append((report.rejected, report.loss, flat(net)))
        net.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("way", ["empty", "frozen"])
def test_the_rate_is_that_of_parameters_that_move(way: str) -> None:
    x, y = values()
    net, other = mlp(), mlp()
    optimizer, plain = regressor(net, damping=0.1), regressor(other, damping=0.1, lr=0.1)
    if way == "frozen":
        for one in (net, other):
            one[0].requires_grad_(False)
    moving = [p for p in net.parameters() if p.requires_grad]
    optimizer.add_param_group({"params": moving, "lr": 0.1})
    assert optimizer.step(x, y).step_norm == pytest.approx(plain.step(x, y).step_norm, rel=1e-9)


def test_states_go_between_compiled_networks_and_plain_ones() -> None:
    x, y = classes()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = classifier(torch.compile(net, backend="eager"))
    for _ in range(3):
        optimizer.step(x, y)
    optimizer.param_groups[0]["lr"] = 1e200
    optimizer.step(x, y)
    plain = classifier(net)
    plain.load_state_dict(optimizer.state_dict())
    plain.param_groups[0]["lr"] = 1.0
    report = plain.step(x, y)
    assert report.rejected
    assert math.isfinite(report.loss)


def test_a_warm_up_that_begins_at_zero_finds_the_same_dampings() -> None:
    x, y = classes()
    net, other = mlp(), mlp()
    optimizer, plain = classifier(net), classifier(other)
    before = flat(net)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(x, y)
    plain.step(x, y)
    assert torch.equal(flat(net), before)
    assert (optimizer.tau, optimizer.zeta) == (plain.tau, plain.zeta)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step(x, y)
    assert not torch.equal(flat(net), before)


def test_absurd_growth_is_taken_back_at_once_where_it_is_measured() -> None:
    x, y = values()
    net = mlp()
    optimizer = regressor(net, damping=Damping(1.0, 1.0, tau_period=1), lr=1e4, limit=1.0)
    before = flat(net)
    report = optimizer.step(x, y)
    assert report.rejected
    assert report.rho == -math.inf
    assert report.tau == 4.0
    assert torch.equal(flat(net), before)


def test_too_many_rejections_end_with_an_error() -> None:
    x, y = values()
    net = mlp()
    before = flat(net)
    optimizer = regressor(net, damping=Damping(1e-3, 1e-3, tau_period=1), lr=1e8, rejections=3)
    optimizer.step(x, y)
    optimizer.step(x, y)
    with pytest.raises(NumericalError, match="3 steps in a row"):
        optimizer.step(x, y)
    assert optimizer.steps == 3
    assert torch.equal(flat(net), before)


def test_a_hard_batch_costs_a_step_and_no_more() -> None:
    """A finite loss far above the first one takes a step back; training goes on from there."""
    x, y = values()
    net = mlp()
    optimizer = regressor(net, damping=1.0)
    optimizer.step(x, y)
    optimizer.step(x, y)
    report = optimizer.step(x, 100 * y)
    assert report.rejected
    assert report.tau > 1.0
    reports = [optimizer.step(x, y) for _ in range(3)]  # the first of these takes the hard batch's step back
    assert [one.rejected for one in reports] == [True, False, False]


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"damping": Damping(decay=1.5)}, "decay"),
    ({"damping": Damping(inversion="other")}, "inversion"),
    ({"betas": (0.9, 0.99)}, "betas"),
    ({"structure": "low-rank"}, "low-rank"),
    ({"structure": "kfac", "expectation": "recursion"}, "recursion"),
    ({"structure": "kfra", "expectation": "exact"}, "recursion"),
    ({"structure": "kflr"}, "kflr"),
]


@pytest.mark.parametrize(("options", "match"), ERRORS)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        classifier(mlp(), **options)


def test_wrong_batches() -> None:
    x, y = classes()
    optimizer = classifier(mlp(), damping=0.1)
    with pytest.raises(InputError, match="no examples"):
        optimizer.step()
    with pytest.raises(InputError, match="y is None"):
        optimizer.step(x)
    with pytest.raises(InputError, match="both"):
        optimizer.step(x, y, closure=lambda: torch.zeros(()), loss=1.0)
    with pytest.raises(DataError, match="NaN"):
        optimizer.step(x * math.nan, y)
    with pytest.raises(DataError):
        optimizer.step(x, y + 3)
    net = mlp()
    with torch.no_grad():
        weight_of(net, "0").mul_(1e308)
    with pytest.raises((NumericalError, ModelError)):
        classifier(net, damping=0.1).step(x * 1e10, y)


def test_kfra_names_what_it_cannot_follow() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.first(x).tanh()
            branched: Tensor = self.third(h + self.second(h).tanh())
            return branched

    x, y = classes()
    with pytest.raises(ModelError, match=r"KFRA cannot follow the network at first: .* one way") as e:
        classifier(Branching(), structure="kfra").step(x.float(), y)
    assert 'structure="kfac"' in str(e.value)  # what to use instead
    classifier(Branching(), structure="kfac").step(x.float(), y)


def test_wide_outputs_of_an_autoencoder() -> None:
    """Neither KFRA nor the step size forms Λ of 400 outputs for each example."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(400, 12), nn.Sigmoid(), nn.Linear(12, 400))
    x = (torch.rand(64, 400) < 0.2).float()
    optimizer = GaussNewton(net, Bernoulli(), structure="kfra")
    reports = [optimizer.step(x, x) for _ in range(8)]
    assert reports[-1].loss < 0.75 * reports[0].loss


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One of several processes, each with every second example."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for structure, expectation in (("kfac", "exact"), ("kfra", "mc")):
        net = mlp()
        optimizer = GaussNewton(
            nn.parallel.DistributedDataParallel(net), Categorical(), structure, expectation
        )
        reports = []
        for k in range(7):
            x, y = classes(seed=k)
            reports.append(optimizer.step(x[rank::size], y[rank::size])._asdict())
        torch.save({"weights": flat(net), "reports": reports}, folder / f"{structure}{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(timeout=HANGS) for rank in ranks] == [0, 0]
    for structure, expectation in (("kfac", "exact"), ("kfra", "mc")):
        net = mlp()
        optimizer = classifier(net, structure=structure, expectation=expectation)
        own = [optimizer.step(*classes(seed=k)) for k in range(7)]
        for rank in range(2):
            found = torch.load(tmp_path / f"{structure}{rank}.pt", weights_only=True)
            assert torch.allclose(found["weights"], flat(net), rtol=1e-7, atol=1e-9)
            for a, b in zip(own, found["reports"], strict=True):
                assert a.examples == b["examples"] == 20
                assert a.alpha == pytest.approx(b["alpha"], rel=1e-6)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))


@pytest.mark.parametrize("structure", ["kfac", "kfra", "ekfac", "full"])
@pytest.mark.parametrize("way", ["copy", "pickle"])
@pytest.mark.thinned(2)
def test_copies_of_network_and_optimizer_go_on_alike(structure: str, way: str) -> None:
    net = mlp()
    x, y = classes()
    optimizer = GaussNewton(net, Categorical(), structure)
    for _ in range(2):
        optimizer.step(x, y)
    both = (net, optimizer)
    other, copied = copy.deepcopy(both) if way == "copy" else pickle.loads(pickle.dumps(both))
    start = flat(net)
    reports = [copied.step(x, y) for _ in range(6)]
    assert torch.equal(flat(net), start)  # the copy has weights of its own
    for report, copied_report in zip([optimizer.step(x, y) for _ in range(6)], reports, strict=True):
        numbers = {name: value for name, value in report._asdict().items() if value is not None}
        assert numbers == pytest.approx({name: getattr(copied_report, name) for name in numbers}, rel=1e-6)
    assert torch.allclose(flat(net), flat(other))


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return net, torch.randn(20, 3).double(), torch.arange(20) % 3


def test_a_copy_is_stepped_alone_though_a_schedule_wraps_the_step() -> None:
    net, x, y = small()
    optimizer = GaussNewton(net, Categorical())
    torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    optimizer.step(x, y)
    pickle.dumps(optimizer)
    before = flat(net).clone()
    twin, other = copy.deepcopy((net, optimizer))
    other.step(x, y)
    assert torch.equal(flat(net), before)
    optimizer.step(x, y)
    assert torch.equal(flat(net), flat(twin))


def test_examples_of_a_step_that_failed_are_in_no_later_one() -> None:
    net, x, y = small()
    optimizer = GaussNewton(net, Categorical())
    optimizer.accumulate(x, y + 5)
    with pytest.raises(DataError, match="classes from 0 to 2"):
        optimizer.step()
    assert optimizer.step(x, y).examples == 20
    failing = [True]

    def closure() -> Tensor:
        optimizer.accumulate(x, y)
        if failing:
            failing.clear()
            raise MemoryError("none left")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    with pytest.raises(InputError, match="none left"):
        optimizer.step(closure)
    assert optimizer.step(closure).examples == 20
