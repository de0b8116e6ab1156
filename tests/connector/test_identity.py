"""Which requests are the same: digests of prompts, and what makes them different."""

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from p2pkv.connector import identity
from p2pkv.connector.identity import Pairs, prompt_digest
from support.connector.instances import D_ADDRESS, P_ADDRESS, inner_id, make_request, pair_id


def prompt(**changes: Any) -> Any:
    plain = {
        "prompt_token_ids": [1, 2, 3],
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }
    return SimpleNamespace(**(plain | changes))


def media(
    name: str, offset: int = 0, length: int = 2, modality: str = "image", **fields: Any
) -> MultiModalFeatureSpec:
    """`fields`: what the model is given of it."""
    field = MultiModalBatchedField()
    data = {key: MultiModalFieldElem(data=value, field=field) for key, value in fields.items()}
    item = MultiModalKwargsItem(data) if data else None
    return MultiModalFeatureSpec(item, modality, name, PlaceholderRange(offset=offset, length=length))


PIXELS = torch.arange(12.0).view(3, 4)


def adapter(name: str, path: str = "/nowhere", number: int = 1, inplace: bool = False) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_path=path, lora_int_id=number, load_inplace=inplace)


DIFFERENT = [
    prompt(),
    prompt(prompt_token_ids=[1, 2, 4]),
    prompt(prompt_token_ids=[1, 2]),
    prompt(prompt_token_ids=[3, 2, 1]),
    prompt(prompt_token_ids=[1, 2, 3 << 32]),
    prompt(prompt_token_ids=None),
    prompt(mm_features=[media("cat")]),
    prompt(mm_features=[media("dog")]),
    prompt(mm_features=[media("cat", offset=1)]),
    prompt(mm_features=[media("cat", length=3)]),
    prompt(mm_features=[media("cat"), media("dog", 2)]),
    prompt(mm_features=[media("dog"), media("cat", 2)]),
    prompt(mm_features=[media("cat", modality="video")]),
    prompt(mm_features=[media("cat", pixels=PIXELS)]),
    prompt(mm_features=[media("cat", pixels=PIXELS + 1)]),
    prompt(mm_features=[media("cat", pixels=PIXELS.view(4, 3))]),
    prompt(mm_features=[media("cat", pixels=PIXELS.view(torch.int32))]),
    prompt(mm_features=[media("cat", others=PIXELS)]),
    prompt(mm_features=[media("cat", pixels=PIXELS, size=torch.tensor(3))]),
    prompt(mm_features=[media("cat", pixels=[PIXELS, PIXELS])]),
    prompt(mm_features=[media("cat", pixels=[PIXELS, [PIXELS]])]),
    prompt(mm_features=[media("cat", pixels=PIXELS, size=3)]),
    prompt(mm_features=[media("cat", pixels=PIXELS.bfloat16())]),
    prompt(mm_features=[media("cat", pixels=PIXELS, more=np.zeros(4000))]),
    prompt(mm_features=[media("cat", pixels=PIXELS, more=np.arange(4000) == 2000)]),
    prompt(mm_features=[media("cat", pixels=PIXELS, more=np.arange(4000) == 2001)]),
    prompt(lora_request=adapter("a")),
    prompt(lora_request=adapter("b")),
    prompt(cache_salt="a"),
    prompt(cache_salt="b"),
    prompt(prompt_embeds=torch.zeros(3, 2)),
    prompt(prompt_embeds=torch.ones(3, 2)),
    prompt(prompt_embeds=torch.zeros(2, 3)),
    prompt(prompt_embeds=torch.zeros(3, 2, dtype=torch.bfloat16)),
    prompt(prompt_embeds=torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1e-30]])),
    prompt(prompt_token_ids=None, prompt_embeds=torch.zeros(3, 2)),
    prompt(prompt_embeds=torch.zeros(3, 2), prompt_is_token_ids=[True, False, False]),
    prompt(prompt_embeds=torch.zeros(3, 2), prompt_is_token_ids=[True, True, False]),
]


def test_every_ingredient_changes_the_digest() -> None:
    digests = [prompt_digest(each) for each in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert {len(digest) for digest in digests} == {16}


def test_what_does_not_change_the_kv_does_not_change_the_digest() -> None:
    one = make_request("cmpl-a-0-12345678", [1, 2, 3], max_tokens=1)
    two = make_request("chatcmpl-b-12345678", [1, 2, 3], max_tokens=9, params={"x": 1}, priority=3)
    assert prompt_digest(one) == prompt_digest(two) == prompt_digest(prompt())
    assert prompt_digest(one).hex() == "b1d9297b90d2cc044b0ea4fa7e00ed0b", "as in any other version"


def test_a_picture_is_known_by_what_the_model_is_given_not_by_vllms_name_for_it() -> None:
    """That has the model's path in it, which may differ between P and D, or is a number of the process."""
    image = Image.new("RGB", (4, 4), "red")
    items = MultiModalDataParser().parse_mm_data({"image": image})
    inputs = ProcessorInputs([1, 2, 3], items)
    names = [inputs.get_mm_hashes(path, "blake3")["image"][0] for path in ("/on/p", "/on/d")]
    names.append("renderer0-mm-17-image-0")
    assert len(set(names)) == 3
    digests = {prompt_digest(prompt(mm_features=[media(name, pixels=PIXELS.clone())])) for name in names}
    assert len(digests) == 1


def test_a_picture_that_is_in_vllms_cache_counts_as_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end leaves it out then, the engine core has it in a cache; its contents are read once."""
    config: Any = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1))
    cache, read = LruKeyReplicatedReceiverCache(config), []
    monkeypatch.setattr(identity, "_digest_of", lambda leaves: read.append(leaves) or bytes(16))
    digests = []
    for feature in (media("cat", pixels=PIXELS), media("cat")):
        (seen,) = cache.get_and_update_features([feature])
        digests.append(prompt_digest(prompt(mm_features=[seen])))
    assert digests[0] == digests[1] and len(read) == 1


def test_a_picture_that_is_not_in_this_processs_memory_counts_by_vllms_name() -> None:
    shared = {"address": 1, "monotonic_id": 2, "signature": "a"}
    moved = shared | {"address": 3}
    on_device = torch.empty(3, device="meta")
    for one, other in ((shared, moved), ({}, {}), ({"pixels": on_device}, {"pixels": on_device})):
        digests = [
            prompt_digest(prompt(mm_features=[media(name, **fields)]))
            for name, fields in (("cat", one), ("cat", other), ("dog", other))
        ]
        assert digests[0] == digests[1] != digests[2]


def written(folder: Path, weights: bytes, settings: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(settings)
    return folder


def adapted(path: Path | str, number: int = 1, inplace: bool = False) -> bytes:
    return prompt_digest(prompt(lora_request=adapter("a", str(path), number, inplace)))


def test_an_adapter_is_known_by_its_files_not_by_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may begin at home. Files that vLLM does not read, as those of a training, do not count."""
    monkeypatch.setenv("HOME", str(tmp_path))
    here, there = (written(tmp_path / name, b"weights") for name in ("here", "there"))
    (there / "optimizer.pt").symlink_to(tmp_path / "nowhere")
    (there / "trainer_state.json").write_text("{}")
    one = adapted(here)
    assert adapted(there, 5) == adapted("~/here", 6) == one
    others = [
        written(tmp_path / "other", b"others!"),
        written(tmp_path / "scaled", b"weights", '{"lora_alpha": 32}'),
    ]
    assert len({one, *map(adapted, others)}) == 3
    written(here, b"others!")
    assert adapted(here, 2) != one, "loaded anew from the same path"


def test_an_adapter_that_vllm_loads_in_place_is_read_again_when_its_files_have_changed(
    tmp_path: Path,
) -> None:
    times = count(10**18, 1000)

    def digest(weights: bytes, inplace: bool) -> bytes:
        """A training writes files of the same size, and here within a microsecond of those before."""
        written(tmp_path, weights)
        now = next(times)
        os.utime(tmp_path / "adapter_model.safetensors", ns=(now, now))
        return adapted(tmp_path, 7, inplace)

    first, second = digest(b"weights", True), digest(b"others!", True)
    assert digest(b"weights", True) == first != second
    once = digest(b"weights", False)
    assert digest(b"others!", False) == once, "vLLM has read them once, and so do we"


def test_an_adapter_without_files_counts_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until they are there: a failure to read them is not kept."""
    path = tmp_path / "later"
    nameless = [adapted(path) for _ in range(2)]
    assert nameless[0] == nameless[1]
    assert caplog.text.count("is distinguished from others by its name alone") == 1
    assert adapted(written(path, b"weights")) != nameless[0]


def test_an_adapter_whose_files_cannot_be_read_ends_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter_model.safetensors").symlink_to(tmp_path / "nowhere")
    assert len(adapted(tmp_path)) == 16 and "cannot be read" in caplog.text


def test_embeddings_count_as_numbers_whatever_their_layout() -> None:
    embeds = torch.arange(6.0).view(2, 3)
    turned = embeds.t().contiguous().t()
    assert prompt_digest(prompt(prompt_embeds=embeds)) == prompt_digest(prompt(prompt_embeds=turned))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embeddings_are_read_where_they_lie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have hundreds of MiB, and the engine core waits: no copy of them is made."""
    embeds, read = torch.ones(64, 128, dtype=dtype), []
    digest = xxhash.xxh3_128_digest
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: read.append(data) or digest(data))
    prompt_digest(prompt(prompt_embeds=embeds))
    (data,) = map(np.asarray, read)
    assert (data.ctypes.data, data.nbytes) == (embeds.data_ptr(), embeds.nbytes)


@pytest.mark.parametrize("params", [None, {}, {"transfer_id": 7}, {"transfer_id": None}, "text", ["list"]])
def test_params_of_other_connectors_do_no_harm(params: Any) -> None:
    request = make_request(inner_id(pair_id()), [1])
    request.kv_transfer_params = params
    paired = Pairs(P_ADDRESS, "P").of(request)
    assert paired.key.startswith("pair:")


def test_no_more_than_a_hundred_ways_of_being_wrong_are_told(caplog: pytest.LogCaptureFixture) -> None:
    pairs = Pairs(D_ADDRESS, "D")
    with caplog.at_level("WARNING", logger="p2pkv"):
        for port in range(300):
            outer = pair_id(decode=type(D_ADDRESS)("127.0.0.1", 30000 + port))
            assert pairs.of(make_request(inner_id(outer), [1])) is None
    assert len(caplog.records) == 100
