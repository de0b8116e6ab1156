"""The interface that vLLM gives a KV connector, as the sources of the installed vLLM have it, and with
VLLM_SOURCES=folder also those of a vLLM that is only read.

What a version adds or changes fails a test here, so that somebody looks at it before users meet it.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.kv_cache_interface import SparseCacheRole

import p2pkv
from p2pkv.config import ConfigError
from p2pkv.connector import P2pKvConnector
from p2pkv.connector.describe import refuse_what_cannot_move
from p2pkv.connector.recurrent import STATE_KINDS, Sizes
from p2pkv.connector.vllm_patches import PATCHES, Function
from p2pkv.connector.weights import KEEPS_WEIGHTS, SESSION
from support.connector.instances import ATTENTION, BLOCK, kv_cache_config, vllm_config
from support.connector.vllm_sources import LayerKind, Sources, signature, table

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SPECS = "v1/kv_cache_interface.py"


# The engine core and its workers, of which p2pkv replaces some methods.

CHANGES_WEIGHTS = {
    *("reload_weights", "reset_weights", "load_model", "sleep", "wake_up", "discard", "shutdown"),
    *("apply_model", "elastic_ep_execute", "handle_ft_command"),
    *("compile_or_warm_up_model", "init_device", "initialize_from_config", "set_kv_cache_layout"),
}
"""Methods of a worker that may change the weights, and those that nobody calls from outside."""


def test_of_every_method_of_a_worker_it_is_known_whether_it_changes_weights(sources: Sources) -> None:
    worker = sources.one("Worker", "v1/worker/gpu_worker.py").methods
    worker |= sources.one("WorkerBase", "v1/worker/worker_base.py").methods
    properties = {
        name for name, each in worker.items() if "property" in map(ast.unparse, each.decorator_list)
    }
    methods = {name for name in worker.keys() - properties if not name.startswith("_")}
    unknown = methods - KEEPS_WEIGHTS - SESSION - CHANGES_WEIGHTS
    assert not unknown, f"vLLM's workers have {sorted(unknown)} too: does it keep the weights?"
    assert methods >= SESSION | {"reload_weights"}


# The methods.

HOOKS = Path(__file__).with_name("vllm_interface.md")
SINCE_33 = {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"}


def test_the_page_says_of_every_method_of_the_interface_what_p2pkv_does(sources: Sources) -> None:
    methods = sources.one("KVConnectorBase_V1", BASE).methods | sources.one("SupportsHMA", BASE).methods
    public = {name for name in methods if not name.startswith("_")}
    said = table(HOOKS, "hooks of")
    assert public - said.keys() == set(), "vLLM's connectors have these too: does p2pkv need its own?"
    lost = said.keys() - public - (set() if sources.since(0, 33) else SINCE_33)
    assert not lost, f"vLLM's connectors no longer have {sorted(lost)}"
    for name, (answer, how, *_) in said.items():
        ours = name in vars(P2pKvConnector)
        assert answer == "of no concern" if not ours else answer in ("handled", "refused"), name
        assert how, f"{name}: no reason"


def test_the_page_says_of_every_memory_option_what_p2pkv_does(sources: Sources) -> None:
    """Those of vLLM's groups of options for the cache and for offloading, and others that it names."""
    taken = {
        (node.func.value.id, node.args[0].value)
        for node in ast.walk(sources.one("EngineArgs", "engine/arg_utils.py").node)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and isinstance(node.func.value, ast.Name)
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    memory = {option for group, option in taken if group in ("cache_group", "offload_group")}
    said = table(HOOKS, "memory options")
    assert len(memory) > 25 and memory <= said.keys()
    assert said.keys() <= {option for _, option in taken}, "vLLM has no such option"
    for option, (answer, how, *_) in said.items():
        assert answer in ("handled", "refused", "of no concern") and how, option


def test_both_runners_zero_blocks_before_they_bind_a_steps_metadata(sources: Sources) -> None:
    """A load that was ordered by that metadata would be zeroed else."""
    for file, update, later in (
        ("v1/worker/gpu_model_runner.py", "_update_states", "kv_connector_no_forward("),
        ("v1/worker/gpu/model_runner.py", "update_requests", "kv_connector.no_forward("),
    ):
        runner = sources.one("GPUModelRunner", file).methods
        assert "zero_block_ids(scheduler_output.new_block_ids_to_zero)" in ast.unparse(runner[update])
        step = ast.unparse(runner["execute_model"])
        assert step.index(f"self.{update}(") < step.index(f"self.{later}")


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
        theirs, here = _names(signature(method)), _names(signature(own))
        assert here[: len(theirs)] == theirs or "**" in signature(own), (
            f"{name}({', '.join(theirs)}) is vLLM's"
        )
        compared += 1
    assert compared > 15


def _names(shown: str) -> list[str]:
    """`block_aligned_local_hit` and the like: what vLLM gives by position may have another name."""
    return [word.rstrip("=") for word in shown.split(", ") if not word.startswith("*")]


def test_the_second_runner_sweeps_behind_the_drafter(sources: Sources) -> None:
    """Layers of a drafter are written after the forward; the sweep must come after that."""
    source = ast.unparse(sources.one("GPUModelRunner", "v1/worker/gpu/model_runner.py").node)
    draft = source.index("self.speculator.propose(", source.index("def sample_tokens"))
    last = "finalize_step" if sources.since(0, 33) else "post_forward"
    assert source.index(f"self.kv_connector.{last}(", draft) > draft


# What p2pkv replaces.

FUNCTIONS = [
    function for patch in PATCHES for function in (*patch.replaced, *patch.required) if not function.only_if
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.name)
def test_the_functions_that_p2pkv_replaces_are_those_it_knows(function: Function, sources: Sources) -> None:
    """As `Function.misfit` finds at runtime, and here also of a vLLM that is only read."""
    holder, _, name = function.name.partition(".")
    file = function.module.removeprefix("vllm.").replace(".", "/") + ".py"
    method = sources.one(holder, file).methods[name]
    if function.parameters:
        assert tuple(_names(signature(method))) == function.parameters
    used = {each.attr for each in ast.walk(method) if isinstance(each, ast.Attribute)}
    assert function.mentions <= used | {each.id for each in ast.walk(method) if isinstance(each, ast.Name)}


def test_the_second_runner_overwrites_blocks_before_it_calls_the_connector(sources: Sources) -> None:
    """Why p2pkv replaces `update_requests`: if this fails, vLLM no longer needs that."""
    methods = sources.one("GPUModelRunner", "v1/worker/gpu/model_runner.py").methods
    update = {each.attr for each in ast.walk(methods["update_requests"]) if isinstance(each, ast.Attribute)}
    assert {"new_block_ids_to_zero", "kv_cache_block_copies"} <= update
    source = ast.unparse(methods["execute_model"])
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
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "RSWASpec": {"rswa_window"},
    "SinkFullAttentionSpec": {"sink_len"},
    "SlidingWindowSpec": {"extra_retained_tokens", "sliding_window"},
    "MambaSpec": {
        *("dtypes", "mamba_cache_mode", "mamba_type", "num_heads", "num_prefill_checkpoint_blocks"),
        *("num_speculative_blocks", "page_size_padded", "prefill_checkpoint_alignment", "shapes"),
        *("tokens_per_state", "tp_replicated"),
    },
    "KVCacheTensor": {"block_stride", "host_resident", "layer_stride", "layers", "offset", "size"},
    "KVCacheGroupSpec": {
        *("enable_kv_transfer", "host_resident", "is_eagle_group", "kv_cache_spec", "layer_names", "role")
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


# The names.


def _imports() -> Iterator[tuple[str, str]]:
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


def test_vllm_s_parallel_configuration_has_what_p2pkv_reads(sources: Sources) -> None:
    config = sources.one("ParallelConfig", "config/parallel.py")
    trees = [ast.parse(file.read_text()) for file in Path(p2pkv.__file__).parent.glob("connector/*.py")]
    read = {
        each.attr
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute)
        and ast.unparse(each.value).split(".")[-1] in ("parallel", "parallel_config")
    }
    assert "nnodes_within_dp" in read
    assert read - config.fields - config.methods.keys() == set()


# Every kind of layer that vLLM registers with KV or a state: how p2pkv moves it, or why it refuses it. What
# is refused is asked of p2pkv itself.

MOVED_SPECS = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "MambaSpec",
    "ChunkedLocalAttentionSpec",
    "RSWASpec",
    "CircularBufferSpec",
}
REFUSED_SPECS = {
    "AttentionSpec": "a base of others",
    "CrossAttentionSpec": "of encoder-decoder models, which vLLM refuses with any KV connector",
    "EncoderOnlyAttentionSpec": "keeps nothing between steps",
    "HiSparseHotSpec": "a copy on the device of KV that lies in host memory",
    "HiSparseResidentSpec": "KV that lies in host memory",
    "HiddenStateCacheSpec": "hidden states for another program to read, not KV",
    "SinkFullAttentionSpec": "vLLM 0.32 cannot serve it: its SinkFullAttentionManager fails to start",
}
HOLDS_OTHERS = {"UniformTypeKVCacheSpecs"}
"""Not a layer's: each of its layers has a spec of its own."""


PAGE = Path(__file__).with_name("vllm_interface.md").read_text().split("## Kinds of layers")[1]


def listed(since_33: bool) -> dict[str, str]:
    """How p2pkv treats each layer: the page's first column. `since_33`: also what is marked with (0.33)."""
    said: dict[str, str] = {}
    for line in (line for line in PAGE.splitlines() if line.startswith("| ")):
        how, classes, *_ = line.strip("| ").split(" | ")
        for name, mark in re.findall(r"`(\w+)`( \(0\.33\))?", classes):
            assert name not in said, f"the page lists {name} twice"
            if since_33 or not mark:
                said[name] = how
    return said


REFUSED_FOR = {
    "DeepseekV32MLAAttention": "DeepseekV32ROCmIndexerCache",
    "DeepseekV41ROCMAiterMLAAttention": "DeepseekV32ROCmIndexerCache",
    "Step5SparseSummaryCacheLayer": "Step5CSATailRing",
}
"""Of layers that could be moved: the layer of the same model for which the model is refused."""

WHERE_IT_DEPENDS = {
    "RSWAAttention",
    "WhisperCausalAttentionWithBlockPooling",
    "DeepseekV32ROCmIndexerCache",
    "DeepseekV4RocmMxfp4IndexerCache",
    "Step5CSATailRing",
}
"""Their spec alone does not decide. The first two are refused where they keep what they are for; as plain
attention, which they also may be, they are moved. The next two are of ROCm. vLLM refuses the last one."""

HOOKED_FUNCTIONS = {"unified_attention_with_output", "unified_mla_attention_with_output", "dummy_attention"}
HOOKED_SINCE_33 = {"step5_dsa_attention_with_output", "step5_swa_attention_with_output"}


def _wrong(name: str, said: dict[str, str], found: LayerKind) -> str:
    how, can_move = said[name], any(each.partition(",")[0] in MOVED_SPECS for each in found.specs)
    refused_for = REFUSED_FOR.get(name, "")
    match how:
        case "hook" | "sweep" if not can_move:
            return f"it keeps {sorted(found.specs)}, of which p2pkv moves none"
        case "hook" | "sweep" if found.hooked is not (how == "hook"):
            return "vLLM calls the hook for it" if found.hooked else "vLLM does not call the hook for it"
        case "sweep" if found.state and (why := _unread(found)):
            return f"p2pkv does not know what it keeps: {why}"
        case "refused" if can_move and not refused_for and name not in WHERE_IT_DEPENDS:
            return f"it keeps {sorted(found.specs)}, which p2pkv moves"
        case "refused" if refused_for and said[refused_for] != "refused":
            return f"it is refused for {refused_for}, which is not"
    return ""


def _unread(layer: LayerKind) -> str:
    """Why p2pkv cannot read what a recurrent layer with these attributes keeps; "" if it can."""
    sizes: dict[str, Any] = dict.fromkeys(layer.sizes, 4)
    sizes |= {"norm": SimpleNamespace(n_groups=4)} if "norm" in sizes else {}
    sizes |= {"intermediate_size": 16} if "intermediate_size" in sizes else {}  # as many as heads x size
    if layer.state not in STATE_KINDS:
        return f"its state is of kind {layer.state}"
    try:
        STATE_KINDS[layer.state](Sizes(layer.name, SimpleNamespace(**sizes)))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_page_says_of_every_layer_that_vllm_registers_what_its_sources_say(sources: Sources) -> None:
    found, said = sources.layer_kinds, listed(sources.since(0, 33))
    assert found.keys() == said.keys(), (
        f"vLLM registers {sorted(found.keys() - said.keys())}, which vllm_interface.md lacks, and no longer "
        f"{sorted(said.keys() - found.keys())}: look how p2pkv treats each, and say so there"
    )
    wrong = {name: sentence for name in said if (sentence := _wrong(name, said, found[name]))}
    assert not wrong, "\n".join(f"{name}: {sentence}" for name, sentence in wrong.items())


def test_the_list_names_every_description_that_vllm_has(sources: Sources) -> None:
    listed = MOVED_SPECS | REFUSED_SPECS.keys() | HOLDS_OTHERS
    assert sources.spec_kinds == listed, (
        f"vLLM has other kinds of KVCacheSpec: {sorted(sources.spec_kinds ^ listed)}"
    )


def test_the_hook_comes_after_these_functions_only(sources: Sources) -> None:
    more = HOOKED_SINCE_33 if sources.since(0, 33) else set()
    assert sources.hooked_functions == HOOKED_FUNCTIONS | more


# What p2pkv itself says.

MORE: dict[str, dict[str, Any]] = {
    "FullAttentionSpec": {"sliding_window": 64},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
    "SlidingWindowSpec": {"sliding_window": 64},
    "SlidingWindowMLASpec": {"sliding_window": 64, "num_kv_heads": 1},
    "MLAAttentionSpec": {"num_kv_heads": 1},
    "RSWASpec": {"rswa_window": 64},
    "SinkFullAttentionSpec": {"sink_len": BLOCK},
}


@pytest.mark.parametrize("name", sorted(MOVED_SPECS - {"MambaSpec"}))  # test_states.py has the states
def test_p2pkv_moves_what_the_list_says_it_moves(name: str) -> None:
    spec = getattr(interface, name)(**ATTENTION | MORE.get(name, {}))
    refuse_what_cannot_move(vllm_config("P"), kv_cache_config(spec=spec))


# HiSparse describes another layer's buffer, and vLLM alone can make such a description.
@pytest.mark.parametrize("name", sorted(name for name in REFUSED_SPECS if not name.startswith("HiSparse")))
def test_p2pkv_refuses_what_the_list_says_it_refuses(name: str) -> None:
    spec = getattr(interface, name)(**ATTENTION | MORE.get(name, {}))
    with pytest.raises(ConfigError, match=name) as error:
        P2pKvConnector(vllm_config("P"), KVConnectorRole.WORKER, kv_cache_config(spec=spec))
    assert "model.layers.0" in str(error.value)


def test_vllm_cannot_serve_static_sinks() -> None:
    """Why p2pkv refuses them: if this fails, they can be moved, as their blocks are in no request's table.
    vLLM calls the managers of all kinds with the same arguments."""
    full, sinks = (
        inspect.signature(kind).parameters
        for kind in (managers.SingleTypeKVCacheManager, managers.SinkFullAttentionManager)
    )
    assert {"needs_kv_cache_zeroing"} <= full.keys() - sinks.keys()


LATENT = ATTENTION | {"num_kv_heads": 1, "dtype": torch.uint8}
UNKNOWN: dict[str, Callable[[], Any]] = {
    "keys of 100 bytes": lambda: interface.MLAAttentionSpec(
        **LATENT | {"head_size": 100}, cache_role=SparseCacheRole.INDEXER
    ),
    "rows of 100 bytes": lambda: interface.MLAAttentionSpec(
        **LATENT, model_version="deepseek_v4", state_content_bytes=100
    ),
    "keeps 2 rows for each token": lambda: interface.FullAttentionSpec(
        **ATTENTION, tokens_per_state=Fraction(1, 2)
    ),
    f"a row for each 5 tokens, and blocks of {BLOCK}": lambda: interface.FullAttentionSpec(
        **ATTENTION, tokens_per_state=5
    ),
}


@pytest.mark.parametrize("sentence", UNKNOWN)
def test_p2pkv_refuses_rows_of_which_it_does_not_know_how_they_lie(sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        refuse_what_cannot_move(vllm_config("P"), kv_cache_config(spec=UNKNOWN[sentence]()))


def test_p2pkv_refuses_keys_that_are_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = interface.MLAAttentionSpec(**LATENT | {"head_size": 132}, cache_role=SparseCacheRole.INDEXER)
    refuse_what_cannot_move(vllm_config("P"), kv_cache_config(spec=spec))
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    with pytest.raises(ConfigError, match="keys that ROCm's kernels shuffle"):
        refuse_what_cannot_move(vllm_config("P"), kv_cache_config(spec=spec))
