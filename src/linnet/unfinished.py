"""Long sums over data that go on where a killed process had come to.

Whatever sums over data asks here for a :class:`Checkpoint`: a file with the sums so far and the place in the
data that they stand for, written now and then. Inside :func:`resumable` every such sum has one, whatever the
call, and every Gram matrix a file of its own; the files are named by the order in which the work comes to
them, which is the same when the same call is made again. What takes less than the time between two writes
leaves none.

Each process of a group has sums of its own, and so files of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet.distributed import Share, agree, world
from linnet.errors import InputError
from linnet.files import load, remove_partial, save
from linnet.params import holding, number, path
from linnet.progress import waiting

INTERVAL = 15.0  # seconds between writes
SHARE = 0.05  # of the time that writing may take
KIND = "unfinished-sums"
COMMON = "kernels"  # the files that all processes of a group write to
_SHOWN = 40  # characters of a setting in an error

Resumed = tuple[int, int]  # examples that are done, and the size of the blocks
Block = tuple[slice, Tensor]


class Checkpoint:
    """Sums on disk, with the place in the data that they stand for."""

    def __init__(
        self, file: str | Path, identity: Mapping[str, Any], interval: float = INTERVAL, stays: bool = False
    ) -> None:
        self.path, self.identity, self.interval = Path(file), dict(identity), interval
        self.stays = stays
        if self.path.suffix != ".safetensors":
            raise InputError(
                f"file={str(file)!r}", expected="a name that ends in .safetensors", remedy="rename it"
            )
        self._written, self._took = time.monotonic(), 0.0

    def read(self) -> tuple[int, int, dict[str, Tensor]] | None:
        """The pass, the place in it and the tensors; ``None`` if there is no file."""
        if not self.path.exists():
            return None
        saved = load(self.path, KIND)
        found = saved["identity"]
        different = [key for key, value in self.identity.items() if found.get(key) != value]
        if different:
            self.refuse([_change(key, found.get(key), self.identity[key]) for key in different])
        # where torch itself puts tensors: factors that lie elsewhere give products other last bits
        return saved["pass"], saved["place"], {key: t.clone() for key, t in saved["sums"].items()}

    def refuse(self, different: Sequence[str]) -> NoReturn:
        """Raise because the file belongs to something else."""
        raise InputError(
            f"file={str(self.path)!r} holds sums with another {', '.join(different)}",
            expected="the file of this very computation",
            remedy="delete it to start over, or choose another name",
        )

    def note(self, turn: int, place: int, tensors: Mapping[str, Tensor]) -> None:
        """Write, if the last write is long enough ago, and writing takes little of the time."""
        if time.monotonic() - self._written >= max(self.interval, self._took / SHARE):
            self.write(turn, place, tensors)

    def write(self, turn: int, place: int, tensors: Mapping[str, Tensor]) -> None:
        """Write now."""
        begin = time.monotonic()
        state = {"identity": self.identity, "pass": turn, "place": place, "sums": tensors}
        save(self.path.parent, self.path.stem, state, KIND)
        self._written = time.monotonic()
        self._took = self._written - begin if self.interval else 0.0

    def end_pass(self, turn: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the sums of a whole pass; of several that stay, those that took long."""
        (self.note if self.stays else self.write)(turn, 0, tensors)

    def remove(self) -> None:
        """Delete the file, and what a killed run left of writing it: the result is complete."""
        if self.stays:
            return
        self.path.unlink(missing_ok=True)
        if self.path.parent.is_dir():
            remove_partial(self.path)


def _change(key: str, before: Any, now: Any) -> str:
    """What differs, with its values where they are short."""
    values = [str(value) for value in (before, now)]
    if before is None or any(len(value) > _SHOWN for value in values):
        return key
    return f"{key} ({values[0]}, now {values[1]})"


class SumsFolder:
    """The files of the work inside one ``resumable``."""

    def __init__(self, folder: Path, interval: float) -> None:
        self.folder, self.interval = folder, interval
        self.rank, self.world = world()
        self._own, self._common = folder / f"{self.rank}-of-{self.world}", folder / COMMON
        self._begun: Counter[str] = Counter()

    def open(self) -> None:
        """Begin, or take up what was begun by as many processes, once all of them are here."""
        if self.world > 1:
            with waiting(f"resumable waits for all {self.world} processes"):
                agree(InputError, {"folder": self.folder}, "name the same folder on all processes")
        for name in sorted(entry.name for entry in self.folder.iterdir()) if self.folder.is_dir() else ():
            rank, _, of = name.partition("-of-")
            if name != COMMON and not (rank.isdecimal() and of.isdecimal()):
                raise InputError(
                    f"folder={str(self.folder)!r} holds other files, first {name}",
                    expected="a folder of its own for unfinished sums, new or empty",
                    remedy="name another one",
                )
            if name != COMMON and int(of) != self.world:
                raise InputError(
                    f"folder={str(self.folder)!r} holds the sums of {of} processes; there are {self.world}",
                    expected="as many processes as have begun: each goes on with its own share",
                    remedy=f"start {of} processes, or remove the folder to begin again",
                )
        try:
            for place in (self._own, self._common):
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"folder={str(self.folder)!r} cannot be made: {error.strerror or type(error).__name__}",
                expected="a folder for unfinished sums",
                remedy="name another one",
            ) from error

    def place(self, what: str, share: Share, suffix: str) -> Path:
        """The file of the next work."""
        shared = share.world == self.world
        kind = "together" if shared else "alone"
        count, self._begun[kind] = self._begun[kind], self._begun[kind] + 1
        folder = self._common if shared and suffix == ".npy" else self._own
        return folder / f"{count:04}-{kind}-{what}{suffix}"

    def close(self) -> None:
        """Remove the files of this process, and with the last of them the folder."""
        shutil.rmtree(self._own, ignore_errors=True)
        if self.rank == 0:
            shutil.rmtree(self._common, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are not done
            self.folder.rmdir()


_folder: ContextVar[SumsFolder | None] = ContextVar("linnet_sums_folder", default=None)


@contextlib.contextmanager
def resumable(folder: str | Path, interval: float = INTERVAL) -> Iterator[None]:
    """Keep unfinished sums in a folder, from which the same calls resume after a crash, to the same bits.

    Sums over data of :func:`linnet.curvature`, of JᵀJ, ridge paths and sketches of :func:`linnet.fit`, and
    tiles of Gram matrices are written now and then, whichever call makes them, and the networks that
    ``linnet.adapt(..., tune=True)`` trains when each of them is done. If the process ends before the
    block does, however it ends, the same block with the same folder goes on from what was last written. Where
    network, settings or data are others, it says so. The folder goes when the block is done. Iterations such
    as conjugate gradients, and decompositions, begin again.

    Args:
        folder: A folder of its own, made if it is missing. All processes of a group come here and name the
            same, on a file system that they share.
        interval: Seconds between writes; less often where writing takes more than a twentieth of the time.

    Yields:
        Nothing.

    Raises:
        InputError: The folder holds other files, or the sums of other work or of another number of processes.

    Example:
        >>> import linnet, tempfile
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 80).view(40, 2)
        >>> with tempfile.TemporaryDirectory() as parent, resumable(f"{parent}/sums"):
        ...     solved = linnet.fit(linnet.linearize(net), (x, x[:, :1]), solver="primal", ridge="loo")
        >>> solved.predict(x).shape
        torch.Size([40, 1])
    """
    place = path("folder", folder, 'pass folder="runs/sums"')
    own = SumsFolder(place, number("interval", interval, least=0))
    own.open()
    with holding(_folder, own):
        yield
    own.close()


def sums_folder() -> SumsFolder | None:
    """What keeps unfinished work, inside ``resumable``."""
    return _folder.get()


def checkpoint(what: str, share: Share, identity: Callable[[], Mapping[str, Any]]) -> Checkpoint | None:
    """A file for the next sum over data."""
    own = _folder.get()
    if own is None:
        return None
    return Checkpoint(own.place(what, share, ".safetensors"), identity(), own.interval, stays=True)


def summing(
    tensors: Mapping[str, Tensor],
    file: Checkpoint | None,
    blocks: Callable[[Resumed | None], Iterator[Block]],
) -> Iterator[Block]:
    """The blocks still to be added to some tensors, which then hold the sums of all before."""
    found = None if file is None else file.read()
    begun: Resumed | None = None
    if found is not None:
        for name, tensor in tensors.items():
            tensor.copy_(found[2][name])
        begun = found[1], int(found[2]["size"])
    size = 0 if begun is None else begun[1]
    for place, block in blocks(begun):
        yield place, block
        size = max(size, place.stop - place.start)
        if file is not None:
            file.note(0, place.stop, {**tensors, "size": torch.tensor(size)})
