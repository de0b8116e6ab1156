"""Makes tiny Llamas with random weights and their own tokenizer, so that demo and tests need no download.

The weights are drawn so that a wrong KV cache shows in the text: attention is peaked rather than flat, and
every layer adds about as much as its input has, so the next token depends on tokens far back.

Shape legend: V vocabulary, E hidden size, A attention heads, K KV heads, D head_dim, F MLP width.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SCORE_STD = 2.5
"""Standard deviation of the attention scores: high enough that a few tokens take most of the weight."""

_LOGIT_STD = 4.0
"""Standard deviation of the logits: the first two are then seldom closer than 0.01."""

_BRANCH_GAIN = 1.5
"""Size of what a branch (attention, MLP) adds, against its normalised input."""


@dataclass(frozen=True, kw_only=True)
class TinyFiles:
    """The parameters of a model, or of a part of one; equal parameters give equal files.

    Attributes:
        family: part of the name.
        recipe: part of what the name is made from: raise it whenever the same parameters give other files.
    """

    family: ClassVar[str]
    recipe: ClassVar[int] = 1
    layers: int
    seed: int = 0

    @property
    def shape(self) -> str:
        """The part of the name that people read."""
        return str(self.layers)

    @property
    def name(self) -> str:
        """A directory name that is the same for equal parameters only."""
        text = json.dumps([self.recipe, asdict(self)], sort_keys=True)
        return f"tiny-{self.family}-{self.shape}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def write(self, directory: Path) -> None:
        """Write config, tokenizer and weights into an existing directory."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TinyModel(TinyFiles):
    """A tiny model with a tokenizer of its own.

    Attributes:
        vocab: upper bound of the tokenizer's vocabulary; the embedding has exactly this many rows.
        max_positions: longest sequence, in tokens.
    """

    vocab: int = 1024
    max_positions: int = 2048

    def write(self, directory: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        silent = write_tokenizer(self.vocab, self.max_positions, directory)
        _write_json(directory / "config.json", self.config())
        file = directory / "model.safetensors"
        try:
            save_file(dict(self.weights(silent)), file, metadata={"format": "pt"})
        except SafetensorError as error:  # which is no OSError, on a full disk either
            raise OSError(f"{file} cannot be written: {error}") from None

    def config(self) -> dict[str, Any]:
        """What config.json holds."""
        raise NotImplementedError

    def weights(self, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every weight; a matrix is [out, in].

        Tokens in `silent` are never the likeliest, so that every answer is readable text and runs to its
        limit.
        """
        raise NotImplementedError


def matrix(draw: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """float32 [rows, columns]: gives outputs of root mean square `gain` for inputs of root mean square 1."""
    import torch

    return torch.randn(rows, columns, generator=draw) * (gain / math.sqrt(columns))


@dataclass(frozen=True, kw_only=True)
class TinyLlama(TinyModel):
    """The parameters of a tiny Llama."""

    family = "llama"
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    mlp: int = 512
    """Width of the MLP."""
    max_positions: int = 4096
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        sizes = (
            self.layers,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.mlp,
            self.max_positions,
        )
        if min(sizes) < 1:
            raise ValueError(f"every size of a tiny model must be at least 1, but this one is {self}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.vocab < 320:
            raise ValueError(f"vocab is {self.vocab}; 256 bytes and the special tokens need at least 320")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; use float32 or bfloat16")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)

    @property
    def shape(self) -> str:
        return f"{self.layers}x{self.kv_heads}x{self.head_dim}"

    def write(self, directory: Path) -> None:
        super().write(directory)
        _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }

    def weights(self, silent: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        draw = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def some(rows: int, columns: int, gain: float) -> torch.Tensor:
            return matrix(draw, rows, columns, gain).to(dtype)

        def ones() -> torch.Tensor:
            return torch.ones(self.hidden, dtype=dtype)

        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # A score is q.k / sqrt(D), so that its deviation is the product of the two gains.
        sharp = math.sqrt(_SCORE_STD)
        yield "model.embed_tokens.weight", torch.randn(self.vocab, self.hidden, generator=draw).to(dtype)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", ones()
            yield prefix + "self_attn.q_proj.weight", some(query, self.hidden, sharp)
            yield prefix + "self_attn.k_proj.weight", some(kv, self.hidden, sharp)
            yield prefix + "self_attn.v_proj.weight", some(kv, self.hidden, 1.0)
            yield prefix + "self_attn.o_proj.weight", some(self.hidden, query, 2 * _BRANCH_GAIN)
            yield prefix + "post_attention_layernorm.weight", ones()
            yield prefix + "mlp.gate_proj.weight", some(self.mlp, self.hidden, 1.0)
            yield prefix + "mlp.up_proj.weight", some(self.mlp, self.hidden, 1.0)
            yield prefix + "mlp.down_proj.weight", some(self.hidden, self.mlp, _BRANCH_GAIN)
        yield "model.norm.weight", ones()
        head = matrix(draw, self.vocab, self.hidden, _LOGIT_STD)
        head[silent] = 0.0
        yield "lm_head.weight", head.to(dtype)


def llama_8b_geometry(*, hidden: int = 128, max_positions: int = 8448) -> TinyLlama:
    """Tiny weights (some 40 MB) with the KV cache of Llama-3.1-8B: 128 KiB a token in bfloat16."""
    return TinyLlama(
        layers=32, hidden=hidden, heads=8, kv_heads=8, head_dim=128, mlp=hidden,
        max_positions=max_positions, dtype="bfloat16",
    )  # fmt: skip


def default_cache_dir() -> Path:
    """Where models are kept between runs: `$P2PKV_CACHE`, else `p2pkv` in the user's cache directory."""
    if own := os.environ.get("P2PKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "p2pkv"


def ensure_model(spec: TinyFiles, cache_dir: Path | None = None) -> Path:
    """The directory of this model, made first if it is not there yet.

    Safe against other processes that make the same model at the same time: each writes a directory of its
    own and renames it into place; the first one wins.
    """
    root = cache_dir or default_cache_dir()
    target = root / spec.name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=root))
    try:
        spec.write(work)
        work.chmod(0o755)
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def write_tokenizer(vocab: int, max_positions: int, directory: Path) -> list[int]:
    """Train and write the tokenizer; returns the ids that no answer should contain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_words(), trainer=trainer)
    if (size := tokenizer.get_vocab_size()) != vocab:
        raise ValueError(f"the tokenizer learned {size} tokens of {vocab}; choose a smaller vocab")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL_TOKENS[0],
        "bos_token": _SPECIAL_TOKENS[1],
        "eos_token": _SPECIAL_TOKENS[2],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    return [i for i in range(vocab) if not _readable(tokenizer.id_to_token(i) or "")]


def _readable(token: str) -> bool:
    """Whether a byte-level token is plain text: letters, or letters after a space (written U+0120)."""
    letters = token.removeprefix("\u0120")
    return letters.isascii() and letters.isalpha()


def _training_words() -> Iterator[str]:
    """Lines of made-up words, always the same; the tokenizer learns its merges from them."""
    syllables = [
        a + b
        for a in ("b", "ch", "d", "f", "gr", "k", "l", "m", "n", "p", "r", "st", "t", "v")
        for b in "aeiou"
    ]
    draw = random.Random(0)
    for _ in range(4000):
        words = ("".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(8))
        yield " ".join(words) + ". "


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
