"""The networks of the zoo that read sequences: attention, text models, recurrence, bags of words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- attention ------------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """A pre-norm transformer block around nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions, two attention blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 5, width))
        self.blocks = nn.ModuleList([AttentionBlock(width, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls_token.expand(h.shape[0], -1, -1), h], dim=1) + self.pos_embed
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class Encoder(nn.Module):
    """nn.TransformerEncoder over real sequences."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class CausalAttention(nn.Module):
    """F.scaled_dot_product_attention with a causal mask and fused projections."""

    def __init__(self, width: int = 8, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width, padding_idx)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x[:, -1] + self.out(h.transpose(1, 2).flatten(2))[:, -1])


def bert(implementation: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=8, num_labels=3, attn_implementation=implementation,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(implementation: str) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8, num_labels=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, use_cache=False, attn_implementation=implementation,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config)


# --- sequences ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer and a linear head on its last state."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Bag(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 5, mode="mean")
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.bag(ids))
