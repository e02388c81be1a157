"""What the studies of coverage compute, against plain refits."""

from __future__ import annotations

import torch

import linnet
from experiments.adapt import kept
from experiments.coverage import conformal
from linnet.nested import tuning


def test_a_ridge_chosen_anew_without_each_sample() -> None:
    g = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (9, 4))
    y = x[:, :1].sin() + 0.3 * torch.randn(9, 1, generator=g, dtype=torch.float64)
    fit = linnet.fit(linnet.linearize(conformal.network(3, 0)), (x, y), ridge="loo")
    left, errors = conformal.chosen_anew(fit, new)
    grid = fit.ridge * torch.logspace(-2, 2, 25, dtype=torch.float64)
    kernel, cross = fit.system.kernel, torch.cat(list(fit.system.kernel_to_train(new))).view(4, 9)
    r, start = fit.system.residual[:, 0], y[:, 0] - fit.system.residual[:, 0]

    def solved(rows: list[int], ridge: float) -> torch.Tensor:
        return torch.linalg.solve(kernel[rows][:, rows] + ridge * torch.eye(len(rows)).double(), r[rows])

    for i in range(9):
        sums = []
        for ridge in grid.tolist():
            total = 0.0
            for j in set(range(9)) - {i}:
                rest = [k for k in range(9) if k not in (i, j)]
                total += float(r[j] - kernel[j, rest] @ solved(rest, ridge)) ** 2
            sums.append(total)
        best, rest = float(grid[min(range(25), key=sums.__getitem__)]), [k for k in range(9) if k != i]
        beta = solved(rest, best)
        assert torch.allclose(errors[i, 0], (y[i, 0] - start[i] - kernel[i, rest] @ beta).abs())
        assert torch.allclose(left[i, :, 0], fit._start(new)[:, 0] + cross[:, rest] @ beta)


def test_rules_keep_what_they_say() -> None:
    cells = [
        {
            "before": 50.0,
            "after": 50.0 + gain,
            "gain": 0.1,
            "gain error": 0.05,
            "points": points,
            "points error": 2,
        }
        for gain, points in ((4.0, 3.0), (1.0, 0.0), (-3.0, -1.0))
    ]
    rows = dict(line.strip("| ").split(" | ", 1) for line in kept.table(cells).splitlines()[2:])
    assert rows["always"] == "3 of 3 | 0.7 ± 2.0 | -3.0"
    assert rows["no fewer right, nor more error by one standard error"] == "2 of 3 | 1.7 ± 1.2 | 0.0"
    assert rows["more right by one standard error"].startswith("1 of 3")


def test_training_is_taken_to_its_end_whatever_folds_say() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x = torch.randn(24, 2)
    fit = linnet.adapt(net, (x, torch.arange(24) % 2))  # labels that nothing can learn
    before = tuning.ladder, tuning.ERRORS
    with kept.whatever_folds_say():
        assert tuning.tuned(fit, 0).trained
    assert (tuning.ladder, tuning.ERRORS) == before
