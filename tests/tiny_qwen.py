"""A tiny Qwen3-Next with random weights: three gated delta nets to each attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from p2pkv.demo.tiny_model import TinyModel, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class TinyQwen(TinyModel):
    """vLLM's CPU kernels want heads of 128."""

    family = "qwen"
    recipe = 2
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    key_heads: int = 2
    value_heads: int = 4
    mlp: int = 128

    def write(self, directory: Path) -> None:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        silent = write_tokenizer(self.vocab, self.max_positions, directory)
        config = Qwen3NextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
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
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            torch_dtype="float32",
        )
        draw = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # transformers draws the decays (A_log)
            model = Qwen3NextForCausalLM(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    # Outputs of root mean square 1, so that an answer depends on all of the prompt.
                    gain = 1.0 if "embed" in name else 1.0 / math.sqrt(weight[0].numel())
                    weight.copy_(torch.randn(weight.shape, generator=draw) * gain)
            model.lm_head.weight *= 4.0
            model.lm_head.weight[silent] = 0.0
        model.save_pretrained(directory)
