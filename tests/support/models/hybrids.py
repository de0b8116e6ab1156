"""Tiny models with random weights that keep states: LFM2 (short convolutions) and Falcon-H1 (Mamba-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.models.random_weights import TinyRandom


@dataclass(frozen=True, kw_only=True)
class TinyLfm2(TinyRandom):
    """Two short convolutions to each attention layer. A head of attention has 32 elements."""

    family = "lfm2"
    mlp: int = 256

    def build(self) -> Any:
        from transformers import Lfm2Config, Lfm2ForCausalLM

        kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(self.layers)]
        config = Lfm2Config(
            **self.common, layer_types=kinds, conv_L_cache=4, block_auto_adjust_ff_dim=False, rope_theta=1e4
        )
        # vLLM asks for these two, which the published configurations have.
        config.conv_dim = config.block_dim = self.hidden
        return Lfm2ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class TinyFalconH1(TinyRandom):
    """Mamba-2 beside attention in every layer. Its B and C are one group, which all ranks copy."""

    family = "falcon-h1"
    mlp: int = 256
    state: int = 32
    mamba_heads: int = 8
    mamba_groups: int = 1

    def build(self) -> Any:
        from transformers import FalconH1Config, FalconH1ForCausalLM

        config = FalconH1Config(
            **self.common,
            mamba_d_ssm=2 * self.hidden,
            mamba_n_heads=self.mamba_heads,
            mamba_d_head=2 * self.hidden // self.mamba_heads,
            mamba_n_groups=self.mamba_groups,
            mamba_d_state=self.state,
            mamba_d_conv=4,
            mamba_chunk_size=64,
        )
        return FalconH1ForCausalLM(config)
