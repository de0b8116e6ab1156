"""A tiny Qwen3-Next with random weights: three gated delta nets to each attention layer; perhaps with an MTP
module, which guesses badly but has KV like any other layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyQwen(TinyRandom):
    """vLLM's CPU kernels want heads of 128. `mtp`: with a module for multi-token prediction."""

    family = "qwen"
    recipe = 3
    head_dim: int = 128
    key_heads: int = 2
    value_heads: int = 4
    mtp: bool = False

    def build(self) -> Any:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        config = Qwen3NextConfig(
            **self.common,
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
        )
        return Qwen3NextForCausalLM(config)

    def write(self, directory: Path) -> None:
        super().write(directory)
        if self.mtp:
            file = directory / "model.safetensors"
            weights = load_file(file)
            save_file({**weights, **dict(self._module(weights))}, file, metadata={"format": "pt"})

    def _module(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The last layer's attention and the first one's experts, behind a projection of its own."""
        attention, experts = f"model.layers.{self.layers - 1}.", "model.layers.0."
        for name, weight in weights.items():
            if name.startswith(attention) and ".mlp." not in name:
                yield "mtp.layers.0." + name.removeprefix(attention), weight.clone()
            elif name.startswith(f"{experts}mlp."):
                yield "mtp.layers.0." + name.removeprefix(experts), weight.clone()
        draw, columns = torch.Generator().manual_seed(self.seed + 1), 2 * self.hidden
        yield "mtp.fc.weight", torch.randn(self.hidden, columns, generator=draw) / math.sqrt(columns)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            yield f"mtp.{name}.weight", torch.zeros(self.hidden)
