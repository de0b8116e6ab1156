"""What an instance says of itself to its peers, and the configurations that it refuses."""

import itertools
import json
import shutil
from collections.abc import Callable
from copy import deepcopy as copy_of
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm.config import LoRAConfig, ModelConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.sample.rejection_sampler import generate_uniform_probs

from p2pkv.config import ConfigError
from p2pkv.connector import P2pKvConnector, P2pNcclConnector, describe
from p2pkv.connector.describe import (
    Layers,
    ahead_tokens,
    block_tables,
    cache_of,
    codec_of,
    computes_last_token,
    first_token_level,
    http_address,
    options_of,
    refuse_what_cannot_move,
    refuse_what_cannot_pair,
    replica,
    resume_level,
)
from p2pkv.connector.identity import ENDS_BYTES, fingerprint
from p2pkv.plugin import register
from p2pkv.protocol.handshake import Refused, negotiate
from p2pkv.protocol.messages import Hello
from support.connector.instances import (
    ATTENTION,
    BLOCK,
    D_ADDRESS,
    FULL,
    LAYERS,
    P_ADDRESS,
    SMALL,
    be_data_parallel,
    caches_of,
    hello_with,
    inner_id,
    kv_cache_config,
    kv_groups,
    pair_id,
    vllm_config,
    write,
)

WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=20)


def with_parallel(**sizes: Any) -> VllmConfig:
    config = vllm_config("P")
    for name, size in sizes.items():
        setattr(config.parallel_config, name, size)
    return config


# Hello


def test_hello_says_who_this_rank_is_and_what_its_cache_looks_like() -> None:
    said = hello_with(vllm_config("P"), caches_of(LAYERS))
    assert (said.role, said.rank, said.link) == ("P", 0, "host")
    assert said.addresses == (said.address,) == (str(P_ADDRESS),)
    (group,) = said.cache.groups
    assert (group.layers, group.heads, said.cache.tp) == ((2,), 2, 1)
    assert (group.row_bytes, group.unit_tokens, group.once) == (32 * 4, 1, False)
    assert (group.dtype, group.codec) == ("float32", "dense")
    assert (said.digest, said.verify) == ("xxh3-64", False)
    assert hello_with(vllm_config("P"), caches_of(LAYERS)).incarnation != said.incarnation


def test_layers_with_kv_heads_of_their_own() -> None:
    """As many as their ranks hold in all; a single one on each of several ranks might be a copy."""
    for held, tp, heads in ((2, 1, 2), (2, 2, 4), (2, 4, 8)):
        said = hello_with(with_parallel(tensor_parallel_size=tp), caches_of(LAYERS, heads=held))
        assert said.cache.groups[0].heads == heads
    kv = kv_groups((["l.0"], FULL), (["l.1"], replace(FULL, num_kv_heads=4)))
    caches = {"l.0": torch.zeros(4, 2, BLOCK, 32), "l.1": torch.zeros(4, 4, BLOCK, 16)}
    said_of_both = cache_of(vllm_config("P"), Layers(caches, kv))[1]
    assert [(group.heads, group.row_bytes) for group in said_of_both.groups] == [(2, 128), (4, 64)]


def heads_said(config: VllmConfig, *specs: Any) -> list[int]:
    """Of a cache with a group for each."""
    named = {f"l.{number}": spec for number, spec in enumerate(specs)}
    caches = {name: torch.zeros(4, spec.num_kv_heads, BLOCK, 32) for name, spec in named.items()}
    kv = kv_groups(*(([name], spec) for name, spec in named.items()))
    return [group.heads for group in cache_of(config, Layers(caches, kv))[1].groups]


@pytest.mark.parametrize(
    "own", [{"swa_num_key_value_heads": 8}, {"attention_other_setting": {"num_attention_groups": 8}}]
)
def test_windows_with_kv_heads_of_their_own_on_more_ranks_than_the_model_has_heads(
    own: dict[str, Any],
) -> None:
    """A rank holds one of either: each of the windows' only once, each of the model's on two ranks."""
    config = with_parallel(tensor_parallel_size=8)
    config.model_config.model_arch_config.total_num_kv_heads = 4
    for name, value in own.items():
        setattr(config.model_config.hf_text_config, name, value)
    window = SlidingWindowSpec(**(ATTENTION | {"num_kv_heads": 1}), sliding_window=32)
    assert heads_said(config, replace(FULL, num_kv_heads=1), window) == [4, 8]


def test_a_convolution_beside_full_attention_is_a_window_with_that_attentions_heads() -> None:
    """Inkling's, with 16 KV heads in its windows and 8 else, on 8 ranks."""
    config = with_parallel(tensor_parallel_size=8)
    config.model_config.model_arch_config.total_num_kv_heads = 8
    config.model_config.hf_text_config.swa_num_key_value_heads = 16
    form = ATTENTION | {"sliding_window": 4}
    specs = {f"l.{held}.conv_state": SlidingWindowSpec(**form | {"num_kv_heads": held}) for held in (1, 2)}
    kv = kv_groups(*(([name], spec) for name, spec in specs.items()))
    caches = {name: torch.zeros(4, spec.num_kv_heads, BLOCK, 32) for name, spec in specs.items()}
    assert [group.heads for group in cache_of(config, Layers(caches, kv))[1].groups] == [8, 16]


def test_layers_whose_kv_heads_the_models_configuration_has() -> None:
    """Gemma-4: fewer in full attention than in windows, so a rank's one head may be a copy."""
    config = with_parallel(tensor_parallel_size=4)
    model = config.model_config.model_arch_config
    model.total_num_kv_heads, model.per_layer_overrides = 8, [{}, {"total_num_kv_heads": 2}]
    specs = [replace(FULL, num_kv_heads=held) for held in (2, 1)]
    assert heads_said(config, *specs) == [8, 2]
    # Nemotron-NAS: vLLM gives the first layer's number for the model's.
    model.per_layer_overrides, text = None, config.model_config.hf_text_config
    text.num_attention_heads = 16
    sizes = [SimpleNamespace(n_heads_in_group=each) for each in (2, 8)]
    text.block_configs = [SimpleNamespace(attention=each) for each in sizes]
    assert heads_said(config, *specs) == [8, 2]


def test_a_model_that_spreads_heads_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds 4 KV heads of .*, but 2 of 2 were expected"):
        hello_with(vllm_config("P"), caches_of(LAYERS, heads=4))  # slots, as nvfp4 has for K and for V
    config = with_parallel(tensor_parallel_size=2)
    config.model_config.model_arch_config.total_num_kv_heads = 8
    one = replace(FULL, num_kv_heads=1)
    kv = kv_cache_config(spec=one)
    with pytest.raises(ConfigError, match=r"rank of 2 holds 1 KV heads of .*, but 4 of 8 were expected"):
        cache_of(config, Layers(caches_of(LAYERS, heads=1), kv))


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
def test_bytes_of_different_meaning_are_different_types(
    tensor: torch.dtype, cache: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config("P")
    config.cache_config.cache_dtype = cache
    for end in (")", " fnuz)"):  # AMD's MI300 has other numbers of eight bits
        found = hello_with(config, caches_of(LAYERS, dtype=tensor)).cache.groups[0].dtype
        assert found == said.replace(")", end)
        monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))


def test_other_layers_that_keep_their_type_in_a_cache_of_bytes_are_refused() -> None:
    """--kv-cache-dtype-skip-layers: as many layers of either type on both sides, but others."""

    def said(role: str, kept: int) -> Hello:
        config, names = vllm_config(role), [f"model.layers.{number}.attn" for number in range(4)]
        config.cache_config.cache_dtype, config.cache_config.kv_cache_dtype_skip_layers = "fp8", [str(kept)]
        numbers = caches_of(names[kept : kept + 1], dtype=torch.bfloat16)
        return hello_with(config, caches_of(names, dtype=torch.uint8) | numbers)

    negotiate(said("P", 1), said("D", 1))
    with pytest.raises(Refused, match=r"not in layers 1.* not in layers 2.*set the same --kv-cache-dtype"):
        negotiate(said("P", 1), said("D", 2))


def test_the_names_of_layers_tell_models_apart_but_not_pipeline_stages() -> None:
    def digest(*names: str) -> str:
        return hello_with(vllm_config("P"), caches_of(names)).cache.groups[0].layer_names

    whole = digest("model.layers.0.attn", "model.layers.1.attn")
    assert digest("model.layers.1.attn") == whole
    assert digest("model.layers.0.attn", "draft.layers.0.attn") != whole


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    """Three vLLM groups, of which two see a window; each has a block table, and all lie in one memory."""
    names = [f"model.layers.{number}.attn" for number in range(6)]
    config = kv_groups((names[2::3], FULL), (names[0::3], WINDOW), (names[1::3], WINDOW))
    one, other = torch.zeros(4, 2, BLOCK, 32), torch.zeros(4, 2, BLOCK, 32)
    memory = {name: one if number < 3 else other for number, name in enumerate(names)}
    layers = Layers(memory, config)
    assert [*layers.indices] == names
    cache, said = cache_of(vllm_config("P"), layers)
    assert [(group.layers, group.window, group.block) for group in said.groups] == [
        ((4,), 20, BLOCK),
        ((2,), 0, 1),
    ]
    for role, cached, block in (("P", False, BLOCK), ("D", True, BLOCK), ("D", False, 1)):
        other = vllm_config(role)
        other.cache_config.enable_prefix_caching = cached
        assert cache_of(other, layers)[1].groups[0].block == block
    assert [group.tables for group in cache.groups] == [(1, 2, 1, 2), (0, 0)]
    assert [list(numbers) for numbers in cache.layers] == [[0, 1, 3, 4], [2, 5]]
    assert not computes_last_token(config) and computes_last_token(kv_cache_config())


# Layers


def test_layers_that_share_their_kv_are_moved_once() -> None:
    """In the order of their numbers, by the block table of the layer whose KV it is: no group has them."""
    own = caches_of(["l.10", "l.9", "l.1", "l.0"])
    caches = {**own, "l.2": own["l.1"], "l.3": own["l.1"].view(4, 2, BLOCK, 32)}
    for kv in (kv_cache_config(), kv_groups((["l.0", "l.9"], FULL), (["l.1", "l.10"], FULL))):
        layers = Layers(caches, kv)
        assert layers.indices == {"l.0": 0, "l.1": 1, "l.9": 2, "l.10": 3}
        expected = [each.data_ptr() for each in reversed(own.values())]
        assert [layer.tensor.data_ptr() for layer in layers.all] == expected
    assert [layer.table for layer in layers.all] == [0, 1, 0, 1]


def test_the_codec_is_that_of_the_attention_layers() -> None:
    config, names = vllm_config("P"), list(LAYERS)
    layers = config.compilation_config.static_forward_context
    assert codec_of(config, names) == "dense"
    layers.update({name: SimpleNamespace() for name in names})
    assert codec_of(config, names) == "dense"
    layers.update({name: SimpleNamespace(isa="vec16") for name in names})
    assert codec_of(config, names) != "dense"
    layers[names[1]] = SimpleNamespace(isa="amx")
    with pytest.raises(ConfigError, match=r"\['amx', 'vec16'\]\): p2pkv needs one"):
        codec_of(config, names)


# Weights


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(write(SMALL), tmp_path / "a" / "copy"))


def served(folder: Path, load: dict[str, Any] | None = None, **model: Any) -> VllmConfig:
    """An instance of the model in a folder; `load` and `model`: vLLM's options."""
    config = vllm_config("P")
    options = {"model": str(folder), "max_model_len": 512, "dtype": "float32"} | model
    config.model_config = ModelConfig(**options)
    for name, value in (load or {}).items():
        setattr(config.load_config, name, value)
    return config


def test_the_same_files_at_another_place_have_the_same_fingerprint(copy: Path) -> None:
    one = fingerprint(vllm_config("D"))
    assert fingerprint(served(copy)) == one
    for kind in ("safetensors", "runai_streamer"):
        assert fingerprint(served(copy, {"load_format": kind})) == one
    assert fingerprint(served(copy, max_model_len=256)) == one
    index = {"weight_map": {"a": next(copy.glob("*.safetensors")).name}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "training_args.bin"):
        (copy / name).write_bytes(b"vLLM does not read it")
        assert fingerprint(served(copy, {"load_format": "hf"})) == one, name
    split = served(copy, {"load_format": "hf"})
    split.parallel_config.tensor_parallel_size = 2
    assert fingerprint(split) == one


def changed(data: bytes, start: int, stop: int) -> bytes:
    return data[:start] + bytes(byte ^ 1 for byte in data[start:stop]) + data[stop:]


def last_bytes(data: bytes) -> list[bytes]:
    other = changed(data, len(data) - 1, len(data))
    return [data, other, other + b"\0"]


def middle_and_end_of_each_tensor(_: bytes) -> list[bytes]:
    """Far from the ends of the file, which are looked at in any case."""
    size = 4 * ENDS_BYTES
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
            for number, name in enumerate("abc")
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(3 * size)
    places = [8 + len(header) + number * size + at for number in range(3) for at in (size // 2, size - 1)]
    return [data, *(changed(data, at, at + 1) for at in places)]


def eighths(_: bytes) -> list[bytes]:
    """A large file of unknown content is looked at throughout."""
    size = 4 << 17
    return [bytes(part * size) + b"x" * size + bytes((7 - part) * size) for part in range(8)]


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        *(("model.safetensors", of) for of in (last_bytes, middle_and_end_of_each_tensor, eighths)),
        *((name, of) for name in ("model.bin", "model.gguf") for of in (last_bytes, eighths)),
    ],
)
def test_other_contents_are_other_weights(
    copy: Path, file: str, contents: Callable[[bytes], list[bytes]]
) -> None:
    (weights,) = copy.glob("*.safetensors")
    made, seen = contents(weights.read_bytes()), set()
    weights.unlink()
    for content in made:
        (copy / file).write_bytes(content)
        config = served(copy)
        if file.endswith("gguf"):
            config.model_config.model_weights = str(copy / file)
        seen.add(fingerprint(config))
    assert len(seen) == len(made)


def test_shards_that_have_changed_their_names_are_other_weights(copy: Path) -> None:
    """Two shards of one size, of which each holds the other's tensors."""
    (weights,) = copy.glob("*.safetensors")
    data = weights.read_bytes()
    seen = set()
    for first in (b"", b"x"):
        weights.write_bytes(data + first)
        (copy / "other.safetensors").write_bytes(data + (b"" if first else b"x"))
        seen.add(fingerprint(served(copy)))
    weights.rename(copy / "renamed.safetensors")
    seen.add(fingerprint(served(copy)))
    assert len(seen) == 3


def _other_base(config: Any) -> Any:
    """vLLM asks for the overrides of an empty configuration, too."""
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    return config


def test_another_configuration_of_the_same_weights_has_another_one(copy: Path, tmp_path: Path) -> None:
    """Another base of RoPE gives another K from the same weights, wherever vLLM has it from."""
    before = fingerprint(served(copy))
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written | {"transformers_version": "0.0"}, indent=1))
    assert fingerprint(served(copy)) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(written | {"rope_theta": 5.0}))
    by = {
        "a nested override": served(
            copy, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
        ),
        "a function": served(copy, hf_overrides=_other_base),
        "--hf-config-path": served(copy, hf_config_path=str(other)),
    }
    (copy / "config.json").write_text(json.dumps(written | {"rope_theta": 5.0}))
    changed = fingerprint(served(copy))
    assert changed != before
    assert {way: fingerprint(config) for way, config in by.items()} == dict.fromkeys(by, changed)


def test_the_configuration_counts_whole_but_for_what_belongs_to_the_machine(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of several parts vLLM keeps the text's configuration apart."""
    one = served(copy)
    before = fingerprint(one)
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "0.0")
    one.model_config.hf_config.update({"max_model_len": 7, "_commit_hash": "0", "new_in_this_version": None})
    assert fingerprint(one) == before
    seen = {before}
    for part in ("hf_config", "hf_text_config"):
        config = served(copy)
        changed = copy_of(getattr(config.model_config, part))
        changed.update({"rms_norm_eps": 1.0})
        setattr(config.model_config, part, changed)
        seen.add(fingerprint(config))
    assert len(seen) == 3


def test_the_longest_context_counts_where_it_decides_what_k_is(copy: Path) -> None:
    def longest(tokens: int, **rope: Any) -> str:
        config = served(copy)
        config.model_config.max_model_len = tokens
        text = config.model_config.hf_text_config
        text.rope_parameters = dict(text.rope_parameters) | rope
        return fingerprint(config)

    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert longest(2048) == longest(8192)
    for rope in (longrope, {"full_attention": longrope, "sliding_attention": {"rope_type": "default"}}):
        assert longest(2048, **rope) == longest(4096, **rope) != longest(4097, **rope)


def test_whether_llama_4_tunes_its_attentions_temperature_counts(copy: Path) -> None:
    """Beyond 32,768 tokens it does, unless the generation's configuration says otherwise."""

    def tuned(tokens: int, derived: int = 0, **generation: Any) -> str:
        config = served(copy)
        config.model_config.max_model_len = tokens
        if derived:  # --max-model-len auto: the model was built before vLLM had found out what fits
            config.model_config.original_max_model_len = -1
            config.model_config.model_arch_config.derived_max_model_len_and_key = derived, "of the model"
        config.model_config.hf_text_config.model_type = "llama4_text"
        config.model_config.override_generation_config = generation
        return fingerprint(config)

    assert tuned(8192) == tuned(32768) != tuned(32769)
    assert tuned(8192, attn_temperature_tuning=True) == tuned(32769)
    assert tuned(65536, attn_temperature_tuning=False) == tuned(8192)
    assert tuned(8192, derived=65536) == tuned(65536) != tuned(8192, derived=32768)


def test_to_which_layers_vllm_applies_adapters_counts(copy: Path) -> None:
    """An adapter's other layers are left out without an error."""
    seen, some = [], ({"target_modules": ["o_proj"]}, {"target_modules": ["q_proj"]})
    for each in (None, {}, {"max_lora_rank": 64}, *some, {"enable_tower_connector_lora": True}):
        config = served(copy)
        config.lora_config = None if each is None else LoRAConfig(**each)  # type: ignore[arg-type]
        seen.append(fingerprint(config))
    assert seen[0] == seen[1] == seen[2] and len({*seen}) == 4


def test_what_vllm_makes_of_the_files_counts(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of its numbers, quantization while it loads, and a class that stands in for the model's."""
    ways: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"quantization": "fp8", "quantization_config": {"ignore": ["lm_head"]}},
        {"model_class_overrides": {"LlamaForCausalLM": "elsewhere:Model"}},
        {"quantization": "humming"},
        {"quantization": "humming", "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}'},
        {"quantization": "humming", "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int8"}'},
    ]
    seen = set()
    for way in ways:
        config = served(copy)
        monkeypatch.setenv(online := "VLLM_HUMMING_ONLINE_QUANT_CONFIG", way.pop(online, "{}"))
        for name, value in way.items():
            setattr(config.model_config, name, value)
        seen.add(fingerprint(config))
    assert len(seen) == len(ways)


def test_weights_that_were_downloaded_to_another_folder_are_found(copy: Path, tmp_path: Path) -> None:
    """--download-dir, which vLLM does not use for the model's configuration."""
    snapshot = tmp_path / "models--somebody--model" / "snapshots" / "0123"
    shutil.copytree(copy, snapshot)
    (tmp_path / "models--somebody--model" / "refs").mkdir()
    (tmp_path / "models--somebody--model" / "refs" / "main").write_text("0123")
    config = served(copy, {"download_dir": str(tmp_path)})
    config.model_config.model = "somebody/model"
    assert fingerprint(config) == fingerprint(served(copy))


@pytest.mark.parametrize(
    ("load", "model", "match"),
    [
        ({"load_format": "dummy"}, {}, r"load format dummy"),
        ({"load_format": "tensorizer"}, {}, r"load format tensorizer"),
        ({}, {"model": "nobody/nothing"}, r"no \.safetensors.* files of nobody/nothing on this machine"),
        ({}, {"model_weights": "s3://bucket/model"}, r"files of s3://bucket/model on this machine"),
    ],
    ids=["dummy", "tensorizer", "elsewhere", "object-storage"],
)
def test_weights_without_files_need_a_name(
    copy: Path, load: dict[str, Any], model: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def instance(name: str, **overrides: Any) -> Hello:
        config = served(copy, load, **overrides)
        config.kv_transfer_config.kv_connector_extra_config["weights_name"] = name
        for attribute, value in model.items():
            setattr(config.model_config, attribute, value)
        return hello_with(config, caches_of(LAYERS))

    with pytest.raises(ConfigError, match=rf"{match}.*give them a name with weights_name"):
        instance("")
    named = instance("policy 7").weights
    assert len(named) == 24
    assert (
        len({named, instance("policy 8").weights, instance("policy 7", hf_overrides=_other_base).weights})
        == 3
    )
    assert fingerprint(served(copy), "policy 7") == named, "a P may have them in files"


# What is refused


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"enable_elastic_ep": True}, "--enable-elastic-ep is set"),
        ({"enable_fault_tolerance": True}, "--enable-fault-tolerance is set"),
        ({"distributed_executor_backend": "external_launcher", "world_size": 2}, "choose mp or ray"),
    ],
)
def test_ranks_that_would_be_addressed_wrongly_are_refused(sizes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        P2pKvConnector(with_parallel(**sizes), KVConnectorRole.WORKER, kv_cache_config())


def test_what_a_d_does_not_learn_by_kv_alone_is_refused() -> None:
    """Positions behind a video that its encoder has pruned; the experts to which tokens were sent."""
    config = vllm_config("D")
    model = config.model_config
    model.multimodal_config = MultiModalConfig(video_pruning_rate=0.5)
    refuse_what_cannot_pair(config)
    model.hf_text_config.rope_parameters = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    assert model.uses_mrope
    with pytest.raises(ConfigError, match="--video-pruning-rate is set"):
        refuse_what_cannot_pair(config)
    model.multimodal_config = MultiModalConfig()
    refuse_what_cannot_pair(config)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ConfigError, match="--enable-return-routed-experts is set"):
        refuse_what_cannot_pair(config)


def test_request_ids_that_may_come_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler asserts that no request of the id is there, and P keeps one until D has its KV."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(ConfigError, match="unset it"):
        refuse_what_cannot_pair(vllm_config("P"))


def test_context_parallel_ranks() -> None:
    """DCP divides the tokens of layers that vLLM says are divided; PCP multiplies the ranks."""
    config = with_parallel(
        tensor_parallel_size=4,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=4,
    )
    refuse_what_cannot_pair(config)
    said = hello_with(config, caches_of(LAYERS, heads=1), rank=5)
    (group,) = said.cache.groups
    assert (said.cache.tp, said.cache.pcp, group.dcp, group.interleave) == (4, 2, 2, 4)
    assert (len(said.addresses), said.address) == (8, str(P_ADDRESS.shifted(5)))
    assert said.cache.ranks == 8
    assert block_tables(config, kv_cache_config()).sizes == (2 * BLOCK,)
    own = replace(FULL, dcp_sharded=False)
    assert block_tables(config, kv_cache_config(spec=own)).sizes == (BLOCK,)
    state = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
    assert block_tables(config, kv_cache_config(spec=state)).sizes == (BLOCK,)


@pytest.mark.parametrize("parallel", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
@pytest.mark.parametrize("engines", [1, 2])
def test_ranks_on_several_hosts_learn_each_others_addresses(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], engines: int
) -> None:
    """Also where the ranks of other data-parallel engines are in the same torch world, as with experts."""
    hosts = {rank: f"10.0.0.{1 + rank}" for rank in (0, 1)}
    others = [
        (index, rank, f"{hosts[rank]}:{1000 * index + rank}") for index in range(engines) for rank in hosts
    ]
    asked: list[object] = []

    def gather(into: list[Any], mine: object, group: str) -> None:
        asked.append((mine, group))
        into[:] = [mine if each[:2] == mine[:2] else each for each in reversed(others)]  # type: ignore[index]

    world = SimpleNamespace(world_size=len(others), cpu_group="all ranks")
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    index = engines - 1
    config = with_parallel(tensor_parallel_size=2, rank=1, data_parallel_index=index, **parallel)
    refuse_what_cannot_pair(config)
    said = hello_with(config, caches_of(LAYERS, heads=1), rank=1)
    mine = str(P_ADDRESS.shifted(2 * index + 1))
    assert asked == [((index, 1, mine), "all ranks")]
    assert said.addresses == (f"10.0.0.1:{1000 * index}", mine) and said.address == mine


def test_a_scheduler_learns_from_rank_0_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Ray may put it on another host, and VLLM_HOST_IP of the server is not the workers'."""
    config = vllm_config("D", proxy_ip="127.0.0.1", proxy_port=1, http_port=8000)
    config.parallel_config.distributed_executor_backend = "ray"
    scheduler = P2pKvConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
    config.kv_transfer_config.kv_connector_extra_config["host"] = "127.0.0.2"
    first = P2pKvConnector(config, KVConnectorRole.WORKER, kv_cache_config()).get_handshake_metadata()
    config.parallel_config.rank = 1
    other = P2pKvConnector(config, KVConnectorRole.WORKER, kv_cache_config()).get_handshake_metadata()
    outer = pair_id("a", decode=replace(D_ADDRESS, host="127.0.0.2"))
    asked: Any = SimpleNamespace(kv_transfer_params=None, request_id=inner_id(outer))
    assert scheduler._pairs.of(asked) is None is other
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): first})
    assert scheduler._pairs.of(asked) is not None and "requests to 127.0.0.2" in caplog.text


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_ports_of_a_data_parallel_engine(model: str) -> None:
    config = with_parallel(tensor_parallel_size=2, data_parallel_size=4, data_parallel_index=3)
    if model == "dense":
        config.parallel_config.reconfigure_for_independent_dp_rank()
    refuse_what_cannot_pair(config)
    said = hello_with(config, caches_of(LAYERS, heads=1), rank=1)
    assert said.addresses == (str(P_ADDRESS.shifted(6)), str(P_ADDRESS.shifted(7)))
    assert said.address == said.addresses[1]


@pytest.mark.parametrize(
    ("balancing", "index", "start", "number", "first", "host"),
    [
        ("internal", 1, 0, 1, "127.0.0.9", "127.0.0.1"),
        ("internal", 3, 2, 3, "10.0.0.9", "10.0.0.9"),  # on the second node; the HTTP server is on the first
        ("internal", 3, 2, 3, "127.0.0.9", "127.0.0.9"),  # two nodes on one machine
        ("internal", 1, 0, 1, "10.0.0.9", "10.0.0.9"),  # the first has --data-parallel-size-local 0
        ("hybrid", 3, 2, 1, "10.0.0.9", "127.0.0.1"),
        ("external", 3, 3, 0, "10.0.0.9", "127.0.0.1"),
    ],
)
def test_a_ping_has_the_engines_http_server_and_its_number_there(
    balancing: str, index: int, start: int, number: int, first: str, host: str
) -> None:
    config = vllm_config("D", proxy_ip="127.0.0.1", proxy_port=1, http_port=8000)
    options = options_of(config)
    assert (replica(config), str(http_address(config, options))) == (None, "127.0.0.1:8000")
    be_data_parallel(config, index, start)
    config.parallel_config.data_parallel_hybrid_lb = balancing == "hybrid"
    config.parallel_config.data_parallel_external_lb = balancing == "external"
    config.parallel_config.data_parallel_master_ip = first
    assert replica(config) == number
    assert str(http_address(config, options)) == f"{host}:8000"


def test_runners_that_draw_otherwise_have_other_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU none takes a seed. With guesses V1 has used its seed before it draws the first token."""
    v1, v1_guesses, v2, v2_guesses = (
        SimpleNamespace(use_v2_model_runner=runner, speculative_config=guesses)
        for runner, guesses in itertools.product((False, True), (None, object()))
    )
    assert describe.sampler(v1) == describe.sampler(v2) == ""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert len({describe.sampler(v1), describe.sampler(v2), ""}) == 3
    assert (describe.sampler(v1_guesses), describe.sampler(v2_guesses)) == ("", describe.sampler(v2))
    seeded = torch.Generator().manual_seed(1)
    generate_uniform_probs(3, [3], {0: seeded}, torch.device("cpu"))
    assert not torch.equal(seeded.get_state(), torch.Generator().manual_seed(1).get_state())


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_memory_that_may_be_taken_away_is_refused_where_vllm_does_not_tell_its_connector(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the allocator vLLM's /sleep works whether sleep mode is on or not."""
    config = vllm_config("P")
    refuse_what_cannot_pair(config)
    monkeypatch.setattr(config.model_config, option, True)
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is set"):
        refuse_what_cannot_pair(config)
    assert not P2pKvConnector.supports_sleep_mode(config.kv_transfer_config)
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    refuse_what_cannot_pair(config)
    assert P2pKvConnector.supports_sleep_mode(config.kv_transfer_config)


def test_a_group_of_which_this_stage_has_no_layer_is_passed_over() -> None:
    """vLLM gives every pipeline stage all groups, some of them without names."""
    refuse_what_cannot_move(vllm_config("P"), kv_groups((["a"], FULL), ([], FULL)))
    config = kv_groups((["a"], FULL), ([], WINDOW))
    assert not computes_last_token(config), "the scheduler of such an engine has stage 0's groups"


# What vLLM asks of the class


def test_vllm_finds_both_names_and_takes_them_for_what_they_are() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()  # once more: vLLM refuses a name that is taken
    for name, kind in (("P2pKvConnector", P2pKvConnector), ("P2pNcclConnector", P2pNcclConnector)):
        config = vllm_config("D")
        config.kv_transfer_config.kv_connector = name
        assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is kind
        assert supports_hma(kind)
        sleeps = hasattr(KVConnectorBase_V1, "unregister_kv_caches")  # from vLLM 0.33 on
        assert kind.supports_sleep_mode(config.kv_transfer_config) is sleeps
        assert kind.get_required_kvcache_layout(config) is None


def test_the_former_name_pings_in_the_clear_though_there_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_SECRET", "a secret of the tests")
    for name, discovery in (("P2pKvConnector", "curve"), ("P2pNcclConnector", "plain")):
        config = vllm_config("P", proxy_ip="127.0.0.1", proxy_port=30001, http_port=8100)
        config.kv_transfer_config.kv_connector = name
        assert options_of(config).discovery == discovery


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


OF_64 = replace(WINDOW, sliding_window=64)


@pytest.mark.parametrize(
    ("role", "spec", "defaults", "more", "level"),
    [
        ("P", FULL, {}, {}, 2),
        ("D", FULL, {}, {}, 2),
        ("P", OF_64, {}, {}, 0),
        ("D", OF_64, {}, {}, 0),
        ("P", FULL, {"max_new_tokens": 9}, {}, 2),
        ("D", FULL, {"max_new_tokens": 9}, {}, 1),
        ("D", FULL, {"max_new_tokens": 9}, {"generation_config": "a/folder"}, 0),
        ("D", FULL, {}, {"override_generation_config": {"max_new_tokens": 9}}, 0),
        ("P", FULL, {}, {"override_generation_config": {"presence_penalty": 0.5}}, 0),
        ("D", FULL, {"frequency_penalty": 0.5}, {}, 0),
        ("D", FULL, {"temperature": 0.7}, {}, 2),
        ("D", FULL, {}, {"logits_processors": ["a.module:Processor"]}, 0),
        ("D", FULL, {}, {"watermark_config": {"key": 5}}, 0),
    ],
)
def test_the_ping_says_whether_ps_token_is_the_first(
    role: str,
    spec: Any,
    defaults: dict[str, Any],
    more: dict[str, Any],
    level: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`defaults`: of the model; `more`: the server's options."""
    config = vllm_config(role)
    for name, value in {"try_get_generation_config": defaults.copy, **more}.items():
        setattr(config if name == "watermark_config" else config.model_config, name, value)
    told = partial(first_token_level, config, kv_cache_config(spec=spec), options_of(config))
    assert told() == level
    assert resume_level(config, options_of(config)) == (2 if spec is OF_64 else level)
    monkeypatch.setattr(describe, "entry_points", lambda group: [group])
    assert told() == 0, "a plug-in's logits processors, too"


def test_the_ping_says_how_many_tokens_have_room_ahead() -> None:
    token = len(LAYERS) * FULL.page_size_bytes // BLOCK
    cache = kv_cache_config()
    for role, room, tokens in (("D", 100 * token, 100), ("D", 0, 0), ("P", 100 * token, 0)):
        config = vllm_config(role, **({"prefetch_bytes": room} if role == "D" else {}))
        assert ahead_tokens(cache, options_of(config)) == tokens
