"""A tiny Gemma-3 with random weights: three layers that see a sliding window to each one that sees all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyGemma(TinyRandom):
    """`window`: tokens that a layer with a window sees, itself counted."""

    family = "gemma"
    recipe = 2
    layers: int = 8
    pattern: int = 4
    """Of so many layers in a row the last one sees all."""
    window: int = 96
    head_dim: int = 32
    mlp: int = 256

    def build(self) -> Any:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        kinds = [
            "full_attention" if layer % self.pattern == self.pattern - 1 else "sliding_attention"
            for layer in range(self.layers)
        ]
        config = Gemma3TextConfig(
            **self.common | {"tie_word_embeddings": True},
            head_dim=self.head_dim,
            query_pre_attn_scalar=self.head_dim,
            sliding_window=self.window,
            layer_types=kinds,
        )
        model = Gemma3ForCausalLM(config)
        # Norms add 1 to their weights. What a branch adds is large beside the embedding, so that an answer
        # depends on all that is seen.
        for name, weight in model.named_parameters():
            if "post_" in name or "q_norm" in name or "k_norm" in name:
                torch.nn.init.constant_(weight, 2.0 if "post_" in name else 0.5)
        return model

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """The embedding is the head too, and Gemma multiplies it by sqrt(E) on the way in."""
        return 4.0 / math.sqrt(self.hidden) if "embed" in name else super().gain(name, weight)
