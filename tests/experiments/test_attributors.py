"""Scores of flipped digits: the network that all share, and the rows of a table from cells."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from experiments.labels import attributors


def test_training_leaves_the_start_and_is_that_of_plain_steps() -> None:
    torch.manual_seed(0)
    start = attributors.made("logistic regression")
    x, labels = torch.randn(6, 784), torch.arange(6)
    before = start[0].weight.clone()
    net = attributors.trained(start, 0.0, x, labels)
    assert torch.equal(start[0].weight, before)
    weight, bias = before.detach(), start[0].bias.detach()
    for _ in range(attributors.EPOCHS):
        error = F.linear(x, weight, bias).softmax(1) - F.one_hot(labels, 10)
        weight, bias = weight - 0.01 * error.T @ x / 6, bias - 0.01 * error.mean(0)
    torch.testing.assert_close(net(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_the_table_has_paired_differences_and_the_best_value_of_hindsight_alone() -> None:
    network = "logistic regression"
    areas = {
        "loss": (0.9, 0.95), "TRAK": (0.8, 0.9), "influence, explicit, 0.01": (0.5, 0.5),
        "influence, explicit, 0.001": (0.3, 0.3), "influence, explicit, 0.1": (0.6, 0.5),
        "influence, explicit, 1": (0.4, 0.5),
    }  # fmt: skip
    cells: list[dict[str, Any]] = [
        {"network": network, "seed": seed, "areas": {name: of[seed]}, "seconds of": {name: 1.0}}
        for name, of in areas.items()
        for seed in (1, 0)
    ]
    rows = [line.split(" | ") for line in attributors.regression_table(cells).splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == [
        "loss", "dattri: TRAK", "dattri: influence, explicit, 0.1 (best of four in hindsight)",
        "dattri: influence, explicit, 0.01",
    ]  # fmt: skip
    assert rows[0][2] == "7.50 ± 2.50"
    assert rows[1][2] == "–"
