"""A tiny DeepSeek V4 with random weights: windows, compressed caches with an indexer, and their states.

Shape legend: E hidden size, A attention heads, D head_dim, Q rank of queries, O rank of outputs in each of G
groups, S residual streams (hyper-connections), X experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from p2pkv.demo.tiny_model import TinyModel, matrix
from support.models.families import common

HEAD, ROPE, INDEX_HEAD, INDEX_TOP = 512, 64, 128, 512
"""D, its rotary part, the same of an indexer's head, and the rows that an indexer chooses: all that vLLM's
CPU kernels know."""
SHARP = 3.0
"""Size of what keys and values are normalised to. Queries are normalised to 1, so that this is the deviation
of the scores: a few tokens take most of the weight, and an answer depends on all of its prompt."""
EXPERTS, CHOSEN = 64, 6
"""The fewest experts that vLLM's CPU kernels route to, and the fewest for each token."""


@dataclass(frozen=True, kw_only=True)
class TinyDeepseekV4(TinyModel):
    """`ratios`: for each layer, how many tokens a row of its compressed cache stands for: 4 with an indexer,
    128 without one; 0: it has no such cache. All layers have a window. An indexer leaves rows out from `4 *
    INDEX_TOP` tokens on; of shorter prompts it chooses all."""

    family = "deepseek-v4"
    layers: int = 5
    ratios: tuple[int, ...] = (0, 4, 128, 4, 128)
    max_positions: int = 8192
    hidden: int = 128
    heads: int = 8
    index_heads: int = 8
    query_rank: int = 128
    output_rank: int = 64
    output_groups: int = 2
    streams: int = 4
    mlp: int = 32
    hashed: int = 1
    """The first layers choose experts by the token alone."""
    window: int = 128

    def config(self) -> dict[str, Any]:
        return {
            **common(self),
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "compress_ratios": list(self.ratios),
            "num_key_value_heads": 1,
            "head_dim": HEAD,
            "qk_rope_head_dim": ROPE,
            "q_lora_rank": self.query_rank,
            "o_lora_rank": self.output_rank,
            "o_groups": self.output_groups,
            "sliding_window": self.window,
            "index_head_dim": INDEX_HEAD,
            "index_n_heads": self.index_heads,
            "index_topk": INDEX_TOP,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": CHOSEN,
            "num_hash_layers": self.hashed,
            "moe_intermediate_size": self.mlp,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "hidden_act": "silu",
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": self.max_positions,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "num_nextn_predict_layers": 0,
            "torch_dtype": "bfloat16",
            # Logits in bfloat16 would be a tie too often: a step is 1/16 where the likeliest lie.
            "head_dtype": "float32",
        }

    def weights(self, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        for name, weight in self._all(draw, silent):
            # Hyper-connections, sinks and what routes are float32; so is what a compressor adds by place.
            single = name.rpartition(".")[2].startswith(("hc_", "ape", "attn_sink", "bias", "tid2eid"))
            yield name, weight if single else weight.bfloat16()

    def _all(self, draw: torch.Generator, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", torch.randn(self.vocab, self.hidden, generator=draw)
        for layer in range(self.layers):
            name = f"layers.{layer}."
            yield name + "attn_norm.weight", torch.ones(self.hidden)
            for part, weight in self._attention(draw, self.ratios[layer]):
                yield f"{name}attn.{part}", weight
            yield name + "ffn_norm.weight", torch.ones(self.hidden)
            for part, weight in self._experts(draw, hashed=layer < self.hashed):
                yield f"{name}ffn.{part}", weight
            for part in ("attn", "ffn"):
                mixes = (2 + self.streams) * self.streams
                yield f"{name}hc_{part}_fn", matrix(draw, mixes, self.streams * self.hidden)
                yield f"{name}hc_{part}_base", 0.1 * torch.randn(mixes, generator=draw)
                yield f"{name}hc_{part}_scale", torch.ones(3)
        yield "hc_head_fn", matrix(draw, self.streams, self.streams * self.hidden)
        yield "hc_head_base", 0.1 * torch.randn(self.streams, generator=draw)
        yield "hc_head_scale", torch.ones(1)
        yield "norm.weight", torch.ones(self.hidden)
        head = matrix(draw, self.vocab, self.hidden, 4.0)
        head[silent] = 0.0
        yield "head.weight", head

    def _attention(self, draw: torch.Generator, ratio: int) -> Iterator[tuple[str, torch.Tensor]]:
        grouped = self.heads * HEAD // self.output_groups
        yield "wq_a.weight", matrix(draw, self.query_rank, self.hidden)
        yield "q_norm.weight", torch.ones(self.query_rank)
        yield "wq_b.weight", matrix(draw, self.heads * HEAD, self.query_rank, 2.0)
        yield "wkv.weight", matrix(draw, HEAD, self.hidden)
        yield "kv_norm.weight", torch.full((HEAD,), SHARP)
        yield "wo_a.weight", matrix(draw, self.output_groups * self.output_rank, grouped, 4.0)
        yield "wo_b.weight", matrix(draw, self.hidden, self.output_groups * self.output_rank, 4.0)
        yield "attn_sink", torch.randn(self.heads, generator=draw)
        if ratio:
            yield from self._compressor(draw, "compressor.", HEAD, ratio)
        if ratio == 4:
            yield "indexer.wq_b.weight", matrix(draw, self.index_heads * INDEX_HEAD, self.query_rank)
            yield "indexer.weights_proj.weight", matrix(draw, self.index_heads, self.hidden)
            yield from self._compressor(draw, "indexer.compressor.", INDEX_HEAD, ratio)

    def _compressor(
        self, draw: torch.Generator, name: str, head: int, ratio: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # Windows of 4 tokens overlap by half: each token has a part in two rows.
        width = 2 * head if ratio == 4 else head
        yield name + "ape", 0.5 * torch.randn(ratio, width, generator=draw)
        yield name + "wkv.weight", matrix(draw, width, self.hidden)
        yield name + "wgate.weight", matrix(draw, width, self.hidden)
        yield name + "norm.weight", torch.full((head,), SHARP)

    def _experts(self, draw: torch.Generator, hashed: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", matrix(draw, EXPERTS, self.hidden)
        if hashed:
            choices = torch.rand(self.vocab, EXPERTS, generator=draw).argsort(dim=1)[:, :CHOSEN]
            yield "gate.tid2eid", choices.int().contiguous()
        else:
            yield "gate.bias", 0.01 * torch.randn(EXPERTS, generator=draw)
        for name in (*(f"experts.{expert}." for expert in range(EXPERTS)), "shared_experts."):
            yield name + "w1.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "w3.weight", matrix(draw, self.mlp, self.hidden)
            yield name + "w2.weight", matrix(draw, self.hidden, self.mlp)
