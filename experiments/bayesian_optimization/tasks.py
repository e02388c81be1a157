"""Families of tuning tasks: every task is a table of costs at the same candidates in the unit cube.

``pendulum``: the gains of a controller with torque limit and lag that turns a pendulum to an angle; tasks
differ in mass, length, friction, lag, limit and angle. ``digits``: principal components and a support vector
classifier of scikit-learn's digits; tasks differ in classes, number of images and share of wrong labels.
``diabetes``: kernel ridge regression with one length scale for the body and one for the serum measurements;
tasks differ in patients and measurements. Cost is to be minimized; its unit is the family's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

Array = npt.NDArray[np.float64]
CANDIDATES, DIMENSIONS = 512, 3
SPLITS = {"earlier": 0, "development": 1000, "reported": 2000}  # the first seed of each


def candidates() -> Tensor:
    """The points that can be evaluated, (512, 3) in the unit cube."""
    return SobolEngine(DIMENSIONS, scramble=True, seed=0).draw(CANDIDATES, dtype=torch.float64)


def pendulum(x: Array, seed: int) -> Array:
    """Log of the time-weighted error of a controller with gains x, over three seconds."""
    source = np.random.default_rng([1, seed])
    mass, length = np.exp(source.uniform(np.log([0.2, 0.3]), np.log([2.0, 1.0])))
    friction, lag, ratio, angle = source.uniform([0.01, 0.02, 1.5, 0.5], [0.3, 0.1, 3.0, 2.0])
    kp, ki, kd = 10 ** (np.array([-0.5, -1.0, -1.5]) + x * np.array([3.0, 3.5, 3.0])).T
    weight, inertia, step = mass * 9.81 * length, mass * length**2, 0.01
    theta, speed, torque, total, cost = (np.zeros(len(x)) for _ in range(5))
    for i in range(300):
        error = angle - theta
        total = total + step * error
        wanted = np.clip(kp * error + ki * total - kd * speed, -ratio * weight, ratio * weight)
        torque = torque + step / lag * (wanted - torque)
        speed = speed + step * (torque - friction * speed - weight * np.sin(theta)) / inertia
        theta = theta + step * speed
        cost += step * (i * step) * np.abs(error)
    return np.log10(cost / angle)


def digits(x: Array, seed: int) -> Array:
    """Share of wrong predictions on 400 held-out images."""
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.svm import SVC

    source = np.random.default_rng([2, seed])
    images, labels = load_digits(return_X_y=True)
    count, wrong = int(np.exp(source.uniform(np.log(50), np.log(200)))), source.uniform(0, 0.15)
    own = np.flatnonzero(np.isin(labels, source.permutation(10)[:5]))
    order = source.permutation(own)
    train, test = order[:count], order[count : count + 400]
    taught = labels[train].copy()
    flipped = source.random(count) < wrong
    taught[flipped] = source.permutation(taught)[flipped]
    reduced = PCA(40, random_state=0).fit(images[train] / 16)
    known, new = reduced.transform(images[train] / 16), reduced.transform(images[test] / 16)
    found = []
    for c, gamma, share in x:
        k = round(2 * 20**share)
        model = SVC(C=10 ** (5 * c - 2), gamma=10 ** (5 * gamma - 4)).fit(known[:, :k], taught)
        found.append(np.mean(model.predict(new[:, :k]) != labels[test]))
    return np.array(found)


def diabetes(x: Array, seed: int) -> Array:
    """Mean squared error on held-out patients, relative to the variance of the targets."""
    from sklearn.datasets import load_diabetes
    from sklearn.kernel_ridge import KernelRidge

    source = np.random.default_rng([3, seed])
    inputs, target = load_diabetes(return_X_y=True)
    inputs, target = inputs / inputs.std(0), (target - target.mean()) / target.std()
    kept = np.sort(np.concatenate([source.permutation(4)[:3], 4 + source.permutation(6)[:4]]))
    order, count = source.permutation(len(target)), int(source.integers(40, 160))
    train, test = order[:count], order[count:]
    center = target[train].mean()
    body = kept < 4
    found = []
    for ridge, own, serum in x:
        scale = np.where(body, 10 ** (2 * own - 1.5), 10 ** (2 * serum - 1.5))
        model = KernelRidge(alpha=10 ** (4 * ridge - 2), kernel="rbf", gamma=0.5)
        model.fit(inputs[train][:, kept] * scale, target[train] - center)
        error = model.predict(inputs[test][:, kept] * scale) + center - target[test]
        found.append(np.mean(error**2) / np.var(target[test]))
    return np.array(found)


FAMILIES = {"pendulum": pendulum, "digits": digits, "diabetes": diabetes}


def costs(family: str, split: str, tasks: int) -> Tensor:
    """The tables of some tasks.

    Args:
        family: One of ``FAMILIES``.
        split: "earlier", "development" or "reported": no task is in two.
        tasks: How many.

    Returns:
        (tasks, 512), at the candidates.
    """
    x = candidates().numpy()
    first = SPLITS[split]
    return torch.from_numpy(np.stack([FAMILIES[family](x, first + i) for i in range(tasks)]))
