"""A tiny DeepSeek-V2 with random weights: multi-head latent attention (MLA), and no experts.

Shape legend: E hidden size, A attention heads, R latent rank, P rotary part of a head, N the rest of it,
V value size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tiny_random import common

from p2pkv.demo.tiny_model import TinyModel, matrix


@dataclass(frozen=True, kw_only=True)
class TinyDeepseek(TinyModel):
    """vLLM's CPU kernel for MLA knows R = 512 and P = 64 only."""

    family = "deepseek"
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    rank: int = 512
    rope: int = 64
    nope: int = 32
    value: int = 32
    mlp: int = 256

    def config(self) -> dict[str, Any]:
        return {
            **common(self),
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "intermediate_size": self.mlp,
            "moe_intermediate_size": self.mlp,
            "first_k_dense_replace": self.layers,
            # Experts exist in the configuration only: every layer comes before the first that has them.
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.rank,
            "qk_rope_head_dim": self.rope,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        }

    def weights(self, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix is [out, in]. Tokens in `silent` are never the likeliest."""
        draw = torch.Generator().manual_seed(self.seed)

        yield "model.embed_tokens.weight", torch.randn(self.vocab, self.hidden, generator=draw)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            yield name + "input_layernorm.weight", torch.ones(self.hidden)
            attention = name + "self_attn."
            yield (
                attention + "q_proj.weight",
                matrix(draw, self.heads * (self.nope + self.rope), self.hidden, 2.0),
            )
            yield attention + "kv_a_proj_with_mqa.weight", matrix(draw, self.rank + self.rope, self.hidden)
            yield attention + "kv_a_layernorm.weight", torch.ones(self.rank)
            yield (
                attention + "kv_b_proj.weight",
                matrix(draw, self.heads * (self.nope + self.value), self.rank),
            )
            yield attention + "o_proj.weight", matrix(draw, self.hidden, self.heads * self.value, 3.0)
            yield name + "post_attention_layernorm.weight", torch.ones(self.hidden)
            yield name + "mlp.gate_proj.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "mlp.up_proj.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "mlp.down_proj.weight", matrix(draw, self.hidden, self.mlp, 1.5)
        yield "model.norm.weight", torch.ones(self.hidden)
        head = matrix(draw, self.vocab, self.hidden, 4.0)
        head[silent] = 0.0
        yield "lm_head.weight", head
