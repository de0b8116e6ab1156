"""A tiny Qwen3 with random weights and a mixture of experts in every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyMoe(TinyRandom):
    """Every token goes to `chosen` of `experts`."""

    family = "moe"
    head_dim: int = 32
    experts: int = 8
    chosen: int = 2

    def build(self) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            **self.common,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            moe_intermediate_size=self.mlp,
            norm_topk_prob=True,
        )
        return Qwen3MoeForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Experts, too, add about as much as their input has; their matrices are [expert, out, in]."""
        if weight.dim() == 3:
            return 1.5 / math.sqrt(weight.shape[-1])
        return super().gain(name, weight)
