"""Where a training run reports, what it keeps on the disk, and what it looks at on the way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from linnet.errors import InputError
from linnet.logged import Log, check_log
from linnet.memory import parse_bytes
from linnet.params import choice, flag, instance, integer, path

KEPT = ("last", "best")


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
        if self.checkpoint is not None:
            path("checkpoint", self.checkpoint)
        check_log(self.log)
        integer("log_every", self.log_every)
        for name in ("save_every", "evaluate_every"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name))
        if self.progress is not None:
            flag("progress", self.progress)
        choice("keep", self.keep, KEPT)
        parse_bytes(self.memory)


def watched(run: Run | None, caller: str, unused: Collection[str] = ()) -> Run:
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
