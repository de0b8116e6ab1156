"""This instance, as vLLM's configuration and its registered tensors describe it."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1 import kv_cache_interface as vllms
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.version import __version__ as version

from p2pkv.config import ConfigError, Options
from p2pkv.connector import stage_layers
from p2pkv.connector.attention_rows import plane_views, row_form
from p2pkv.connector.circular_buffers import is_ring, ring_groups
from p2pkv.connector.held_blocks import most_blocks
from p2pkv.connector.identity import drafter_of, fingerprint
from p2pkv.connector.recurrent import conv_dim_first, form_of, is_recurrent, state_groups
from p2pkv.connector.scheduler import BlockTables
from p2pkv.connector.stage_layers import Layer, LocalGroup
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.page_packings import DENSE, cpu_codec
from p2pkv.pairing import Address
from p2pkv.protocol.handshake import DRAFTER
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def options_of(config: VllmConfig) -> Options:
    """The instance's options. Raises ConfigError with a sentence."""
    has_gpu = torch.cuda.is_available()
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    assert transfer is not None
    stage = parallel.prefill_context_parallel_size * parallel.tensor_parallel_size
    ranks = int(parallel.pipeline_parallel_size * stage)
    return Options.from_extra(
        transfer.kv_connector_extra_config,
        role=str(transfer.kv_role),
        kv_port=transfer.kv_port,
        default_host=get_ip(),
        has_gpu=has_gpu,
        # It asks NVML, so that a scheduler's process does not become a user of the device.
        gpu_bytes=current_platform.get_device_total_memory() if has_gpu else 0,
        engine=(parallel.data_parallel_index, ranks, data_parallel(config)),
        former=transfer.kv_connector == "P2pNcclConnector",
    )


def token_parts(config: VllmConfig, spec: KVCacheSpec) -> int:
    """Over how many ranks of a stage decode-context parallelism divides the tokens of these layers. A block
    of the scheduler has so many times the tokens of a rank's block."""
    divided = not keeps_state(spec) and getattr(spec, "dcp_sharded", True)
    return int(config.parallel_config.decode_context_parallel_size) if divided else 1


def on_one_host(config: VllmConfig) -> bool:
    """Whether all ranks of this engine run on its engine core's host, by vLLM's configuration."""
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend
    return parallel.nnodes_within_dp == 1 and backend in (None, "mp", "uni")


def rank_addresses(config: VllmConfig, options: Options) -> tuple[str, ...]:
    """Where each rank of this engine listens, for a worker.

    A worker knows its own host only. Where the ranks may be on several, each waits here for all others.
    """
    parallel, ranks = config.parallel_config, options.engine_ranks
    if on_one_host(config):
        return tuple(str(options.address.shifted(rank)) for rank in range(ranks))
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()  # of a model with experts: the ranks of all data-parallel engines
    mine = parallel.data_parallel_index, parallel.rank, str(options.address.shifted(parallel.rank))
    gathered: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(gathered, mine, group=world.cpu_group)
    found = {rank: address for index, rank, address in gathered if index == parallel.data_parallel_index}
    return tuple(found[rank] for rank in range(ranks))


def data_parallel(config: VllmConfig) -> bool:
    """Whether this engine's instance may have others. A dense model's engine finds that in its id only."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    named = transfer is not None and re.search(r"_dp[0-9]+$", str(transfer.engine_id)) is not None
    return named or parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0


def replica(config: VllmConfig) -> int | None:
    """X-data-parallel-rank, by which its HTTP server sends a request to this engine; None: it needs none."""
    parallel = config.parallel_config
    if not data_parallel(config):
        return None
    # The server of a node (hybrid) or of one rank (external) counts its own engines only.
    own_only = parallel.local_engines_only
    return int(parallel.data_parallel_rank_local if own_only else parallel.data_parallel_index)


def http_address(config: VllmConfig, options: Options) -> Address | None:
    """Where requests for this engine go; None without http_port."""
    parallel, address = config.parallel_config, options.http_address
    if address is None or not data_parallel(config) or parallel.local_engines_only:
        return address
    # One HTTP server for all nodes, on the first one, which may have no engine.
    first = parallel.data_parallel_master_ip
    on_first = parallel.data_parallel_rank_local == parallel.data_parallel_index and _is_here(first)
    return address if on_first else Address(first, address.port)


def _is_here(host: str) -> bool:
    """Whether it is an IPv4 address of this machine."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


ATTENTION = (
    vllms.FullAttentionSpec,
    vllms.MLAAttentionSpec,
    vllms.SlidingWindowSpec,
    vllms.SlidingWindowMLASpec,
    vllms.ChunkedLocalAttentionSpec,
    vllms.RSWASpec,  # of the tokens behind a prompt only, vLLM gives blocks back
)
"""What vLLM keeps of the attention layers that this version moves."""


def refuse_what_cannot_move(vllm_config: VllmConfig, config: KVCacheConfig) -> None:
    """Raises ConfigError for KV that this version does not move. For a worker, which has the layers
    themselves, before vLLM takes the cache's memory."""
    modules = vllm_config.compilation_config.static_forward_context
    tp = vllm_config.parallel_config.tensor_parallel_size
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = _spec_of(group, name)
            if is_recurrent(spec):
                form_of(name, spec, modules.get(name), tp=tp, dim_first=conv_dim_first())
            if keeps_state(spec):
                continue
            if type(spec) not in ATTENTION:
                names = ", ".join(kind.__name__ for kind in ATTENTION)
                raise ConfigError(
                    f"this model keeps {type(spec).__name__} for {name}: this version of p2pkv moves "
                    f"recurrent states, rings, and of attention {names}; serve this model without p2pkv"
                )
            row_form(name, spec, modules.get(name))


def computes_last_token(config: KVCacheConfig) -> bool:
    """Whether P computes the whole prompt. Where layers see a window or keep a state, P leaves the last token
    to D: once P has computed it, vLLM has freed what D needs to compute it, and a state includes it."""
    # A group without a name: all of its layers may lie on other stages.
    specs = (_spec_of(group, name) for group in config.kv_cache_groups for name in group.layer_names or ("",))
    return not any(_window(spec) or keeps_state(spec) for spec in specs)


def prompt_tail(config: VllmConfig) -> int:
    """How many of a prompt's last tokens D computes itself: the last one, for its logits, and what a drafter
    reads ahead. The KV that a drafter has of a token depends on the tokens behind it, and beyond the prompt's
    end these are P's samples, not D's."""
    return max(1, int(config.num_prefill_lookahead_tokens))


def resume_level(config: VllmConfig, options: Options) -> int:
    """The ping's `resumes`: whether streams go on elsewhere, where a part of the answer is prompt. What the
    server itself sets may count tokens of the answer: penalties, logits processors, a watermark, a bound."""
    model, defaults = config.model_config, config.model_config.get_diff_sampling_param()
    counts = any(defaults.get(f"{name}_penalty") for name in ("presence", "frequency"))
    counts |= bool(
        model.logits_processors or entry_points(group=LOGITSPROCS_GROUP) or config.watermark_config
    )
    bounds = options.decodes and defaults.get("max_tokens")
    of_all = model.override_generation_config.get("max_new_tokens")
    counts |= bool(bounds and (of_all or model.generation_config not in ("auto", "vllm")))
    return 0 if counts else 1 if bounds else 2


def first_token_level(config: VllmConfig, kv_config: KVCacheConfig, options: Options) -> int:
    """The ping's `first_token`. Where layers see a window or keep a state, or a drafter reads ahead, the
    token that P computes is not the one behind the whole prompt, or D needs more than that."""
    first = computes_last_token(kv_config) and prompt_tail(config) == 1
    return resume_level(config, options) if first else 0


def sampler(config: VllmConfig) -> str:
    """The ping's `sampler`: with one seed vLLM's two model runners draw different tokens, and so may its
    versions. "" on a CPU, where no request may have a seed: vLLM's engine core ends when one that has a seed
    and a prompt computed in part is in a step with others, as torch's CPU generator has no offset. Nor has V1
    with guesses a name: D's first step has room for them, and takes more numbers from the seed."""
    guesses = config.speculative_config is not None and not config.use_v2_model_runner
    named = not (guesses or current_platform.is_cpu())
    return f"vLLM {version}, V{1 + config.use_v2_model_runner} runner" if named else ""


def ahead_tokens(kv_config: KVCacheConfig, options: Options) -> int:
    """How many tokens of prompts fit into `prefetch_bytes`, where all layers keep the same tokens."""
    if not options.decodes or options.data_parallel:
        return 0
    specs = [_spec_of(group, name) for group in kv_config.kv_cache_groups for name in group.layer_names]
    token = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    return int(options.prefetch_bytes / token) if token else 0


def replayed_window(spec: KVCacheSpec) -> int:
    """How many tokens before a cached prefix's end vLLM computes this layer's KV of again, as its prefix
    cache has none (--swa-bounded-replay of vLLM 0.33); 0: its KV is cached."""
    return int(getattr(spec, "prefix_replay_tokens", 0))


def block_tables(config: VllmConfig, kv_config: KVCacheConfig) -> BlockTables:
    specs = _table_specs(kv_config)
    sizes = (0 if is_ring(spec) else spec.block_size * token_parts(config, spec) for spec in specs)
    states = {number: spec for number, spec in enumerate(specs) if keeps_state(spec)}
    windows = {n: replayed_window(group.kv_cache_spec) for n, group in enumerate(kv_config.kv_cache_groups)}
    replayed = {number: window for number, window in windows.items() if window}
    return BlockTables(tuple(sizes), states, prompt_tail(config), computes_last_token(kv_config), replayed)


def request_blocks(config: VllmConfig, kv_config: KVCacheConfig) -> Callable[[int], int]:
    tables = []
    for spec in _table_specs(kv_config):
        most = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        tables.append((spec.block_size * token_parts(config, spec), max(1, most)))
    return partial(most_blocks, tables, config.num_speculative_tokens)


def keeps_state(spec: KVCacheSpec) -> bool:
    """Whether a request has one row of this layer, which is overwritten in place."""
    return is_recurrent(spec) or is_ring(spec)


def _spec_of(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    inner: dict[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return inner.get(name, group.kv_cache_spec)


def _table_specs(config: KVCacheConfig) -> list[KVCacheSpec]:
    """By block table, vLLM's description of the first of its layers."""
    return [_spec_of(group, next(iter(group.layer_names), "")) for group in config.kv_cache_groups]


def _window(spec: KVCacheSpec) -> int:
    """Tokens whose KV vLLM keeps for this layer; 0: all, as for windows without its hybrid allocator."""
    if _chunked(spec):
        return int(spec.attention_chunk_size)
    slides = isinstance(spec, vllms.SlidingWindowSpec)
    return spec.sliding_window + spec.extra_retained_tokens if slides else 0


def _chunked(spec: KVCacheSpec) -> bool:
    """Whether vLLM keeps the KV of the chunk that is computed, and not of a window that slides."""
    return isinstance(spec, vllms.ChunkedLocalAttentionSpec)


def notifies_of_sleep() -> bool:
    """Whether vLLM notifies a connector before it takes the memory of the KV cache away, as 0.33 does."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def refuse_what_cannot_pair(config: VllmConfig) -> None:
    """Raises ConfigError for an engine whose ranks p2pkv would address wrongly."""
    for option in ("enable_sleep_mode", "enable_cumem_allocator"):  # the first sets the second on GPUs
        if getattr(config.model_config, option) and not notifies_of_sleep():
            raise ConfigError(
                f"--{option.replace('_', '-')} is set: with it vLLM's /sleep and /release_kv_cache_memory "
                "give the memory of the KV cache back, and this vLLM does not notify p2pkv, which may still "
                "read it or write to it; leave the option out, or use vLLM 0.33"
            )
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise ConfigError(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set: with it vLLM's engine core ends when a router "
            "uses an id again while P holds blocks for it; unset it, as p2pkv needs no equal ids on P and D"
        )
    if config.aux_output_config.enabled:
        raise ConfigError(
            "--enable-return-routed-experts is set: D does not get the experts of the tokens that P "
            "computed, and vLLM needs them; leave the option out"
        )
    model, parallel = config.model_config, config.parallel_config
    if model.uses_mrope and (media := model.multimodal_config) and media.is_multimodal_pruning_enabled():
        raise ConfigError(
            "--video-pruning-rate is set: what is kept of a video decides the positions of later tokens, and "
            "D does not encode a video whose KV comes from P; leave the option out"
        )
    if parallel.enable_elastic_ep:
        raise ConfigError(
            "--enable-elastic-ep is set: this version of p2pkv does not follow data-parallel ranks that come "
            "and go; leave the option out"
        )
    if parallel.enable_fault_tolerance:
        raise ConfigError(
            "--enable-fault-tolerance is set: with it vLLM goes on after a step that has failed, and p2pkv "
            "cannot know what that step has computed, or which transfers had ended; leave the option out"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "the external_launcher executor runs a scheduler in each rank, and p2pkv needs one for all: "
            "choose mp or ray"
        )


class Layers:
    """The registered KV tensors in layer order, each piece of memory once.

    Attributes:
        all: the layers, by number.
        indices: the number of each layer, by name.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], config: KVCacheConfig) -> None:
        groups = config.kv_cache_groups
        tables = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        self.all: list[Layer] = []
        seen: set[tuple[int, int]] = set()
        owned = {tensors[name].data_ptr() for name in tables if name in tensors}
        for name in stage_layers.layer_order(list(tensors)):
            tensor, table = tensors[name], tables.get(name, 0)
            # A layer that shares another's KV is in no group here.
            shares = name not in tables and tensor.data_ptr() in owned
            # Groups of layers lie in the same memory: each block is one group's at a time.
            if not shares and (address := (tensor.data_ptr(), table)) not in seen:
                seen.add(address)
                self.all.append(Layer(name, _spec_of(groups[table], name), tensor, table, len(self.all)))
        self.indices = {layer.name: layer.number for layer in self.all}
        self.device = self.all[0].tensor.device if self.all else torch.device("cpu")


def codec_of(config: VllmConfig, names: list[str]) -> str:
    """How the attention kernels arrange a page's bytes; dense unless they pack tokens together."""
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    isas = {str(layers[name].isa) for name in names if getattr(layers.get(name), "isa", None)}
    if len(isas) > 1:
        raise ConfigError(
            f"attention layers pack pages in different ways ({sorted(isas)}): p2pkv needs one way; serve "
            "this model without p2pkv"
        )
    return cpu_codec(isas.pop()) if isas else DENSE


def make_ready(device: torch.device, layers: Iterable[Any]) -> None:
    """Prepare what vLLM (0.32, 0.33) prepares in its first step only, which on D may come after a load.

    A process may use AMX only once it has asked the system; in vLLM the first large matrix product happens
    to. A D whose first step is a decode would end with an illegal instruction. And Triton's attention sets
    all scales of `--kv-cache-dtype *_per_token_head` to 1, those that have been loaded too. `layers`: vLLM's.
    """
    for layer in layers:
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False) and hasattr(impl, "_ensure_scale_caches"):
            impl._ensure_scale_caches(layer.kv_cache)
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def cache_of(config: VllmConfig, layers: Layers) -> tuple[RankCache, Cache]:
    """This rank's cache, and its entry in the Hello. Raises ConfigError for sizes that do not add up."""
    parallel = config.parallel_config
    groups = local_groups(config, layers)
    mine = [group.described for group in groups]
    stages = stage_layers.exchange_with_stages(mine) if parallel.pipeline_parallel_size > 1 else [mine]
    cache, shapes = stage_layers.over_stages(groups, stages, layers.device)
    return cache, Cache(parallel.tensor_parallel_size, shapes, parallel.prefill_context_parallel_size)


def local_groups(config: VllmConfig, layers: Layers) -> list[LocalGroup]:
    modules = config.compilation_config.static_forward_context
    alike: dict[tuple[Any, ...], list[Layer]] = {}
    """Attention layers with the same rows, planes, units, window and heads."""
    for layer in layers.all:
        spec, shape = layer.spec, tuple(layer.tensor.shape[1:])
        if not keeps_state(spec):
            rows, seen = row_form(layer.name, spec, modules.get(layer.name)), (_window(spec), _chunked(spec))
            heads = _model_heads(config, layer.name, spec, rows.slot_heads or shape[0])
            form = rows, shape, _element_type(config, layer), spec.block_size, seen, heads
            alike.setdefault(form, []).append(layer)
    groups = [group for form, some in alike.items() for group in _groups_of(config, form, some)]
    states = [replace(each, module=modules.get(each.name)) for each in layers.all if is_recurrent(each.spec)]
    tp = config.parallel_config.tensor_parallel_size
    once = state_groups(states, tp=tp, dim_first=conv_dim_first()) if states else []
    once += ring_groups(layers.all)
    return [*groups, *sorted(once, key=lambda group: group.numbers[0])]


def _groups_of(config: VllmConfig, form: tuple[Any, ...], layers: list[Layer]) -> Iterator[LocalGroup]:
    """The KV groups of layers that are alike: one for each plane of their rows. Raises ConfigError."""
    names, spec, rows = [layer.name for layer in layers], layers[0].spec, form[0]
    parts, transfer = token_parts(config, spec), config.kv_transfer_config
    assert transfer is not None
    keeps_windows = transfer.kv_role != "kv_consumer" or config.cache_config.enable_prefix_caching
    keeps_windows = keeps_windows and not replayed_window(spec)
    modules = config.compilation_config.static_forward_context
    views = [plane_views(each.name, rows, each.tensor, modules.get(each.name)) for each in layers]
    for planes in zip(*views, strict=True):
        plane, tensors = planes[0][0], [tensor for _, tensor in planes]
        codec, tables = rows.codec(plane, codec_of(config, names)), [layer.table for layer in layers]
        group = PagedCache.from_tensors(
            tensors, block_size=spec.block_size, codec=codec, tables=tables, tokens_per_row=rows.tokens
        )
        yield stage_layers.local_group(
            group,
            (layer.number for layer in layers),
            names,
            f"{form} {plane}",
            plane,
            heads=_model_heads(config, names[0], spec, group.heads),
            dtype=_element_type(config, layers[0]),
            window=_window(spec),
            block=spec.block_size if _window(spec) and keeps_windows else 1,
            dcp=parts,
            interleave=int(config.parallel_config.cp_kv_cache_interleave_size) if parts > 1 else 1,
            chunked=_chunked(spec),
        )


def hello_of(
    config: VllmConfig, options: Options, cache: RankCache, shape: Cache, rank: int, link: str
) -> Hello:
    """This rank's Hello, without `to`; with both roles D's, of which `Context.hello_for` makes P's."""
    model, name = config.model_config, options.weights_name
    drafter = drafter_of(config, name)
    return Hello(
        version=PROTOCOL_VERSION,
        incarnation=uuid.uuid4().hex,
        role="D" if options.decodes else "P",
        rank=rank,
        to="none",
        address=str(options.address.shifted(rank)),
        addresses=rank_addresses(config, options),
        model=str(model.model),
        weights=fingerprint(config, name) + (f"{DRAFTER}{drafter}" if drafter else ""),
        cache=shape,
        link=link,
        prefetch=options.decodes and options.prefetch_bytes > 0 and not options.data_parallel,
        instance=str(options.instance or ""),
        digest=cache.digest_name,
        verify=options.verify,
        several=True,
        together=True,
    )


def _model_heads(config: VllmConfig, layer: str, spec: KVCacheSpec, held: int) -> int:
    """KV heads of a layer, before tensor parallelism, of which a rank holds `held`: those of the model or of
    the drafter, or the layer's own; of latents, and of an indexer's keys, the one that all ranks hold.

    Raises ConfigError where the numbers do not add up.
    """
    if isinstance(spec, vllms.MLAAttentionSpec | vllms.SlidingWindowMLASpec):
        return 1
    tp, model = config.parallel_config.tensor_parallel_size, config.model_config
    if _is_drafters(config, layer, spec):
        assert config.speculative_config is not None
        model = config.speculative_config.draft_model_config or model
    sizes, number = model.model_arch_config, _number(layer)
    if number < len(sizes.per_layer_overrides or ()):  # layers differ, as Gemma-4's
        sizes = sizes[number]
    heads = 1 if model.use_mla else sizes.total_num_kv_heads
    text = model.hf_text_config
    blocks = getattr(text, "block_configs", None) or ()  # of Nemotron-NAS, whose layers differ
    attention = getattr(blocks[number], "attention", None) if number < len(blocks) else None
    if group := getattr(attention, "n_heads_in_group", None):
        heads = text.num_attention_heads // group
    if getattr(spec, "sliding_window", None):  # of MiMo-V2, and of Step-3.5
        own = "swa_num_key_value_heads"
        others = getattr(text, "attention_other_setting", None) or {}
        windows = getattr(text, own, None) or others.get("num_attention_groups") or heads
        # A convolution beside Inkling's full attention is a window, too, with that attention's heads.
        heads = windows if held == max(1, windows // tp) else heads
    if held == max(1, heads // tp):
        return int(heads)
    # A layer with heads of its own: a rank that holds several has no copies.
    if held == getattr(spec, "num_kv_heads", 0) and (held > 1 or tp == 1):
        return int(held * tp)
    raise ConfigError(
        f"a rank of {tp} holds {held} KV heads of {layer}, but {max(1, heads // tp)} of {heads} were "
        "expected: p2pkv does not know how this model spreads its heads; choose another "
        "--tensor-parallel-size"
    )


def _is_drafters(config: VllmConfig, layer: str, spec: KVCacheSpec) -> bool:
    """Whether a drafter has this layer: by a flag since vLLM 0.33, before by a prefix or a high number."""
    drafting = config.speculative_config
    if drafting is None or not drafting.uses_draft_kv_cache():
        return False
    behind = _number(layer) >= config.model_config.get_total_num_hidden_layers()
    return bool(getattr(spec, "is_draft", False)) or layer.startswith(stage_layers.DRAFTERS) or behind


def _number(layer: str) -> int:
    """The layer's number in the model; 0: its name has none."""
    return next((int(part) for part in layer.split(".") if part.isdigit()), 0)


def _element_type(config: VllmConfig, layer: Layer) -> str:
    """Tensors of bytes hold one of several types of numbers: the cache's own name has which."""
    dtype, drafting = layer.tensor.dtype, config.speculative_config
    name = str(dtype).removeprefix("torch.")
    if dtype.is_floating_point and dtype.itemsize > 1:
        return name
    kind, skipped = str(config.cache_config.cache_dtype), config.cache_config.kv_cache_dtype_skip_layers
    if drafting is not None and _is_drafters(config, layer.name, layer.spec):
        kind = drafting.kv_cache_dtype or kind
    form = " fnuz" if current_platform.is_fp8_fnuz() else ""  # AMD's MI300: other numbers of eight bits
    form += f", not in layers {' '.join(sorted(skipped))}" if skipped else ""  # names leave numbers out
    return f"{name} ({'fp8_e4m3' if kind == 'fp8' else kind}{form})"
