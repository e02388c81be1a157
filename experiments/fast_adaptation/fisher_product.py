"""Fisher-vector products by differences against exact ones (Maddox et al. 2021, figure A.1).

The product F v is the directional derivative of ∇ KL(p_θ ‖ p_θ'), taken by differences with step ε along v
/ ‖v‖, for v the gradient of the loss: relative error ‖F v − exact‖ / ‖exact‖ (C.2). The paper has a
PreResNet-56 on CIFAR-10, every 25 epochs of training: about 10⁻³, below 1 % for most ε, growing where ε is
too small (rounding) or too large. Here a PreResNet-20 (``--depth``) is trained on CIFAR-10 from scratch,
its products measured after several epochs, beside the ResNet-20 and ResNet-56 that others trained to the
end. The library's own rule for ε is measured too, and one-sided differences, which the paper's formula has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.fast_adaptation.networks import PreResNet
from experiments.figures import COLORS, figure, save
from experiments.sources import CIFAR, images, pixels, pretrained
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.curvatures import MatrixFree
from linnet.likelihoods import Categorical

STEPS = tuple(10.0 ** (e / 2) for e in range(-14, 1))  # ε in units of ‖v‖, 1e-7 to 1
GOAL = 0.01


def flat_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """∇ loss, (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def moved_gradient(model: nn.Module, x: Tensor, p: Tensor, direction: Tensor, epsilon: float) -> Tensor:
    """∇_θ' mean KL(p ‖ p_θ') at θ' = θ + ε u, as the paper computes it: in the network's own precision."""
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(theta + epsilon * direction, model.parameters())
    try:
        divergence = -(p * model(x).log_softmax(1)).sum(1).mean()
        return flat_gradient(divergence, model)
    finally:
        torch.nn.utils.vector_to_parameters(theta, model.parameters())


def measured(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Relative errors for every ε, one-sided and central, and of the library's own products."""
    model = model.eval()
    gradient = flat_gradient(F.cross_entropy(model(x), y), model)
    length = float(gradient.norm())
    unit = gradient / length
    lin, products = linnet.linearize(model, params="all"), MatrixFree(derivative="finite-difference")
    exact = linnet.curvature(lin, (x, y), Categorical(), "matrix-free") @ gradient / len(x)
    own = linnet.curvature(lin, (x, y), Categorical(), products, matrix="fisher") @ gradient / len(x)
    with torch.no_grad():
        p = model(x).softmax(1)
    start = moved_gradient(model, x, p, unit, 0.0)

    def error(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    forward, central = [], []
    for epsilon in STEPS:
        ahead = moved_gradient(model, x, p, unit, epsilon)
        behind = moved_gradient(model, x, p, unit, -epsilon)
        forward.append(error((ahead - start) * (length / epsilon)))
        central.append(error((ahead - behind) * (length / (2 * epsilon))))
    return {"steps": list(STEPS), "forward": forward, "central": central, "library": error(own),
            "gradient": length, "accuracy": float((p.argmax(1) == y).double().mean())}  # fmt: skip


def trained(
    data: tuple[Tensor, Tensor], depth: int, width: int, epochs: list[int], seed: int
) -> list[tuple[int, nn.Module]]:
    """A PreResNet after the epochs listed, by SGD with momentum as in the paper."""
    torch.manual_seed(seed)
    model, found = PreResNet(depth, width), []
    last = max(epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, y = data
    for epoch in range(last + 1):
        if epoch in epochs:
            kept = PreResNet(depth, width)
            kept.load_state_dict(model.state_dict())
            found.append((epoch, kept))
        if epoch == last:
            break
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / last))
        model.train()
        for index in torch.randperm(len(x)).split(128):
            batch = x[index].flip(3) if torch.rand(()) < 0.5 else x[index]
            loss = F.cross_entropy(model(batch), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Figures 3 and A.1: one-sided on the left, central on the right."""
    drawn, axes = figure(columns=2, width=3.6, height=3.0)
    for ax, kind in zip(axes, ("forward", "central"), strict=True):
        for color, name in zip(COLORS, dict.fromkeys(cell["network"] for cell in cells), strict=False):
            for k, cell in enumerate(cell for cell in cells if cell["network"] == name):
                ax.loglog(cell["steps"], cell[kind], color=color, label=None if k else name)
        ax.axhline(GOAL, color="black", lw=0.8, ls="--")
        ax.set(xlabel="ε", ylabel="relative error", title=f"{kind} differences", ylim=(1e-5, 10))
    axes[0].legend(fontsize=7)
    save(drawn, study.out / "fisher_product.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--images", type=int, default=32, help="images that products are summed over")
    options.add_argument("--train", type=int, default=1000, help="images trained on")
    options.add_argument("--depth", type=int, default=20)
    options.add_argument("--width", type=int, default=8, help="channels of the first stage (the paper: 16)")
    options.add_argument("--epochs", type=int, nargs="+", default=[0, 2, 6])
    options.add_argument("--pretrained", nargs="*", default=["resnet20", "resnet56"])
    given = options.parse_args(arguments)
    if given.full:
        given.depth, given.width, given.train, given.images = 56, 16, 10_000, 256
        given.epochs = list(range(0, 201, 25))
    study = Study("fast_adaptation/fisher_product", given)
    sets = images("cifar10_10k_5k", given.data_dir)
    x, y = pixels(sets.test_x[: given.images], CIFAR), sets.test_y[: given.images]
    cells: list[dict[str, Any]] = []
    networks: dict[int, dict[int, nn.Module]] = {}

    def after(epoch: int, seed: int) -> nn.Module:
        if seed not in networks:
            data = pixels(sets.train_x[: given.train], CIFAR), sets.train_y[: given.train]
            networks[seed] = dict(trained(data, given.depth, given.width, given.epochs, seed))
        return networks[seed][epoch]

    for seed in study.seeds:
        for epoch in given.epochs:
            what = {"network": f"PreResNet-{given.depth}, epoch {epoch}", "seed": seed, "images": len(x),
                    "train": given.train, "width": given.width}  # fmt: skip
            cells.append(study.cell(what, lambda e=epoch, s=seed: measured(after(e, s), x, y)))
    for name in given.pretrained:
        model, normalization = pretrained(name, given.data_dir)
        other = pixels(sets.test_x[: given.images], normalization)
        what = {"network": name.replace("resnet", "ResNet-") + ", trained", "seed": 0, "images": len(x)}
        cells.append(study.cell(what, lambda m=model, o=other: measured(m.requires_grad_(True), o, y)))
    study.publish(table(cells), cells, published="about 1e-3, below 1 % for most ε")
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: smallest errors, where they are, and how many ε have less than 1 %, by network."""
    rows = []
    for name in dict.fromkeys(cell["network"] for cell in cells):
        own = [cell for cell in cells if cell["network"] == name]
        row = [name, with_error((c["accuracy"] for c in own), 0, 100)]
        for kind in ("forward", "central"):
            best = [min(zip(c[kind], c["steps"], strict=True)) for c in own]
            row += [with_error((error for error, _ in best), 2, 100),
                    with_error((math.log10(step) for _, step in best), 1),
                    with_error((sum(error < GOAL for error in c[kind]) for c in own), 1)]  # fmt: skip
        rows.append([*row, with_error((c["library"] for c in own), 2, 100)])
    header = ["network", "accuracy %"]
    for kind in ("one-sided", "central"):
        header += [f"least error %, {kind}", "log₁₀ of its ε", f"ε below 1 %, of {len(STEPS)}"]
    return markdown([*header, "with linnet's own ε, %"], rows)


if __name__ == "__main__":
    main()
