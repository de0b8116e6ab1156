"""A tiny Qwen3-Next with random weights: three gated delta nets to each attention layer; perhaps with an MTP
module, which guesses badly but has KV like any other layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from p2pkv.demo.tiny_model import TinyModel, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class TinyQwen(TinyModel):
    """vLLM's CPU kernels want heads of 128. `mtp`: with a module for multi-token prediction."""

    family = "qwen"
    recipe = 3
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    key_heads: int = 2
    value_heads: int = 4
    mlp: int = 128
    mtp: bool = False

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
            # vLLM wants experts in one layer at least, and in an MTP module, which it numbers as the first.
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=self.mlp,
            shared_expert_intermediate_size=self.mlp,
            mlp_only_layers=list(range(1, self.layers) if self.mtp else range(self.layers - 1)),
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
        if self.mtp:
            file = directory / "model.safetensors"
            weights = load_file(file)
            save_file({**weights, **dict(self._mtp(weights, draw))}, file, metadata={"format": "pt"})

    def _mtp(
        self, weights: dict[str, torch.Tensor], draw: torch.Generator
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The last layer's attention and the first one's experts, behind a projection of its own."""
        attention, experts = f"model.layers.{self.layers - 1}.", "model.layers.0."
        for name, weight in weights.items():
            if name.startswith(attention) and ".mlp." not in name:
                yield "mtp.layers.0." + name.removeprefix(attention), weight.clone()
            elif name.startswith(f"{experts}mlp."):
                yield "mtp.layers.0." + name.removeprefix(experts), weight.clone()
        columns = 2 * self.hidden
        yield "mtp.fc.weight", torch.randn(self.hidden, columns, generator=draw) / math.sqrt(columns)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            yield f"mtp.{name}.weight", torch.zeros(self.hidden)
