"""A tiny EAGLE head for a tiny Llama, with random weights: it guesses badly, but has KV like any other.

It reads a token and the model's last hidden state of the token before it, and has one layer of the model's
own sizes, which vLLM numbers behind the model's. Embedding and output are the model's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from p2pkv.demo.tiny_model import TinyFiles, TinyLlama, matrix


@dataclass(frozen=True, kw_only=True)
class TinyEagle(TinyFiles):
    """`target`: the model for which it guesses."""

    family = "eagle"
    recipe = 2
    target: TinyLlama = field(default_factory=TinyLlama)
    layers: int = 1
    seed: int = 7

    def write(self, directory: Path) -> None:
        config = self.target.config() | {"num_hidden_layers": self.layers}
        (directory / "config.json").write_text(json.dumps(config))
        save_file(dict(self._weights()), directory / "model.safetensors", metadata={"format": "pt"})

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix is [out, in]. The first layer has no norm before its attention."""
        draw, target = torch.Generator().manual_seed(self.seed), self.target
        dtype = getattr(torch, target.dtype)
        yield "fc.weight", matrix(draw, target.hidden, 2 * target.hidden).to(dtype)
        for name, weight in replace(target, layers=self.layers, seed=self.seed).weights([]):
            if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight":
                yield name.removeprefix("model."), weight
