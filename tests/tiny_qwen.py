"""A tiny Qwen3-Next with random weights: three gated delta nets to each attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiny_random import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyQwen(TinyRandom):
    """vLLM's CPU kernels want heads of 128."""

    family = "qwen"
    recipe = 2
    head_dim: int = 128
    key_heads: int = 2
    value_heads: int = 4

    def build(self) -> Any:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        config = Qwen3NextConfig(
            **self.common,
            head_dim=self.head_dim,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            # vLLM wants experts in one layer at least.
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=self.mlp,
            shared_expert_intermediate_size=self.mlp,
            mlp_only_layers=list(range(self.layers - 1)),
        )
        return Qwen3NextForCausalLM(config)
