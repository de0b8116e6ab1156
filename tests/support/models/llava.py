"""A tiny LLaVA with random weights: a CLIP tower whose patches stand among the tokens of the tiny Llama.

Its pictures are processed by Pillow alone, so that no torchvision is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from p2pkv.demo.tiny_model import TinyFiles, TinyLlama

IMAGE = "<image>"


@dataclass(frozen=True, kw_only=True)
class TinyLlava(TinyFiles):
    family = "llava"
    text: TinyLlama = field(default_factory=TinyLlama)
    layers: int = 3
    """Of the tower; the last but one is used."""
    hidden: int = 64
    heads: int = 2
    mlp: int = 128
    picture: int = 84
    """Height and width of a picture that the tower sees."""
    patch: int = 14
    rows: int = 1088
    """Of the embedding: the tokenizer's tokens, and one that stands for a picture's patch."""
    seed: int = 1

    @property
    def patches(self) -> int:
        """Tokens of one picture."""
        return (self.picture // self.patch) ** 2

    def write(self, directory: Path) -> None:
        self.text.write(directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(IMAGE, normalized=False)])
        tokenizer.save(str(directory / "tokenizer.json"))
        self._configure(directory, tokenizer.token_to_id(IMAGE))
        weights = dict(self._text(load_file(directory / "model.safetensors")))
        save_file(weights | dict(self._tower()), directory / "model.safetensors", metadata={"format": "pt"})

    def _configure(self, directory: Path, image_token: int) -> None:
        text = json.loads((directory / "config.json").read_text())
        config = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": text | {"vocab_size": self.rows},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": self.hidden,
                "intermediate_size": self.mlp,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "image_size": self.picture,
                "patch_size": self.patch,
                "projection_dim": self.hidden,
                "hidden_act": "quick_gelu",
            },
            "image_token_index": image_token,
            "image_seq_length": self.patches,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        size = {"height": self.picture, "width": self.picture}
        pictures = {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": size,
            "crop_size": size,
        }
        processor = {
            "processor_class": "LlavaProcessor",
            "patch_size": self.patch,
            "vision_feature_select_strategy": "default",
            "image_token": IMAGE,
            "num_additional_image_tokens": 1,
        }
        for name, content in (
            ("config.json", config),
            ("preprocessor_config.json", pictures),
            ("processor_config.json", processor),
        ):
            (directory / name).write_text(json.dumps(content))

    def _text(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tiny Llama's, with rows for the new token: it is never the likeliest."""
        for name, tensor in weights.items():
            if name in ("lm_head.weight", "model.embed_tokens.weight"):
                more = torch.zeros(self.rows - len(tensor), tensor.shape[1], dtype=tensor.dtype)
                tensor = torch.cat([tensor, more])
            yield f"language_model.{name}", tensor

    def _tower(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix is [out, in]."""
        draw = torch.Generator().manual_seed(self.seed)

        def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) * gain

        def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
            yield f"{name}.weight", random(rows, columns, gain=1 / math.sqrt(columns))
            yield f"{name}.bias", torch.zeros(rows)

        def norm(name: str) -> Iterator[tuple[str, torch.Tensor]]:
            yield f"{name}.weight", torch.ones(self.hidden)
            yield f"{name}.bias", torch.zeros(self.hidden)

        tower, size = "vision_tower.vision_model.", self.patch
        yield tower + "embeddings.class_embedding", random(self.hidden)
        patches = random(self.hidden, 3, size, size, gain=1 / math.sqrt(3 * size * size))
        yield tower + "embeddings.patch_embedding.weight", patches
        yield tower + "embeddings.position_embedding.weight", random(self.patches + 1, self.hidden, gain=0.1)
        yield from norm(tower + "pre_layrnorm")
        yield from norm(tower + "post_layernorm")
        for layer in range(self.layers):
            name = f"{tower}encoder.layers.{layer}."
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from linear(f"{name}self_attn.{part}", self.hidden, self.hidden)
            yield from norm(name + "layer_norm1")
            yield from norm(name + "layer_norm2")
            yield from linear(name + "mlp.fc1", self.mlp, self.hidden)
            yield from linear(name + "mlp.fc2", self.hidden, self.mlp)
        yield from linear("multi_modal_projector.linear_1", self.text.hidden, self.hidden)
        yield from linear("multi_modal_projector.linear_2", self.text.hidden, self.text.hidden)
