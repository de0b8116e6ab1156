"""What side_by_side.py does with its measurements: statistics, the closed loop, the page and the plot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from side_by_side import rounded, while_all, why
from side_by_side_load import (
    Asker,
    Asking,
    Failed,
    Taken,
    asking,
    closed_loop,
    mixed,
    paired_ratio,
    percentile,
    t_quantile,
    within,
)
from side_by_side_report import marks, plot, report, series_ratios

ABOUT = {
    "date": "2026-11-22 10:00 UTC",
    "cpu": "a CPU",
    "cores": 2,
    "model": "32 layers",
    "versions": "Python 3.11",
    "command": "python side_by_side.py",
    "minutes": 30.0,
}


# Statistics.


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("degrees", "tabled"), [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (9, 2.262), (29, 2.045)]
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, tabled: float) -> None:
    assert t_quantile(degrees) == pytest.approx(tabled, abs=0.002)


def test_a_constant_ratio_has_no_spread() -> None:
    ratio = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio.pairs == 3


def test_one_pair_has_no_interval() -> None:
    ratio = paired_ratio([3.0], [2.0])
    assert ratio.mean == pytest.approx(1.5)
    assert ratio.low is None and ratio.high is None
    assert "one pair" in str(ratio)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        base = draw.lognormal(sigma=0.5, size=10)
        ratio = paired_ratio(list(base * 1.2 * draw.lognormal(sigma=0.1, size=10)), list(base))
        assert ratio.low is not None and ratio.high is not None
        covered += ratio.low <= 1.2 <= ratio.high
    assert 360 <= covered <= 396


@pytest.mark.parametrize("pairs", [([], []), ([1.0], [1.0, 2.0])])
def test_ratios_need_pairs(pairs: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="as many pairs"):
        paired_ratio(*pairs)


def test_steps_count_only_while_all_answers_are_under_way() -> None:
    early = Taken(first=1.0, total=4.0, gaps=(1.0, 1.0, 1.0))
    late = Taken(first=2.0, total=5.0, gaps=(0.5, 1.5, 1.0))
    # From 2.0 to 4.0: the last two gaps of the first, the first two of the second.
    assert while_all([early, late]) == pytest.approx((1.0 + 1.0 + 0.5 + 1.5) / 4)
    with pytest.raises(Failed, match="longer ones"):
        while_all([Taken(1.0, 2.0, gaps=(1.0,)), Taken(3.0, 4.0, gaps=(1.0,))])


def test_floats_are_rounded_and_nothing_else() -> None:
    assert rounded({"a": [1.23456789, 2], "b": (None, "x")}) == {"a": [1.23457, 2], "b": [None, "x"]}


def test_a_server_that_did_not_start_says_what_was_raised_first(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO starting\n(Worker) ERROR OSError: no such library\nRuntimeError: engine failed\n")
    assert why("it ended.\nmore", log) == "it ended. (OSError: no such library)"
    assert why("it ended.", tmp_path / "none.log") == "it ended."


# Clients.


def test_mixed_requests_are_the_same_for_the_same_seed() -> None:
    one, same, other = (mixed(20, 1024, "m", 4, seed) for seed in (1, 1, 2))
    assert [each.prompt for each in one] == [each.prompt for each in same]
    assert [each.prompt for each in one] != [each.prompt for each in other]
    assert {len(each.prompt) for each in one} <= {64, 256, 1000}


def test_a_closed_loop_keeps_its_clients_busy_and_counts_what_failed() -> None:
    under_way, most = 0, 0

    async def ask(one: Asking) -> Taken:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1
        if len(one.prompt) == 3:
            raise Failed("the third does not end well")
        return Taken(1.0, 2.0)

    requests = [asking(length, 1024, "m", draw=random.Random(0)) for length in range(1, 9)]
    loaded = asyncio.run(closed_loop(ask, requests, 4, 30.0))
    assert most == 4
    assert len(loaded.taken) == 7
    assert loaded.failed == ["the third does not end well"]


async def test_a_request_that_hangs_is_a_sentence() -> None:
    with pytest.raises(Failed, match="not answered within 0 s"):
        await within(0.01, asyncio.Event().wait())


@asynccontextmanager
async def server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as made:
        yield str(made.make_url("")).rstrip("/")


async def _stream(request: web.Request, events: list[str]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    return response


async def test_a_pair_is_asked_in_turn_and_d_gets_what_p_said() -> None:
    bodies: list[dict[str, Any]] = []

    async def p(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"kv_transfer_params": {"where": "here"}})

    async def d(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await _stream(request, ["{}", "{}", "[DONE]"])

    one = Asking([5, 6], "m", 2, {"X-Request-Id": "r"})
    one.p_more = {"kv_transfer_params": {"do_remote_decode": True}}
    one.d_more = lambda answer: {"kv_transfer_params": answer["kv_transfer_params"]}
    async with server(p) as to_p, server(d) as to_d, Asker() as asker:
        taken = await asker.in_turn(to_p, to_d, one)
    assert bodies[0]["max_tokens"] == 1 and "stream" not in bodies[0]
    assert bodies[1]["max_tokens"] == 2 and bodies[1]["stream"]
    assert bodies[1]["kv_transfer_params"] == {"where": "here"}
    assert taken.p is not None and taken.d is not None
    assert taken.first == pytest.approx(taken.p + taken.d)
    assert len(taken.gaps) == 1


@pytest.mark.parametrize(
    ("events", "sentence"), [(["[DONE]"], "without a token"), (['{"error": "no KV"}', "[DONE]"], "no KV")]
)
async def test_an_answer_without_tokens_or_with_an_error_has_failed(events: list[str], sentence: str) -> None:
    async def p(_request: web.Request) -> web.Response:
        return web.json_response({})

    async def d(request: web.Request) -> web.StreamResponse:
        return await _stream(request, events)

    async with server(p) as to_p, server(d) as to_d, Asker() as asker:
        with pytest.raises(Failed, match=sentence):
            await asker.at_once(to_p, to_d, Asking([5], "m"))


# The page.


def timed(section: str, system: str, first: float, **more: Any) -> dict[str, Any]:
    base = {"group": "p2pkv", "section": section, "system": system, "tokens": 2000, "round": 0, "answer": 1}
    return {**base, "first": first, "total": first, "p": None, "d": None, "after": None, "gaps": [], **more}


def everything() -> dict[str, Any]:
    """A small run in which all was measured, and one system was not there."""
    p_first = {"p": 2.1, "d": 0.1, "after": 0.1}
    example = {"p": 2.6, "d": 0.4, "after": 0.4}
    records: list[dict[str, Any]] = []
    for number in range(5):
        records.append(timed("series", "plain", 2.0, round=number, gaps=[0.1, 0.1], answer=3))
        records.append(timed("series", "p2pkv", 2.205, round=number, p=2.1, d=2.205, after=0.105))
        records.append(timed("series", "p2pkv P first", 2.6, round=number, p=2.1, d=0.5, after=0.5))
        for system in ("p2pkv", "p2pkv no naps"):
            decode = {"group": "p2pkv", "section": "decode", "system": system, "step": 0.1}
            records.append({**decode, "round": number})
    for number in range(3):
        files = {"group": "files", "round": number}
        records.append(timed("lengths", "plain", 2.0, **files))
        records.append(timed("lengths", "p2pkv", 2.2 + number / 100, p=2.1, d=2.2, after=0.1, **files))
        for section in ("lengths", "legs"):
            records.append(timed(section, "p2pkv P first", 2.2, **p_first, **files))
            records.append(timed(section, "Example", 3.0, **example, **files))
    failed = {"group": "nixl", "section": "lengths", "system": "NIXL", "tokens": 2000, "round": 0}
    records.append({**failed, "failed": "not answered within 60 s"})
    for name, first in (("plain", 1.0), ("p2pkv", 0.9), ("Example", 2.0)):
        records.append(
            {"group": "files", "section": "load", "system": name, "clients": 16, "round": 0, "count": 2}
            | {"seconds": 2.0, "failed": ["it | broke"], "first": [first], "gaps": [0.05, 0.06]}
        )
    records.append(timed("small", "plain", 0.08, tokens=64, gaps=[0.04, 0.04]))
    records += [
        timed("small", name, at, tokens=64) for name, at in (("p2pkv", 0.13), ("p2pkv P first", 0.14))
    ]
    for waits, first in ((False, 0.05), (True, 0.056)):
        arrived = {"group": "p2pkv", "section": "arrivals", "system": "p2pkv", "round": 0}
        records.append({**arrived, "waits": waits, "first": [first] * 10})
    cores = {"worker": 0.1, "engine core": 0.05}
    records.append({"group": "p2pkv", "section": "idle", "system": "p2pkv", "role": "D", "cores": cores})
    link = {"group": "", "section": "links", "system": "memcpy", "MiB": 1}
    records.append({**link, "GB/s": [9.0, 10.0, 11.0]})
    return {
        "about": ABOUT,
        "titles": {name: name for name in ("plain", "p2pkv", "p2pkv P first", "Example", "NIXL")},
        "missing": {"Mooncake": "pip cannot install it: no such | package", "link nixl": "it hung"},
        "cut": ["files, lengths: 3 of 4 rounds"],
        "records": records,
    }


def test_the_page_of_a_run_says_everything() -> None:
    text = report(everything(), picture=True)
    assert "| files | Example | 3,000 (3,000 to 3,000) |" in text
    assert "| files | Example | 1.50 (1.50 to 1.50) |" in text
    assert "| Mooncake |  | 0 | 0 | 0 | - | pip cannot install it: no such / package |" in text
    assert "| NIXL | NIXL | 1 | 1 | 0 | - | not answered within 60 s |" in text
    assert "| 16 | files | p2pkv | 0.50 | 1.00 | 900 | 900 | 900 | 55 | 59 | 60 | 1: it / broke |" in text
    assert "| memcpy | 10.00 (9.00 to 11.00) |" in text
    assert "| nixl | it hung |" in text
    assert "- files, lengths: 3 of 4 rounds" in text
    assert "![" in text


def test_marks_are_held_against_what_the_issue_asks_for() -> None:
    found = everything()
    assert series_ratios(found, "p2pkv") == pytest.approx([2.205 / 2.1] * 5)
    reached = {sentence: ok for ok, sentence in marks(found)}

    def verdict(start: str) -> bool:
        (one,) = [ok for sentence, ok in reached.items() if sentence.startswith(start)]
        return one

    assert verdict("P and D at once, 2,000 tokens")
    assert not verdict("P first, 2,000 tokens")
    assert verdict("D's leg after P: median 500 ms, p90 500 ms of 5")
    assert verdict("D's leg after P, 2,000 tokens: 0.250")
    assert verdict("P and D at once, 64 tokens: 130 ms of 1 prompts, +10 ms")
    assert not verdict("P first, 64 tokens")
    assert verdict("a short prompt at a D where a request waits for KV: +6.0 ms, median of 10 against 10")
    assert verdict("D's worker and engine core take 15% of a core")
    assert verdict("a decode with 16 at once")
    assert verdict("TTFT, p2pkv / Example")
    assert verdict("p99 of TTFT, 16 clients: p2pkv / Example 0.45")


def test_a_run_that_measured_nothing_still_says_why(tmp_path: Path) -> None:
    found = {
        "about": ABOUT,
        "titles": {},
        "missing": {"p2pkv": "p2pkv-P did not serve: it ended"},
        "cut": ["everything after this: no server"],
        "records": [],
    }
    text = report(found)
    assert "p2pkv-P did not serve" in text and "everything after this" in text
    assert list(marks(found)) == []
    assert not plot(found, tmp_path / "plot.svg")
