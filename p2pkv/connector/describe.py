"""What vLLM's configuration and its registered tensors say about this instance, in p2pkv's words."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import TYPE_CHECKING, Any

import torch

from p2pkv.config import ConfigError, Options
from p2pkv.connector.identity import fingerprint
from p2pkv.kv.cache import PagedCache
from p2pkv.kv.codecs import DENSE, cpu_codec
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def options_of(config: VllmConfig) -> Options:
    """The instance's options. Raises ConfigError with a sentence."""
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_ip

    has_gpu = torch.cuda.is_available()
    transfer = config.kv_transfer_config
    assert transfer is not None
    return Options.from_extra(
        transfer.kv_connector_extra_config,
        role=str(transfer.kv_role),
        kv_port=transfer.kv_port,
        default_host=get_ip(),
        has_gpu=has_gpu,
        # It asks NVML, so that a scheduler's process does not become a user of the device.
        gpu_bytes=current_platform.get_device_total_memory() if has_gpu else 0,
        former=transfer.kv_connector == "P2pNcclConnector",
    )


def layer_order(names: list[str]) -> list[str]:
    """Layer names by the numbers in them: layer 10 after layer 9."""
    return sorted(
        names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def refuse_what_cannot_move(config: KVCacheConfig) -> None:
    """Raises ConfigError for KV that this version does not move."""
    _refuse_planes(config)
    from vllm.v1.kv_cache_interface import FullAttentionSpec, is_full_attention_spec

    for group in config.kv_cache_groups:
        if not is_full_attention_spec(group.kv_cache_spec):
            raise ConfigError(
                f"this model keeps {type(group.kv_cache_spec).__name__} for {group.layer_names[0]}: "
                f"this version of p2pkv moves {FullAttentionSpec.__name__} only; for sliding windows try "
                "--disable-hybrid-kv-cache-manager"
            )


def _refuse_planes(config: KVCacheConfig) -> None:
    """Raises ConfigError for blocks in which a token's bytes do not lie together, though their view says so.

    The keys of a sparse attention's indexer are written as a block's values and behind them its scales, and
    DeepSeek V4's latents likewise: a part of such a block is not some of its tokens.
    """
    from vllm.v1.kv_cache_interface import SparseCacheRole

    for group in config.kv_cache_groups:
        alike = {group.layer_names[0]: group.kv_cache_spec}
        for name, spec in getattr(group.kv_cache_spec, "kv_cache_specs", alike).items():
            indexer = getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
            if indexer or getattr(spec, "model_version", None) is not None:
                raise ConfigError(
                    f"this model's layer {name} keeps the values of a block apart from their scales "
                    f"({type(spec).__name__}): this version of p2pkv moves tokens whose bytes lie together "
                    "only; serve this model without p2pkv"
                )


def refuse_what_cannot_pair(config: VllmConfig) -> None:
    """Raises ConfigError for an engine whose ranks p2pkv would address wrongly."""
    if config.model_config.enable_sleep_mode:
        raise ConfigError(
            "--enable-sleep-mode is set: a sleeping engine gives the memory of its KV cache back, and p2pkv "
            "may still read it or write to it; leave the option out"
        )
    parallel = config.parallel_config
    if parallel.data_parallel_index > 0 and parallel.data_parallel_size == 1:
        # vLLM has made a dense model's rank an engine of its own, but with this one's address.
        raise ConfigError(
            f"this is data-parallel rank {parallel.data_parallel_index}, so --data-parallel-size is not 1, "
            "and all ranks would have the same kv_port; set it to 1, and start replicas as instances of "
            "their own, each with its own kv_port"
        )
    sizes = {
        "--data-parallel-size": parallel.data_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"{option} is {size}: this version of p2pkv knows tensor and pipeline parallelism only; "
                "set it to 1, and start replicas as instances of their own, each with its own kv_port"
            )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "the external_launcher executor runs a scheduler in each rank, and p2pkv needs one for all: "
            "choose mp or ray"
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


def make_ready(device: torch.device) -> None:
    """Ask the system for what vLLM's kernels use and vLLM 0.32 does not ask for by itself.

    A process may use AMX only once it has asked; in vLLM the first large matrix product happens to. A D
    whose first step is a decode would end with an illegal instruction.
    """
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


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
            layers=_stages(config, rank, len(layers.names)),
            kv_heads=heads,
            tp=tp,
            row_bytes=cache.row_bytes,
            unit_tokens=cache.unit_tokens,
            dtype=_element_type(config, layers.tensors[0]),
            codec=cache.codec,
            layer_names=hashlib.blake2b(" ".join(patterns).encode(), digest_size=8).hexdigest(),
        ),
        link=link,
        ahead=options.role == "D" and options.ahead_bytes > 0,
        digest=cache.digest_name,
        verify=options.verify,
    )


def _element_type(config: VllmConfig, tensor: torch.Tensor) -> str:
    """Tensors of bytes hold one of several types of numbers: the cache's own name says which."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return name
    kind = str(config.cache_config.cache_dtype)
    return f"{name} ({'fp8_e4m3' if kind == 'fp8' else kind})"


def _stages(config: VllmConfig, rank: int, mine: int) -> tuple[int, ...]:
    """KV layers of each pipeline stage; `mine` are on this rank's. Raises ConfigError."""
    parallel = config.parallel_config
    pp = parallel.pipeline_parallel_size
    if pp == 1:
        return (mine,)
    from vllm.distributed.utils import get_pp_indices

    total = config.model_config.get_total_num_hidden_layers()
    spans = [get_pp_indices(total, stage, pp) for stage in range(pp)]
    stages = tuple(stop - start for start, stop in spans)
    stage = rank // parallel.tensor_parallel_size
    if stages[stage] != mine:
        raise ConfigError(
            f"pipeline stage {stage} of {pp} has {mine} KV layers, but {stages[stage]} were expected: p2pkv "
            "does not know how this model spreads its layers; serve it without --pipeline-parallel-size"
        )
    return stages
