"""A herd of requests: who is served, who waits, who is turned away, and what of it reaches an instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web
from proxy_behaviours import Seen, after, answer_json
from proxy_fakes import Deployment, FakeInstance, deployed, quiet

from p2pkv_proxy.limits import Limits
from support.waiting import eventually

NARROW = Limits(max_requests=1, max_waiting=3, max_wait=30.0, max_held=10_000, body_seconds=0.3)


@pytest.fixture
async def narrow() -> AsyncIterator[Deployment]:
    """One P, and one D that takes one request at a time; three may wait."""
    async with deployed("concurrent", 1, 1, limits=NARROW) as deployment:
        yield deployment


@contextmanager
def slow(instance: FakeInstance) -> Iterator[None]:
    """Its answers wait until the end of the block."""
    release = asyncio.Event()
    instance.behaviour = after(release, answer_json)
    yield
    release.set()


async def with_one_waiting(deployment: Deployment) -> list[asyncio.Task[int]]:
    """The first request is at D, which is slow, and the second one waits."""
    asked = [ask(deployment, "first")]
    await eventually(lambda: len(deployment.d.requests) == 1)
    asked.append(ask(deployment, "second"))
    await eventually(lambda: deployment.proxy.admission.waiting == 1)
    return asked


def ask(deployment: Deployment, prompt: str = "hi", model: str = "tiny") -> asyncio.Task[int]:
    async def status() -> int:
        async with await deployment.post({"model": model, "prompt": prompt}) as response:
            await response.read()
            return response.status

    return asyncio.create_task(status())


def prompts(instance: FakeInstance) -> list[str]:
    return [seen.body["prompt"] for seen in instance.requests]


async def test_beyond_the_queue_there_is_a_503_that_says_when_to_come_again(narrow: Deployment) -> None:
    with slow(narrow.d):
        asked = [ask(narrow) for _ in range(4)]
        await eventually(lambda: narrow.proxy.admission.waiting == 3)
        response = await narrow.post()
        assert response.status == 503
        assert int(response.headers["Retry-After"]) in range(3, 7)
        error = (await response.json())["error"]
        assert error["type"] == "service_unavailable_error"
        assert "as many as may are waiting" in error["message"]
    assert await asyncio.gather(*asked) == [200] * 4
    assert narrow.proxy.counters.refused_full == 1
    assert len(narrow.d.requests) == 4


async def test_who_waits_too_long_gets_a_503() -> None:
    limits = Limits(max_requests=1, max_wait=0.2)
    async with deployed("concurrent", 1, 1, limits=limits) as deployment:
        with slow(deployment.d):
            first = ask(deployment)
            await eventually(lambda: len(deployment.d.requests) == 1)
            assert "within 0.2 seconds" in await deployment.refusal(503)
            assert deployment.proxy.counters.refused_late == 1
        assert await first == 200
        assert len(deployment.d.requests) == 1


async def test_a_client_that_leaves_in_the_queue_is_out_and_reaches_nobody(narrow: Deployment) -> None:
    with slow(narrow.d):
        first, leaves = await with_one_waiting(narrow)
        stays = ask(narrow, "stays")
        await eventually(lambda: narrow.proxy.admission.waiting == 2)
        leaves.cancel()
        await eventually(lambda: narrow.proxy.admission.waiting == 1)
        assert narrow.proxy.counters.left_waiting == 1
    assert await asyncio.gather(first, stays) == [200, 200]
    assert prompts(narrow.d) == ["first", "stays"]
    assert sorted(prompts(narrow.p)) == ["first", "stays"]


async def test_who_waits_goes_on_waiting_while_there_is_no_instance(narrow: Deployment) -> None:
    with slow(narrow.d):
        first, second = await with_one_waiting(narrow)
        narrow.pingers[narrow.d.http_address].stop()
        await narrow.ready(prefill=1, decode=0)
    assert await first == 200
    assert narrow.proxy.admission.waiting == 1
    newcomer = await narrow.add("D")
    assert await second == 200
    assert prompts(newcomer) == ["second"]


async def test_bodies_are_held_within_a_bound(narrow: Deployment) -> None:
    with slow(narrow.d):
        asked = [ask(narrow, "x" * 4000) for _ in range(2)]
        await eventually(lambda: narrow.proxy.admission.waiting == 1)
        assert 8000 < narrow.proxy.intake.held < 10_000
        assert "holds as many requests as it can" in await narrow.refusal(503, {"prompt": "x" * 4000})
        assert narrow.proxy.counters.refused_full == 1
    assert await asyncio.gather(*asked) == [200, 200]
    await quiet(narrow)
    assert narrow.proxy.intake.held == 0


async def test_of_a_herd_everybody_gets_one_answer_and_d_never_more_than_it_takes() -> None:
    limits = Limits(max_requests=4, max_waiting=50, max_wait=30.0)
    most = 0

    async def busy(request: web.Request, seen: Seen) -> web.StreamResponse:
        nonlocal most
        under_way = sum(not each.answered and not each.aborted for each in deployment.d.requests)
        most = max(most, under_way)
        await asyncio.sleep(0)
        return await answer_json(request, seen)

    async with deployed("concurrent", 1, 1, limits=limits) as deployment:
        deployment.d.behaviour = busy
        statuses = await asyncio.gather(*(ask(deployment) for _ in range(200)))
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) == len(deployment.d.requests) == deployment.proxy.counters.admitted >= 54
        assert statuses.count(503) == deployment.proxy.counters.refused_full
        assert 1 <= most <= 4


async def test_a_body_as_deep_as_one_may_be_harms_nobody_else(narrow: Deployment) -> None:
    """Its tokens are counted where the stack is deeper than where it was read, and by another's turn."""

    def nested(depth: int) -> bytes:
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        return b'{"model": "tiny", "prompt": "x", "tools": [' + deep + b"]}"

    async def post(body: bytes) -> int:
        async with narrow.client.post(f"{narrow.url}/v1/completions", data=body) as response:
            await response.read()
            return response.status

    readable, refused = 1, 1_400  # which just fits what may be held
    while refused - readable > 1:
        middle = (readable + refused) // 2
        if await post(nested(middle)) == 400:
            refused = middle
        else:
            readable = middle
    before = len(narrow.d.requests)
    with slow(narrow.d):
        first = ask(narrow)
        await eventually(lambda: len(narrow.d.requests) == before + 1)
        deep = asyncio.create_task(post(nested(readable)))
        last = ask(narrow)
        await eventually(lambda: narrow.proxy.admission.waiting == 2)
    assert await first == await last == 200
    assert await deep in (200, 400, 500)
    await narrow.newcomer("D")
