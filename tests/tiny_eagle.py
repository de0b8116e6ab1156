"""A tiny EAGLE head for a tiny Llama, with random weights: it guesses badly, but has KV like any other.

It reads a token and the model's last hidden state of the token before it, and has one layer of the model's
own sizes, which vLLM numbers behind the model's. Embedding and output are the model's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from p2pkv.demo.tiny_model import TinyFiles, TinyLlama


@dataclass(frozen=True, kw_only=True)
class TinyEagle(TinyFiles):
    """`target`: the model for which it guesses."""

    family = "eagle"
    target: TinyLlama = field(default_factory=TinyLlama)
    layers: int = 1
    seed: int = 7

    def write(self, directory: Path) -> None:
        target = self.target
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": target.vocab,
            "hidden_size": target.hidden,
            "intermediate_size": target.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "head_dim": target.head_dim,
            "max_position_embeddings": target.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": target.dtype,
        }
        (directory / "config.json").write_text(json.dumps(config))
        save_file(dict(self._weights()), directory / "model.safetensors", metadata={"format": "pt"})

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix is [out, in]. The first layer has no norm before its attention."""
        draw, target = torch.Generator().manual_seed(self.seed), self.target
        dtype = getattr(torch, target.dtype)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=draw) / math.sqrt(columns)).to(dtype)

        query, kv = target.heads * target.head_dim, target.kv_heads * target.head_dim
        yield "fc.weight", matrix(target.hidden, 2 * target.hidden)
        for layer in range(self.layers):
            name = f"layers.{layer}."
            if layer:
                yield name + "input_layernorm.weight", torch.ones(target.hidden, dtype=dtype)
            yield name + "self_attn.q_proj.weight", matrix(query, target.hidden)
            yield name + "self_attn.k_proj.weight", matrix(kv, target.hidden)
            yield name + "self_attn.v_proj.weight", matrix(kv, target.hidden)
            yield name + "self_attn.o_proj.weight", matrix(target.hidden, query)
            yield name + "post_attention_layernorm.weight", torch.ones(target.hidden, dtype=dtype)
            yield name + "mlp.gate_proj.weight", matrix(target.mlp, target.hidden)
            yield name + "mlp.up_proj.weight", matrix(target.mlp, target.hidden)
            yield name + "mlp.down_proj.weight", matrix(target.hidden, target.mlp)
