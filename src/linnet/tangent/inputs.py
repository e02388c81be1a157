"""The door for inputs: what users hold, as tensors that the network takes; training and new inputs alike.

First the form, which needs no network (:func:`tensorize`): tensors as they are; arrays and lists of numbers;
data frames, whose columns have to be numbers, and their series; images of PIL, as bytes (N, C, H, W); lists
of samples; mappings such as a tokenizer's, with text beside the numbers.

Then the network (:func:`admit`). It is asked with one example whether it runs on the inputs as they are; then
they are left as they are. Otherwise

- floats, and integers where nothing is looked up, take the type of its weights;
- bytes with three axes or more are images: divided by 255, and not normalized; so are integers of other
  types where the network has convolutions, and none of them may be beyond 255;
- images (N, H, W, C) are permuted to (N, C, H, W) where the first convolution has C channels; gray, color
  and transparency of bytes become those that it takes, as Pillow converts them;
- entries of a mapping that are no argument of ``forward`` are left out, and the one input that it lacks is
  the entry that is left, or the one that is called so, such as ``image``;
- a list of more tensors than it has arguments is a list of samples.

What is ambiguous is refused. These are rules about types, shapes and names alone, so that ``predict`` does
with new inputs what the fit did with its own; what was done is in ``fit.record.reasons["data"]``. A fit
remembers the columns and the range of its own inputs (:class:`Known`), and compares new ones. A network
is asked only where inputs are unusual, and once for each type and number of axes.
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from linnet.errors import DataError, InputError, LinnetError
from linnet.tangent.batch import (
    MASK,
    TARGETS,
    TOKENS,
    Inputs,
    concatenate,
    is_data_set,
    mask_of,
    named_tensor,
    observed,
    on_device,
    padding_token,
    take,
    with_padding,
    yields,
)
from linnet.tangent.functional import (
    FAILURES,
    SMALL,
    Functional,
    adapt_outputs,
    call_arguments,
    copied,
    without_wrapper,
)
from linnet.tangent.modes import random_kept
from linnet.tree import map_tensors, tensors_in

IMAGE_MODES = {
    "1": "L", "L": "L", "LA": "RGBA", "P": "RGB", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB",
}  # fmt: skip
LIKE = 0.8  # likeness of two names, as difflib has it, from which one may be a slip for the other
UNMASKED = "padding counts as text; pass all that the tokenizer returns, or attention_mask too"
# What the entry with the inputs is called in mappings of others.
NAMES = ("image", "images", "img", "pixel_values", "x", "input", "inputs", "features", "input_values", "data")
INSIDE = ("body", "network", "module")  # what modules that wrap a network call it
CHANNELS = (1, 3, 4)  # of images, where no convolution says how many
# What was done with pixels, in notes on data.
BYTES, INTEGERS = "bytes were divided by 255", "integers were divided by 255, as bytes are"
SOME = 64  # images that a range is taken of


@dataclass
class DataNotes:
    """What is to be said of data."""

    notes: list[str] = field(default_factory=list)  # what was done with them, which changes no result
    warnings: list[str] = field(default_factory=list)  # what a reader of the results must know
    # names of the classes, where y is text: those that there are already, or those that are found
    classes: tuple[str, ...] = ()
    text: bool = False  # whether y may name classes that there are not yet: they come after those known
    columns: tuple[str, ...] = ()  # of data frames: those of the data before, or those that are found
    indexed: tuple[Any, str] = (None, "x")  # a table whose index is that of the rows, and its name
    _numbers: dict[str, int] = field(default_factory=dict)
    _kinds: set[str] = field(default_factory=set)  # of y: whether text or numbers

    def of_kind(self, kind: str) -> None:
        """Raise where some of y are text and others numbers, or missing."""
        self._kinds.add(kind)
        if len(self._kinds) > 1:
            raise DataError(
                "y is text in some samples, and a number or missing in others",
                expected="text alone, or numbers alone",
                remedy="drop or repair these samples",
            )

    def number(self, words: Sequence[str]) -> Tensor:
        """Numbers of words, in the order in which they come for the first time."""
        return torch.tensor([self._numbers.setdefault(str(word), len(self._numbers)) for word in words])

    def numbered(self, y: Tensor) -> Tensor:
        """Classes for what :meth:`number` gave, in alphabetical order or that of the classes known."""
        if not self._numbers:
            if self.classes and not y.is_floating_point() and called_by_numbers(self.classes):
                raise DataError(
                    f"y holds numbers, and the classes are called {', '.join(map(repr, self.classes[:6]))}",
                    expected="their names, as text",
                    remedy="pass y.astype(str); of places p among the names, [fit.class_names[i] for i in p]",
                )
            return y
        if not self.classes:
            self.classes = tuple(sorted(self._numbers))
            self.notes.append("classes were numbered in alphabetical order")
        unknown = sorted(set(self._numbers) - set(self.classes))
        if unknown and self.text:
            for one in unknown:
                like = [name for name in self.classes if name.casefold().strip() == one.casefold().strip()]
                like += [name for name in self.classes if len(one) > 2 and sorted(name) == sorted(one)]
                like += difflib.get_close_matches(one, self.classes, 1, LIKE)
                if like:
                    self.warnings.append(f"y holds the new class {one!r}, and there is {like[0]!r}: a slip?")
            self.classes = (*self.classes, *unknown)
        elif unknown:
            raise DataError(
                f"y holds the class {unknown[0]!r}",
                expected=f"one of {', '.join(map(repr, self.classes))}, as in the data before",
                remedy="check the spelling, or fit again with examples of all classes",
            )
        return torch.tensor([self.classes.index(word) for word in self._numbers])[y]


def called_by_numbers(classes: Sequence[str]) -> bool:
    """Whether classes are called by numbers, and by others than those of their places."""
    others = [str(place) for place in range(len(classes))] != list(classes)
    return others and all(name.removeprefix("-").replace(".", "", 1).isdecimal() for name in classes)


# -- the form ----------------------------------------------------------------------------------------


def tensorize(x: Any, name: str = "x") -> Inputs:
    """Whatever holds numbers as tensors, structure kept; nested lists of numbers are one array."""
    if isinstance(x, Tensor):
        return named_tensor(x, name)
    if isinstance(x, PackedSequence):
        raise InputError(
            f"{name} is a PackedSequence, in which examples are not apart",
            expected="padded sequences (N, T, ...), and their lengths or a mask beside them",
            remedy="pass torch.nn.utils.rnn.pad_packed_sequence(x, batch_first=True): pack in the network",
        )
    if isinstance(x, Mapping):
        entries = {key: value if _is_text(value) else _padded_list(value, x) for key, value in x.items()}
        return {
            key: value if _is_text(value) else tensorize(value, f"{name}[{key!r}]")
            for key, value in entries.items()
        }
    if str(getattr(x, "dtype", "")) == "object" and holds_arrays(found := np.asarray(x).tolist()):
        x = found
    if isinstance(x, Sequence) and not isinstance(x, list | tuple | str | bytes | range):
        x = list(x)  # a column of a data set
    if not hasattr(x, "to_numpy") and (yields(x) or (is_data_set(x) and not hasattr(x, "__array__"))):
        return x  # no inputs, as whoever counts them says
    if isinstance(x, list | tuple):
        if x and all(map(is_image, x)):
            return _images(x, name)
        if x and all(isinstance(one, Mapping) for one in x):
            return concatenate([as_batch(one) for one in x])
        if holds_arrays(x):
            parts = [tensorize(value, name) for value in x]
            return parts if isinstance(x, list) else tuple(parts)
    if is_image(x):
        return _images([x], name)[0]
    return named_tensor(_frame(x, name) if _is_frame(x) else x, name)


def in_columns(x: Any, said: DataNotes) -> Any:
    """A data frame in the order of the columns known, whose names are kept where none are; others as is."""
    names = tuple(map(str, x.columns)) if _is_frame(x) else ()
    if names == tuple(map(str, range(len(names)))) or names == said.columns:
        return x
    if not said.columns:
        said.columns = names
        return x
    if sorted(names) != sorted(said.columns) or len(set(names)) < len(names):
        lacking = [name for name in said.columns if name not in names]
        more = [name for name in names if name not in said.columns]
        raise InputError(
            f"x is a table that lacks the columns {lacking[:4]} and has the others {more[:4]}",
            expected=f"the columns of the training data, {', '.join(said.columns[:8])}",
            remedy="take these columns of the table, or pass x.to_numpy() in their order",
        )
    return x[[x.columns[names.index(name)] for name in said.columns]]


def has_index(table: Any) -> bool:
    """Whether rows have an index, as those of pandas have."""
    return hasattr(table, "index") and hasattr(table, "to_numpy")


def in_rows(x: Any, y: Any, name: str = "y", said: DataNotes | None = None, of: str = "x") -> Any:
    """The targets of a table, or its weights, in the order of its rows, by the index of both."""
    if not (has_index(x) and has_index(y)) or x.index.equals(y.index):
        return y
    if x.index.is_unique and y.index.is_unique and set(x.index) == set(y.index):
        if said is not None:
            said.notes.append(f"{name} was put in the order of the index of {of}")
        return y.loc[x.index]
    raise DataError(
        f"{of} and {name} have different indices, so that rows of {name} may belong to other rows of {of}",
        expected="one index, in any order",
        remedy=f"pass {name}.loc[{of}.index], or {name}.to_numpy() where the rows are in the same order",
    )


def answers(y: Any, said: DataNotes | None = None) -> Tensor:
    """Targets as a tensor."""
    if _is_frame(y) and len(y.columns) > 1:
        _frame(y, "y")  # which names the columns without numbers
    else:
        require_no_times(y, "y")
    y = y.to_numpy() if hasattr(y, "to_numpy") else y
    if isinstance(_first(y), Decimal):
        y = np.array(y, dtype=object)  # of which floats are made
    if isinstance(y, np.ndarray) and y.dtype.kind == "O" and y.size:
        y = y.astype(bool) if all(isinstance(one, bool | np.bool_) for one in y.flat) else y
    if isinstance(y, np.ndarray) and y.dtype.kind in "USO" and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    words = y.tolist() if isinstance(y, np.ndarray) and y.dtype.kind in "USO" else y
    if isinstance(words, str | bytes):
        return answers([words], said)[0]
    if isinstance(words, list | tuple):
        words = [word.decode() if isinstance(word, bytes) else word for word in words]
    if not isinstance(words, list | tuple) or not any(isinstance(word, str) for word in words):
        if said is not None and not isinstance(y, Tensor):  # text that has numbers comes again as one
            said.of_kind("numbers")
        found = named_tensor(y, "y")
        return found.long() if found.dtype == torch.bool and found.ndim < 2 else found
    other = next((place for place, word in enumerate(words) if not isinstance(word, str)), None)
    if other is not None:
        raise DataError(
            f"y is text, and at index {other} it is {words[other]!r}",
            expected="text alone, or numbers alone",
            remedy="drop or repair these examples",
        )
    if said is None or not (said.text or said.classes):
        raise InputError(
            f"y is text, such as {words[0]!r}",
            expected="numbers of classes",
            remedy="number those of training, names, y = numpy.unique(y, return_inverse=True), and all "
            "others by the same names, [list(names).index(name) for name in y]",
        )
    said.of_kind("text")
    return said.number(words)


def known_answers(y: Any, classes: Sequence[str]) -> Tensor:
    """Targets as a tensor, where classes have names already."""
    said = DataNotes(classes=tuple(classes))
    return said.numbered(answers(y, said))


def as_batch(x: Any) -> Inputs:
    """The inputs of one sample as a batch of one, (1, ...)."""
    found = map_tensors(lambda t: t[None], tensorize(x))
    return (
        {key: [v] if isinstance(v, str) else v for key, v in found.items()}
        if isinstance(x, Mapping)
        else found
    )


def holds_arrays(x: Any) -> bool:
    """Whether anything in nested lists is an input of its own: a tensor, an array, an image or a mapping."""
    if isinstance(x, list | tuple):
        return any(holds_arrays(value) for value in x)
    return isinstance(x, Mapping) or getattr(x, "ndim", 0) > 0 or is_image(x)


def is_image(value: Any) -> bool:
    """Whether it is an image of PIL, which is not imported for that."""
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "convert")


def _first(value: Any) -> Any:
    """The first entry of nested lists."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def _is_text(value: Any) -> bool:
    """Whether it is text, or as many texts as there are samples."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US"
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], str)
    )


def _images(images: Sequence[Any], name: str) -> Tensor:
    """Images as bytes (N, C, H, W), all of one mode."""
    if odd := [image.mode for image in images if image.mode not in IMAGE_MODES]:
        raise InputError(
            f"{name} holds an image of PIL of mode {odd[0]!r}",
            expected="images of 8 bits a channel",
            remedy='convert them, image.convert("RGB"), or pass numpy.asarray(image) scaled as for training',
        )
    modes = {IMAGE_MODES[image.mode] for image in images}
    mode = modes.pop() if len(modes) == 1 else "RGB"
    arrays = [np.array(image.convert(mode)) for image in images]
    sizes = list(dict.fromkeys(array.shape[:2] for array in arrays))
    if len(sizes) > 1:
        raise DataError(
            f"{name} holds images of {len(sizes)} sizes (height, width), such as {sizes[0]} and {sizes[1]}",
            expected="images of one size",
            remedy="resize them, [image.resize((width, height)) for image in images], as for training",
        )
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked[:, None] if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()


def _frame(table: Any, name: str) -> Any:
    """The columns of a data frame side by side, (N, D)."""
    if len(set(table.columns)) < len(table.columns):
        twice = next(label for label, count in Counter(table.columns).items() if count > 1)
        raise InputError(
            f"{name} has several columns named {twice!r}", "a name for each column", f"rename them in {name}"
        )
    require_no_times(table, name)
    found, wrong = [], []
    for label in table.columns:
        column = table[label].to_numpy()
        try:
            found.append(np.asarray(column, dtype=column.dtype if column.dtype.kind in "fiu" else np.float64))
        except (TypeError, ValueError):
            wrong.append(str(label))
    if wrong or not found:
        raise InputError(
            f"{name} is {type(table).__name__}, columns without numbers: {', '.join(wrong[:4]) or 'all'}",
            expected="numbers in every column",
            remedy=f"leave them out or encode them, as pandas.get_dummies({name}) does",
        )
    return np.column_stack(found)


def _is_frame(table: Any) -> bool:
    """Whether it is a data frame."""
    return hasattr(table, "columns") and hasattr(table, "to_numpy")


def require_no_times(values: Any, name: str) -> None:
    """Raise where an array or a column of a data frame holds times, which some take as counts from 1970."""
    columns = {name: values}
    if _is_frame(values):
        columns = {f"{name}[{str(label)!r}]": values[label] for label in values.columns}
    for called, column in columns.items():
        if hasattr(column, "to_numpy") and not hasattr(getattr(column, "dtype", None), "kind"):
            column = column.to_numpy()  # of other libraries than pandas, whose types say zones
        kind = getattr(getattr(column, "dtype", None), "kind", "")
        parts = np.ravel(column) if kind == "O" else ()
        times = [one for one in parts if isinstance(one, np.datetime64 | np.timedelta64)]
        if times or kind in ("M", "m"):
            named_tensor(times[0] if times else column, called)


def _padded_list(value: Any, beside: Mapping[str, Any]) -> Any:
    """Lists of numbers of several lengths, as of tokenizers, filled with zeros if a mask is beside them."""
    rows = isinstance(value, list) and len(value) > 0 and all(isinstance(row, list) for row in value)
    if not rows or not any("mask" in str(key) for key in beside):
        return value
    longest = max(map(len, value))
    return [[*row, *[0] * (longest - len(row))] for row in value]


# -- the network -------------------------------------------------------------------------------------


def device_of(network: Functional | nn.Module) -> torch.device:
    """Where a network's weights are; the CPU for one without any."""
    if isinstance(network, Functional):
        return network.device
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def taken(network: Functional | nn.Module, x: Any, name: str = "x", said: DataNotes | None = None) -> Inputs:
    """New inputs as the network takes them, whose values are not looked at; ``None`` stays."""
    return None if x is None else admit(network, tensorize([x] if is_image(x) else x, name), said)


def one_image(network: Functional | nn.Module, x: Any) -> Any:
    """A single image (C, H, W) or (H, W, C) as a batch of one, where a network of convolutions takes that."""
    x = tensorize(x) if hasattr(x, "__array__") and not isinstance(x, Tensor) and not is_image(x) else x
    if not isinstance(x, Tensor) or x.ndim != 3:
        return x
    change = _change_of(network)
    if change is None or change.channels is None or change.channels not in (x.shape[0], x.shape[2]):
        return x
    return x if _runs(network, change.typed(x[:1])) else x[None]


def admit(network: Functional | nn.Module, x: Inputs, said: DataNotes | None = None) -> Inputs:
    """A batch of tensors as the network takes it."""
    if observed(x)[1] is not None:
        return x
    said = DataNotes() if said is None else said
    if isinstance(x, Mapping):
        model = _module_of(network)
        x = _routed(_known(network, "arguments", lambda: _arguments(model)), x, said)
        x = with_padding(x, _known(network, "padding", lambda: padding_token(model)))
    elif isinstance(x, list):
        x = _listed(network, x)
    tensors = [t for t in tensors_in(x) if t.ndim]
    change = _change_of(network)
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return x
    if change is None or not any(map(change.odd, tensors)) or not len(tensors[0]):
        return x
    kind = tuple((t.dtype, t.ndim, change.last(t), change.given(t)) for t in tensors)
    few = take(x, slice(0, 1))
    for step in _known(network, kind, lambda: _way(network, few, change)):
        said.notes += [note for t in tensors_in(x) if t.ndim and (note := change.note(step, t))]
        x = change.after([step], x)
    return x


def _module_of(network: Functional | nn.Module) -> nn.Module:
    """The modules of a network."""
    return network.model if isinstance(network, Functional) else without_wrapper(network)


def _change_of(network: Functional | nn.Module) -> _InputRules | None:
    """What may be done with inputs of a network; ``None`` for one without weights."""
    found: _InputRules | None = _known(network, "change", lambda: _InputRules.of(_module_of(network)))
    return found


def _known(network: Functional | nn.Module, what: Any, find: Callable[[], Any]) -> Any:
    """What is found out once about a network that does not change."""
    if not isinstance(network, Functional):
        return find()
    kept = network.cache.admitted
    if what not in kept:
        kept[what] = find()
    return kept[what]


class _InputRules(NamedTuple):
    """What may be done with a tensor so that a network takes it."""

    # the types of the network's weights, the first of them that of most inputs
    kinds: tuple[torch.dtype, ...]
    channels: int | None  # channels of its first convolution, if it has one
    looks_up: bool  # whether integers may be positions in a table

    @classmethod
    def of(cls, model: nn.Module) -> _InputRules | None:
        """That of a network; ``None`` for one without weights."""
        kinds = tuple(dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point()))
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        tables = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
        return cls(kinds, channels, tables) if kinds else None

    def pixels(self, t: Tensor) -> bool:
        """Whether it holds images of numbers from 0 to 255."""
        if t.dtype == torch.uint8:
            return t.ndim > 2
        whole = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        return whole and t.ndim in (3, 4) and self.channels is not None and not self.looks_up

    def typed(self, t: Tensor) -> Tensor:
        """The tensor in the type of the weights, bytes with three axes or more as shares of 255."""
        if self.pixels(t):
            return _within(t).to(self.kinds[0]) / 255
        if t.dtype == torch.uint8:
            return t
        if t.is_complex() or t.dtype == torch.bool or (self.looks_up and not t.is_floating_point()):
            return t
        return t if t.dtype in self.kinds else t.to(self.kinds[0])

    def last(self, t: Tensor) -> bool:
        """Whether it looks like images with their channels last."""
        expected = CHANNELS if self.channels is None else (self.channels,)
        return t.ndim == 4 and t.shape[-1] in expected and t.shape[1] not in expected

    def permuted(self, t: Tensor) -> Tensor:
        """Channels last put first."""
        return t.permute(0, 3, 1, 2).contiguous() if self.last(t) else t

    def given(self, t: Tensor) -> int | None:
        """Channels of images of pixels that have others than the first convolution takes; 0 for no axis."""
        if not self.pixels(t) or self.channels not in CHANNELS:
            return None
        if t.ndim == 3:
            return 0
        if t.ndim != 4 or self.channels in (t.shape[1], t.shape[-1]):
            return None
        return next((size for size in (t.shape[-1], t.shape[1]) if size in CHANNELS), None)

    def colored(self, t: Tensor) -> Tensor:
        """Pixels with the channels that the first convolution takes, as Pillow converts them."""
        found = self.given(t)
        if found is None:
            return t
        t = t[:, None] if not found else t.permute(0, 3, 1, 2) if t.shape[-1] == found else t
        if t.shape[1] > 1 and self.channels == 1:
            red, green, blue = t[:, :3].long().unbind(1)
            return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(t.dtype)[:, None]
        colors = t[:, :3] if t.shape[1] > 1 else t.expand(-1, 3, -1, -1)
        if self.channels == 4:
            colors = torch.cat([colors, torch.full_like(colors[:, :1], 255)], 1)
        return (t if self.channels == 1 else colors).contiguous()

    def after(self, steps: Sequence[str], x: Inputs) -> Inputs:
        """Inputs after some steps, each a method of this class."""
        for step in steps:
            x = map_tensors(getattr(self, step), x)
        return x

    def odd(self, t: Tensor) -> bool:
        """Whether the network has to be asked about it."""
        other = t.dtype == torch.uint8 or self.typed(t[:0]).dtype != t.dtype
        return other or (self.last(t) and self.channels is not None)

    def note(self, step: str, t: Tensor) -> str | None:
        """What a step did with a tensor, if anything."""
        if step == "permuted":
            return "images (N, H, W, C) were permuted to (N, C, H, W)" if self.last(t) else None
        if step == "colored":
            found = self.given(t)
            told = f"images of {found or 1} channel(s) were converted to {self.channels}"
            return told if found is not None and max(found, 1) != self.channels else None
        made = self.typed(t[:0]).dtype
        if made == t.dtype:
            return None
        if self.pixels(t):
            return BYTES if t.dtype == torch.uint8 else INTEGERS
        return f"{t.dtype} was converted to {made}".replace("torch.", "")


def _within(t: Tensor) -> Tensor:
    """Integers that are pixels, or an error."""
    if t.dtype == torch.uint8 or not t.numel():
        return t
    low, high = (int(end) for end in t.aminmax())
    if low < 0 or high > 255:
        raise DataError(
            f"x holds integers ({t.dtype}) from {low} to {high} for a network of convolutions",
            expected="pixels from 0 to 255, or floats",
            remedy="pass x.float(), scaled and normalized as for the network's training",
        )
    return t


def _way(network: Functional | nn.Module, few: Inputs, change: _InputRules) -> tuple[str, ...]:
    """The fewest steps after which a network runs on an example; none if it never does."""

    def after(*steps: str) -> Inputs:
        return change.after(steps, few)

    ways: tuple[tuple[str, ...], ...] = ((), ("typed",), ("permuted",), ("typed", "permuted"))
    if any(change.given(t) is not None for t in tensors_in(few)):
        ways += (("colored", "typed"),)
    given = [t for t in tensors_in(few) if t.dtype == torch.uint8]
    shape = tuple(given[0].shape[1:]) if given else ()
    found = next((way for way in ways if _runs(network, after(*way))), None)
    doubtful = found == ("typed",) and any(change.last(t) and t.shape[-1] > 1 for t in given)
    if doubtful and _runs(network, after("typed", "permuted")):
        raise InputError(
            f"x holds bytes of shape {shape} for each example, and the network runs on them with the "
            "channels last and with the channels first",
            expected="images as the network was trained on them",
            remedy="pass x.permute(0, 3, 1, 2) / 255 for channels first, or x / 255",
        )
    plain = map_tensors(lambda t: t.to(change.kinds[0]), few)
    if found is None and any(t.ndim <= 2 for t in given) and _runs(network, plain):
        raise InputError(
            f"x holds bytes (uint8) of shape {shape} for each example, which may be pixels or numbers",
            expected=f"inputs in the network's type, {change.kinds[0]}",
            remedy="pass x.float() / 255 for pixels, or x.float() for numbers",
        )
    return found or ()


def _result(network: Functional | nn.Module, x: Inputs) -> Any:
    """What a network returns for a batch; ``None`` where it fails."""
    try:
        with torch.no_grad(), random_kept():
            if isinstance(network, Functional):
                return network(network.theta, x)
            model = without_wrapper(network)
            # a copy, as a pass may write to buffers and attributes; its train() could write to the weights
            large = [t for t in model.buffers() if t.numel() > SMALL]
            model = copied(model, [*model.parameters(), *large])
            for module in model.modules():
                module.training = False
            args, named = call_arguments(on_device(x, device_of(model)))
            return model(*args, **named)
    except (*FAILURES, LinnetError):
        return None


def _runs(network: Functional | nn.Module, x: Inputs) -> bool:
    """Whether a network runs on one example."""
    found = _result(network, x)
    return found is not None and (not isinstance(network, Functional) or len(found) == 1)


def outputs_or_none(network: Functional | nn.Module, x: Inputs) -> Tensor | None:
    """The outputs of a network for a batch; ``None`` where they are no tensor, or it fails."""
    return _outputs_of(_result(network, x))


def states_or_none(network: Functional | nn.Module, x: Inputs) -> Tensor | None:
    """The outputs, or the last hidden states where a network returns these."""
    result = _result(network, x)
    found = _outputs_of(result)
    states = getattr(result, "last_hidden_state", None) if found is None else found
    return states if isinstance(states, Tensor) else None


def _outputs_of(result: Any) -> Tensor | None:
    """The outputs in what a network returns; ``None`` where they are no tensor."""
    try:
        return adapt_outputs(result, None)
    except (*FAILURES, LinnetError):
        return None


def _listed(network: Functional | nn.Module, x: list[Any]) -> Inputs:
    """A list of inputs, or of samples if the network does not take as many arguments, or not these."""
    found, alike = _arguments(_module_of(network)), are_alike(x)
    needed = 0 if found is None else sum(found.values())
    if found is None or not alike or len(x) == needed > 1:
        return tuple(x)
    samples = torch.stack(x)
    if not needed <= len(x) <= len(found):
        return samples
    change = _change_of(network)
    images = change is not None and change.channels is not None and samples.ndim == 4

    def are_samples() -> bool:
        return _fits(network, samples, change) and (images or not _fits(network, tuple(x), change))

    kind = (len(x), samples.dtype, samples.shape[1:])
    return samples if _known(network, kind, are_samples) else tuple(x)


def _fits(network: Functional | nn.Module, x: Inputs, change: _InputRules | None) -> bool:
    """Whether a network runs on the first example, as it is or changed."""
    few = take(x, slice(0, 1))
    return _runs(network, few if change is None else change.after(_way(network, few, change), few))


def are_alike(x: Any) -> bool:
    """Whether it is a list of tensors of one shape, and so perhaps of samples."""
    return isinstance(x, list) and all(isinstance(t, Tensor) and t.shape == x[0].shape for t in x)


def bare_inputs(x: Any) -> Any:
    """Inputs without targets as a tensor, where their form says that they are; anything else as it is."""
    listed = isinstance(x, list) and all(getattr(one, "ndim", 0) > 2 or is_image(one) for one in x)
    if not (listed and x) and not hasattr(x, "__array__"):
        return x
    found = tensorize(x)
    return torch.stack(found) if are_alike(found) else found


def _arguments(model: nn.Module) -> dict[str, bool] | None:
    """The arguments of ``forward``, and which of them it needs; ``None`` if it takes any."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled forward without a signature
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        inner = [part for name, part in model.named_children() if name in INSIDE]
        return _arguments(inner[0]) if len(inner) == 1 else None
    return {p.name: p.default is p.empty for p in found}


def _routed(found: dict[str, bool] | None, x: Mapping[str, Any], said: DataNotes) -> Inputs:
    """The entries of a mapping that the network takes; what it is given by position alone is a tensor."""
    if not x:
        return x
    texts = [key for key, value in x.items() if _is_text(value)]
    if found is None:
        if texts:
            said.notes.append(f"the network is not given {', '.join(map(repr, texts))}")
        return {key: value for key, value in x.items() if key not in texts}
    taken = {key: value for key, value in x.items() if key in found}
    rest = {key: value for key, value in x.items() if key not in found and key not in TARGETS}
    lacking = [name for name, needed in found.items() if needed and name not in taken]
    if not taken and not lacking:
        lacking = list(found)[:1]
    tensors = {key: value for key, value in rest.items() if isinstance(value, Tensor) and value.ndim > 0}
    named = [key for key in tensors if key in NAMES] or [key for key in tensors if tensors[key].ndim > 1]
    named = named or list(tensors)
    if lacking and (len(lacking) > 1 or len(named) != 1):
        raise InputError(
            f"x is a mapping with {', '.join(map(repr, x))}, and the network's forward takes "
            f"{', '.join(map(repr, found))}",
            expected="an entry for each of its arguments",
            remedy=f"call the entry {lacking[0]!r} that it is to take there, or pass (x, y) pairs",
        )
    if lacking:
        taken[lacking[0]] = rest.pop(named[0])
    if rest:
        said.notes.append(f"the network is not given {', '.join(map(repr, rest))}")
    return taken[lacking[0]] if lacking and len(taken) == 1 else taken


# -- the scale of images -----------------------------------------------------------------------------


class KnownInputs(NamedTuple):
    """What a fit remembers of its inputs, to compare new ones with."""

    columns: tuple[str, ...]  # of a data frame
    range: tuple[float, float] | None  # of images, as the network takes them
    masked: bool  # whether a mask says which positions of sequences count
    token: int | None  # of padding, by the network's configuration or where nothing else is hidden
    moved: bool = False  # whether labels were those of their own positions

    @classmethod
    def of(cls, x: Inputs, columns: tuple[str, ...], token: int | None, moved: bool = False) -> KnownInputs:
        """That of training inputs."""
        key = mask_of(x)
        ids = x.get(TOKENS) if isinstance(x, Mapping) else None
        if token is None and key == MASK and isinstance(ids, Tensor) and ids.shape == x[key].shape:
            hidden = ids[x[key] == 0].unique()
            token = int(hidden) if len(hidden) == 1 else None
        return cls(columns, _range(x), key is not None, token, moved)

    def doubts(self, x: Inputs, notes: Sequence[str]) -> list[str]:
        """Why inputs are probably unlike those of the training data, images by their scale."""
        if self.masked and mask_of(x) is None and self.token is not None and ends_in(x, self.token):
            return [f"x has no mask, and the training data had one: {UNMASKED}"]
        found = _range(x)
        if found is None or self.range is None:
            return []
        (low, high), (least, most), scaled = found, self.range, {BYTES, INTEGERS} & set(notes)
        shares = low >= 0 and high <= 1 and (scaled or high - low > 0.5)  # pixels that were divided by 255
        far = 8 * max(-least, most, 1e-30) < max(-low, high) and high > 1.5
        small = shares and most > 16  # pixels in 0 to 255, for a network that divides them by itself
        signed = least < -0.5 and shares, least >= 0 and low < -0.5
        if not (far or small or any(signed)):
            return []
        how = "bytes are divided by 255, which is all that is done to them; " if scaled else ""
        return [
            f"x holds values from {low:.3g} to {high:.3g}, and the images of the training data from "
            f"{least:.3g} to {most:.3g}: {how}scale and normalize x as the training data were"
            + (", x / 255 for pixels up to 255" if far else "")
        ]


def doubts(network: Functional | nn.Module, x: Inputs, notes: Sequence[str]) -> list[str]:
    """Why training inputs are probably not what the network takes."""
    return [*_doubts_of_pixels(x, notes), *_doubts_of_padding(_module_of(network), x)]


def _doubts_of_padding(model: nn.Module, x: Inputs) -> list[str]:
    """Whether token ids end in padding that no mask hides."""
    token, takes_mask = padding_token(model), MASK in (_arguments(model) or ())
    if token is None or not takes_mask or mask_of(x) is not None or not ends_in(x, token):
        return []
    return [f"x ends in the network's padding, token {token}, and has no mask: {UNMASKED}"]


def ends_in(x: Inputs, token: int) -> bool:
    """Whether token ids have a token of padding, at their ends alone."""
    ids = x.get(TOKENS) if isinstance(x, Mapping) else x
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return False
    at = ids == token
    ends = at.long().cumprod(1).bool() | at.flip(1).long().cumprod(1).bool().flip(1)
    return bool(at.any()) and not bool((at & ~ends).any())  # elsewhere it is a token like others


def _range(x: Inputs) -> tuple[float, float] | None:
    """The smallest and the largest value of some images; ``None`` without any."""
    few = [_few(t) for t in tensors_in(observed(x)[0]) if t.ndim == 4 and t.is_floating_point() and t.numel()]
    ends = [torch.stack(t.aminmax()).double().cpu() for t in few]
    return (min(float(e[0]) for e in ends), max(float(e[1]) for e in ends)) if ends else None


def _few(t: Tensor) -> Tensor:
    """Some rows of a tensor, evenly spaced."""
    return t[:: -(-len(t) // SOME)].detach()


def _doubts_of_pixels(x: Inputs, notes: Sequence[str]) -> list[str]:
    """Why training images are probably not scaled as the network takes them."""
    found = _range(x)
    if found is None or found[0] < 0:
        return []
    if INTEGERS in notes and 0 < found[1] < 1.5 / 255:
        return ["x holds the integers 0 and 1, which were divided by 255: pass x.float() to keep them"]
    images = [_few(t) for t in tensors_in(observed(x)[0]) if t.ndim == 4 and t.is_floating_point()]
    if not 1.5 < found[1] <= 255 or any(bool((t != t.round()).any()) for t in images):
        return []
    return [
        f"x holds whole numbers up to {found[1]:.0f}, as pixels are: pass x / 255, or bytes (uint8), if the "
        "network was trained on pixels in [0, 1]; normalize them as for its training"
    ]
