"""Networks by name from transformers, timm and torchvision, each used if it can be imported.

None is required: torchvision in particular must match the user's torch exactly, and one that does not breaks
other packages when they import it. What does not work is said, with its cause.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from linnet.errors import DependencyError, LinnetError, ModelError


def _from_huggingface(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A classifier of images or of text, in float32."""
    with _optional("transformers", f"hf:{name}", "pip install 'linnet[text]'"):
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(name)
        kind = _classifier_kind(transformers, config)
        automatic = getattr(transformers, f"AutoModelFor{kind}")
        arguments = {"dtype": torch.float32, **arguments}
        if pretrained:
            model = automatic.from_pretrained(name, **arguments)
        else:
            config = transformers.AutoConfig.from_pretrained(name, **arguments)
            model = automatic.from_config(config)
    return require_module(model, f"hf:{name}")


def _classifier_kind(transformers: ModuleType, config: Any) -> str:
    """The task that a Hugging Face configuration is for, as transformers spells it."""
    kinds = {
        "ImageClassification": transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        "SequenceClassification": transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }
    named = [kind for kind in kinds if any(kind in name for name in config.architectures or ())]
    known = [kind for kind, mapping in kinds.items() if type(config) in mapping]
    if not named and not known:
        raise ModelError(
            f"transformers has no classifier of images or of text for {type(config).__name__}",
            expected="a model with a ForImageClassification or ForSequenceClassification class",
            remedy="build it yourself and pass path/to/file.py:factory",
        )
    return (named or known)[0]


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


BUILDERS: dict[str, Callable[[str, bool, dict[str, Any]], nn.Module]] = {
    "hf": _from_huggingface,
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}
"""By prefix: from a name, whether pretrained weights are wanted, and keyword arguments, to a network."""


@contextmanager
def _optional(package: str, model: str, remedy: str) -> Iterator[None]:
    """Tell a package that does not work from a model that cannot be built, and chain the cause."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError, OSError) as error:  # a torchvision for another torch: RuntimeError
        raise DependencyError(
            f"{package}, which model {model!r} needs, cannot be imported ({type(error).__name__}: {error})",
            expected=f"a {package} that works with torch {torch.__version__}",
            remedy=f"{remedy}; or pass path/to/file.py:factory",
        ) from error
    try:
        yield
    except LinnetError:
        raise
    except ImportError as error:
        raise DependencyError(
            f"{package} could not import what model {model!r} needs ({error})", remedy=remedy
        ) from error
    except Exception as error:
        raise ModelError(
            f"{package} could not build model {model!r} ({type(error).__name__}: {error})",
            expected="a name that it knows, or a local folder for hf",
            remedy="check the name, the network connection and model_args",
        ) from error


def require_module(model: object, maker: str) -> nn.Module:
    """Check that a maker of networks made one.

    Args:
        model: What it made.
        maker: What it is called, for the error.

    Returns:
        ``model``.

    Raises:
        ModelError: It is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        what = f"{maker} returned an object of type {type(model).__name__}"
        raise ModelError(what, expected="a torch.nn.Module")
    return model
