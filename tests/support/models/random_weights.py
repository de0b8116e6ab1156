"""Tiny models that transformers builds, with weights of which an answer depends on all of the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from p2pkv.demo.tiny_model import TinyModel, write_tokenizer


def common(model: Any) -> dict[str, Any]:
    """What the configuration of every family has."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


@dataclass(frozen=True, kw_only=True)
class TinyRandom(TinyModel):
    """What such models have in common."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 128

    @property
    def common(self) -> dict[str, Any]:
        """What all configurations of transformers call the same."""
        return {**common(self), "intermediate_size": self.mlp, "num_key_value_heads": self.kv_heads}

    def build(self) -> Any:
        """The model, with any weights."""
        raise NotImplementedError

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """The size of a weight; None: as transformers draws it. Outputs have a root mean square of 1."""
        if weight.dim() < 2:
            return None
        if "embed" in name:
            return 1.0
        # Logits are spread over more, so that the first two are seldom close.
        return (4.0 if "lm_head" in name else 1.0) / math.sqrt(weight[0].numel())

    def write(self, directory: Path) -> None:
        silent = write_tokenizer(self.vocab, self.max_positions, directory)
        draw = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            # transformers draws what has one axis, such as the decays of a state.
            torch.manual_seed(self.seed)
            model = self.build()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if (gain := self.gain(name, weight)) is not None:
                    weight.copy_(torch.randn(weight.shape, generator=draw) * gain)
            model.lm_head.weight[silent] = 0.0
        model.save_pretrained(directory)
