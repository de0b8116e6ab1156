"""What an instance says of itself to its peers, and the configurations that it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_support import BLOCK, LAYERS, P_ADDRESS, kv_cache_config, model_folder, vllm_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from p2pkv.config import ConfigError
from p2pkv.connector import P2pKvConnector, P2pNcclConnector
from p2pkv.connector.describe import (
    Layers,
    cache_of,
    codec_of,
    computes_last_token,
    hello_of,
    layer_order,
    options_of,
    refuse_what_cannot_move,
    refuse_what_cannot_pair,
)
from p2pkv.connector.identity import fingerprint
from p2pkv.protocol.messages import Hello

pytestmark = pytest.mark.vllm


def tensors(names: list[str], heads: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4, heads, BLOCK, 32, dtype=dtype) for name in names}


def hello(config: VllmConfig, caches: dict[str, torch.Tensor], rank: int = 0) -> Hello:
    kv = kv_cache_config(layers=list(caches))
    layers = Layers(caches, kv)
    cache, said = cache_of(config, kv, layers, rank)
    return hello_of(config, options_of(config), cache, said, rank, "host")


def with_parallel(**sizes: Any) -> VllmConfig:
    config = vllm_config("P")
    for name, size in sizes.items():
        setattr(config.parallel_config, name, size)
    return config


# Hello


def test_hello_says_who_this_rank_is_and_what_its_cache_looks_like() -> None:
    said = hello(vllm_config("P"), tensors(list(LAYERS)))
    assert (said.role, said.rank, said.link) == ("P", 0, "host")
    assert said.addresses == (said.address,) == (str(P_ADDRESS),)
    (group,) = said.cache.groups
    assert (group.layers, group.heads, said.cache.tp) == ((2,), 2, 1)
    assert (group.row_bytes, group.unit_tokens, group.once) == (32 * 4, 1, False)
    assert (group.dtype, group.codec) == ("float32", "dense")
    assert (said.digest, said.verify) == ("xxh3-64", False)
    assert hello(vllm_config("P"), tensors(list(LAYERS))).incarnation != said.incarnation


def test_a_rank_of_several_says_its_own_address_and_all_of_them() -> None:
    config = with_parallel(tensor_parallel_size=2, pipeline_parallel_size=2)
    said = hello(config, tensors([next(iter(LAYERS))], heads=1), rank=3)
    assert said.addresses == tuple(str(P_ADDRESS.shifted(rank)) for rank in range(4))
    assert said.address == said.addresses[3]
    assert (said.cache.groups[0].layers, said.cache.tp) == ((1, 1), 2)


def test_a_model_that_spreads_heads_or_layers_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 2 KV heads, but 1 of 2 were expected"):
        hello(with_parallel(tensor_parallel_size=2), tensors(list(LAYERS)))
    with pytest.raises(ConfigError, match="stage 1 of 2 has 2 KV layers, but 1 were expected"):
        hello(with_parallel(pipeline_parallel_size=2), tensors(list(LAYERS)), rank=1)


@pytest.mark.parametrize(
    ("tensor", "cache", "said"),
    [
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.uint8, "fp8", "uint8 (fp8_e4m3)"),
        (torch.uint8, "fp8_e4m3", "uint8 (fp8_e4m3)"),
        (torch.uint8, "fp8_e5m2", "uint8 (fp8_e5m2)"),
        (torch.float8_e4m3fn, "fp8_inc", "float8_e4m3fn (fp8_inc)"),
    ],
)
def test_bytes_of_different_meaning_are_different_types(tensor: torch.dtype, cache: str, said: str) -> None:
    config = vllm_config("P")
    config.cache_config.cache_dtype = cache
    assert hello(config, tensors(list(LAYERS), dtype=tensor)).cache.groups[0].dtype == said


def test_the_names_of_layers_tell_models_apart_but_not_pipeline_stages() -> None:
    def digest(*names: str) -> str:
        return hello(vllm_config("P"), tensors(list(names))).cache.groups[0].layer_names

    whole = digest("model.layers.0.attn", "model.layers.1.attn")
    assert digest("model.layers.1.attn") == whole
    assert digest("model.layers.0.attn", "draft.layers.0.attn") != whole


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    """Three vLLM groups, of which two see a window; each has a block table, and all lie in one memory."""
    names = [f"model.layers.{number}.attn" for number in range(6)]
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=20
    )
    groups = [
        KVCacheGroupSpec([names[2], names[5]], FULL),
        KVCacheGroupSpec([names[0], names[3]], window),
        KVCacheGroupSpec([names[1], names[4]], window),
    ]
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    one, other = torch.zeros(4, 2, BLOCK, 32), torch.zeros(4, 2, BLOCK, 32)
    memory = {name: one if number < 3 else other for number, name in enumerate(names)}
    layers = Layers(memory, config)
    assert layers.names == names
    cache, said = cache_of(vllm_config("P"), config, layers, 0)
    assert [(group.layers, group.window, group.block) for group in said.groups] == [
        ((4,), 20, BLOCK),
        ((2,), 0, 1),
    ]
    for role, cached, block in (("P", False, BLOCK), ("D", True, BLOCK), ("D", False, 1)):
        other = vllm_config(role)
        other.cache_config.enable_prefix_caching = cached
        assert cache_of(other, config, layers, 0)[1].groups[0].block == block
    assert [group.tables for group in cache.groups] == [(1, 2, 1, 2), (0, 0)]
    assert [list(numbers) for numbers in cache.layers] == [[0, 1, 3, 4], [2, 5]]
    assert not computes_last_token(config) and computes_last_token(kv_cache_config())
    with pytest.raises(ConfigError, match=r"KV layers differ.*serve it without --pipeline-parallel-size"):
        cache_of(with_parallel(pipeline_parallel_size=2), config, layers, 0)


# Layers


def test_layers_come_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 9, 1, 0, 2)]
    assert layer_order(names) == [f"model.layers.{number}.attn" for number in (0, 1, 2, 9, 10)]


def test_layers_that_share_their_kv_are_moved_once() -> None:
    own = tensors(["l.0", "l.1", "l.10"])
    layers = Layers({**own, "l.2": own["l.1"], "l.3": own["l.1"].view(4, 2, BLOCK, 32)}, kv_cache_config())
    assert layers.places == {"l.0": 0, "l.1": 1, "l.10": 2}
    assert [tensor.data_ptr() for tensor in layers.tensors] == [each.data_ptr() for each in own.values()]


def test_the_codec_is_that_of_the_attention_layers() -> None:
    config, names = vllm_config("P"), list(LAYERS)
    layers = config.compilation_config.static_forward_context
    assert codec_of(config, names) == "dense"
    layers.update({name: SimpleNamespace() for name in names})
    assert codec_of(config, names) == "dense"
    layers.update({name: SimpleNamespace(isa="vec16") for name in names})
    assert codec_of(config, names) != "dense"
    layers[names[1]] = SimpleNamespace(isa="amx")
    with pytest.raises(ConfigError, match=r"\['amx', 'vec16'\]\); p2pkv needs one"):
        codec_of(config, names)


# Weights


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(), tmp_path / "a" / "copy"))


def served(folder: Path, **load: Any) -> VllmConfig:
    config = vllm_config("P")
    config.model_config.model = str(folder)
    for name, value in load.items():
        setattr(config.load_config, name, value)
    return config


def test_copies_of_a_model_have_the_same_fingerprint(copy: Path) -> None:
    assert fingerprint(served(copy)) == fingerprint(vllm_config("D"))
    assert fingerprint(served(copy, load_format="safetensors")) == fingerprint(vllm_config("D"))


def test_other_weights_have_another_one(copy: Path) -> None:
    before = fingerprint(served(copy))
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = fingerprint(served(copy))
    weights.write_bytes(data + b"\0")
    assert len({before, changed, fingerprint(served(copy))}) == 3


def test_weights_that_differ_in_one_tensor_have_another_one(copy: Path) -> None:
    """As after a LoRA was merged into some of them: in whichever tensor, and in files of any kind."""
    (weights,) = copy.glob("*.safetensors")
    data = weights.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:header])
    tensors.pop("__metadata__", None)
    seen = {fingerprint(served(copy))}
    for tensor in tensors.values():
        start, stop = (header + offset for offset in tensor["data_offsets"])
        changed = bytes(byte ^ 1 for byte in data[start:stop])
        weights.write_bytes(data[:start] + changed + data[stop:])
        seen.add(fingerprint(served(copy)))
    assert len(seen) == 1 + len(tensors) > 10


def test_another_configuration_of_the_same_weights_has_another_one(copy: Path) -> None:
    """It decides what K is: another base of RoPE gives another K, from the same weights."""
    seen = [fingerprint(served(copy))]
    overridden = served(copy)
    overridden.model_config.hf_overrides = {"rope_theta": 5.0}
    seen.append(fingerprint(overridden))
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written | {"transformers_version": "0.0"}, indent=1))
    assert fingerprint(served(copy)) == seen[0]
    (copy / "config.json").write_text(json.dumps(written | {"rope_theta": 5.0}))
    seen.append(fingerprint(served(copy)))
    (copy / "config.json").unlink()
    seen.append(fingerprint(served(copy)))
    assert len(set(seen)) == 4


def test_the_longest_context_counts_where_it_decides_what_k_is(copy: Path) -> None:
    def longest(tokens: int, **rope: Any) -> str:
        config = served(copy)
        config.model_config.max_model_len = tokens
        text = config.model_config.hf_text_config
        text.rope_parameters = dict(text.rope_parameters) | rope
        return fingerprint(config)

    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert longest(2048) == longest(8192)
    assert longest(2048, **longrope) == longest(4096, **longrope) != longest(4097, **longrope)


def test_whether_llama_4_tunes_its_attentions_temperature_counts(copy: Path) -> None:
    """Beyond 32,768 tokens it does, unless the generation's configuration says otherwise."""

    def tuned(tokens: int, **generation: Any) -> str:
        config = served(copy)
        config.model_config.max_model_len = tokens
        config.model_config.hf_text_config.model_type = "llama4_text"
        config.model_config.override_generation_config = generation
        return fingerprint(config)

    assert tuned(8192) == tuned(32768) != tuned(32769)
    assert tuned(8192, attn_temperature_tuning=True) == tuned(32769)
    assert tuned(65536, attn_temperature_tuning=False) == tuned(8192)


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_large_file_of_unknown_content_is_looked_at_throughout(tmp_path: Path, suffix: str) -> None:
    size, seen = 4 << 20, set()
    weights = tmp_path / f"model{suffix}"
    for part in range(8):
        data = bytearray(size)
        data[part * size // 8 : (part + 1) * size // 8] = b"x" * (size // 8)
        weights.write_bytes(data)
        seen.add(fingerprint(served(tmp_path)))
    assert len(seen) == 8


def test_another_element_type_has_another_one(copy: Path) -> None:
    config = served(copy)
    config.model_config.dtype = torch.bfloat16
    assert fingerprint(config) != fingerprint(served(copy))


def test_random_weights_are_told_by_seed_and_configuration(copy: Path) -> None:
    def dummy(seed: int, **settings: Any) -> str:
        config = served(copy, load_format="dummy")
        config.model_config.seed = seed
        config.model_config.hf_config.update(settings)
        return fingerprint(config)

    one = dummy(1)
    assert dummy(1, _name_or_path="/elsewhere", transformers_version="0.0") == one
    assert len({one, dummy(2), dummy(1, rope_theta=5.0), fingerprint(served(copy))}) == 4


def test_without_weight_files_the_configuration_stands_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="p2pkv"):
        assert fingerprint(served(tmp_path)) == fingerprint(served(tmp_path))
    assert "no weight files" in caplog.text
    assert fingerprint(served(tmp_path)) != fingerprint(vllm_config("P"))


def test_a_model_that_is_not_on_this_machine_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(fingerprint(served(Path("nobody/nothing")))) == 24


# What is refused


FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
REFUSED = [
    replace(FULL, tokens_per_state=4),
    ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, attention_chunk_size=64
    ),
]


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: type(spec).__name__)
def test_kv_that_cannot_move_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(ConfigError, match=type(spec).__name__) as error:
        P2pKvConnector(vllm_config("P"), KVConnectorRole.SCHEDULER, kv_cache_config(spec=spec))
    assert "model.layers.0" in str(error.value)


def test_attention_of_every_kind_and_states_move() -> None:
    mla = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=64
    )
    state = MambaSpec(block_size=BLOCK, shapes=((2, 2), (2, 2, 2)), dtypes=(torch.float32,) * 2)
    for spec in (FULL, mla, replace(FULL, sliding_window=64), window, state):
        refuse_what_cannot_move(vllm_config("P"), kv_cache_config(spec=spec))


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size is 2"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size is 2"),
        ({"prefill_context_parallel_size": 4}, "--prefill-context-parallel-size is 4"),
        ({"nnodes": 2}, "--nnodes is 2: .* all ranks at one host"),
        ({"distributed_executor_backend": "external_launcher", "world_size": 2}, "choose mp or ray"),
    ],
)
def test_ranks_that_would_be_addressed_wrongly_are_refused(sizes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        P2pKvConnector(with_parallel(**sizes), KVConnectorRole.WORKER, kv_cache_config())


def test_a_data_parallel_rank_of_a_dense_model_is_refused() -> None:
    """vLLM tells it that data_parallel_size is 1."""
    config = with_parallel(data_parallel_size=2, data_parallel_index=1)
    config.parallel_config.reconfigure_for_independent_dp_rank()
    with pytest.raises(ConfigError, match=r"data-parallel rank 1.*each with its own kv_port"):
        refuse_what_cannot_pair(config)


def test_sleep_mode_is_refused_where_vllm_does_not_tell_its_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = vllm_config("P")
    refuse_what_cannot_pair(config)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(ConfigError, match="--enable-sleep-mode is set"):
        refuse_what_cannot_pair(config)
    assert not P2pKvConnector.supports_sleep_mode(config.kv_transfer_config)
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    refuse_what_cannot_pair(config)
    assert P2pKvConnector.supports_sleep_mode(config.kv_transfer_config)


@pytest.mark.parametrize("kind", [{"cache_role": SparseCacheRole.INDEXER}, {"model_version": "deepseek_v4"}])
@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_with_their_scales_apart_are_refused(kind: dict[str, Any], mixed: bool) -> None:
    """Also where vLLM keeps them in one group with the layers that could be moved."""
    plain = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    apart = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8, **kind)
    spec = (
        UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": plain, "b": apart}) if mixed else apart
    )
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["b"], spec)])
    with pytest.raises(ConfigError, match="layer b keeps the values of a block apart from their scales"):
        refuse_what_cannot_move(vllm_config("P"), config)
    config.kv_cache_groups[0].kv_cache_spec = plain
    refuse_what_cannot_move(vllm_config("P"), config)


def test_a_group_of_which_this_stage_has_no_layer_is_passed_over() -> None:
    """vLLM gives every pipeline stage all groups, some of them without names."""
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec([], FULL)],
    )
    refuse_what_cannot_move(vllm_config("P"), config)


def test_tensor_and_pipeline_parallelism_are_not_refused() -> None:
    refuse_what_cannot_pair(with_parallel(tensor_parallel_size=4, pipeline_parallel_size=2, world_size=8))


def test_kv_both_is_refused_with_what_to_do() -> None:
    config = vllm_config("P")
    config.kv_transfer_config.kv_role = "kv_both"
    with pytest.raises(ConfigError, match="start one instance with kv_producer and another"):
        P2pKvConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())


# What vLLM asks of the class


def test_vllm_finds_both_names_and_takes_them_for_what_they_are() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, kind in (("P2pKvConnector", P2pKvConnector), ("P2pNcclConnector", P2pNcclConnector)):
        config = vllm_config("D")
        config.kv_transfer_config.kv_connector = name
        assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is kind
        assert supports_hma(kind)
        assert kind.supports_sleep_mode(config.kv_transfer_config) is False
        assert kind.get_required_kvcache_layout(config) is None


def test_the_former_name_pings_in_the_clear_though_there_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_SECRET", "a secret of the tests")
    for name, discovery in (("P2pKvConnector", "curve"), ("P2pNcclConnector", "plain")):
        config = vllm_config("P", proxy_ip="127.0.0.1", proxy_port=30001, http_port=8100)
        config.kv_transfer_config.kv_connector = name
        assert options_of(config).discovery == discovery


def test_off_loopback_without_a_secret_no_instance_starts() -> None:
    with pytest.raises(ConfigError, match="there is no secret"):
        P2pKvConnector(vllm_config("P", host="10.0.0.1"), KVConnectorRole.WORKER, kv_cache_config())


def test_only_p_must_deliver() -> None:
    for role, must in (("P", True), ("D", False)):
        connector = P2pKvConnector(vllm_config(role), KVConnectorRole.SCHEDULER, kv_cache_config())
        assert connector.requires_kv_delivery is must
        assert not connector.has_pending_push_work()


def test_staging_is_sized_by_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(vllm_config("P")).staging_bytes == 64 << 20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: 80 << 30)
    assert options_of(vllm_config("P")).staging_bytes == 640 << 20
    assert options_of(vllm_config("P", staging_bytes=32 << 20)).staging_bytes == 32 << 20
