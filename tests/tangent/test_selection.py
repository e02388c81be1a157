"""``params=``: by keyword, name, regular expression, module or predicate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import FileFormatError, InputError, LinnetError, ModelError
from linnet.fitting import Sketch
from linnet.likelihoods import Categorical, Gaussian
from linnet.tangent.selection import select_parameters
from tests.refusals import refused


class Block(nn.Module):
    """Linear layers, a norm, a LoRA pair, a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.lora_A = nn.Parameter(torch.zeros(4, 2))
        self.lora_B = nn.Parameter(torch.zeros(2, 4))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)


class Net(nn.Module):
    """Two blocks and a head; the embedding is tied to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head_bias = nn.Parameter(torch.zeros(2))
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.embed.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


NET = Net()
ALL = [name for name, p in NET.named_parameters() if p.is_floating_point()]
BLOCK = ["norm.weight", "norm.bias", "fc.weight", "fc.bias", "lora_A", "lora_B"]


def ordered(names: list[str]) -> list[str]:
    return sorted(names, key=ALL.index)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, ALL),
        ("all", ALL),
        ("last-layer", ["head.weight", "head.bias"]),
        ("last_layer", ["head.weight", "head.bias"]),
        ("lora", [f"blocks.{i}.{n}" for i in (0, 1) for n in ("lora_A", "lora_B")]),
        ("bias", [n for n in ALL if n.endswith("bias")]),
        ("biases", [n for n in ALL if n.endswith("bias")]),
        (r"^blocks\.1\.", [f"blocks.1.{n}" for n in BLOCK]),
        (r"fc\.weight$", ["blocks.0.fc.weight", "blocks.1.fc.weight"]),
        (["head.bias", "embed.weight"], ["embed.weight", "head.bias"]),
        (("head.bias", "head.bias"), ["head.bias"]),
        (["decoder.weight"], ["embed.weight"]),  # tied: the second name stands for the first
        (NET.blocks[0], [f"blocks.0.{n}" for n in BLOCK]),
        (NET.decoder, ["embed.weight", "decoder.bias"]),
        (NET, ALL),
        (
            lambda name, p: p.ndim == 2 and "lora" not in name,
            [n for n in ALL if n.endswith("weight") and "norm" not in n],
        ),
    ],
)
def test_selections(params: Any, expected: list[str]) -> None:
    assert select_parameters(NET, params) == ordered(expected)


def test_no_integer_is_ever_selected() -> None:
    assert "blocks.0.steps" in dict(NET.named_parameters())
    assert not any("steps" in name for name in select_parameters(NET, lambda *_: True))


def test_frozen_parameters_are_left_out_unless_all_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert select_parameters(model) == ["1.weight", "1.bias"]
    assert select_parameters(model, "all") == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert select_parameters(model, ["0.bias"]) == ["0.bias"]
    model.requires_grad_(False)
    assert select_parameters(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_last_layer_of_a_network_that_ends_in_a_norm_or_a_bare_parameter() -> None:
    assert select_parameters(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "last-layer") == [
        "0.weight",
        "0.bias",
    ]
    assert select_parameters(nn.Conv1d(1, 2, 3), "last-layer") == ["weight", "bias"]


def test_many_names_are_cut_short() -> None:
    error = refused(InputError, lambda: select_parameters(NET, "encoder"), "and ")
    assert str(error).count("'") < 25


def test_complex_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    refused(ModelError, lambda: select_parameters(model), "'phase'", "complex", "params=")
    assert select_parameters(model, "0") == ["0.weight", "0.bias"]


GENERATOR = torch.Generator().manual_seed(0)
IDS, Y = torch.randint(12, (14, 5), generator=GENERATOR), torch.arange(14) % 2
T = torch.randn(14, 2, generator=GENERATOR).double()


class Text(nn.Module):
    """Tokens, a normalization, a convolution and a head; the table is used twice if it is tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.e, self.n = nn.Embedding(12, 6), nn.LayerNorm(6)
        self.c, self.o, self.tied = nn.Conv1d(6, 4, 2), nn.Linear(4, 2), tied

    def forward(self, ids: Tensor) -> Tensor:
        h = self.n(self.e(ids))
        out: Tensor = self.o(torch.tanh(self.c(h.mT)).mean(2))
        if self.tied:
            out = out + (h.mean(1) @ self.e.weight.T)[:, :2]
        return out


def network(tied: bool = False) -> Text:
    torch.manual_seed(0)
    return Text(tied).double()


def some(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5


NEW = (torch.arange(12) >= 9)[:, None]  # rows of new tokens
MASKS: dict[str, dict[str, Tensor | bool | None]] = {
    "rows of a table": {"e.weight": NEW, "o.weight": None},
    "entries of a table": {"e.weight": some(12, 6), "o.bias": True},
    "rows of a layer": {"o.weight": torch.tensor([[True], [False]]), "o.bias": torch.tensor([True, False])},
    "entries of all": {"e.weight": NEW, "n.weight": some(6), "n.bias": some(6), "c.weight": some(4, 6, 2),
                       "c.bias": some(4), "o.weight": some(2, 4)},
}  # fmt: skip


def truth(net: nn.Module, masks: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """J (N·C, P) with zeros where entries do not vary, and where they do (P,), by autograd."""
    theta = {name: p.detach() for name, p in net.named_parameters() if name in masks}
    full = {n: torch.ones_like(p, dtype=torch.bool) for n, p in theta.items()}
    where = {n: full[n] & (masks[n] if isinstance(masks[n], Tensor) else full[n]) for n in theta}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (IDS,)))(theta)
    rows = torch.cat([(J[n] * where[n]).reshape(28, -1) for n in theta], 1)
    return rows, torch.cat([where[n].flatten() for n in theta])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_rows_of_the_jacobian_are_zero_where_nothing_varies(kind: str, tied: bool) -> None:
    net = network(tied)
    lin = linnet.linearize(net, MASKS[kind])
    J, where = truth(net, MASKS[kind])
    torch.testing.assert_close(lin.jacobian(IDS).reshape(28, -1), J)
    torch.testing.assert_close(lin.kernel(IDS).reshape(28, 28), J @ J.T)
    v, u = torch.randn(len(where)).double(), torch.randn(14, 2).double()
    torch.testing.assert_close(lin.jvp(IDS, v).flatten(), J @ v)
    torch.testing.assert_close(lin.vjp(IDS, u, like="flat"), J.T @ u.flatten())
    assert not lin.vjp(IDS, u, like="flat")[~where].any()
    with torch.no_grad():
        for value in lin.delta.values():
            value.fill_(1.0)
    torch.testing.assert_close((lin(IDS) - lin.base(IDS)).flatten(), J.sum(1))


@pytest.mark.parametrize("solver", ["dual", "primal", "cg", Sketch(8)])
def test_a_fit_moves_what_may_move(solver: Any) -> None:
    masks, net = MASKS["entries of all"], network()
    J, where = truth(net, masks)
    fit = linnet.fit(linnet.linearize(net, masks), (IDS, T), ridge=0.1, solver=solver)
    model = fit.module.model
    sketched = hasattr(model, "displacement")
    delta = model.displacement(fit.delta["epsilon"]) if sketched else fit.delta
    flat = torch.cat([delta[name].flatten() for name, _ in net.named_parameters() if name in masks])
    assert bool((flat[~where] == 0).all())
    if not sketched:
        residual = (T - net(IDS)).flatten().detach()
        beta = torch.linalg.solve(J @ J.T + 0.1 * torch.eye(28), residual)
        torch.testing.assert_close(flat, J.T @ beta, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("structure", ["full", "block", "diagonal", "kfac", "ekfac"])
def test_curvatures_are_zero_there(structure: str) -> None:
    masks, net = MASKS["entries of all"], network()
    J, where = truth(net, masks)
    G = linnet.curvature(linnet.linearize(net, masks), (IDS, Y), Categorical(), structure=structure).dense()
    if structure != "ekfac" and structure != "kfac":  # whose factors spread what they hold
        assert not G[~where].any()
    p = net(IDS).softmax(1).detach()
    Λ = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p))
    exact = J.T @ Λ @ J
    torch.testing.assert_close(G.trace(), exact.trace())
    if structure == "full":
        torch.testing.assert_close(G, exact)


def test_a_posterior_does_not_move_them_either() -> None:
    masks, net = MASKS["entries of all"], network()
    J, where = truth(net, masks)
    la = linnet.Laplace(net, Gaussian(), "full", prior_precision=2.0, params=masks).fit((IDS, T))
    draws = la.sample(5, seed=0)
    theta = torch.cat([p.detach().flatten() for n, p in net.named_parameters() if n in masks])
    assert bool((draws[:, ~where] == theta[~where]).all())
    H = J.T @ J + 2.0 * torch.eye(len(where))
    expected = (J @ torch.linalg.solve(H, J.T)).diagonal().view(14, 2)
    torch.testing.assert_close(la.predictive(IDS).variance, expected)


def hooked(kind: Callable[[nn.Parameter, Tensor], object]) -> Text:
    net = network()
    kind(net.e.weight, NEW.double())
    return net


HOOKS: list[Callable[[nn.Parameter, Tensor], object]] = [
    lambda p, m: p.register_hook(lambda g: g * m),
    lambda p, m: p.register_hook(lambda g: torch.where(m > 0, g, torch.zeros_like(g)).clamp(-1, 1)),
    lambda p, m: p.register_post_accumulate_grad_hook(lambda q: q.grad.mul_(m)),
]
OTHERS: list[Callable[[nn.Parameter, Tensor], object]] = [
    lambda p, m: p.register_hook(lambda g: 0.1 * g),
    lambda p, m: p.register_hook(lambda g: -g),
    lambda p, m: p.register_hook(lambda g: g * 0),
    lambda p, m: p.register_post_accumulate_grad_hook(lambda q: q.data.zero_()),
    lambda p, m: p.register_hook(lambda g: g / 0 if not m.any() else [].pop()),
]
CALLS: dict[str, Callable[[Any], Any]] = {
    "kernel": lambda net: linnet.linearize(net).kernel(IDS),
    "fit": lambda net: linnet.fit(linnet.linearize(net), (IDS, Y)).predict(IDS),
    "adapt": lambda net: linnet.adapt(net, (IDS, Y), weight=0.9, ridge=1.0).predict(IDS),
    "laplace": lambda net: linnet.Laplace(net, Categorical()).fit((IDS, Y)).predictive(IDS).variance,
    "gp": lambda net: linnet.TangentGP(net, Gaussian()).fit(IDS, T).predictive(IDS).variance,
}
GIVEN: dict[str, Callable[[Any, Any], Any]] = {
    "kernel": lambda net, params: linnet.linearize(net, params).kernel(IDS),
    "fit": lambda net, params: linnet.fit(linnet.linearize(net, params), (IDS, Y)).predict(IDS),
    "adapt": lambda net, params: linnet.adapt(
        net, (IDS, Y), params=params, weight=0.9, ridge=1.0).predict(IDS),
    "laplace": lambda net, params: linnet.Laplace(net, Categorical(), params=params)
    .fit((IDS, Y)).predictive(IDS).variance,
    "gp": lambda net, params: linnet.TangentGP(net, Gaussian(), params=params)
    .fit(IDS, T).predictive(IDS).variance,
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.thinned(2)
def test_hooks_that_zero_entries_are_obeyed(call: str) -> None:
    masks = {name: NEW if name == "e.weight" else None for name, _ in network().named_parameters()}
    expected, free = GIVEN[call](network(), masks), CALLS[call](network())
    assert not torch.allclose(expected, free)
    for hook in HOOKS:
        torch.testing.assert_close(CALLS[call](hooked(hook)), expected)


@pytest.mark.parametrize("hook", OTHERS)
def test_other_hooks_are_refused(hook: Callable[[nn.Parameter, Tensor], object]) -> None:
    net = hooked(hook)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ModelError, match="params="):
        linnet.linearize(net)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert net.e.weight.grad is None
    linnet.linearize(net, "last-layer").kernel(IDS)  # nobody asks for its gradient


def test_hooks_that_only_look_are_let_be() -> None:
    net = network()
    net.e.weight.register_hook(lambda g: None)
    torch.testing.assert_close(linnet.linearize(net).kernel(IDS), linnet.linearize(network()).kernel(IDS))


@pytest.mark.parametrize("wrong", [
    {"e.weight": torch.ones(12, 6)}, {"e.weight": torch.ones(5, 6) > 0}, {"e.weight": NEW & False},
    {"x": True}, {"e.weight": "new"}, {"e.weight": False}, {},
])  # fmt: skip
def test_what_is_no_mask_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError) as told:
        linnet.linearize(network(), wrong)
    assert "To fix it" in str(told.value)


def test_files_belong_to_networks_with_the_same_masks(tmp_path: Path) -> None:
    masks = MASKS["rows of a table"]
    lin = linnet.linearize(network(), masks)
    fit = linnet.fit(lin, (IDS, Y))
    fit.save(tmp_path)
    torch.testing.assert_close(
        linnet.load(tmp_path, linnet.linearize(network(), masks)).predict(IDS), fit.predict(IDS)
    )
    with pytest.raises(FileFormatError, match="another network"):
        linnet.load(tmp_path, network())


def test_what_cannot_obey_says_so() -> None:
    for ask in (
        lambda: linnet.adapt(hooked(HOOKS[0]), (IDS, Y), tune=True),
        lambda: linnet.finetune(hooked(HOOKS[0]), (IDS, Y)),
    ):
        with pytest.raises(LinnetError, match=r"hook|entries"):
            ask()


def test_rows_of_a_large_table_are_not_formed() -> None:
    """New tokens of a vocabulary of which the gradients of one example would take 51 MB an output."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50_000, 128), nn.Flatten(), nn.Linear(5 * 128, 2))
    new = (torch.arange(50_000) >= 49_990)[:, None]
    ids = torch.randint(49_980, 50_000, (8, 5))
    lin = linnet.linearize(net, {"0.weight": new})
    K = lin.kernel(ids, memory="100MB")
    seen = (ids[:, None, :, None] == ids[None, :, None, :]) & new[ids][:, None]  # (N, M, S, T)
    w = net[2].weight.detach().view(2, 5, 128)
    expected = torch.einsum("nmst,ksd,ltd->nkml", seen.squeeze(-1).float(), w, w)
    torch.testing.assert_close(K, expected, rtol=1e-4, atol=1e-4)


def test_lora_takes_what_is_trained_beside_its_matrices() -> None:
    inner = nn.ModuleDict(
        {"q_lora_A": nn.Linear(2, 2), "head": nn.ModuleDict({"modules_to_save": nn.Linear(2, 3)})}
    )
    names = ["q_lora_A.weight", "q_lora_A.bias", "head.modules_to_save.weight", "head.modules_to_save.bias"]
    assert select_parameters(inner, "lora") == names
    del inner["q_lora_A"]
    inner.peft_config = {}  # type: ignore[assignment]
    with pytest.raises(InputError, match="leave params= out for all that peft trains"):
        select_parameters(inner, "lora")
