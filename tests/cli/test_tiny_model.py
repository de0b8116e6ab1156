"""The tiny model: made once for its parameters, readable, and refused with a sentence."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pkv.demo.tiny_model import TinyLlama, default_cache_dir, ensure_model, llama_8b_geometry

SMALL = TinyLlama(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64, vocab=512)


def test_equal_parameters_give_equal_files(tmp_path: Path) -> None:
    one, two = ensure_model(SMALL, tmp_path / "one"), ensure_model(SMALL, tmp_path / "two")
    names = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in names
    assert names == sorted(path.name for path in two.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_a_model_is_made_once_even_by_several_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: ensure_model(SMALL, tmp_path), range(4)))
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in paths] == [SMALL.name]


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    greedy = TinyLlama(layers=1, vocab=1 << 20)
    with pytest.raises(ValueError, match="choose a smaller vocab"):
        ensure_model(greedy, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_files_say_what_was_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    path = ensure_model(SMALL, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (2, 16, 512)
    weights = load_file(path / "model.safetensors")
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "Any text, even Ünïcode, comes back."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bytes_per_token_of_the_8b_geometry() -> None:
    spec = llama_8b_geometry()
    assert spec.kv_bytes_per_token == 128 << 10
    assert spec.name != llama_8b_geometry(hidden=64).name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": 0}, "at least 1"),
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"vocab": 300}, "need at least 320"),
        ({"dtype": "float16"}, "use float32 or bfloat16"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TinyLlama(**changes)  # type: ignore[arg-type]


def test_the_cache_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("P2PKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/p2pkv")
