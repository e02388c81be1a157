"""Networks by name from transformers, timm and torchvision, as installed.

None is required: torchvision in particular must match the user's torch exactly, and one that does not breaks
other packages when they import it. What does not work is said, with its cause.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distribution import importing, install_command
from linnet.errors import DependencyError, LinnetError, ModelError
from linnet.fitting.last_layer import BELOW

_PREPROCESSOR = "preprocessor_config.json"
_TIMM = ("pretrained_cfg", "default_cfg")  # where a network of timm has what it was trained on
UNITS = 256  # hidden units of the network that is made for a table where none is given
_WHOSE_CODE = ("trust_remote_code", "code_revision")
# Arguments that make a library run code from elsewhere, or unpickle, with the values that do not. In order:
# of transformers (a model's own Python files, pickled weights, kernels from the hub), of timm (pickles), of
# torch.hub and NumPy (factories hand them on), and the words for a class that is to be imported.
_CODE_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "trust_remote_code": (False, None), "code_revision": (None,), "auto_map": (None,),
    "weights_only": (True, None), "use_kernels": (False, None), "allow_all_kernels": (False, None),
    "kernel_config": (None,), "checkpoint_path": ("", None), "pretrained_cfg": (None,),
    "pretrained_cfg_overlay": (None,), "trust_repo": (False, None), "allow_pickle": (False, None),
    "class_path": (), "_class_path": (), "_target_": (),
}  # fmt: skip
_HUB_CODE = (
    "attn_implementation",
    "experts_implementation",
)  # a name with a slash is a repository of kernels


def code_arguments(arguments: object, inside: str = "") -> tuple[str, ...]:
    """The arguments that make a library run code of others, at any depth."""
    if isinstance(arguments, list | tuple):
        return tuple(name for value in arguments for name in code_arguments(value, inside))
    if not isinstance(arguments, Mapping):
        return ()
    found: list[str] = []
    for name, value in arguments.items():
        harmless = _CODE_ARGUMENTS.get(name)
        is_hub = name in _HUB_CODE and "/" in str(value)
        if is_hub or (harmless is not None and not any(value is one or value == one for one in harmless)):
            found.append(f"{inside}{name}")
        found += code_arguments(value, f"{inside}{name}.")
    return tuple(found)


def _from_huggingface(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A classifier of images or of text, or the encoder where a checkpoint has no head, in float32."""
    with _optional("transformers", f"hf:{name}", install_command("text")):
        transformers = importlib.import_module("transformers")
        # said outright: transformers asks at the terminal whether to run a model's own code otherwise
        arguments = {"dtype": torch.float32, "trust_remote_code": False, **arguments}
        own = {key: arguments[key] for key in _WHOSE_CODE if arguments.get(key)}
        own.setdefault("trust_remote_code", False)
        config = transformers.AutoConfig.from_pretrained(name, **own)
        automatic = getattr(transformers, f"AutoModel{_kind(transformers, config)}")
        if pretrained:
            model = automatic.from_pretrained(name, **arguments)
            if getattr(model, "main_input_name", "") == "pixel_values" and not os.path.isdir(name):
                with suppress(
                    OSError
                ):  # beside the weights, for own_normalization; not every network has one
                    transformers.utils.cached_file(name, _PREPROCESSOR)
        else:
            config = transformers.AutoConfig.from_pretrained(name, **arguments)
            model = automatic.from_config(config, **own)
        if getattr(model, "main_input_name", "") == "input_ids" and model.config.pad_token_id is None:
            with suppress(OSError, ValueError, ImportError, KeyError):  # a network need not have a tokenizer
                model.config.pad_token_id = transformers.AutoTokenizer.from_pretrained(
                    name, **own
                ).pad_token_id
    return require_module(model, f"hf:{name}")


def _kind(transformers: ModuleType, config: Any) -> str:
    """The task that a Hugging Face checkpoint is for, as transformers spells it; empty for an encoder."""
    # A head that a checkpoint does not have would be random, and what lies below it, such as BERT's pooler,
    # untrained. Models of two encoders, and encoders with a decoder, do not run on one input without one.
    kinds = {
        "ForImageClassification": transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        "ForSequenceClassification": transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }
    if named := [kind for kind in kinds if any(kind in name for name in config.architectures or ())]:
        return named[0]
    joint = getattr(config, "is_encoder_decoder", False) or hasattr(config, "vision_config")
    if type(config) in transformers.MODEL_MAPPING and not joint:
        return ""
    if known := [kind for kind, mapping in kinds.items() if type(config) in mapping]:
        return known[0]
    raise ModelError(
        f"transformers has no encoder and no classifier of images or of text for {type(config).__name__}",
        expected="a model that AutoModel makes, or one with a classification head",
        remedy="build it yourself and pass path/to/file.py:factory",
    )


def _from_timm(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A network of timm."""
    with _optional("timm", f"timm:{name}", "install the torchvision that matches this torch, then timm"):
        timm = importlib.import_module("timm")
        model = timm.create_model(name, **{"pretrained": pretrained, **arguments})
    return require_module(model, f"timm:{name}")


def _from_torchvision(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A network of torchvision."""
    with _optional("torchvision", f"torchvision:{name}", "install the torchvision that matches this torch"):
        models = importlib.import_module("torchvision.models")
        model = models.get_model(name, **{"weights": "DEFAULT" if pretrained else None, **arguments})
    return require_module(model, f"torchvision:{name}")


def own_size(model: nn.Module) -> tuple[int, str] | None:
    """Height and width of the images in a network's training, as timm's configuration of it says."""
    for name in _TIMM:
        values = getattr(model, name, None)
        shape = values.get("input_size") if isinstance(values, Mapping) else None
        if isinstance(shape, list | tuple) and len(shape) == 3:
            height, width = shape[1:]
            if isinstance(height, int) and height == width > 0:
                return height, f"its {name}"
    return None


def own_normalization(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...], str] | None:
    """The normalization of images in a network's training, as its own configuration says."""
    # Looked at are timm's `pretrained_cfg` or `default_cfg`, the configuration of a Hugging Face network, and
    # `preprocessor_config.json` in the folder or repository that the network came from.
    for name in _TIMM:
        found = _mean_and_std(getattr(model, name, None), "mean", "std")
        if found:
            return (*found, f"its {name}")
    config = getattr(model, "config", None)
    found = _mean_and_std(config, "image_mean", "image_std")
    if found:
        return (*found, "its configuration")
    file = _PREPROCESSOR
    values = _preprocessor(getattr(config, "_name_or_path", None))
    if values.get("do_rescale") is False:  # it takes pixels from 0 to 255
        return None
    if values.get("do_normalize") is False:
        return (0.0,), (1.0,), file
    found = _mean_and_std(values, "image_mean", "image_std")
    return (*found, file) if found else None


def _mean_and_std(values: Any, mean: str, std: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Two entries of a configuration as numbers for one or three channels, if they are such."""
    found = []
    for name in (mean, std):
        value = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
        value = [value] if isinstance(value, int | float) else value
        if not isinstance(value, list | tuple) or len(value) not in (1, 3):
            return None
        if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
            return None
        found.append(tuple(map(float, value)))
    same = len(found[0]) == len(found[1])
    return (found[0], found[1]) if same and all(v > 0 for v in found[1]) else None


def _preprocessor(place: object) -> dict[str, Any]:
    """Content of ``preprocessor_config.json`` of a transformers network; empty where there is none."""
    if not isinstance(place, str) or not place:
        return {}
    try:
        if os.path.isdir(place):
            path: str | None = os.path.join(place, _PREPROCESSOR)
        else:
            utils: Any = importlib.import_module("transformers.utils")
            path = utils.cached_file(place, _PREPROCESSOR, local_files_only=True)
        values = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, ImportError):  # none there, offline, or no JSON: nothing is known
        return {}
    return values if isinstance(values, dict) else {}


class RandomUnits(nn.Module):
    """Standardized columns beside random ReLU units of them; neither has seen a target."""

    # x (..., D): a linear function of the columns alone would take the units many more rows

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.units = nn.Linear(columns, UNITS)
        nn.init.kaiming_normal_(self.units.weight, nonlinearity="relu")
        nn.init.normal_(self.units.bias, std=0.1)
        self.scale = math.sqrt(UNITS / columns)  # both parts have the same mean square length

    def forward(self, x: Tensor) -> Tensor:
        """Features (..., D + UNITS)."""
        return torch.cat([self.scale * x, self.units(x).relu()], -1)


def random_units(columns: int, outputs: int, *before: nn.Module) -> nn.Module:
    """A network of random units on standardized columns, after modules that make them, and a linear head."""
    made = nn.Sequential(*before, RandomUnits(columns), nn.Linear(columns + UNITS, outputs))
    setattr(made, BELOW, "hidden units")
    return made


def _random_features(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """The network that the estimators have, with a head to be replaced."""
    return random_units(arguments["inputs"], UNITS)


BUILDERS: dict[str, Callable[[str, bool, dict[str, Any]], nn.Module]] = {
    "hf": _from_huggingface,
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "random": _random_features,
}
"""By prefix: from a name, whether pretrained weights are wanted, and keyword arguments, to a network."""


@contextmanager
def _optional(package: str, model: str, remedy: str) -> Iterator[None]:
    """Tell a package that does not work from a model that cannot be built, and chain the cause."""
    expected = f"a {package} that works with torch {torch.__version__}"
    with importing(package, f"model {model!r}", expected, f"{remedy}; or pass path/to/file.py:factory"):
        importlib.import_module(package)
    try:
        yield
    except LinnetError:
        raise
    except ImportError as error:
        raise DependencyError(
            f"{package} could not import what model {model!r} needs ({error})",
            remedy=remedy,
            expected="the packages that the model is built with",
        ) from error
    except Exception as error:
        remedy = "check the name, the network connection and model_args"
        if package != "transformers":  # whose configuration comes from the same place
            remedy += "; where nothing can be downloaded, give a file of the network's weights (--weights)"
        raise ModelError(
            f"{package} could not build model {model!r} ({type(error).__name__}: {error})",
            expected="a name that it knows, or a local folder for hf",
            remedy=remedy,
        ) from error


def require_module(model: object, maker: str) -> nn.Module:
    """Check that a maker of networks made one."""
    if not isinstance(model, nn.Module):
        what = f"{maker} returned an object of type {type(model).__name__}"
        raise ModelError(what, expected="a torch.nn.Module", remedy="return the network itself")
    return model
