"""A tiny DeepSeek-V2 with random weights: multi-head latent attention (MLA), and no experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyDeepseek(TinyRandom):
    """vLLM's CPU kernel for MLA knows a latent rank of 512 and a rotary part of 64 elements only."""

    family = "deepseek"
    recipe = 2
    layers: int = 3
    kv_heads: int = 4
    rank: int = 512
    rope: int = 64
    nope: int = 32
    value: int = 32
    mlp: int = 256

    def build(self) -> Any:
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(
            **self.common,
            # Experts exist in the configuration only: every layer comes before the first that has them.
            first_k_dense_replace=self.layers,
            moe_intermediate_size=self.mlp,
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            q_lora_rank=None,
            kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope,
            qk_nope_head_dim=self.nope,
            v_head_dim=self.value,
        )
        return DeepseekV2ForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Scores are spread, and branches add much, so that an answer depends on all that is seen."""
        gain = super().gain(name, weight)
        part = name.split(".")[-2]
        return gain and gain * {"q_proj": 2.0, "o_proj": 3.0, "down_proj": 1.5}.get(part, 1.0)
