"""Tiny models with random weights that keep states: LFM2 (short convolutions) and Falcon-H1 (Mamba-2)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from p2pkv.demo.tiny_model import write_tokenizer

_RECIPE = 1


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    vocab: int = 1024
    max_positions: int = 2048
    seed: int = 0

    @property
    def name(self) -> str:
        kind = type(self).__name__.lower()
        text = json.dumps([_RECIPE, asdict(self)], sort_keys=True)
        return f"{kind}-{self.layers}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def common(self) -> dict[str, Any]:
        """What all configurations of transformers call the same."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }


class TinyLfm2(_Sizes):
    """Two short convolutions to each attention layer. A head of attention has 32 elements."""

    def write(self, directory: Path) -> None:
        from transformers import Lfm2Config, Lfm2ForCausalLM

        kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(self.layers)]
        config = Lfm2Config(
            **self.common, layer_types=kinds, conv_L_cache=4, block_auto_adjust_ff_dim=False, rope_theta=1e4
        )
        # vLLM asks for these two, which the published configurations have.
        config.conv_dim = config.block_dim = self.hidden
        write_random(self, Lfm2ForCausalLM, config, directory)


@dataclass(frozen=True, kw_only=True)
class TinyFalconH1(_Sizes):
    """Mamba-2 beside attention in every layer. Its B and C are one group, which all ranks copy."""

    state: int = 32
    mamba_heads: int = 8
    mamba_groups: int = 1

    def write(self, directory: Path) -> None:
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
        write_random(self, FalconH1ForCausalLM, config, directory)


def write_random(spec: _Sizes, kind: type, config: Any, directory: Path) -> None:
    """Write a model of transformers with weights of which an answer depends on all of the prompt."""
    silent = write_tokenizer(spec.vocab, spec.max_positions, directory)
    draw = torch.Generator().manual_seed(spec.seed)
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)  # transformers draws what has one axis: the decays of a state
        model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                gain = 1.0 if "embed" in name else 1.0 / math.sqrt(weight[0].numel())
                weight.copy_(torch.randn(weight.shape, generator=draw) * gain)
        model.lm_head.weight *= 4.0
        model.lm_head.weight[silent] = 0.0
    model.save_pretrained(directory)
