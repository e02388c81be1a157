"""Causal language models of Hugging Face with their tokenizer and an adapter of peft.

None of the packages is required. No code of a checkpoint runs, whatever its configuration asks for.
"""

from __future__ import annotations

import importlib
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from linnet.distribution import importing, install_command
from linnet.errors import InputError, LinnetError, ModelError
from linnet.files import read_json
from linnet.integrations.pretrained import require_module

SETTINGS: dict[str, Any] = {"r": 8, "lora_alpha": 16, "layers": 1, "target_modules": None}
"""Of a fresh adapter: rank, scale, number of last blocks, names of linear layers in them (``None``: all)."""
_CONFIG = "adapter_config.json"
_OWN = {"trust_remote_code": False}  # said outright: transformers asks at the terminal otherwise


def language_model(name: str, arguments: Mapping[str, Any], seed: int) -> tuple[nn.Module, Any, str]:
    """A causal network with an adapter, a saved one or a fresh one, its tokenizer, and both in words."""
    settings, spec = _settings(arguments), f"hf:{name}"
    with importing("transformers", spec, "transformers 5 or later", install_command("text")):
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
    with importing("peft", f"an adapter on {spec}", "peft 0.17 or later", "pip install peft"):
        peft: Any = importlib.import_module("peft")
    with _loading(f"the configuration of {spec}", "a local folder or a name that transformers knows"):
        saved = _adapter_file(transformers, name)
        base = name if saved is None else _base(saved)
        config = transformers.AutoConfig.from_pretrained(base, **_OWN)
        if base != name and _adapter_file(transformers, base) is not None:
            raise ModelError(
                f"{base}, the network of the adapter {name}, is an adapter itself",
                expected="the network that it was trained on",
                remedy="merge that adapter first",
            )
    known, kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, config.architectures or ()
    if type(config) not in known or config.is_encoder_decoder or any("ForMasked" in one for one in kinds):
        raise ModelError(
            f"{base} is a {', '.join(kinds) or type(config).__name__}, which is no causal language model",
            expected="a network that continues texts, as AutoModelForCausalLM makes it",
            remedy="name another folder; networks for images are adapted to folders of images",
        )
    with _loading(f"the network {base}", "a network as save_pretrained writes it"):
        wanted = {**_OWN, "dtype": torch.float32, "output_loading_info": True}
        network, found = transformers.AutoModelForCausalLM.from_pretrained(base, **wanted)
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:4])
        raise ModelError(
            f"{base} lacks weights: {missing}",
            "all weights of a network that continues texts",
            "save it with its head, as LlamaForCausalLM has one; an encoder classifies texts in Python, by "
            "linnet.adapt(encoder, (tokenizer(texts, ...), labels))",
        )
    with _loading(f"the tokenizer of {spec}", "the tokenizer in the folder of the network or adapter"):
        has_own = transformers.utils.cached_file(name, "tokenizer_config.json", **_MAYBE)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name if has_own else base, **_OWN)
    rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer of {spec} has {len(tokenizer)} tokens and the network {rows}",
            expected="a token of the network for each of the tokenizer",
            remedy="save the network with its own tokenizer, or after resize_token_embeddings",
        )
    if most := getattr(config, "max_position_embeddings", None):
        tokenizer.model_max_length = min(tokenizer.model_max_length, most)
    kind = type(network).__name__
    if saved is not None and arguments:
        raise InputError(
            f"model_args is {dict(arguments)!r}, and {name} is an adapter already",
            expected="settings where a fresh adapter is made",
            remedy="leave model_args= out, or name the network without its adapter",
        )
    with _loading(f"the adapter on {spec}", "an adapter as save_pretrained of peft writes it"):
        if saved is None:
            network, told = _fresh(peft, network, settings, seed)
        else:
            network, told = peft.PeftModel.from_pretrained(network, name, is_trainable=True), "a saved one"
    return require_module(network, spec).eval(), tokenizer, f"{kind} with a LoRA adapter, {told}"


_MAYBE = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}


def _adapter_file(transformers: Any, name: str) -> str | None:
    """The configuration of an adapter, where the name is that of one."""
    found: str | None = transformers.utils.cached_file(name, _CONFIG, **_MAYBE)
    return found


def _base(path: str) -> str:
    """The network that an adapter was made for."""
    config = read_json(path)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    # peft imports the module that a configuration of megatron names
    if base and config.get("peft_type") == "LORA" and not config.get("megatron_config"):
        return str(base)
    raise ModelError(
        f"{path} describes no adapter that can be taken",
        expected='"peft_type": "LORA", the network as "base_model_name_or_path", and no megatron_config',
        remedy="save an adapter of LoraConfig with save_pretrained",
    )


def _settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a fresh adapter."""
    for name, value in arguments.items():
        if name not in SETTINGS:
            raise _refused(name, value, f"settings of an adapter: {', '.join(SETTINGS)}")
        if name == "target_modules":
            if value is not None and not (value and isinstance(value, list)):
                raise _refused(name, value, "a list of names of linear layers")
        elif type(value) is not int or value < 1:
            raise _refused(name, value, "a positive integer")
    return {**SETTINGS, **arguments}


def _refused(name: str, value: Any, expected: str) -> InputError:
    """The error of a setting."""
    return InputError(f"model_args= holds {name}: {value!r}", expected, 'such as {"r": 16, "layers": 4}')


def _fresh(peft: Any, network: nn.Module, settings: dict[str, Any], seed: int) -> tuple[nn.Module, str]:
    """The network with a new adapter on the linear layers of its last blocks, and that in words."""
    lists = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.ModuleList)]
    place, blocks = max(
        lists, key=lambda one: sum(p.numel() for p in one[1].parameters()), default=("", nn.ModuleList())
    )
    count, names = settings["layers"], settings["target_modules"]
    if count > len(blocks):
        raise _refused("layers", count, f"at most the {len(blocks)} blocks of the network")
    widest = max((size for p in blocks.parameters() for size in p.shape), default=0)
    if settings["r"] > widest:
        raise _refused("r", settings["r"], f"a rank of at most {widest}, that of the largest layer")
    linear = [
        f"{place}.{at}.{inside}"
        for at in range(len(blocks) - count, len(blocks))
        for inside, part in blocks[at].named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    ]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if any(one not in ends for one in names or ()):
        raise _refused("target_modules", names, f"some of {', '.join(ends)}")
    chosen = [name for name in linear if names is None or name.rpartition(".")[2] in names]
    torch.manual_seed(seed)
    rank, alpha = settings["r"], settings["lora_alpha"]
    turned = any(type(part).__name__ == "Conv1D" for part in blocks.modules())  # GPT-2's, with W transposed
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, fan_in_fan_out=turned)
    where = "the last block" if count == 1 else f"the last {count} blocks"
    told = f"a fresh one of rank {rank} and scale {alpha} on {len(chosen)} linear layers of {where}"
    return peft.get_peft_model(network, config), told


@contextmanager
def _loading(what: str, expected: str) -> Iterator[None]:
    """Say what could not be loaded, and chain the cause."""
    try:
        with warnings.catch_warnings():  # of these packages about each other
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except LinnetError:
        raise
    except Exception as error:  # what the loaders raise has no common type
        cause = textwrap.shorten(next(iter(str(error).strip().splitlines()), ""), 200)
        raise ModelError(
            f"{what} cannot be loaded ({type(error).__name__}: {cause})",
            expected=expected,
            remedy="check the name; write network and tokenizer there with save_pretrained(FOLDER)",
        ) from error
