"""The benchmark at its smallest: it runs, measures what it says, and notices KV that is not P's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from p2pkv.bench.harness import BenchError
from p2pkv.bench.latents import LATENTS, PARTS
from p2pkv.bench.memory import CELL, HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, Layout, Memory, capacity_for
from p2pkv.bench.prefill import prefill
from p2pkv.cli import main
from p2pkv.links import make_factory

TOKENS = 40


def test_it_measures_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--tokens", str(TOKENS), "--repeat", "1", "--layer-ms", "0.1", "--json", str(out)]
    threads = torch.get_num_threads()
    assert main(["bench", *arguments]) == 0
    assert torch.get_num_threads() == threads
    results = json.loads(out.read_text())
    (ready,), (layers,) = results["ready"], results["layers"]
    assert ready["bytes"] == (TOKENS - 1) * TOKEN_BYTES and ready["page_bytes"] == 128 * TOKEN_BYTES
    # Short prompts are measured three times for each --repeat.
    for kind in ("copy", "raw", "page_copy", "page_raw", "dense", "pages", "planes", "as_many", "verified"):
        assert len(ready[kind]) == 3 and min(ready[kind]) > 0
    for mode, called in (("layers", LAYERS), ("whole", 0)):
        measured = layers["modes"][mode]
        assert [len(hooks) for hooks in measured["hooks"]] == [called] * 3
        assert all(0 < tail < total for tail, total in zip(measured["tail"], measured["total"], strict=True))
        assert min(measured["forward"]) >= LAYERS * 0.1e-3
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] == [str(TOKENS)]]
    assert len(rows) == 4, printed
    assert "with checksums (verify)" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "1"], "nothing would be pushed"),
        (["--chunk-bytes", "7"], "choose 1024 to"),
        (["--tokens", "100000000"], "choose shorter prompts"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--json", "/tmp"], "name a file in it"),
        (["--layer-ms", "-1"], "choose 0 or more milliseconds"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kv_of_another_place_is_noticed(layout: Layout, tp: int) -> None:
    """By the last of `tp` ranks of D, which holds its share of the heads."""
    capacity, share = capacity_for(TOKENS), HEADS // tp
    p, d = Memory(capacity, "P"), Memory(capacity, "D", rank=tp - 1, tp=tp)
    buffer = torch.empty(layout.nbytes(TOKENS) // tp, dtype=torch.uint8)
    span = (0, LAYERS), (0, TOKENS - 1)
    p.cache(layout).gather(buffer, *span, (HEADS - share, HEADS), [layout.table(TOKENS, capacity, "P")])
    assert len(d.wrong(layout, TOKENS)) > 10
    for wrong in (False, True):
        put = buffer.roll(2 * CELL) if wrong else buffer
        d.cache(layout).scatter(put, *span, (0, share), [layout.table(TOKENS, capacity, "D")])
        assert bool(d.wrong(layout, TOKENS)) is wrong
        d.clear(layout, TOKENS)


@pytest.mark.parametrize("tokens", [2, 40, 300])
def test_kv_of_another_place_is_noticed_in_planes(tokens: int) -> None:
    capacity = capacity_for(tokens)
    p, d = Memory(capacity, "P"), Memory(capacity, "D")
    caches, tables = (
        [make(side) for side in (p, d)]
        for make in (LATENTS.rank_cache, lambda side: LATENTS.tables(tokens, capacity, side.side))
    )
    pairs = list(zip(*(cache.groups for cache in caches), strict=True))
    for (source, target), (number, *_) in zip(pairs, LATENTS._planes, strict=True):
        span = PARTS[number].needed(tokens)
        buffer = torch.empty(source.nbytes(source.layers, *span, 1), dtype=torch.uint8)
        source.gather(buffer, (0, source.layers), span, (0, 1), tables[0])
        assert not buffer.numel() or LATENTS.wrong(d, tokens)
        target.scatter(buffer, (0, target.layers), span, (0, 1), tables[1])
    assert LATENTS.wrong(d, tokens) == []
    assert LATENTS.nbytes(tokens) == sum(
        one.nbytes(one.layers, *PARTS[number].needed(tokens), 1)
        for (one, _), (number, *_) in zip(pairs, LATENTS._planes, strict=True)
    )
    LATENTS.clear(d, tokens)
    assert LATENTS.wrong(d, tokens)


def test_a_link_may_stage_its_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TCP does: P's end has no room at times, and moves nothing unless it is polled."""
    monkeypatch.setattr("p2pkv.bench.prefill.make_factory", partial(make_factory, shared_memory=False))
    with prefill(capacity_for(TOKENS), 16 << 20, "host") as both:
        assert both.raw(24 << 20) > 0


def test_a_decode_process_that_ends_is_an_error() -> None:
    with prefill(TOKENS, 1 << 20, "host") as both:
        assert both.push_ready("dense", TOKENS).total > 0
        both.pipe.send(order="load", layout="dense", key="k", prefill="nowhere", tokens=TOKENS)
        with pytest.raises(BenchError, match="nowhere"):
            both.raw(1 << 20)
