"""The door for inputs: what users hold, as tensors that the network takes; training and new inputs alike.

First the form, which needs no network (:func:`tensorize`): tensors as they are; arrays and lists of numbers;
data frames, whose columns have to be numbers, and their series; images of PIL, as bytes (N, C, H, W); lists
of samples; mappings such as a tokenizer's, with text beside the numbers.

Then the network (:func:`admit`). It is asked with one example whether it runs on the inputs as they are; then
they are left as they are. Otherwise

- floats, and integers where nothing is looked up, take the type of its weights;
- bytes with three axes or more are images: divided by 255, and not normalized;
- images (N, H, W, C) are permuted to (N, C, H, W) where the first convolution has C channels;
- entries of a mapping that are no argument of ``forward`` are left out, and the one input that it lacks is
  the entry that is left, or the one that is called so, such as ``image``;
- a list of more tensors than it has arguments is a list of samples.

What is ambiguous is refused. These are rules about types, shapes and names alone, so that ``predict`` does
with new inputs what the fit did with its own; what was done is in ``fit.record.reasons["data"]``. A network
is asked only where inputs are unusual, and once for each type and number of axes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError, LinnetError
from linnet.tangent.batch import (
    TARGETS,
    Inputs,
    check_examples,
    concatenate,
    is_data_set,
    map_tensors,
    named_tensor,
    observed,
    on_device,
    take,
    tensors_in,
    yields,
)
from linnet.tangent.functional import FAILURES, Functional, adapt_outputs, call_arguments
from linnet.tangent.order import Said, random_kept

IMAGE_MODES = {
    "1": "L", "L": "L", "LA": "RGBA", "P": "RGB", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB",
}  # fmt: skip
# What the entry with the inputs is called in mappings of others.
NAMES = ("image", "images", "img", "pixel_values", "x", "input", "inputs", "features", "input_values", "data")
INSIDE = ("body", "network", "module")  # what modules that wrap a network call it
CHANNELS = (1, 3, 4)  # of images, where no convolution says how many


# -- the form ----------------------------------------------------------------------------------------


def tensorize(x: Any, name: str = "x") -> Inputs:
    """Whatever holds numbers as tensors, structure kept; nested lists of numbers are one array."""
    if isinstance(x, Mapping):
        entries = {key: value if _is_text(value) else _padded_list(value, x) for key, value in x.items()}
        return {
            key: value if _is_text(value) else tensorize(value, f"{name}[{key!r}]")
            for key, value in entries.items()
        }
    if str(getattr(x, "dtype", "")) == "object" and holds_arrays(found := np.asarray(x).tolist()):
        x = found
    if isinstance(x, Sequence) and not isinstance(x, list | tuple | str | range):
        x = list(x)  # a column of a data set
    if not hasattr(x, "to_numpy") and (yields(x) or (is_data_set(x) and not hasattr(x, "__array__"))):
        return x  # no inputs, as whoever counts them says
    if isinstance(x, list | tuple):
        if x and all(map(_is_image, x)):
            return _images(x, name)
        if x and all(isinstance(one, Mapping) for one in x):
            return concatenate([as_batch(one) for one in x])
        if holds_arrays(x):
            parts = [tensorize(value, name) for value in x]
            return parts if isinstance(x, list) else tuple(parts)
    if _is_image(x):
        return _images([x], name)[0]
    return named_tensor(_frame(x, name) if hasattr(x, "columns") and hasattr(x, "to_numpy") else x, name)


def answers(y: Any, said: Said | None = None) -> Tensor:
    """Targets as a tensor."""
    y = y.to_numpy() if hasattr(y, "to_numpy") else y
    words = y.tolist() if isinstance(y, np.ndarray) and y.dtype.kind in "USO" else y
    if isinstance(words, str | bytes):
        return answers([words], said)[0]
    if isinstance(words, list | tuple):
        words = [word.decode() if isinstance(word, bytes) else word for word in words]
    if not isinstance(words, list | tuple) or not any(isinstance(word, str) for word in words):
        if said is not None and not isinstance(y, Tensor):  # text that has numbers comes again as one
            said.of_kind("numbers")
        return named_tensor(y, "y")
    other = next((place for place, word in enumerate(words) if not isinstance(word, str)), None)
    if other is not None:
        raise DataError(
            f"y is text, and at index {other} it is {words[other]!r}",
            expected="text alone, or numbers alone",
            remedy="drop or repair these examples",
        )
    if said is None or not said.text:
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
    said = Said.known(classes)
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
    return isinstance(x, Mapping) or getattr(x, "ndim", 0) > 0 or _is_image(x)


def _is_image(value: Any) -> bool:
    """Whether it is an image of PIL, which is not imported for that."""
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "convert")


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
            remedy="leave them out or encode them, as pandas.get_dummies(x) does",
        )
    return np.column_stack(found)


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


def examples(network: Functional | nn.Module, x: Any, name: str = "x") -> Inputs:
    """New inputs as the network takes them."""
    made = taken(network, x, name)
    check_examples(made, name)
    return made


def taken(network: Functional | nn.Module, x: Any, name: str = "x") -> Inputs:
    """New inputs as the network takes them, whose values are not looked at; ``None`` stays."""
    return None if x is None else admit(network, tensorize([x] if _is_image(x) else x, name))


def admit(network: Functional | nn.Module, x: Inputs, said: Said | None = None) -> Inputs:
    """A batch of tensors as the network takes it."""
    if observed(x)[1] is not None:
        return x
    said = Said() if said is None else said
    model = network.model if isinstance(network, Functional) else getattr(network, "_orig_mod", network)
    if isinstance(x, Mapping):
        x = _routed(_known(network, "arguments", lambda: _arguments(model)), x, said)
    elif isinstance(x, list):
        x = _listed(network, model, x)
    tensors = [t for t in tensors_in(x) if t.ndim]
    change = _known(network, "change", lambda: _Change.of(model))
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return x
    if change is None or not any(map(change.odd, tensors)) or not len(tensors[0]):
        return x
    kind = tuple((t.dtype, t.ndim, change.last(t)) for t in tensors)
    few = take(x, slice(0, 1))
    for step in _known(network, kind, lambda: _way(network, model, few, change)):
        said.notes += [note for t in tensors if (note := change.note(step, t))]
        x = map_tensors(getattr(change, step), x)
    return x


def _known(network: Functional | nn.Module, what: Any, find: Callable[[], Any]) -> Any:
    """What is found out once about a network that does not change."""
    if not isinstance(network, Functional):
        return find()
    kept = network.cache.setdefault("taken", {})
    if what not in kept:
        kept[what] = find()
    return kept[what]


class _Change(NamedTuple):
    """What may be done with a tensor so that a network takes it."""

    # the types of the network's weights, the first of them that of most inputs
    kinds: tuple[torch.dtype, ...]
    channels: int | None  # channels of its first convolution, if it has one
    looks_up: bool  # whether integers may be positions in a table

    @classmethod
    def of(cls, model: nn.Module) -> _Change | None:
        """That of a network; ``None`` for one without weights."""
        kinds = tuple(dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point()))
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        tables = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
        return cls(kinds, channels, tables) if kinds else None

    def typed(self, t: Tensor) -> Tensor:
        """The tensor in the type of the weights, bytes with three axes or more as shares of 255."""
        if t.dtype == torch.uint8:
            return t.to(self.kinds[0]) / 255 if t.ndim > 2 else t
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

    def odd(self, t: Tensor) -> bool:
        """Whether the network has to be asked about it."""
        other = t.dtype == torch.uint8 or self.typed(t[:0]).dtype != t.dtype
        return other or (self.last(t) and self.channels is not None)

    def note(self, step: str, t: Tensor) -> str | None:
        """What a step did with a tensor, if anything."""
        if step == "permuted":
            return "images (N, H, W, C) were permuted to (N, C, H, W)" if self.last(t) else None
        made = self.typed(t[:0]).dtype
        if made == t.dtype:
            return None
        if t.dtype == torch.uint8:
            return "bytes were divided by 255"
        return f"{t.dtype} was converted to {made}".replace("torch.", "")


def _way(network: Functional | nn.Module, model: nn.Module, few: Inputs, change: _Change) -> tuple[str, ...]:
    """The fewest steps after which a network runs on an example; none if it never does."""

    def after(*steps: str) -> Inputs:
        made = few
        for step in steps:
            made = map_tensors(getattr(change, step), made)
        return made

    ways: tuple[tuple[str, ...], ...] = ((), ("typed",), ("permuted",), ("typed", "permuted"))
    given = [t for t in tensors_in(few) if t.dtype == torch.uint8]
    shape = tuple(given[0].shape[1:]) if given else ()
    with _asking(model):
        found = next((way for way in ways if _runs(network, model, after(*way))), None)
        doubtful = found == ("typed",) and any(change.last(t) and t.shape[-1] > 1 for t in given)
        if doubtful and _runs(network, model, after("typed", "permuted")):
            raise InputError(
                f"x holds bytes of shape {shape} for each example, and the network runs on them with the "
                "channels last and with the channels first",
                expected="images as the network was trained on them",
                remedy="pass x.permute(0, 3, 1, 2) / 255 for channels first, or x / 255",
            )
        plain = map_tensors(lambda t: t.to(change.kinds[0]), few)
        if found is None and any(t.ndim <= 2 for t in given) and _runs(network, model, plain):
            raise InputError(
                f"x holds bytes (uint8) of shape {shape} for each example, which may be pixels or numbers",
                expected=f"inputs in the network's type, {change.kinds[0]}",
                remedy="pass x.float() / 255 for pixels, or x.float() for numbers",
            )
    return found or ()


@contextlib.contextmanager
def _asking(model: nn.Module) -> Iterator[None]:
    """A network in evaluation mode, without gradients; it and all random streams are put back."""
    modes = [(module, module.training) for module in model.modules()]
    if model.training:
        model.eval()
    try:
        with torch.no_grad(), random_kept():
            yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)


def _runs(network: Functional | nn.Module, model: nn.Module, x: Inputs) -> bool:
    """Whether a network runs on one example."""
    try:
        if isinstance(network, Functional):
            return len(network(network.theta, x)) == 1
        args, named = call_arguments(on_device(x, device_of(model)))
        model(*args, **named)
    except (*FAILURES, LinnetError):
        return False
    return True


def outputs_of(network: Functional | nn.Module, x: Inputs) -> Tensor | None:
    """What a network returns for a batch; ``None`` where that is no tensor, or it fails."""
    model = network.model if isinstance(network, Functional) else network
    try:
        with _asking(model):
            if isinstance(network, Functional):
                return network(network.theta, x)
            args, named = call_arguments(on_device(x, device_of(model)))
            return adapt_outputs(model(*args, **named), None)
    except (*FAILURES, LinnetError):
        return None


def _listed(network: Functional | nn.Module, model: nn.Module, x: list[Any]) -> Inputs:
    """A list of inputs, or of samples if the network does not take as many arguments, or not these."""
    found, alike = _arguments(model), are_alike(x)
    needed = 0 if found is None else sum(found.values())
    if found is None or not alike or len(x) == needed > 1:
        return tuple(x)
    samples = torch.stack(x)
    if not needed <= len(x) <= len(found):
        return samples
    change = _known(network, "change", lambda: _Change.of(model))
    images = change is not None and change.channels is not None and samples.ndim == 4

    def are_samples() -> bool:
        return _fits(network, model, samples, change) and (
            images or not _fits(network, model, tuple(x), change)
        )

    kind = (len(x), samples.dtype, samples.shape[1:])
    return samples if _known(network, kind, are_samples) else tuple(x)


def _fits(network: Functional | nn.Module, model: nn.Module, x: Inputs, change: _Change | None) -> bool:
    """Whether a network runs on the first example, as it is or changed."""
    few = take(x, slice(0, 1))
    for step in () if change is None else _way(network, model, few, change):
        few = map_tensors(getattr(change, step), few)
    with _asking(model):
        return _runs(network, model, few)


def are_alike(x: Any) -> bool:
    """Whether it is a list of tensors of one shape, and so perhaps of samples."""
    return isinstance(x, list) and all(isinstance(t, Tensor) and t.shape == x[0].shape for t in x)


def alone(x: Any) -> Any:
    """Inputs without targets as a tensor, where their form says that they are; anything else as it is."""
    listed = isinstance(x, list) and all(getattr(one, "ndim", 0) > 2 or _is_image(one) for one in x)
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


def _routed(found: dict[str, bool] | None, x: Mapping[str, Any], said: Said) -> Inputs:
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
