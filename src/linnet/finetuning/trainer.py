"""One trainer for every recipe: seeded steps, logs, checkpoints that survive a kill.

Step s takes its examples and its augmentation from generators seeded by (seed, epoch) and (seed, s), so a
run is a function of its settings: the same seed gives the same bits, and a run that was killed and resumed
gives the bits of one that was not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError, NumericalError
from linnet.files import load_tensors, save_tensors
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.course import Course, Objective, Optimization
from linnet.finetuning.examples import Examples
from linnet.finetuning.loss_curve import LossCurve
from linnet.finetuning.run import Run
from linnet.fitting.descent import outputs_of
from linnet.logged import tell
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.params import path as checked_path
from linnet.progress import track
from linnet.tangent.batch import hash_tensors
from linnet.tangent.functional import OutputAdapter
from linnet.training import stream, train

KIND = "training"


@dataclass
class State:
    """Where a run is."""

    step: int = 0  # steps done
    history: list[dict[str, float]] = field(default_factory=list)  # what was logged
    best: float = -math.inf  # best validation score
    best_tensors: dict[str, Tensor] = field(default_factory=dict)  # weights and buffers that had it
    curve: LossCurve = field(default_factory=lambda: LossCurve(1))  # the training loss from epoch to epoch


class Trainer:
    """Trains the parameters of one module."""

    def __init__(
        self,
        module: nn.Module,
        data: Examples,
        objective: Objective,
        optimization: Optimization,
        course: Course,
        watched: Run | None = None,
    ) -> None:
        self.module, self.data, self.objective = module, data, objective
        self.optimization, self.course, self.watched = optimization, course, watched or Run()
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.optimizer = optimization.build(list(self.parameters.values()))
        self.augmentation = Augmentation()
        self.preconditioner: KroneckerPreconditioner | None = None
        self.validation: Examples | None = None
        self.output: OutputAdapter = None
        self.description = "training"
        self.state = State(curve=LossCurve.of(data.n, min(course.batch_size, data.n)))
        self._identity = ""

    def run(self) -> State:
        """Train to the end, from the last state kept if there is one."""
        self._check_batch()
        self._identity = self._fingerprint() if self.watched.checkpoint is not None else ""
        self._resume()
        steps = self.course.steps
        was_training = self.module.training
        self.module.train(self.course.training_mode)
        begin = self.state.step
        batches = islice(enumerate(self._batches(begin), begin), steps - begin)
        ahead = track(batches, self.description, steps - begin, self.watched.progress)

        def rate(step: int) -> float:
            return self.optimization.rate(step, steps)

        try:
            for step, loss in train(self.optimizer, ahead, self._gradient, rate, begin):
                self.state.curve.add(loss)
                if step % self.watched.log_every == 0 or step + 1 == steps:
                    self._note({"loss": loss, "learning_rate": rate(step)}, step)
                if (step + 1) % self.course.evaluate_every == 0 or step + 1 == steps:
                    self._validate(step + 1)
                self.state.step = step + 1
                if self._saves(step + 1):
                    self._save()
        finally:
            self.module.train(was_training)
        if self.course.keep == "best" and self.state.best_tensors:
            self._put(self.state.best_tensors)
        return self.state

    def score(self, examples: Examples) -> dict[str, float]:
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

    def _gradient(self, batch: tuple[int, Tensor]) -> float:
        """The loss of a step, and the gradients that the optimizer takes."""
        step, rows = batch
        x, y = self.data.batch(rows)
        if self.augmentation.kind != "none":
            x = self.augmentation(x, _generator(self.course.seed, step, 1))
        with _seeded(self.course, step, self.data.device):
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

    def _batches(self, begin: int) -> Iterator[Tensor]:
        """Positions of the examples of each step."""
        n, seed = self.data.n, self.course.seed
        order = partial(_order, n, seed)
        return stream(n, self.course.batch_size, order, begin)

    def _validate(self, step: int) -> None:
        """Score the validation examples, and keep the weights if they are the best so far."""
        if self.validation is None:
            return
        scores = self.score(self.validation)
        self._note({f"validation_{name}": value for name, value in scores.items()}, step)
        score = rank(scores)
        if score > self.state.best:
            self.state.best = score
            if self.course.keep == "best":
                self.state.best_tensors = {name: t.clone() for name, t in self._tensors().items()}

    def _note(self, values: dict[str, float], step: int) -> None:
        """Keep numbers in the history and hand them to the logger."""
        self.state.history.append({"step": step, **values})
        if self.watched.log is not None:
            tell(self.watched.log, dict(values), step, self._kept())

    def _kept(self) -> str:
        """What is left of a run that ends."""
        if self.watched.checkpoint is None:
            return "the run ends here; with Run(checkpoint=FOLDER) the same call would go on"
        return f"the run ends here; the same call goes on from the last state in {self.watched.checkpoint}"

    def _check_batch(self) -> None:
        """Raise if BatchNorm would normalize single examples."""
        normalized = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())
        if self.course.training_mode and normalized and min(self.course.batch_size, self.data.n) == 1:
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
    def _put(self, tensors: dict[str, Tensor]) -> None:
        """Set parameters and buffers."""
        for name, target in self._tensors().items():
            target.copy_(tensors[name])

    def _saves(self, step: int) -> bool:
        """Whether the state is kept after this step."""
        every = self.watched.save_every or max(1, self.course.steps // 20)
        return self.watched.checkpoint is not None and (step % every == 0 or step == self.course.steps)

    def _save(self) -> None:
        """Keep the state: a whole new file takes the place of the old one."""
        names = {id(p): name for name, p in self.parameters.items()}
        tensors = self._tensors()
        for p, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{names[id(p)]}/{key}"] = value
        tensors |= {f"best/{name}": value for name, value in self.state.best_tensors.items()}
        metadata = {
            "step": self.state.step,
            "history": self.state.history,
            "best": None if self.state.best == -math.inf else self.state.best,
            "curve": self.state.curve.state(),
            "run": self._identity,
        }
        assert self.watched.checkpoint is not None
        save_tensors(self.watched.checkpoint, KIND, tensors, metadata)

    def _resume(self) -> None:
        """Take up the state in the folder, if there is one."""
        if self.watched.checkpoint is None:
            return
        path = checked_path("checkpoint", self.watched.checkpoint) / f"{KIND}.safetensors"
        if not path.exists():
            return
        tensors, metadata = load_tensors(path, KIND)
        if metadata["run"] != self._identity:
            raise InputError(
                f"{path} belongs to a run with other settings, data or starting weights",
                expected="the same call as the one that was interrupted",
                remedy="pass another checkpoint= folder, or remove this one to start again",
            )
        device = self.data.device
        self._put({name: t for name, t in tensors.items() if name.startswith(("parameter/", "buffer/"))})
        for name, p in self.parameters.items():
            prefix = f"optimizer/{name}/"
            kept = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            if kept:  # Adam counts its steps on the CPU
                self.optimizer.state[p] = {k: t if t.ndim == 0 else t.to(device) for k, t in kept.items()}
        best = -math.inf if metadata["best"] is None else metadata["best"]
        best_tensors = {n.removeprefix("best/"): t for n, t in tensors.items() if n.startswith("best/")}
        curve = LossCurve(**metadata["curve"])
        self.state = State(metadata["step"], metadata["history"], best, best_tensors, curve)

    def _fingerprint(self) -> str:
        """A hash of all that decides what the run computes."""
        settings: dict[str, Any] = {
            "objective": asdict(self.objective),
            "optimization": asdict(self.optimization),
            "course": asdict(self.course),
            "augmentation": asdict(self.augmentation),
            "log_every": self.watched.log_every,
            "data": self.data.fingerprint(),
            "validation": self.validation and self.validation.fingerprint(),
            "start": hash_tensors(list(self._tensors().values())),
            "damping": self.preconditioner and float(self.preconditioner.damping),
            "curvature": self.preconditioner and repr(self.preconditioner.curvature.made),
        }
        function = getattr(self.module, "_function", None)
        settings["network"] = function.fingerprint() if function is not None else None
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def rank(scores: dict[str, float]) -> float:
    """One number for scores: accuracy, ties to the smaller loss; for values, the negative loss."""
    loss = scores["loss"]
    if not math.isfinite(loss):
        return -math.inf
    return scores["accuracy"] - 1e-9 * min(loss, 1e6) if "accuracy" in scores else -loss


def _generator(seed: int, counter: int, stream: int) -> torch.Generator:
    """A generator for one epoch's order or one step's randomness."""
    digest = hashlib.sha256(f"{seed} {counter} {stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _order(n: int, seed: int, epoch: int) -> Tensor:
    """Positions of all examples in the order of an epoch."""
    return torch.randperm(n, generator=_generator(seed, epoch, 0))


@contextlib.contextmanager
def _seeded(course: Course, step: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like drawn for this step; torch's own generators are left as they were."""
    if not course.training_mode:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_generator(course.seed, step, 2).initial_seed())
        yield
