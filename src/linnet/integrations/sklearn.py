"""Linear fits as scikit-learn estimators; needs ``pip install 'linnet-torch[sklearn]'``."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet import params as check
from linnet.curvatures.build import curvature
from linnet.errors import DataError, InputError
from linnet.fitting.fit import fit
from linnet.fitting.sketch import with_metric
from linnet.integrations import classes
from linnet.integrations.pretrained import random_units
from linnet.likelihoods import Categorical, Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.targets import CLASSES, VALUES
from linnet.nested.adapt import adapt
from linnet.tangent.batch import split
from linnet.tangent.inputs import require_no_times
from linnet.tangent.linearized import linearize

if TYPE_CHECKING:
    LinnetClassifier: Any
    LinnetRegressor: Any

METHODS = ("adapt", "fit")
BATCH = 1024  # examples that are predicted at once
FLOATS = (np.float64, np.float32)


class _Standardize(nn.Module):
    """(x − m)/s with the mean and the standard deviation of each feature."""

    # x (N, D)

    mean: Tensor
    spread: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        spread = x.std(0, correction=0)
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("spread", torch.where(spread > 0, spread, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardized features (N, D)."""
        found: Tensor = (x - self.mean) / self.spread
        return found


def _random_network(x: Tensor, outputs: int) -> nn.Module:
    """Random units on standardized features."""
    flat = x.flatten(1)
    return random_units(flat.shape[1], outputs, nn.Flatten(), _Standardize(flat)).to(x.dtype)


class _Estimator(ABC):
    """What the classifier and the regressor share."""

    network: nn.Module | Callable[[int, int], nn.Module] | None
    method: str
    ridge: float | str
    solver: Any
    metric: str | None
    tune: bool
    random_state: Any
    n_features_in_: int
    fit_: Any
    loss: str
    _likelihood: Likelihood  # of a metric's curvature

    def _validated(self, *given: Any, **options: Any) -> Any:
        """Arrays that are checked."""
        from sklearn.utils.validation import validate_data  # since 1.6

        for name, value in zip(("X", "y"), given, strict=False):
            # which scikit-learn takes as nanoseconds, or cannot join with numbers
            require_no_times(value if hasattr(value, "columns") else np.asarray(value), name)
        return validate_data(self, *given, **options)

    def inputs(self, X: Any) -> Tensor:
        """Examples as ``fit_`` takes them, such as for ``fit_.influence``.

        Args:
            X: (T, ...), like those of the fit.

        Returns:
            A tensor of the network's type on its device.
        """
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return self._tensor(self._validated(X, reset=False, dtype=FLOATS, allow_nd=True))

    def _tensor(self, array: Any) -> Tensor:
        """An array of its own for the network."""
        return torch.from_numpy(np.array(array)).to(device=self._device, dtype=self._dtype)

    def _weights(self, X: Any, given: Any) -> Any:
        """Weights of the examples, (N,), of which some may be zero; ``None`` for ones."""
        from sklearn.utils.validation import _check_sample_weight

        return (
            None
            if given is None
            else _check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=True)
        )

    def _fit(self, X: Any, y: Tensor, outputs: int, weights: Any = None) -> None:
        """Make ``fit_`` of C outputs, of the examples whose weight is not zero."""
        from sklearn.utils import check_random_state

        self._check()
        if weights is not None and not weights.all():
            counted = weights > 0
            X, y, weights = X[counted], y[torch.from_numpy(counted)], weights[counted]
            if not y.is_floating_point() and len(y.unique()) < outputs:
                raise DataError(
                    "a class has no example whose weight is positive",
                    expected="an example that counts of every class in y",
                    remedy="leave the examples of such classes out of X and y",
                )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        network = self._made(X, outputs, seed)
        parameter = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(1))
        self._device, self._dtype = parameter.device, parameter.dtype
        x = self._tensor(X)
        data = x, y.to(self._device)
        if self.method == "adapt":
            ridge = None if self.ridge == "loo" else self.ridge
            options = {"ridge": ridge, "seed": seed, "tune": self.tune, "sample_weight": weights}
            with warnings.catch_warnings():  # whether y are classes is what the estimator says
                warnings.filterwarnings("ignore", f"{CLASSES}|{VALUES}", UserWarning)
                self.fit_ = adapt(network, data, **options)
            return
        if self.metric is not None:
            metric = curvature(network, data, self._likelihood, structure=self.metric)
            network = with_metric(network, metric)
        options = {"loss": self.loss, "ridge": self.ridge, "solver": self.solver, "sample_weight": weights}
        self.fit_ = fit(linearize(network), data, **options)
        found = self.fit_.targets.shape[1]
        if found != outputs and not (found == 1 and outputs == 2):
            raise InputError(
                f"the network has {found} outputs for {outputs} classes",
                expected="as many outputs as classes, in the order of classes_",
                remedy='leave method="adapt", which gives the network a head of its own',
            )

    def _check(self) -> None:
        """Raise on settings that do not go together."""
        check.choice("method", self.method, METHODS)
        check.flag("tune", self.tune)
        other: dict[str, tuple[Any, Any]]
        if self.method == "fit":
            other = {"tune": (self.tune, False)}
            if self.network is None:
                raise InputError(
                    "method='fit' without a network",
                    expected="a trained network, or a function that makes one",
                    remedy='pass network=, or leave method="adapt"',
                )
        else:
            other = {
                "loss": (self.loss, "squared"),
                "solver": (self.solver, "auto"),
                "metric": (self.metric, None),
            }
            if isinstance(self.ridge, str):
                check.choice("ridge", self.ridge, ("loo",), remedy='pass ridge="loo", or ρ > 0')
        for name, (value, kept) in other.items():
            if value is not kept and value != kept:
                raise InputError(
                    f"{name}={value!r} with method={self.method!r}",
                    expected=f"{name}={kept!r}",
                    remedy=f"leave {name}= out, or pass method={METHODS[self.method == 'adapt']!r}",
                )

    def _made(self, X: Any, outputs: int, seed: int) -> nn.Module:
        """The network: the one given, or made from the seed without touching torch's own."""
        given = self.network
        if isinstance(given, nn.Module):
            return given
        expected = "a torch.nn.Module, a function (n_features, n_outputs) that makes one, or None"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # of this device alone
            if given is None:
                return _random_network(torch.from_numpy(np.array(X)), outputs)
            if not callable(given):
                check.refuse("network", given, expected, "pass the network itself")
            made = check.call("network", given, self.n_features_in_, outputs, expected=expected)
        check.instance("network(n_features, n_outputs)", made, nn.Module, expected, "return the network")
        found: nn.Module = made
        return found

    def _predict(self, X: Any, what: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> list[Any]:
        """Arrays of what is asked of the fit, batch by batch."""
        parts = [what(self.fit_, part) for part in split(self.inputs(X), BATCH)]
        return [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.three_d_array = True
        return tags


class _Regressor(_Estimator):
    """A regressor by closed-form fine-tuning of a network, which is linearized and never changed."""

    # Without a network it is 256 random units beside the standardized features: the exact
    # optimum of a linear model that no label has formed, so that leave-one-out is honest. It is for up to a
    # few thousand examples, of which the time grows with the cube.

    loss = "squared"
    _likelihood = Gaussian()

    def __init__(
        self,
        network: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        method: str = "adapt",
        ridge: float | str = "loo",
        solver: Any = "auto",
        metric: str | None = None,
        tune: bool = False,
        random_state: Any = None,
    ) -> None:
        self.network, self.method, self.ridge, self.solver = network, method, ridge, solver
        self.metric, self.tune, self.random_state = metric, tune, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Solve for the optimum.

        Args:
            X: (N, n_features), or (N, ...) as the network takes it.
            y: (N,) or (N, C).
            sample_weight: What each example counts in the loss, (N,); 1 by default.

        Returns:
            The estimator.
        """
        options = {"dtype": FLOATS, "allow_nd": True, "multi_output": True, "y_numeric": True}
        X, y = self._validated(X, y, ensure_min_samples=2, **options)
        targets = np.array(y, dtype=np.float64)  # its own: those of a DataFrame cannot be written to
        self._single = targets.ndim == 1
        targets = targets.reshape(len(targets), -1)
        # One noise and one ridge are found for all columns, which therefore get the same spread.
        scaled = self.method == "adapt" and not self._single
        spread = targets.std(axis=0) * (np.ptp(targets, axis=0) > 0) * scaled
        self._spread = np.where(spread > 0, spread, 1.0)
        targets = targets / self._spread
        self._fit(X, torch.from_numpy(targets), targets.shape[1], self._weights(X, sample_weight))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict targets.

        Args:
            X: (T, ...), like those of the fit.
            return_std: Whether to return the standard deviation of a new target too, its noise included.

        Returns:
            (T,) or (T, C), like y; with ``return_std`` a pair of them.
        """
        if not return_std:
            return self._shaped(self._predict(X, lambda fit, x: (fit.predict(x),))[0])

        def moments(fit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            prediction = fit.predictive(x).with_noise()
            return prediction.mean, prediction.variance.clamp_min(0).sqrt()

        mean, std = self._predict(X, moments)
        return self._shaped(mean), self._shaped(std)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Any:
        """Intervals that hold new targets as often as ``coverage`` says, by the fits without each example.

        Args:
            X: (T, ...), like those of the fit.
            coverage: Share of new targets that are to be held.

        Returns:
            Lower and upper ends, (T, 2), or (T, C, 2) where y has columns; ``fit_.interval`` says more.
        """
        x = self.inputs(X)
        return self._shaped(self.fit_.interval(x, coverage).cpu().numpy())

    def _shaped(self, values: Any) -> Any:
        """(T, C), or (T,) where y was, in its units."""
        if self._single:
            return values[:, 0]
        return values * (self._spread if values.ndim == 2 else self._spread[:, None]).astype(values.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _Classifier(_Estimator):
    """A classifier by closed-form fine-tuning of a network, which is linearized and never changed."""

    # Without a network it is 256 random units beside the standardized features: the exact
    # optimum of a linear model that no label has formed, so that leave-one-out is honest, and probabilities
    # are calibrated by it. It is for up to a few thousand examples, of which the time grows with the cube.

    classes_: Any  # the labels, sorted
    _likelihood = Categorical()

    def __init__(
        self,
        network: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        method: str = "adapt",
        loss: str = "squared",
        ridge: float | str = "loo",
        solver: Any = "auto",
        metric: str | None = None,
        tune: bool = False,
        class_weight: Any = None,
        random_state: Any = None,
    ) -> None:
        self.network, self.method, self.loss, self.ridge = network, method, loss, ridge
        self.solver, self.metric, self.tune, self.random_state = solver, metric, tune, random_state
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Solve for the optimum.

        Args:
            X: (N, n_features), or (N, ...) as the network takes it.
            y: Labels (N,), of any type that can be sorted.
            sample_weight: What each example counts in the loss, (N,), times that of its class; 1 by
                default.

        Returns:
            The estimator.

        Raises:
            DataError: If there is one class only.
        """
        from sklearn.utils.class_weight import compute_sample_weight
        from sklearn.utils.multiclass import check_classification_targets

        X, y = self._validated(X, y, dtype=FLOATS, allow_nd=True)
        check_classification_targets(y)
        weights = self._weights(X, sample_weight)
        if self.class_weight is not None:
            own = compute_sample_weight(self.class_weight, y)
            weights = own if weights is None else own * weights
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y holds one class only ({self.classes_[0]})",
                expected="examples of at least two classes",
                remedy="add examples of another class",
            )
        self._fit(X, torch.from_numpy(labels.reshape(-1)), len(self.classes_), weights)
        same = self.classes_.dtype.kind in "iu" and np.array_equal(
            self.classes_, np.arange(len(self.classes_))
        )
        if self.fit_.targets.shape[1] == len(self.classes_) and not same:
            self.fit_.record = replace(self.fit_.record, classes=tuple(map(str, self.classes_)))
        return self

    def decision_function(self, X: Any) -> Any:
        """Outputs of the linear model.

        Args:
            X: (T, ...), like those of the fit.

        Returns:
            (T, C), the largest of which is the prediction; for two classes (T,), positive for the second.
        """
        self._grow()
        outputs = self._predict(X, lambda fit, x: (fit.predict(x),))[0]
        if len(self.classes_) > 2:
            return outputs
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]

    def predict(self, X: Any) -> Any:
        """Predict labels.

        Args:
            X: (T, ...), like those of the fit.

        Returns:
            Labels (T,).
        """
        scores = self.decision_function(X)
        return self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)]

    def predict_proba(self, X: Any) -> Any:
        """Probabilities of the classes, the uncertainty of the outputs averaged over.

        Args:
            X: (T, ...), like those of the fit.

        Returns:
            (T, C), in the order of ``classes_``.
        """
        self._grow()
        probs = self._predict(X, lambda fit, x: (fit.predictive(x).probs,))[0]
        return probs / probs.sum(1, keepdims=True)

    def _grow(self) -> None:
        """Take over the classes that an update of ``fit_`` has brought."""
        known, names = len(getattr(self, "classes_", ())), ()
        if hasattr(self, "fit_"):  # others are told that they are not fitted
            names = self.fit_.class_names or tuple(range(self.fit_.classes or 0))
        if len(names) > known:
            self.classes_ = np.array([*self.classes_, *map(self.classes_.dtype.type, names[known:])])

    def predict_set(
        self, X: Any, coverage: float = 0.9, by_class: bool = False, *, empty: bool = False
    ) -> Any:
        """Sets of classes that hold the right one as often as ``coverage`` says, by the fits without each.

        Args:
            X: (T, ...), like those of the fit.
            coverage: Share of right classes that are to be held.
            by_class: Whether each class is to be held so often, not the mean of all.
            empty: Whether sets may be empty, so that not more are held where the fit is right more often.

        Returns:
            Whether each class is in the set, (T, C) of bool; ``fit_.sets`` says more.
        """
        self._grow()
        x = self.inputs(X)
        return self.fit_.sets(x, coverage, by_class, empty=empty).cpu().numpy()


def _regressor() -> tuple[type, ...]:
    """The classes of scikit-learn that make a regressor."""
    from sklearn.base import BaseEstimator, RegressorMixin

    return RegressorMixin, BaseEstimator


def _classifier() -> tuple[type, ...]:
    """The classes of scikit-learn that make a classifier."""
    from sklearn.base import BaseEstimator, ClassifierMixin

    return ClassifierMixin, BaseEstimator


_OWN = {"LinnetRegressor": (_Regressor, _regressor), "LinnetClassifier": (_Classifier, _classifier)}
__getattr__ = classes(__name__, "sklearn", "scikit-learn 1.6 or later", _OWN)
