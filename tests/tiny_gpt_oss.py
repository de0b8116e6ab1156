"""A tiny gpt-oss with random weights: attention sinks, experts, and a sliding window in every other layer."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from p2pkv.demo.tiny_model import write_tokenizer

_RECIPE = 1


@dataclass(frozen=True, kw_only=True)
class TinyGptOss:
    """`window`: tokens that a layer with a window sees, itself counted."""

    layers: int = 4
    window: int = 96
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 128
    experts: int = 4
    vocab: int = 1024
    max_positions: int = 2048
    seed: int = 0

    @property
    def name(self) -> str:
        text = json.dumps([_RECIPE, asdict(self)], sort_keys=True)
        return f"tiny-gpt-oss-{self.layers}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def write(self, directory: Path) -> None:
        from transformers import GptOssConfig, GptOssForCausalLM

        silent = write_tokenizer(self.vocab, self.max_positions, directory)
        config = GptOssConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            sliding_window=self.window,
            num_local_experts=self.experts,
            num_experts_per_tok=2,
            max_position_embeddings=self.max_positions,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": self.max_positions // 2,
            },
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            torch_dtype="float32",
        )
        draw = torch.Generator().manual_seed(self.seed)
        model = GptOssForCausalLM(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    continue
                weight.copy_(torch.randn(weight.shape, generator=draw) * _gain(name, weight))
            model.lm_head.weight[silent] = 0.0
        model.save_pretrained(directory)


def _gain(name: str, weight: torch.Tensor) -> float:
    """Makes outputs of root mean square 1 or more, so that an answer depends on all that is seen."""
    if name.endswith("sinks") or "embed" in name:
        return 1.0
    if name.endswith("bias"):
        return 0.1
    # An expert's matrix is [expert, in, out], any other [out, in].
    inputs = weight.shape[-2] if "experts" in name else weight.shape[-1]
    return (4.0 if "lm_head" in name else 1.5) / math.sqrt(inputs)
