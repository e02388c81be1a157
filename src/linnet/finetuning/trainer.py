"""The trainer of every recipe: seeded steps, logs, checkpoints that survive a kill.

Step s takes its examples and its augmentation from generators seeded by (seed, epoch) and (seed, s), so a
run is a function of its settings: the same seed gives the same bits, and a run that was killed and resumed
gives the bits of one that was not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from linnet.errors import DataError, InputError, NumericalError
from linnet.files import load, save
from linnet.finetuning.augment import Augmentation
from linnet.fitting.descent import outputs_of
from linnet.linear.targets import make_targets
from linnet.memory import parse_bytes
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.params import choice, flag, instance, integer, optional, path, warn, wrapped
from linnet.progress import Log, check_log, tell, track
from linnet.tangent.batch import Inputs, batch_size, concatenate, is_data_set, on_device, take
from linnet.tangent.data import Data, as_pair
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.inputs import as_batch, taken
from linnet.training import cosine, stream, train
from linnet.tree import hash_tensors, tensors_in

KIND = "training"
EVALUATED = 256  # examples predicted at once
FEWEST = 10  # steps in a mean of losses, however few examples there are
RISE = 0.2  # of the first mean, by which the last exceeds the lowest where it rises
SURE = 3.0  # standard errors, by which it exceeds it besides: batches differ


@dataclass(frozen=True, kw_only=True)
class Run:
    """Monitoring and checkpoints of a training run.

    Args:
        checkpoint: A folder for the run's state; an interrupted call resumes from it, to the same bits.
        save_every: Steps between two states kept there; by default a twentieth of the run.
        log: Called with a dict of numbers and the step, as ``mlflow.log_metrics`` is.
        log_every: Steps between two of these calls.
        progress: Show progress; by default only when it takes over two seconds.
        evaluate_every: Steps between two scores on validation data; by default an epoch.
        keep: ``"last"``, or ``"best"`` for the weights of the best score on validation data.
        memory: Budget such as ``"4GB"``; by default half of what is available.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Run(checkpoint="runs/first", log_every=1).keep
        'last'
    """

    checkpoint: str | Path | None = None
    save_every: int | None = None
    log: Log | None = None
    log_every: int = 10
    progress: bool | None = None
    evaluate_every: int | None = None
    keep: str = "last"
    memory: str | int | None = None

    def __post_init__(self) -> None:
        optional(path, "checkpoint", self.checkpoint)
        check_log(self.log)
        integer("log_every", self.log_every)
        for name in ("save_every", "evaluate_every"):
            optional(integer, name, getattr(self, name))
        optional(flag, "progress", self.progress)
        choice("keep", self.keep, ("last", "best"))
        parse_bytes(self.memory)


def checked_run(run: Run | None, caller: str, unused: Collection[str] = ()) -> Run:
    """The settings, or the defaults."""
    own = Run() if run is None else run
    instance("run", own, Run, "a linnet.Run", 'pass run=linnet.Run(checkpoint="runs/first")')
    defaults = {field.name: field.default for field in fields(own)}
    for name in unused:
        value = getattr(own, name)
        if value != defaults[name]:
            raise InputError(
                f"{name}={value!r} in the run= of {caller}",
                expected=f"settings that it uses: {', '.join(n for n in defaults if n not in unused)}",
                remedy=f"leave {name}= out",
            )
    return own


class ExampleSet:
    """Data that are read by position: a pair in memory, or a Dataset that is read as it is needed."""

    def __init__(self, data: Any, device: torch.device, network: nn.Module | None = None) -> None:
        self.device, self._network = device, network
        self._set: Any = None
        self._collate: Callable[[Any], Any] = _collate
        self.index: Tensor | None = None
        loaded = isinstance(data, DataLoader)
        if loaded:
            self._collate = data.collate_fn
            data = data.dataset
        if isinstance(data, IterableDataset):
            raise InputError(
                f"data is a {type(data).__name__}, which can only be read in its own order",
                expected="examples that can be read by position, so that a run can be repeated and resumed",
                remedy="pass a map-style Dataset or an (x, y) pair",
            )
        if (loaded or is_data_set(data)) and not hasattr(data, "tensors"):
            self._set, self.n = data, len(data)
            if self.n == 0:
                raise DataError(
                    "data is empty: it holds 0 examples", "at least one example", "check the path"
                )
        else:
            self._x, self._y = Data.of(data, network, keep=False).pair
            self._y = self._y.to(device)
            self.n = batch_size(self._x)

    @property
    def in_memory(self) -> bool:
        """Whether the examples are tensors, rather than read as they are needed."""
        return self._set is None

    def part(self, index: Tensor) -> ExampleSet:
        """Some of the examples."""
        own = object.__new__(ExampleSet)
        own.__dict__.update(self.__dict__)
        own.index = index.cpu() if self.index is None else self.index[index.cpu()]
        own.n = len(index)
        return own

    def batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """The examples at some positions."""
        rows = index if self.index is None else self.index[index]
        if self._set is None:
            return on_device(take(self._x, rows), self.device), self._y[rows.to(self.device)]
        x, y = as_pair(self._collate([self._set[i] for i in rows.tolist()]))
        x = x if self._network is None else taken(self._network, x)
        return on_device(x, self.device), wrapped(y).to(self.device)

    def batches(self, size: int = EVALUATED) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples, in order."""
        for rows in torch.arange(self.n).split(size):
            yield self.batch(rows)

    def labels(self) -> Tensor:
        """The targets of all examples."""
        return torch.cat([y for _, y in self.batches()])

    def fingerprint(self) -> str:
        """A hash of the examples; of a Dataset only of its length and first examples."""
        if self._set is None and self.index is None:
            return hash_tensors([*tensors_in(self._x), self._y])
        x, y = self.batch(torch.arange(min(self.n, 4)))
        own = [] if self.index is None else [self.index]
        return hash_tensors([torch.tensor(self.n), y, *tensors_in(x), *own])


def _collate(samples: list[Any]) -> Any:
    """One batch of samples; the lists in dicts are arrays of numbers, which torch's own would take apart."""
    if not isinstance(samples[0], Mapping):
        return default_collate(samples)
    pairs = [as_pair(sample, "a sample") for sample in samples]
    return concatenate([as_batch(x) for x, _ in pairs]), default_collate([y for _, y in pairs])


@dataclass
class LossCurve:
    """Means of the loss over windows of steps."""

    window: int  # steps in a window, at least two
    means: list[float] = field(default_factory=list)  # of the whole windows so far
    variances: list[float] = field(default_factory=list)  # squares of their standard errors
    losses: list[float] = field(default_factory=list)  # of the window that is not whole yet

    @classmethod
    def of(cls, examples: int, batch_size: int) -> LossCurve:
        """An empty curve whose windows are whole epochs."""
        epochs = math.ceil(FEWEST * batch_size / examples)
        return cls(math.ceil(epochs * examples / batch_size))

    def add(self, loss: float) -> None:
        """Take one step's loss."""
        self.losses.append(loss)
        if len(self.losses) == self.window:
            mean, variance = _mean(self.losses)
            self.means.append(mean)
            self.variances.append(variance)
            self.losses = []

    @property
    def rises(self) -> bool:
        """Whether the last mean is above the lowest by a fifth of the first, and for sure."""
        if len(self.means) < 2:
            return False
        last = self.means[-1]
        if 2 * len(self.losses) >= self.window:  # half a window says enough
            last = _mean(self.losses)[0]
        low = min(self.means)
        # the noise of batches; a loss that grows has a variance of its own, so the lowest window's counts
        error = math.sqrt(2 * self.variances[self.means.index(low)])
        return last - low > max(RISE * abs(self.means[0]), SURE * error)


def _mean(losses: list[float]) -> tuple[float, float]:
    """The mean, and the square of its standard error."""
    n, mean = len(losses), math.fsum(losses) / len(losses)
    return mean, math.fsum((loss - mean) ** 2 for loss in losses) / (n * max(1, n - 1))


@dataclass(frozen=True)
class Objective:
    """The objective: the mean over examples of a loss, plus ½ λ‖δ‖²."""

    # `"squared"` is ½ ‖t − f‖² summed over outputs, with α-scaled one-hot t for classes. Its Hessian is JᵀJ/N
    # + λI, so the optimum is that of `linnet.fit` at ridge ρ = N λ.
    #
    # Source: Achille et al., CVPR 2021, eq. (3), halved and averaged as in section A.3.

    loss: str  # ``"squared"`` or ``"cross-entropy"``
    outputs: int  # C
    scale: float  # α
    weight_decay: float  # λ, on the displacement δ of a linear model and on the weights of a plain network

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch, without the weight decay."""
        f = outputs.reshape(outputs.shape[0], -1)
        if self.loss == "cross-entropy":
            return F.cross_entropy(f, y.long().flatten())
        y = make_targets(y, self.outputs, self.scale, varied=False, dtype=f.dtype).values
        # ½ Σᵢ ‖tᵢ − fᵢ‖² / N
        return 0.5 * (y.to(f).reshape(f.shape) - f).square().sum() / f.shape[0]


@dataclass(frozen=True)
class Optimization:
    """The steps of a run, every setting with its value."""

    learning_rate: float  # η
    steps: int = 1
    batch_size: int = 28  # examples a step; all of them if there are fewer
    momentum: float = 0.9  # of SGD, or β₁ of Adam
    schedule: str = "constant"  # or `"cosine"` down to zero
    clip: float | None = None  # largest norm of the whole gradient, after preconditioning
    optimizer: str = "sgd"  # or `"adam"`
    training_mode: bool = False  # whether BatchNorm uses the batch and dropout is on

    def build(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The torch optimizer."""
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.learning_rate, betas=(self.momentum, 0.999))
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)

    def rate(self, step: int) -> float:
        """η at a step."""
        return self.learning_rate * (cosine(step, self.steps) if self.schedule == "cosine" else 1.0)


class Trainer:
    """Trains the parameters of one module."""

    def __init__(
        self,
        module: nn.Module,
        data: ExampleSet,
        objective: Objective,
        optimization: Optimization,
        seed: int = 0,
        run: Run | None = None,
    ) -> None:
        self.module, self.data, self.objective = module, data, objective
        self.optimization, self.seed, self.monitor = optimization, seed, run or Run()
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.optimizer = optimization.build(list(self.parameters.values()))
        self.augmentation = Augmentation()
        self.preconditioner: KroneckerPreconditioner | None = None
        self.validation: ExampleSet | None = None
        self.output: OutputAdapter = None
        self.description = "training"
        self.step = 0  # steps done
        self.history: list[dict[str, float]] = []  # what was logged
        self.best = -math.inf  # best validation score
        self.best_tensors: dict[str, Tensor] = {}  # weights and buffers that had it
        self.curve = LossCurve.of(data.n, min(optimization.batch_size, data.n))
        self._identity = ""

    def run(self) -> None:
        """Train to the end, from the last state kept if there is one."""
        self._check_batch()
        self._resume()
        begin, steps = self.step, self.optimization.steps
        n, size = self.data.n, min(self.optimization.batch_size, self.data.n)
        each = self.monitor.evaluate_every or math.ceil(n / size)
        batches = islice(enumerate(stream(n, size, self._order, begin), begin), steps - begin)
        ahead = track(batches, self.description, steps - begin, self.monitor.progress)
        rate = self.optimization.rate
        was_training = self.module.training
        self.module.train(self.optimization.training_mode)
        try:
            for step, loss in train(self.optimizer, ahead, self._gradient, rate, begin):
                self.curve.add(loss)
                if step % self.monitor.log_every == 0 or step + 1 == steps:
                    self._note({"loss": loss, "learning_rate": rate(step)}, step)
                if (step + 1) % each == 0 or step + 1 == steps:
                    self._validate(step + 1)
                self.step = step + 1
                if self._saves(step + 1):
                    self._save()
        finally:
            self.module.train(was_training)
        if self.best_tensors:
            self._put(self.best_tensors)

    def score(self, examples: ExampleSet) -> dict[str, float]:
        """Mean loss on examples, and accuracy for classes; from center crops if images are cropped."""
        was_training = self.module.training
        self.module.eval()
        loss, right, classes = 0.0, 0, True
        with torch.no_grad():
            for x, y in examples.batches():
                f = outputs_of(self.module, self.augmentation.evaluation(x), self.output)
                loss += float(self.objective(f, y)) * len(y)
                classes = not y.is_floating_point()
                right += int((f.flatten(1).argmax(1) == y.flatten()).sum()) if classes else 0
        self.module.train(was_training)
        scores = {"loss": loss / examples.n}
        return scores | {"accuracy": right / examples.n} if classes else scores

    def _order(self, epoch: int) -> Tensor:
        """Positions of all examples in the order of an epoch."""
        return torch.randperm(self.data.n, generator=_generator(self.seed, epoch, 0))

    def _gradient(self, batch: tuple[int, Tensor]) -> float:
        """The loss of a step, and the gradients that the optimizer takes."""
        step, rows = batch
        x, y = self.data.batch(rows)
        if self.augmentation.kind != "none":
            x = self.augmentation(x, _generator(self.seed, step, 1))
        with self._seeded(step):
            loss = self.objective(outputs_of(self.module, x, self.output), y)
            loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NumericalError(
                f"the loss is {value} at step {step} with learning_rate={self.optimization.learning_rate:g}",
                expected="a finite loss",
                remedy="pass a smaller learning_rate=, or a larger damping= where there is a preconditioner",
            )
        for p in self.parameters.values():
            if p.grad is not None and self.objective.weight_decay:
                p.grad.add_(p.detach(), alpha=self.objective.weight_decay)  # ∇ ½ λ‖p‖²
        if self.preconditioner is not None:
            self.preconditioner.step()
        if self.optimization.clip is not None:
            nn.utils.clip_grad_norm_(list(self.parameters.values()), self.optimization.clip)
        return value

    @contextlib.contextmanager
    def _seeded(self, step: int) -> Iterator[None]:
        """Dropout and the like drawn for this step; torch's own generators are left as they were."""
        device = self.data.device
        if not self.optimization.training_mode:
            yield
            return
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_generator(self.seed, step, 2).initial_seed())
            yield

    def _validate(self, step: int) -> None:
        """Score the validation examples, and keep the weights if they are the best so far."""
        if self.validation is None:
            return
        scores = self.score(self.validation)
        self._note({f"validation_{name}": value for name, value in scores.items()}, step)
        score = rank(scores)
        if score > self.best:
            self.best = score
            if self.monitor.keep == "best":
                self.best_tensors = {name: t.clone() for name, t in self._tensors().items()}

    def _note(self, values: dict[str, float], step: int) -> None:
        """Keep numbers in the history and hand them to the logger."""
        self.history.append({"step": step, **values})
        if self.monitor.log is None:
            return
        place = self.monitor.checkpoint
        after = "with Run(checkpoint=FOLDER) the same call would go on"
        after = f"the same call goes on from the last state in {place}" if place else after
        tell(self.monitor.log, dict(values), step, f"the run ends here; {after}")

    def _check_batch(self) -> None:
        """Raise if BatchNorm would normalize single examples."""
        normalized = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())
        single = min(self.optimization.batch_size, self.data.n) == 1
        if self.optimization.training_mode and normalized and single:
            raise InputError(
                "batch_size=1 with BatchNorm in training mode",
                expected="at least two examples a step, whose statistics normalize them",
                remedy="pass a larger batch_size=, or training_mode=False to keep the running statistics",
            )

    # -- state on the disk -------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, the tensors themselves."""
        return {
            **{f"parameter/{name}": p.detach() for name, p in self.parameters.items()},
            **{f"buffer/{name}": b for name, b in self.module.named_buffers()},
        }

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers."""
        for name, target in self._tensors().items():
            target.copy_(tensors[name])

    def _saves(self, step: int) -> bool:
        """Whether the state is kept after this step."""
        steps = self.optimization.steps
        every = self.monitor.save_every or max(1, steps // 20)
        return self.monitor.checkpoint is not None and (step % every == 0 or step == steps)

    def _save(self) -> None:
        """Keep the state: a whole new file takes the place of the old one."""
        names = {id(p): name for name, p in self.parameters.items()}
        tensors = self._tensors()
        for p, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{names[id(p)]}/{key}"] = value
        tensors |= {f"best/{name}": value for name, value in self.best_tensors.items()}
        metadata = {
            "step": self.step,
            "history": self.history,
            "best": None if self.best == -math.inf else self.best,
            "curve": asdict(self.curve),
            "run": self._identity,
        }
        assert self.monitor.checkpoint is not None
        save(self.monitor.checkpoint, KIND, {"tensors": tensors, **metadata})

    def _resume(self) -> None:
        """Take up the state in the folder, if there is one."""
        if self.monitor.checkpoint is None:
            return
        self._identity = self._fingerprint()
        place = path("checkpoint", self.monitor.checkpoint) / f"{KIND}.safetensors"
        if not place.exists():
            return
        metadata = load(place, KIND)
        tensors = metadata["tensors"]
        if metadata["run"] != self._identity:
            raise InputError(
                f"{place} belongs to a run with other settings, data or starting weights",
                expected="the same call as the one that was interrupted",
                remedy="pass another checkpoint= folder, or remove this one to start again",
            )
        self._put(tensors)
        for name, p in self.parameters.items():
            prefix = f"optimizer/{name}/"
            kept = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            if kept:  # Adam counts its steps on the CPU
                device = self.data.device
                self.optimizer.state[p] = {k: t if t.ndim == 0 else t.to(device) for k, t in kept.items()}
        self.step, self.history = metadata["step"], metadata["history"]
        self.best = -math.inf if metadata["best"] is None else metadata["best"]
        self.best_tensors = {n.removeprefix("best/"): t for n, t in tensors.items() if n.startswith("best/")}
        self.curve = LossCurve(**metadata["curve"])

    def _fingerprint(self) -> str:
        """A hash of all that decides what the run computes."""
        function = getattr(self.module, "_function", None)
        settings: dict[str, Any] = {
            "objective": asdict(self.objective),
            "optimization": asdict(self.optimization),
            "seed": self.seed,
            "augmentation": asdict(self.augmentation),
            "evaluate_every": self.monitor.evaluate_every,
            "keep": self.monitor.keep,
            "data": self.data.fingerprint(),
            "validation": self.validation and self.validation.fingerprint(),
            "start": hash_tensors(list(self._tensors().values())),
            "damping": self.preconditioner and float(self.preconditioner.damping),
            "curvature": self.preconditioner and repr(self.preconditioner.curvature.made),
            "network": function.fingerprint() if function is not None else None,
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def without_rise(
    make: Callable[[float | None, str], Trainer], rate: float | None, folder: str, retries: int
) -> tuple[Trainer, list[float]]:
    """A trainer that has run, and the rates, last first, with which the loss rose before: each a third."""
    rose: list[float] = []
    while True:
        trainer = make(rate, folder)
        try:
            trainer.run()
            rises = trainer.curve.rises
        except NumericalError:
            if len(rose) == retries:
                raise
            rises = True
        if not rises or len(rose) == retries:
            return trainer, rose
        rose.insert(0, trainer.optimization.learning_rate)
        rate, folder = rose[0] / 3, f"{folder}-slower".removeprefix("-")


def rank(scores: dict[str, float]) -> float:
    """One number for scores: accuracy, ties to the smaller loss; for values, the negative loss."""
    loss = scores["loss"]
    if not math.isfinite(loss):
        return -math.inf
    return scores["accuracy"] - 1e-9 * min(loss, 1e6) if "accuracy" in scores else -loss


def warn_of_large_steps(learning_rate: float, given: bool) -> None:
    """Tell the user that the loss went up again."""
    remedy = "leave it out" if given else "larger batches with batch_size="
    warn(
        f"the training loss went up again with learning_rate={learning_rate:g}: the steps are too large for "
        f"this problem, and the result is not to be trusted; pass a smaller learning_rate=, or {remedy}"
    )


def _generator(seed: int, counter: int, kind: int) -> torch.Generator:
    """A generator for one epoch's order or one step's randomness."""
    digest = hashlib.sha256(f"{seed} {counter} {kind}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
