"""Every kind of layer that vLLM registers with KV or a state: how p2pkv moves it, or why it refuses it.

A kind that is listed neither here nor in vllm_interface.md fails a test: somebody has to look at it. The
lists are of the classes in vLLM's sources; what is refused is asked of p2pkv itself.
"""

import inspect
import re
from collections.abc import Callable
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

from p2pkv.config import ConfigError
from p2pkv.connector import P2pKvConnector
from p2pkv.connector.describe import refuse_what_cannot_move
from p2pkv.connector.recurrent import STATE_KINDS, Sizes
from support.connector.instances import ATTENTION, BLOCK, kv_cache_config, vllm_config
from support.connector.vllm_sources import LayerKind, Sources

# What vLLM keeps for a layer.

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
