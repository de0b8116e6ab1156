"""The benchmarks' clients: statistics, the closed loop, how a pair is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from clients import (
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


async def test_a_pair_is_asked_in_turn() -> None:
    bodies: list[dict[str, Any]] = []

    async def p(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async def d(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await _stream(request, ["{}", "{}", "[DONE]"])

    one = Asking([5, 6], "m", 2, {"X-Request-Id": "r"})
    async with server(p) as to_p, server(d) as to_d, Asker() as asker:
        taken = await asker.in_turn(to_p, to_d, one)
    assert bodies[0]["max_tokens"] == 1 and "stream" not in bodies[0]
    assert bodies[1]["max_tokens"] == 2 and bodies[1]["stream"]
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
