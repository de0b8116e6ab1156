"""A tiny gpt-oss with random weights: attention sinks, experts, and a sliding window in every other layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyGptOss(TinyRandom):
    """`window`: tokens that a layer with a window sees, itself counted."""

    family = "gpt-oss"
    window: int = 96
    head_dim: int = 64
    experts: int = 4

    def build(self) -> Any:
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            **self.common,
            head_dim=self.head_dim,
            sliding_window=self.window,
            num_local_experts=self.experts,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": self.max_positions // 2,
            },
        )
        return GptOssForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Outputs have a root mean square of 1 or more, so that an answer depends on all that is seen."""
        if "norm" in name:
            return None
        if name.endswith("sinks") or "embed" in name:
            return 1.0
        if name.endswith("bias"):
            return 0.1
        # An expert's matrix is [expert, in, out], any other [out, in].
        inputs = weight.shape[-2] if "experts" in name else weight.shape[-1]
        return (4.0 if "lm_head" in name else 1.5) / math.sqrt(inputs)
