"""Figure 1: neural anisotropy directions, and how well networks generalize on each.

Ortiz-Jimenez et al., supplement C: the first ten NADs of LeNet and ResNet18 with GELU at the origin, with
their Fourier magnitudes; and test accuracy on the linearly separable D(u) of eq. (C.1), ε = σ = 1, against
the index of the NAD u: networks generalize on the first ones and not on the last, though every D(u) is as
easy for a linear classifier.

Images are 1 × 32 × 32, as in Ortiz-Jimenez et al., "Neural anisotropy directions" (NeurIPS 2020). Pooling is
by means: at the origin all inputs of a maximum tie, and there is no derivative.

    python -m experiments.kernels.directions --threads 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.kernels.networks import accuracy, lenet, resnet18, train
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import spectrum
from linnet.linalg.random import normal, signs

NETWORKS = ("LeNet", "ResNet18")
INDICES = (0, 4, 16, 64, 256)
SHOWN = 10


def make(name: str, seed: int, width: int) -> nn.Module:
    """A smooth network with one channel and one output."""
    torch.manual_seed(seed)
    if name == "LeNet":
        return lenet(1, activation=nn.GELU, pool=nn.AvgPool2d).eval()
    return resnet18(1, width, activation=nn.GELU).eval()


def directions(name: str, seed: int, width: int, count: int, device: str) -> spectrum.AnisotropyDirections:
    """NADs at the origin."""
    return spectrum.anisotropy_directions(
        make(name, seed, width).to(device), torch.zeros(1, 32, 32, device=device), k=count, tolerance=1e-4
    )


def first_ten(name: str, seed: int, width: int, device: str) -> dict[str, Any]:
    """The ten leading directions, and how concentrated their energy is in space and in frequency."""
    found = directions(name, seed, width, SHOWN, device)
    fourier = found.fourier_magnitudes()[:, 0]
    power = fourier.square() / fourier.square().sum((1, 2), keepdim=True)
    far = torch.fft.fftshift(torch.fft.fftfreq(32)).abs()
    radius = (far[:, None].square() + far[None].square()).sqrt().to(power)
    return {
        "singular_values": found.singular_values.tolist(), "mismatch": found.mismatch,
        "frequency": (power * radius).sum((1, 2)).tolist(),
        "largest": power.flatten(1).topk(2, dim=1).values.sum(1).tolist(),
        "images": (found.images()[:, 0] * 255).round().int().tolist(),
        "fourier": (255 * fourier / fourier.amax((1, 2), keepdim=True)).round().int().tolist(),
    }  # fmt: skip


def separable_data(u: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """D(u) of eq. (C.1): x = y u + w with y = ±1 and w ~ N(0, I − uuᵀ), for the unit vector along u."""
    generator, flat = torch.Generator().manual_seed(seed), (u / u.norm()).reshape(-1)
    y = signs((count,), generator, u.dtype, u.device)
    noise = normal((count, flat.numel()), generator, u.dtype, u.device)
    x = y[:, None] * flat + (noise - (noise @ flat)[:, None] * flat)
    return x.reshape(count, *u.shape), y


def learn(name: str, u: Tensor, seed: int, size: tuple[int, int], epochs: int, width: int) -> dict[str, Any]:
    """Train on D(u) and test."""
    count, tests = size
    x, y = separable_data(u, count, seed)
    x_test, y_test = separable_data(u, tests, seed + 1000)
    network = train(make(name, seed, width).to(u.device), x, y, epochs, 128, seed)
    return {"accuracy": accuracy(network, x_test, y_test), "training accuracy": accuracy(network, x, y)}


def draw(pictures: dict[str, dict[str, Any]], cells: list[dict[str, Any]], study: Study) -> None:
    """Pictures of the first ten, then accuracy against the index."""
    drawn, axes = figure(SHOWN, 2 * len(pictures), width=0.8, height=0.85)
    for row, (name, found) in enumerate(pictures.items()):
        for j in range(SHOWN):
            space, fourier = axes[2 * row][j], axes[2 * row + 1][j]
            space.imshow(np.array(found["images"][j]), cmap="gray", vmin=0, vmax=255)
            fourier.imshow(np.array(found["fourier"][j]), cmap="magma", vmin=0, vmax=255)
            for panel in (space, fourier):
                panel.set(xticks=[], yticks=[])
                panel.grid(False)
            space.set_title(f"{name}, {j + 1}" if not j else str(j + 1), fontsize=6)
    save(drawn, study.out / "directions.svg")
    drawn, axes = figure()
    for color, name in zip(COLORS, pictures, strict=False):
        indices = sorted({c["index"] for c in cells if c["network"] == name and "index" in c})
        values = [chosen(cells, "accuracy", network=name, index=j) for j in indices]
        means = [100 * sum(v) / len(v) for v in values]
        axes.plot([j + 1 for j in indices], means, "o-", color=color, ms=4, label=name)
    axes.set(
        xscale="log", xlabel="index of the NAD, from 1", ylabel="test accuracy on D(u) (%)", ylim=(45, 102)
    )
    axes.legend(fontsize=7)
    save(drawn, study.out / "directions_accuracy.svg")


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument(
        "--samples", type=int, default=None, help="samples of D(u) (default 3000, ResNet 1500)"
    )
    options.add_argument(
        "--epochs", type=int, default=None, help="epochs (default 40, ResNet 8; 100 in full)"
    )
    options.add_argument(
        "--indices", nargs="*", type=int, default=None, help="directions to learn; without any, pictures only"
    )
    options.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    arguments = options.parse_args(words)
    full, study, cells = arguments.full, Study("kernels/directions", arguments), []
    width = 64 if full else 8
    pictures: dict[str, dict[str, Any]] = {}
    for name in arguments.networks:
        small = name == "ResNet18" and not full
        samples = arguments.samples or (10000 if full else 1500 if small else 3000)
        epochs = arguments.epochs or (100 if full else 8 if small else 40)
        usual = [*(INDICES[::2] if small else INDICES), *((1000,) if full else ())]
        indices = usual if arguments.indices is None else arguments.indices
        for seed in study.seeds:
            what = {"network": name, "seed": seed, "first": SHOWN, "width": width}
            found = study.cell(what, lambda n=name, s=seed: first_ten(n, s, width, arguments.device))  # type: ignore[misc]
            pictures.setdefault(name, found)
            cells.append({k: v for k, v in found.items() if k not in ("images", "fourier")})
        for seed in study.seeds:
            known: dict[int, spectrum.AnisotropyDirections] = {}
            for index in indices:
                what = {"network": name, "seed": seed, "index": index, "samples": samples, "epochs": epochs,
                        "width": width}  # fmt: skip

                def compute(
                    n: str = name, s: int = seed, j: int = index, size: int = samples, e: int = epochs,
                    all_of: Any = known, count: int = max(indices) + 1,
                ) -> dict[str, Any]:  # fmt: skip
                    if s not in all_of:
                        all_of[s] = directions(n, s, width, count, arguments.device)
                    value = float(all_of[s].singular_values[j])
                    return {
                        "singular_value": value,
                        **learn(n, all_of[s].directions[j], s, (size, 2000), e, width),
                    }

                cells.append(study.cell(what, compute))
    study.publish(table(cells) + "\n\n" + frequencies(cells), cells)
    draw(pictures, cells, study)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: accuracies on D(u)."""
    rows = []
    learned = [cell for cell in cells if "index" in cell]
    for name in dict.fromkeys(cell["network"] for cell in learned):
        for index in sorted({cell["index"] for cell in learned if cell["network"] == name}):
            own = {"network": name, "index": index}
            rows.append([
                name, f"u {index}", len(chosen(learned, "seed", **own)),
                with_error(chosen(learned, "singular_value", **own), 4),
                with_error(chosen(learned, "training accuracy", **own), scale=100),
                with_error(chosen(learned, "accuracy", **own), scale=100),
            ])  # fmt: skip
    return markdown(
        ["network", "direction", "seeds", "singular value", "training accuracy %", "test accuracy %"], rows
    )


def frequencies(cells: Sequence[Cell]) -> str:
    """Markdown: how fast the first ten directions are."""
    rows = []
    firsts = [cell for cell in cells if "frequency" in cell]
    for name in dict.fromkeys(cell["network"] for cell in firsts):
        values = chosen(firsts, "singular_values", network=name)
        rates = chosen(firsts, "frequency", network=name)
        rows.append([
            name, len(rates), with_error((v[0] for v in values), 4), with_error((v[-1] for v in values), 4),
            with_error((f[0] for f in rates), 2), with_error((sum(f) / len(f) for f in rates), 2),
            with_error(map(min, rates), 2), with_error(map(max, rates), 2),
            with_error((s[0] for s in chosen(firsts, "largest", network=name)), 2),
        ])  # fmt: skip
    header = [
        "network", "seeds", "1st singular value", "10th", "radial frequency, 1st", "mean of ten",
        "lowest of ten", "highest of ten", "share of the strongest pair of frequencies, 1st",
    ]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
