"""A tiny Gemma-3 with random weights: three layers that see a sliding window to each one that sees all.

Shape legend: E hidden size, A attention heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tiny_random import common

from p2pkv.demo.tiny_model import TinyModel, matrix


@dataclass(frozen=True, kw_only=True)
class TinyGemma(TinyModel):
    """`window`: tokens that a layer with a window sees, itself counted."""

    family = "gemma"
    layers: int = 8
    pattern: int = 4
    """Of so many layers in a row the last one sees all."""
    window: int = 96
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 256

    def config(self) -> dict[str, Any]:
        kinds = [
            "full_attention" if layer % self.pattern == self.pattern - 1 else "sliding_attention"
            for layer in range(self.layers)
        ]
        return {
            **common(self),
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "intermediate_size": self.mlp,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "layer_types": kinds,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
        }

    def weights(self, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix is [out, in]. Norms add 1 to their weights. Tokens in `silent` are never the likeliest."""
        draw = torch.Generator().manual_seed(self.seed)

        # The embedding is the head too, and Gemma multiplies it by sqrt(E) on the way in.
        table = matrix(draw, self.vocab, self.hidden, 4.0)
        table[silent] = 0.0
        yield "model.embed_tokens.weight", table
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            for norm in ("input_layernorm", "pre_feedforward_layernorm"):
                yield f"{name}{norm}.weight", torch.zeros(self.hidden)
            # Large beside the embedding, so that an answer depends on all that is seen.
            for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
                yield f"{name}{norm}.weight", torch.full((self.hidden,), 2.0)
            attention = name + "self_attn."
            yield attention + "q_proj.weight", matrix(draw, self.heads * self.head_dim, self.hidden)
            yield attention + "k_proj.weight", matrix(draw, self.kv_heads * self.head_dim, self.hidden)
            yield attention + "v_proj.weight", matrix(draw, self.kv_heads * self.head_dim, self.hidden)
            yield attention + "o_proj.weight", matrix(draw, self.hidden, self.heads * self.head_dim)
            yield attention + "q_norm.weight", torch.full((self.head_dim,), 0.5)
            yield attention + "k_norm.weight", torch.full((self.head_dim,), 0.5)
            yield name + "mlp.gate_proj.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "mlp.up_proj.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "mlp.down_proj.weight", matrix(draw, self.hidden, self.mlp)
        yield "model.norm.weight", torch.zeros(self.hidden)
