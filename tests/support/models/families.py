"""Tiny models of many families, which transformers builds, with random weights of which an answer depends on
all of the prompt."""

import math
from collections.abc import Iterator
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


@dataclass(frozen=True, kw_only=True)
class TinyDeepseek(TinyRandom):
    """A tiny DeepSeek-V2 with random weights: multi-head latent attention (MLA), and no experts. vLLM's CPU
    kernel for MLA knows a latent rank of 512 and a rotary part of 64 elements only."""

    family = "deepseek"
    recipe = 2
    layers: int = 3
    kv_heads: int = 4
    rank: int = 512
    rope: int = 64
    nope: int = 32
    value: int = 32
    mlp: int = 256

    def build(self) -> Any:
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(
            **self.common,
            # Experts exist in the configuration only: every layer comes before the first that has them.
            first_k_dense_replace=self.layers,
            moe_intermediate_size=self.mlp,
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            q_lora_rank=None,
            kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope,
            qk_nope_head_dim=self.nope,
            v_head_dim=self.value,
        )
        return DeepseekV2ForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Scores are spread, and branches add much, so that an answer depends on all that is seen."""
        gain = super().gain(name, weight)
        part = name.split(".")[-2]
        return gain and gain * {"q_proj": 2.0, "o_proj": 3.0, "down_proj": 1.5}.get(part, 1.0)


@dataclass(frozen=True, kw_only=True)
class TinyGemma(TinyRandom):
    """A tiny Gemma-3 with random weights: three layers with a window, itself counted, to one without."""

    family = "gemma"
    recipe = 2
    layers: int = 8
    pattern: int = 4
    """Of so many layers in a row the last one sees all."""
    window: int = 96
    head_dim: int = 32
    mlp: int = 256

    def build(self) -> Any:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        kinds = [
            "full_attention" if layer % self.pattern == self.pattern - 1 else "sliding_attention"
            for layer in range(self.layers)
        ]
        config = Gemma3TextConfig(
            **self.common | {"tie_word_embeddings": True},
            head_dim=self.head_dim,
            query_pre_attn_scalar=self.head_dim,
            sliding_window=self.window,
            layer_types=kinds,
        )
        model = Gemma3ForCausalLM(config)
        # Norms add 1 to their weights. What a branch adds is large beside the embedding, so that an answer
        # depends on all that is seen.
        for name, weight in model.named_parameters():
            if "post_" in name or "q_norm" in name or "k_norm" in name:
                torch.nn.init.constant_(weight, 2.0 if "post_" in name else 0.5)
        return model

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """The embedding is the head too, and Gemma multiplies it by sqrt(E) on the way in."""
        return 4.0 / math.sqrt(self.hidden) if "embed" in name else super().gain(name, weight)


@dataclass(frozen=True, kw_only=True)
class TinyGptOss(TinyRandom):
    """A tiny gpt-oss with random weights: attention sinks, experts, and a sliding window in every other
    layer. `window`: tokens that a layer with a window sees, itself counted."""

    family = "gpt-oss"
    window: int = 96
    head_dim: int = 64
    experts: int = 4

    def build(self) -> Any:
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            **self.common,
            head_dim=self.head_dim,
            sliding_window=self.window,
            num_local_experts=self.experts,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": self.max_positions // 2,
            },
        )
        return GptOssForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Outputs have a root mean square of 1 or more, so that an answer depends on all that is seen."""
        if "norm" in name:
            return None
        if name.endswith("sinks") or "embed" in name:
            return 1.0
        if name.endswith("bias"):
            return 0.1
        # An expert's matrix is [expert, in, out], any other [out, in].
        inputs = weight.shape[-2] if "experts" in name else weight.shape[-1]
        return (4.0 if "lm_head" in name else 1.5) / math.sqrt(inputs)


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


@dataclass(frozen=True, kw_only=True)
class TinyMoe(TinyRandom):
    """A tiny Qwen3 with random weights; in every layer each token goes to `chosen` of `experts`."""

    family = "moe"
    head_dim: int = 32
    experts: int = 8
    chosen: int = 2

    def build(self) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            **self.common,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            moe_intermediate_size=self.mlp,
            norm_topk_prob=True,
        )
        return Qwen3MoeForCausalLM(config)

    def gain(self, name: str, weight: torch.Tensor) -> float | None:
        """Experts, too, add about as much as their input has; their matrices are [expert, out, in]."""
        if weight.dim() == 3:
            return 1.5 / math.sqrt(weight.shape[-1])
        return super().gain(name, weight)


@dataclass(frozen=True, kw_only=True)
class TinyQwen(TinyRandom):
    """A tiny Qwen3-Next with random weights: three gated delta nets to each attention layer; perhaps with
    an MTP module, which guesses badly but has KV like any other layer. vLLM's CPU kernels want heads of
    128. `mtp`: with a module for multi-token prediction."""

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
            from safetensors.torch import load_file, save_file

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
