"""The interface that vLLM gives a KV connector, as the sources of the installed vLLM have it, and with
VLLM_SOURCES=folder also those of a vLLM that is only read.

What a version adds or changes fails a test here, so that somebody looks at it before users meet it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_sources import Sources, signature

import p2pkv
from p2pkv.connector import P2pKvConnector
from p2pkv.connector.states import STATE_KINDS

pytestmark = pytest.mark.vllm

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SPECS = "v1/kv_cache_interface.py"


# The methods.

DEFAULTS = {
    "_get_connector_metadata": "vLLM's own",
    "bind_gpu_block_pool": "p2pkv looks at no block's state",
    "bind_kv_cache_manager": "the same",
    "clear_connector_metadata": "vLLM's own",
    "finish_forward": "the sweep is in wait_for_save, which every runner calls",
    "get_block_ids_with_load_errors": "a failed load is told by request, which works with several KV groups",
    "get_external_cache_hit_sources": "it reads _cache_hit_source",
    "get_finished": "replaced by get_transfer_results",
    "get_finished_count": "every rank reports each request",
    "get_handshake_metadata": "ranks shake hands themselves",
    "get_kv_connector_kv_cache_events": "p2pkv stores nothing",
    "get_mem_pool_context": "blocks are registered wherever they lie",
    "get_required_kvcache_layout": "p2pkv takes every layout",
    "has_connector_metadata": "vLLM's own",
    "has_pending_block_frees": "blocks of a sent prompt belong to a request that vLLM still knows",
    "has_pending_push_work": "the same",
    "register_finished_partial_tail": "P sends from the blocks of the request, not from prefix-cache copies",
    "requires_kv_delivery": "a producer's default is right",
    "requires_piecewise_for_cudagraph": "what no hook covered is swept",
    "reset_cache": "p2pkv stores nothing",
    "reset_capture_state": "the hooks keep nothing that a capture could spoil",
    "restore_kv_caches": "sleep mode is refused",
    "role": "vLLM's own",
    "set_host_xfer_buffer_ops": "p2pkv has staging of its own",
    "set_xfer_handshake_metadata": "ranks shake hands themselves",
    "set_xfer_handshake_metadata_pp_aware": "the same",
    "supports_divergent_local_hybrid_hits": "local hits end where all KV groups agree",
    "take_events": "p2pkv stores nothing",
    "unregister_kv_caches": "sleep mode is refused",
}
"""Methods that p2pkv leaves as they are, and why that is right."""

SINCE_33 = {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"}


def test_every_method_of_the_interface_is_ours_or_right_as_it_is(sources: Sources) -> None:
    methods = sources.one("KVConnectorBase_V1", BASE).methods
    ours = set(vars(P2pKvConnector))
    unknown = methods.keys() - ours - DEFAULTS.keys()
    assert not unknown, f"vLLM's connectors have {sorted(unknown)} too: does p2pkv need its own?"
    gone = DEFAULTS.keys() - (set() if sources.since(0, 33) else SINCE_33) - methods.keys()
    assert not gone, f"vLLM's connectors no longer have {sorted(gone)}"
    hma = sources.one("SupportsHMA", BASE).methods
    assert hma.keys() == {"request_finished_all_groups"}


def test_our_methods_take_what_vllm_gives(sources: Sources) -> None:
    """By position or by name: the arguments have vLLM's names and order."""
    methods = sources.one("KVConnectorBase_V1", BASE).methods | sources.one("SupportsHMA", BASE).methods
    compared = 0
    for name, method in methods.items():
        mine = vars(P2pKvConnector).get(name)
        if mine is None:
            continue
        function = mine.__func__ if isinstance(mine, classmethod) else mine
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)).strip())
        (own,) = tree.body
        assert isinstance(own, ast.FunctionDef)
        theirs, here = _names(signature(method)), _names(signature(own))
        assert here[: len(theirs)] == theirs or "**" in signature(own), (
            f"{name}({', '.join(theirs)}) is vLLM's"
        )
        compared += 1
    assert compared > 15


def _names(shown: str) -> list[str]:
    """`block_aligned_local_hit` and the like: what vLLM gives by position may have another name."""
    return [word.rstrip("=") for word in shown.split(", ") if not word.startswith("*")]


CALLS = {
    "v1/core/sched/scheduler.py": (
        "self.connector",
        {
            *("bind_kv_cache_manager", "on_new_request", "get_num_new_matched_tokens"),
            *("get_loaded_kv_cache_group_ids", "update_state_after_alloc", "build_connector_meta"),
            *("update_connector_output", "request_finished", "request_finished_all_groups"),
            *("register_finished_partial_tail", "get_external_cache_hit_sources", "get_kv_connector_stats"),
            *("has_pending_block_frees", "has_pending_push_work", "reset_cache", "shutdown", "take_events"),
        },
    ),
    "v1/worker/kv_connector_model_runner_mixin.py": (
        "kv_connector",
        {
            *("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results"),
            *("get_block_ids_with_load_errors", "get_kv_connector_stats", "get_kv_connector_kv_cache_events"),
            *("build_connector_worker_meta", "clear_connector_metadata"),
        },
    ),
    "v1/worker/gpu/kv_connector.py": (
        "self.kv_connector",
        {
            *("register_kv_caches", "set_host_xfer_buffer_ops", "handle_preemptions"),
            *("bind_connector_metadata", "start_load_kv", "finish_forward", "reset_capture_state"),
            *("wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors"),
            *("get_kv_connector_stats", "get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
            "clear_connector_metadata",
        },
    ),
    "model_executor/layers/attention/kv_transfer_utils.py": (
        "connector",
        {"has_connector_metadata", "wait_for_layer_load", "save_kv_layer"},
    ),
}
"""What vLLM calls, by file: docs/design.md has the order."""


@pytest.mark.parametrize("file", CALLS)
def test_vllm_calls_what_it_did(file: str, sources: Sources) -> None:
    receiver, expected = CALLS[file]
    called = sources.calls_of(file, receiver, "connector")
    assert called == expected, f"vLLM calls {sorted(called - expected)}, and not {sorted(expected - called)}"


def test_the_second_runner_sweeps_behind_the_drafter(sources: Sources) -> None:
    """Layers of a drafter are written after the forward; the sweep must come after that."""
    source = ast.unparse(sources.one("GPUModelRunner", "v1/worker/gpu/model_runner.py").node)
    draft = source.index("self.speculator.propose(", source.index("def sample_tokens"))
    last = "finalize_step" if sources.since(0, 33) else "post_forward"
    assert source.index(f"self.kv_connector.{last}(", draft) > draft


# What p2pkv replaces.

REPLACED = {
    "_process_input_queue": (
        ("EngineCoreProc", "v1/engine/core.py"),
        "self",
        {"has_work", "is_running", "input_queue", "_handle_client_request"},
    ),
    "wait": (
        ("SpinCondition", "distributed/device_communicators/shm_broadcast.py"),
        "self, timeout_ms=",
        {"last_read", "busy_loop_s", "poller"},
    ),
    "update_requests": (
        ("GPUModelRunner", "v1/worker/gpu/model_runner.py"),
        "self, scheduler_output",
        {"new_block_ids_to_zero", "kv_cache_block_copies"},
    ),
}
"""Methods that p2pkv replaces: class and file, arguments, and the attributes by which p2pkv knows them."""


@pytest.mark.parametrize("name", REPLACED)
def test_the_methods_that_p2pkv_replaces_are_those_it_knows(name: str, sources: Sources) -> None:
    place, arguments, known = REPLACED[name]
    method = sources.one(*place).methods[name]
    assert signature(method) == arguments
    assert known <= {each.attr for each in ast.walk(method) if isinstance(each, ast.Attribute)}


def test_an_engine_core_can_be_woken(sources: Sources) -> None:
    kinds = sources.one("EngineCoreRequestType", "v1/engine/__init__.py").node
    assert "WAKEUP" in {ast.unparse(each.targets[0]) for each in kinds.body if isinstance(each, ast.Assign)}


def test_the_second_runner_overwrites_blocks_before_it_calls_the_connector(sources: Sources) -> None:
    """Why p2pkv replaces `update_requests`: if this fails, vLLM no longer needs that."""
    runner = sources.one("GPUModelRunner", "v1/worker/gpu/model_runner.py").methods["execute_model"]
    source = ast.unparse(runner)
    assert source.index("self.update_requests(") < source.index("self.kv_connector.")


# The memory.

FIELDS = {
    "KVCacheSpec": {"block_size", "block_stride_alignment", "dcp_sharded"},
    "AttentionSpec": {
        *("dcp_sharded", "dtype", "head_size", "head_size_v", "kv_quant_mode", "max_tp_shards"),
        *("num_head_slots", "num_kv_heads", "page_size_padded", "state_content_bytes", "tokens_per_state"),
    },
    "FullAttentionSpec": {"attention_chunk_size", "non_causal", "sliding_window"},
    "MLAAttentionSpec": {
        *("alignment", "cache_dtype_str", "cache_role", "head_size_v", "is_index_group_leader"),
        *("model_version", "non_causal_multi_token_decode"),
    },
    "SlidingWindowSpec": {"extra_retained_tokens", "sliding_window"},
    "MambaSpec": {
        *("dtypes", "mamba_cache_mode", "mamba_type", "num_heads", "num_prefill_checkpoint_blocks"),
        *("num_speculative_blocks", "page_size_padded", "prefill_checkpoint_alignment", "shapes"),
        *("tokens_per_state", "tp_replicated"),
    },
    "KVCacheTensor": {"block_stride", "host_resident", "layer_stride", "layers", "offset", "size"},
    "KVCacheGroupSpec": {
        *("enable_kv_transfer", "host_resident", "is_eagle_group", "kv_cache_spec", "layer_names", "role"),
    },
}
"""What vLLM says of a layer's memory."""

FIELDS_SINCE_33 = {
    "KVCacheSpec": {"is_draft"},  # which layers are a drafter's: describe.py reads it
    "MLAAttentionSpec": {"topk_buffer_width"},  # of sparse attention, whose indexer is refused
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_layers_memory_is_described_as_it_was(kind: str, sources: Sources) -> None:
    more = FIELDS_SINCE_33.get(kind, set()) if sources.since(0, 33) else set()
    assert sources.one(kind, SPECS).fields == FIELDS[kind] | more


def test_layouts_are_strides_of_the_same_axes(sources: Sources) -> None:
    layout = sources.one("KVCacheLayout", "v1/kv_cache_layout.py").node
    names = {
        t.id
        for each in layout.body
        if isinstance(each, ast.Assign)
        for t in each.targets
        if isinstance(t, ast.Name)
    }
    assert names == {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}


def test_recurrent_layers_are_of_the_kinds_that_p2pkv_knows(sources: Sources) -> None:
    kinds = {kind.state for kind in sources.layer_kinds.values()} - {""}
    assert kinds == STATE_KINDS.keys()


# The names.


def _imports() -> Iterator[tuple[str, str]]:
    """What p2pkv imports from vLLM: module and name."""
    folder = Path(p2pkv.__file__).parent
    for file in sorted((folder / "connector").glob("*.py")):
        for each in ast.walk(ast.parse(file.read_text())):
            if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("vllm"):
                yield from ((str(each.module), alias.name) for alias in each.names)


def test_every_name_that_p2pkv_imports_is_there(sources: Sources) -> None:
    wanted = set(_imports())
    assert len(wanted) > 20
    missing = {
        f"{module}.{name}"
        for module, name in wanted
        if name not in sources.names(module) and not _is_module(sources, f"{module}.{name}")
    }
    assert not missing


def _is_module(sources: Sources, dotted: str) -> bool:
    path = sources.root.joinpath(*dotted.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()
