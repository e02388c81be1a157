"""Transformers without a head, as networks of the study: pooled, with a linear layer for a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
