"""Every kind of layer that vLLM registers with KV or a state: how p2pkv moves it, or why it refuses it.

A kind that is not listed here fails a test: somebody has to look at it. The lists are of the classes in
vLLM's sources; what is refused is asked of p2pkv itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).with_name("vllm_interface.md").read_text()


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


class How(StrEnum):
    HOOK = "hook"  # save_kv_layer is called for it, and its KV is handed over at once
    SWEEP = "sweep"  # handed over at the end of the step
    REFUSED = "refused"
    NOTHING = "nothing"  # keeps no KV, or is a base that no model uses by itself


class Kind(NamedTuple):
    how: How
    why: str = ""
    beside: str = ""
    """Of a layer that could be moved: the layer of the same model for which the model is refused."""


PRIVATE = "has an attention of its own"
OWN_CACHE = "a cache beside an attention, without a forward of its own"
RECURRENT = "recurrent layers have no hook"
SHUFFLED = "ROCm's kernels shuffle an indexer's keys"
SEVERAL = "keeps several rows for each token"
RING = "a ring of the last tokens, written in place"
STEP5 = "vLLM 0.33 takes no other connectors for Step5 than NIXL's and Mooncake's"
BASE = "a base of others"

KINDS: dict[str, Kind] = {
    name: kind
    for kind, names in {
        Kind(How.HOOK): (
            "Attention MLAAttention PrefillPrefixLMAttention Dots3NotePaddedMLAAttention "
            "ChunkedLocalAttention RSWAAttention"
        ),
        Kind(How.SWEEP, PRIVATE): (
            "InklingAttention InklingConvState MultiHeadLatentAttention DeepseekV32Attention "
            "DeepseekV4Attention DeepseekV4CPUAttention DeepseekV4FlashInferMLAAttention "
            "DeepseekV4FlashInferSM120Attention DeepseekV4FlashMLAAttention DeepseekV4MegaAttnAttention "
            "DeepseekV4ROCMAiterMLAAttention DeepseekV4XPUAttention MiniMaxM3SparseAttention "
            "Qwen4ExpQSAAttention"
        ),
        Kind(How.SWEEP, RECURRENT): (
            "BailingMoELinearAttention BailingMoeV3KimiDeltaAttention Glm5NextLinearAttention "
            "KimiGatedDeltaNetAttention KimiK3DeltaAttention MambaMixer MambaMixer2 "
            "MiniMaxText01LinearAttention OlmoHybridGatedDeltaNetAttention QwenGatedDeltaNetAttention "
            "ShortConv Qwen4ExpPLELayer"
        ),
        Kind(How.REFUSED, REFUSED_SPECS["HiddenStateCacheSpec"]): "CacheOnlyAttentionLayer",
        Kind(How.SWEEP, OWN_CACHE): (
            "CompressorStateCache DeepseekV32IndexerCache DeepseekV4CPUIndexerCache "
            "DeepseekV4IndexerCache DeepseekV4SWACache Glm5NextIndexerCache MiniMaxM3IndexerCache "
            "QSACompressedKeyCache"
        ),
        Kind(How.REFUSED, REFUSED_SPECS["CrossAttentionSpec"]): "CrossAttention",
        Kind(How.REFUSED, PRIVATE, beside="DeepseekV32ROCmIndexerCache"): (
            "DeepseekV32MLAAttention DeepseekV41ROCMAiterMLAAttention"
        ),
        Kind(How.REFUSED, SHUFFLED): "DeepseekV32ROCmIndexerCache",
        Kind(How.SWEEP, RING): "Glm5NextTailCache QSAKeyStateCache",
        Kind(How.REFUSED, REFUSED_SPECS["SinkFullAttentionSpec"]): "StaticSinkAttention",
        Kind(How.REFUSED, SEVERAL): "WhisperCausalAttentionWithBlockPooling",
        Kind(How.NOTHING, REFUSED_SPECS["EncoderOnlyAttentionSpec"]): "EncoderOnlyAttention",
        Kind(How.NOTHING, BASE): "GatedDeltaNetAttention LinearAttention MambaBase _QSAStateCache",
    }.items()
    for name in names.split()
}

SINCE_33: dict[str, Kind] = {
    "DeepseekV4RocmMxfp4IndexerCache": Kind(How.REFUSED, SHUFFLED),
    "Step5CSATailRing": Kind(How.REFUSED, STEP5),
    "Step5SparseSummaryCacheLayer": Kind(How.REFUSED, OWN_CACHE, beside="Step5CSATailRing"),
}
"""What vLLM 0.33 has besides."""

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


def check_kinds(found: dict[str, LayerKind], listed: dict[str, Kind]) -> None:
    """The list names every layer kind, and says of each what its sources say."""
    assert found.keys() == listed.keys(), (
        f"vLLM registers {sorted(found.keys() - listed.keys())}, which the list of this file lacks, and no "
        f"longer {sorted(listed.keys() - found.keys())}: look how p2pkv treats each, and say so here and in "
        "vllm_interface.md"
    )
    wrong = {
        name: sentence for name, kind in listed.items() if (sentence := _wrong(kind, found[name], listed))
    }
    assert not wrong, "\n".join(f"{name}: {sentence}" for name, sentence in wrong.items())


def _wrong(kind: Kind, found: LayerKind, listed: dict[str, Kind]) -> str:
    can_move = any(each.partition(",")[0] in MOVED_SPECS for each in found.specs)
    match kind.how:
        case How.HOOK | How.SWEEP if not can_move:
            return f"it keeps {sorted(found.specs)}, of which p2pkv moves none"
        case How.HOOK | How.SWEEP if found.hooked is not (kind.how is How.HOOK):
            return "vLLM calls the hook for it" if found.hooked else "vLLM does not call the hook for it"
        case How.SWEEP if found.state and (why := _unread(found)):
            return f"p2pkv does not know what it keeps: {why}"
        case How.REFUSED if can_move and not kind.beside and found.name not in WHERE_IT_DEPENDS:
            return f"it keeps {sorted(found.specs)}, which p2pkv moves"
        case How.REFUSED if kind.beside and listed[kind.beside].how is not How.REFUSED:
            return f"it is refused for {kind.beside}, which is not"
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


def check_specs(found: set[str]) -> None:
    listed = MOVED_SPECS | REFUSED_SPECS.keys() | HOLDS_OTHERS
    assert found == listed, f"vLLM has other kinds of KVCacheSpec: {sorted(found ^ listed)}"


def test_the_list_names_every_layer_that_vllm_registers(sources: Sources) -> None:
    check_kinds(sources.layer_kinds, KINDS | SINCE_33 if sources.since(0, 33) else KINDS)


def test_the_list_names_every_description_that_vllm_has(sources: Sources) -> None:
    check_specs(sources.spec_kinds)


def test_a_kind_that_nobody_has_looked_at_fails_the_list(sources: Sources, tmp_path: Path) -> None:
    """Also one whose class derives from another new one, and one that vLLM treats in another way than we."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "new.py").write_text(
        "class NewBase(AttentionLayerBase):\n    pass\n\n\nclass New(nn.Module, NewBase):\n"
        "    def forward(self):\n        unified_attention_with_output()\n"
        "    def get_kv_cache_spec(self, vllm_config):\n        return FullAttentionSpec(block_size=1)\n"
    )
    (package / "specs.py").write_text("class FullAttentionSpec(KVCacheSpec):\n    pass\n")
    (package / "hooks.py").write_text(
        "@maybe_transfer_kv_layer\ndef unified_attention_with_output():\n    pass\n"
    )
    (package / "base.py").write_text("class AttentionLayerBase(ABC):\n    pass\n")
    found = Sources(package).layer_kinds
    assert found["New"] == LayerKind("New", frozenset({"FullAttentionSpec"}), hooked=True)
    nothing = {"NewBase": Kind(How.NOTHING)}
    with pytest.raises(AssertionError, match=r"vLLM registers \['New'\], which the list"):
        check_kinds(found, nothing)
    for how, sentence in [(How.SWEEP, "vLLM calls the hook for it"), (How.REFUSED, "which p2pkv moves")]:
        with pytest.raises(AssertionError, match=sentence):
            check_kinds(found, nothing | {"New": Kind(how)})
    check_kinds(found, nothing | {"New": Kind(How.HOOK)})


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


@pytest.mark.parametrize("name", sorted(REFUSED_SPECS))
def test_p2pkv_refuses_what_the_list_says_it_refuses(name: str) -> None:
    if name.startswith("HiSparse"):
        pytest.skip("vLLM alone can make one: it describes another layer's buffer")
    spec = getattr(interface, name)(**ATTENTION | MORE.get(name, {}))
    with pytest.raises(ConfigError, match=name) as error:
        P2pKvConnector(vllm_config("P"), KVConnectorRole.WORKER, kv_cache_config(spec=spec))
    assert "model.layers.0" in str(error.value)


def test_vllm_cannot_serve_static_sinks() -> None:
    """Why p2pkv refuses them: if this fails, they can be moved, as their blocks are in no request's table.

    vLLM calls the managers of all kinds with the same arguments.
    """
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


# The page.


def test_the_page_lists_the_same() -> None:
    section = PAGE.split("## Kinds of layers")[1].split("\n#")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    said: dict[str, str] = {}
    for how, classes, *_ in rows:
        for name in re.findall(r"`(\w+)`", classes):
            assert name not in said, f"the page lists {name} twice"
            said[name] = how.strip("| *")
    assert said == {name: str(kind.how) for name, kind in (KINDS | SINCE_33).items()}
