"""What vLLM's configuration and its registered tensors say about this instance, in p2pkv's words."""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from p2pkv.config import ConfigError, Options
from p2pkv.pages.codecs import DENSE, cpu_codec
from p2pkv.pages.geometry import PagedCache
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("p2pkv")

SAMPLE_BYTES = 1 << 16
"""Bytes hashed at both ends of each weight file."""


def options_of(config: VllmConfig) -> Options:
    """The instance's options. Raises ConfigError with a sentence."""
    from vllm.utils.network_utils import get_ip

    transfer = config.kv_transfer_config
    assert transfer is not None
    return Options.from_extra(
        transfer.kv_connector_extra_config,
        role=str(transfer.kv_role),
        kv_port=transfer.kv_port,
        default_host=get_ip(),
        has_gpu=torch.cuda.is_available(),
    )


def layer_order(names: list[str]) -> list[str]:
    """Layer names by the numbers in them: layer 10 after layer 9."""
    return sorted(
        names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def refuse_what_cannot_move(config: KVCacheConfig) -> None:
    """Raises ConfigError for KV that this version does not move."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, is_full_attention_spec

    for group in config.kv_cache_groups:
        if not is_full_attention_spec(group.kv_cache_spec):
            raise ConfigError(
                f"this model keeps {type(group.kv_cache_spec).__name__} for {group.layer_names[0]}: "
                f"this version of p2pkv moves {FullAttentionSpec.__name__} only; for sliding windows try "
                "--disable-hybrid-kv-cache-manager"
            )


class Layers:
    """The registered KV tensors in layer order, each piece of memory once."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: KVCacheConfig) -> None:
        groups = {
            name: number for number, group in enumerate(config.kv_cache_groups) for name in group.layer_names
        }
        seen: set[tuple[int, int]] = set()
        self.names: list[str] = []
        for name in layer_order(list(tensors)):
            place = (tensors[name].data_ptr(), groups.get(name, 0))
            if place not in seen:
                seen.add(place)
                self.names.append(name)
        self.tensors = [tensors[name] for name in self.names]
        self.groups = [groups.get(name, 0) for name in self.names]
        self.places = {name: place for place, name in enumerate(self.names)}


def codec_of(config: VllmConfig, names: list[str]) -> str:
    """How the attention kernels arrange a page's bytes; dense unless they pack tokens together."""
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    isas = {str(layers[name].isa) for name in names if getattr(layers.get(name), "isa", None)}
    if len(isas) > 1:
        raise ConfigError(
            f"attention layers pack their pages in different ways ({sorted(isas)}); p2pkv needs one"
        )
    return cpu_codec(isas.pop()) if isas else DENSE


def hello_of(
    config: VllmConfig, options: Options, cache: PagedCache, layers: Layers, rank: int, link: str
) -> Hello:
    """This rank's Hello, without `to`. Raises ConfigError for a model whose sizes do not add up."""
    model, parallel = config.model_config, config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    if cache.heads != max(1, heads // tp):
        raise ConfigError(
            f"a rank of {tp} holds {cache.heads} KV heads, but {max(1, heads // tp)} of {heads} were "
            "expected: p2pkv does not know how this model spreads its heads"
        )
    patterns = sorted({re.sub(r"\d+", "#", name) for name in layers.names})
    return Hello(
        version=PROTOCOL_VERSION,
        incarnation=uuid.uuid4().hex,
        role=options.role,
        rank=rank,
        to="none",
        address=str(options.address.shifted(rank)),
        addresses=tuple(str(options.address.shifted(each)) for each in range(tp * pp)),
        model=str(model.model),
        weights=fingerprint(config),
        cache=Cache(
            layers=_stages(config, len(layers.names)),
            kv_heads=heads,
            tp=tp,
            row_bytes=cache.row_bytes,
            unit_tokens=cache.unit_tokens,
            dtype=str(layers.tensors[0].dtype).removeprefix("torch."),
            codec=cache.codec,
            layer_names=hashlib.blake2b(" ".join(patterns).encode(), digest_size=8).hexdigest(),
        ),
        link=link,
    )


def _stages(config: VllmConfig, mine: int) -> tuple[int, ...]:
    """KV layers of each pipeline stage."""
    pp = config.parallel_config.pipeline_parallel_size
    if pp == 1:
        return (mine,)
    from vllm.distributed.utils import get_pp_indices

    total = config.model_config.get_total_num_hidden_layers()
    spans = [get_pp_indices(total, stage, pp) for stage in range(pp)]
    return tuple(stop - start for start, stop in spans)


def fingerprint(config: VllmConfig) -> str:
    """Which weights these are: sizes and sampled bytes of the files, never a path or a name."""
    model = config.model_config
    digest = hashlib.blake2b(digest_size=12)
    text = [str(model.dtype), str(model.quantization), str(config.load_config.load_format)]
    if str(config.load_config.load_format) == "dummy":
        text.append(f"{model.seed} {model.hf_config.to_json_string()}")
    digest.update(" ".join(text).encode())
    folder = _weights_folder(str(model.model), model.revision)
    files = (
        sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
        if folder
        else []
    )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(SAMPLE_BYTES))
            data.seek(max(0, size - SAMPLE_BYTES))
            digest.update(data.read(SAMPLE_BYTES))
    if not files:
        digest.update(model.hf_config.to_json_string().encode())
        log.info(
            "no weight files found for %s: peers are told apart by the model's configuration only",
            model.model,
        )
    return digest.hexdigest()


def _weights_folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
