"""The pictures of the start page and of the guides, each drawn from a run that takes seconds.

    python -m experiments.gallery            all of them, into docs/gallery
    python -m experiments.gallery stream     one of them

The picture of the report is a screenshot and needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.figures import COLORS, figure, save
from linnet.examples import load_digits

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "gallery"
_WIDTH, _HEIGHT = 900, 620  # of the screenshot, in pixels


def _digits(seed: int = 0) -> tuple[Tensor, Tensor]:
    """All digits, (N, 64) in [0, 1], and their labels, in a random order."""
    x, y = (torch.as_tensor(part) for part in load_digits())
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[order].flatten(1) / 255, y[order]


def _trained(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The network after some steps of Adam on the cross-entropy."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def curve() -> Any:
    """A tangent Gaussian process on ten points of a sine."""
    torch.manual_seed(0)
    place = torch.linspace(-3, 3, 200)[:, None]
    seen = place[40:150:11]
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    values = (2 * seen).sin()
    process = linnet.TangentGP(net, linnet.likelihoods.Gaussian(variance=0.01)).fit(seen, values)
    process.tune(noise=False)
    drawn, axes = figure()
    process.plot.curve(place, axes)
    axes.plot(seen, values, "k.", label="data")
    axes.plot(place, (2 * place).sin(), color="gray", linestyle=":", label="truth")
    axes.legend()
    axes.set(xlabel="input", ylabel="output", title="mean and two standard deviations")
    return drawn


def behind() -> Any:
    """A test digit, and the training digits that moved its prediction most."""
    torch.manual_seed(0)
    x, y = _digits()
    fit = linnet.adapt(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), (x[:100], y[:100]))
    query = x[100:101]
    label = int(fit.predict(query).argmax())
    influence = fit.influence(query)[:, 0, label]
    up, down = influence.topk(3), influence.topk(3, largest=False)
    shown = [(query[0], f"asked: a {label}?"), *((x[i], f"{v:+.2f}") for i, v in zip(*up[::-1], strict=True))]
    shown += [(x[i], f"{v:+.2f}") for i, v in zip(*down[::-1], strict=True)]
    drawn, axes = figure(7, 1, width=0.85, height=1.35)
    for axis, (image, title) in zip(axes, shown, strict=True):
        axis.imshow(image.view(8, 8), cmap="gray_r")
        axis.set_title(title, fontsize=8)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    drawn.suptitle("training samples that pushed the output up, and down", fontsize=9)
    return drawn


def unknown() -> Any:
    """Entropies of a classifier that has never seen an 8 or a 9, alone and under a Laplace posterior."""
    torch.manual_seed(0)
    x, y = _digits()
    known = y < 8
    inside, labels, outside = x[known], y[known], x[~known]
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    _trained(net, inside[:200], labels[:200], 300)
    posterior = linnet.Laplace(net, linnet.likelihoods.Categorical(), structure="kfac")
    posterior.fit((inside[:200], labels[:200])).tune("validation", data=(inside[200:400], labels[200:400]))
    drawn, axes = figure(2, 1, width=2.6)
    with torch.no_grad():
        alone = [net(part).softmax(1) for part in (inside[400:], outside)]
    averaged = [posterior.predictive(part).probs for part in (inside[400:], outside)]
    for axis, title, parts in zip(axes, ("network", "Laplace"), (alone, averaged), strict=True):
        for part, name, color in zip(parts, ("known digits", "unknown digits"), COLORS, strict=False):
            entropy = -torch.special.xlogy(part, part).sum(1)
            axis.hist(entropy.numpy(), 20, (0, 2.08), density=True, alpha=0.6, color=color, label=name)
        axis.set(title=title, xlabel="entropy of the prediction", yticks=[])
    axes[0].legend()
    return drawn


def stream() -> Any:
    """Average accuracy over the tasks so far: plain training, and with the posterior of the past as prior."""
    torch.manual_seed(0)
    patterns = torch.randn(10, 64)

    def task(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        order, labels = torch.randperm(64, generator=generator), torch.arange(400) % 10
        return (patterns[labels] + torch.randn(400, 64, generator=generator))[:, order], labels

    tasks = [task(index) for index in range(6)]

    def averages(strength: float | None) -> list[float]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        likelihood = linnet.likelihoods.Categorical()
        method = linnet.continual.OnlineLaplace(net, likelihood, structure="kfac", strength=strength or 1.0)
        found = []
        for number, (x, y) in enumerate(tasks, 1):
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
            for _ in range(100):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                if strength is not None:
                    method.add_grad_(examples=len(x))
                optimizer.step()
            if strength is not None:
                method.consolidate((x, y))
            with torch.no_grad():
                right = [(net(a).argmax(1) == b).double().mean() for a, b in tasks[:number]]
            found.append(float(torch.stack(right).mean()))
        return found

    drawn, axes = figure()
    axes.plot(range(1, 7), averages(30.0), "o-", label="online Laplace")
    axes.plot(range(1, 7), averages(None), "s-", label="plain training")
    axes.set(xlabel="tasks learned", ylabel="accuracy on all of them", ylim=(0, 1.02))
    axes.legend()
    return drawn


def spectrum() -> Any:
    """The eigenvalues of a kernel on digits, and the part of each that the ridge leaves."""
    torch.manual_seed(0)
    x, y = _digits()
    net = _trained(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), x[500:], y[500:], 60)
    fit = linnet.fit(linnet.linearize(net), (x[:100], y[:100]), ridge="loo")
    drawn, axes = figure()
    fit.plot.spectrum(axes)
    return drawn


def report(file: Path) -> None:
    """The first screen of the page that `linnet demo` writes."""
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the picture of the report needs chromium or google-chrome")
    with TemporaryDirectory() as folder:
        page, picture = Path(folder, "demo", "report.html"), Path(folder, "page.png")
        subprocess.run([sys.executable, "-m", "linnet", "demo", "--out", str(page.parent)], check=True)
        size = f"--window-size={_WIDTH},{_HEIGHT}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        subprocess.run([browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True)
        Image.open(picture).convert("RGB").save(file, quality=80)


DRAWN: dict[str, Callable[[], Any]] = {
    "curve": curve, "behind": behind, "unknown": unknown, "stream": stream, "spectrum": spectrum,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Make the pictures that are named, or all."""
    for name in names or [*DRAWN, "report"]:
        file = FOLDER / f"{name}.webp"
        if name == "report":
            report(file)
        else:
            save(DRAWN[name](), file)
        print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
