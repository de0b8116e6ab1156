"""Instances as an operator sees and drains them, over HTTP and on the dashboard."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from proxy_behaviours import after, dies, never, streams, streams_at_once
from proxy_browser import Browser, browsing, found
from proxy_fakes import Deployment, FakeInstance, all_do, deployed, error_of, join, ping, quiet
from proxy_process import Served, served

from p2pkv_proxy.access import Access
from p2pkv_proxy.membership.registry import Registry
from support.waiting import eventually

TOKEN = "a token of the tests"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def guarded() -> AsyncIterator[Deployment]:
    """Two P and two D behind a proxy with an admin token."""
    async with deployed("concurrent", prefill=2, decode=2, guard=Access(TOKEN)) as deployment:
        yield deployment


async def drained(deployment: Deployment, instance: FakeInstance) -> None:
    assert (await deployment.order(instance, "drain", SHOWN)).status == 200


async def states(deployment: Deployment) -> dict[str, str]:
    status, page = await deployment.get("/instances")
    assert status == 200
    return {each["address"]: each["state"] for each in page["instances"]}


async def test_the_list_says_who_is_there_and_no_zmq_address(guarded: Deployment) -> None:
    status, listing = await guarded.get("/instances")
    assert status == 200
    p = next(each for each in listing["instances"] if each["address"] == guarded.p.http_address)
    assert (p["role"], p["state"], p["models"], p["running"], p["rank"]) == (
        "prefill",
        "ready",
        ["tiny"],
        0,
        0,
    )
    everyone = guarded.prefills + guarded.decodes
    assert {each["address"] for each in listing["instances"]} == {each.http_address for each in everyone}
    for path in ("/instances", "/status", "/metrics"):
        text = await guarded.text(path)
        assert everyone[0].http_address in text or path == "/metrics"
        assert not [each for each in everyone if each.zmq_address in text]


@pytest.mark.parametrize("role", ["P", "D"])
async def test_a_drained_instance_ends_what_it_has_and_gets_no_more(guarded: Deployment, role: str) -> None:
    release = asyncio.Event()
    all_do(guarded.decodes, streams(release))
    answers = [await guarded.begin() for _ in range(4)]
    leaver, stayer = guarded.prefills if role == "P" else guarded.decodes
    assert len(leaver.requests) == len(stayer.requests) == 2
    await drained(guarded, leaver)
    if role == "D":
        assert (await states(guarded))[leaver.http_address] == "draining"
    answers += [await guarded.post(stream=True) for _ in range(4)]
    assert (len(leaver.requests), len(stayer.requests)) == (2, 6)
    release.set()
    for answer in answers:
        assert b"second" in await answer.content.read()
    await quiet(guarded)
    assert (await states(guarded))[leaver.http_address] == "drained"
    assert not any(seen.aborted for seen in leaver.requests)

    assert (await guarded.order(leaver, "resume", SHOWN)).status == 200
    assert (await states(guarded))[leaver.http_address] == "ready"
    await guarded.serves(2)
    assert len(leaver.requests) == 3


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "two"])
async def test_a_p_counts_as_drained_when_d_has_its_kv_and_not_before(prompt: str | list[str]) -> None:
    """Of several prompts that is at the end of the stream."""
    async with deployed("concurrent", prefill=1, decode=1, guard=Access(TOKEN)) as deployment:
        first, rest = asyncio.Event(), asyncio.Event()
        deployment.d.behaviour = after(first, streams(rest))
        asking = asyncio.create_task(deployment.post(stream=True, prompt=prompt))
        await eventually(lambda: bool(deployment.p.requests) and deployment.p.requests[0].answered)
        (p,) = deployment.registry.known("P")
        await eventually(lambda: p.load == 0)
        await drained(deployment, deployment.p)
        assert (await states(deployment))[deployment.p.http_address] == "draining"
        first.set()
        answer = await asking
        await answer.content.readuntil(b"\n\n")
        has_all = "drained" if prompt == "x" else "draining"
        assert (await states(deployment))[deployment.p.http_address] == has_all
        rest.set()
        await answer.content.read()
        await quiet(deployment)
        assert (await states(deployment))[deployment.p.http_address] == "drained"


async def test_when_the_last_is_drained_requests_are_told_so_and_resume_lets_them_in() -> None:
    async with deployed("concurrent", prefill=1, decode=1, guard=Access(TOKEN)) as deployment:
        await drained(deployment, deployment.d)
        assert "of 1 registered, 1 drained" in await deployment.refusal(503)
        assert (await deployment.get("/ready"))[0] == 503
        await deployment.order(deployment.d, "resume", SHOWN)
        assert (await deployment.post()).status == 200


async def test_who_waits_for_a_place_gets_that_of_a_resumed_instance() -> None:
    async with deployed("concurrent", prefill=1, decode=2, max_requests=1, guard=Access(TOKEN)) as deployment:
        first, second = deployment.decodes
        first.behaviour = never
        await drained(deployment, second)
        stuck = asyncio.create_task(deployment.post())
        await eventually(lambda: deployment.proxy.admission.under_way == 1)
        waiting = asyncio.create_task(deployment.post())
        await eventually(lambda: deployment.proxy.admission.waiting == 1)
        await deployment.order(second, "resume", SHOWN)
        assert (await waiting).status == 200
        stuck.cancel()


async def test_a_change_takes_the_token(guarded: Deployment, concurrent: Deployment) -> None:
    for shown in (None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer"):
        answer = await guarded.order(guarded.p, "drain", {"Authorization": shown} if shown else {})
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await error_of(answer))["type"] == "authentication_error"
    assert set((await states(guarded)).values()) == {"ready"}
    for headers in ({}, {"Authorization": "Bearer "}, SHOWN):  # of a proxy that has none
        answer = await concurrent.order(concurrent.p, "drain", headers)
        assert answer.status == 403
        assert "--admin-token" in (await error_of(answer))["message"]
    assert set((await states(concurrent)).values()) == {"ready"}


async def test_a_private_proxy_shows_instances_to_operators_only() -> None:
    guard = Access(TOKEN, private=True)
    async with deployed("concurrent", prefill=1, decode=1, guard=guard) as deployment:
        for path in ("/instances", "/status", "/metrics"):
            status, error = await deployment.get(path)
            assert status == 401 and "admin token" in error["error"]["message"]
            async with deployment.client.get(deployment.url + path, headers=SHOWN) as response:
                assert response.status == 200
        for path in ("/health", "/ready"):
            assert (await deployment.get(path))[0] == 200
        assert (await deployment.post()).status == 200


async def test_a_mistake_is_explained(guarded: Deployment) -> None:
    wrong = f"{guarded.d.http_address}/drain?move_after=soon"
    for order, status in (("127.0.0.1:1/drain", 404), ("nonsense/drain", 400), (wrong, 400)):
        answer = await guarded.client.post(f"{guarded.url}/instances/{order}", headers=SHOWN)
        assert answer.status == status
        said = (await error_of(answer))["message"]
    assert "move_after is 'soon'" in said and not any(each.drained for each in guarded.everyone())
    async with guarded.client.get(f"{guarded.url}/instances/127.0.0.1:1/drain") as answer:
        assert answer.status == 405
        await error_of(answer)


async def test_ready_says_whether_and_what_it_takes() -> None:
    for share, needs, alone in (
        (0.25, "a decode instance", 200),
        (0.0, "a prefill and a decode instance", 503),
    ):
        async with deployed("concurrent", alone_share=share) as deployment:
            status, answer = await deployment.get("/ready")
            assert (status, answer["ready"], answer["needs"]) == (503, False, needs)
            assert len(answer["missing"]) == 2
            await deployment.newcomer("D")
            assert (await deployment.get("/ready"))[0] == alone
            await deployment.newcomer("P")
            assert await deployment.get("/ready") == (
                200,
                {"ready": True, "needs": needs, "prefill": 1, "decode": 1, "missing": []},
            )


async def test_a_restart_ends_a_drain_and_a_lost_connection_does_not() -> None:
    registry = Registry(life=1.0)
    first = ping("D", incarnation="first")
    instance = join(registry, first)
    registry.drain(instance, True)
    assert registry.routable("D", 0.5) == []
    assert registry.expire(5.0) == [instance]
    assert join(registry, first, 6.0).drained
    restarted = join(registry, ping("D", incarnation="second"), 8.0)
    assert not restarted.drained
    assert registry.routable("D", 8.0) == [restarted]
    registry.drain(restarted, True)
    registry.drain(restarted, False)
    assert registry.routable("D", 8.0) == [restarted]


async def test_the_status_says_who_pushes_to_whom(guarded: Deployment) -> None:
    release = asyncio.Event()
    all_do(guarded.decodes, streams(release))
    answer = await guarded.begin()
    _, now = await guarded.get("/status")
    (pair,) = now["pairs"]
    p = next(each for each in guarded.prefills if each.requests)
    d = next(each for each in guarded.decodes if each.requests)
    assert pair == {"prefill": p.http_address, "decode": d.http_address, "total": 1, "running": 1}
    assert (now["status"], now["can_drain"], now["gauges"]["under_way"]) == ("ok", True, 1)
    assert now["first_token_seconds"]["p50"] > 0
    release.set()
    await answer.content.read()
    await quiet(guarded)
    _, now = await guarded.get("/status")
    assert now["pairs"][0]["running"] == 0
    assert now["outcomes"]["answered"] == 1
    assert now["stream_events"] == 2
    assert all(len(row) == len(now["history_fields"]) for row in now["history"])


# The dashboard: what is served, and what a real browser makes of it while requests pass.


CHROMIUM = found()
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install one, or name it in P2PKV_CHROMIUM"
)
NASTY = "<img src=x onerror=alert(1)>"


@dataclass
class Watched:
    proxy: Served
    browser: Browser

    async def shows(self, name: str) -> str:
        return str(await self.browser.value(f"document.getElementById('{name}').textContent"))

    async def until(self, name: str, pattern: str) -> str:
        text = f"document.getElementById('{name}').textContent"
        return str(await self.browser.waits(f"({text}.match(/{pattern}/) || [])[0]"))


@pytest.fixture(params=[()])
async def watched(request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    """With one P and two D; the fixture's parameter is more arguments for the proxy."""
    async with served(*request.param) as proxy, browsing(CHROMIUM) as browser:
        last = await proxy.add("D", models=("tiny", NASTY))
        await proxy.says(f"{last.http_address} is ready")
        await browser.open(proxy.url)
        yield Watched(proxy, browser)


async def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing_but_its_own(lonely: Deployment) -> None:
    async with lonely.client.get(f"{lonely.url}/") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        policy, page = response.headers["Content-Security-Policy"], await response.text()
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert len(re.findall(r"'sha256-[^']{44}'", policy)) == 2
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|\sstyle=|javascript:|innerHTML|insertAdjacentHTML", page)


@in_a_browser
async def test_numbers_move_while_requests_pass(watched: Watched) -> None:
    await watched.until("state", "serving")
    assert await watched.shows("counts") == "1 prefill, 2 decode"
    assert await watched.shows("answered") == "0"
    release = asyncio.Event()
    all_do(watched.proxy.decodes, streams(release))
    answers = [await watched.proxy.post(stream=True) for _ in range(3)]
    await watched.until("running", "^3$")
    p, d = watched.proxy.prefills[0].http_address, watched.proxy.decodes[0].http_address
    assert p in await watched.shows("prefill") and d in await watched.shows("decode")
    assert await watched.browser.waits("document.querySelectorAll('#flow path.busy').length === 2")
    assert p in await watched.shows("flow") and d in await watched.shows("flow")
    release.set()
    for answer in answers:
        assert b"second" in await answer.content.read()
    await watched.until("answered", "^3$")
    await watched.until("running", "^0$")
    assert re.fullmatch(r"[\d.,]+ (ms|s)", await watched.shows("ttft"))
    assert await watched.until("requests", r"\d")
    # A model's name is text, whatever it looks like.
    await watched.until("decode", "onerror")
    assert NASTY in await watched.shows("decode")
    assert await watched.browser.value("document.querySelectorAll('main img').length") == 0
    assert watched.browser.complaints == []


@in_a_browser
@pytest.mark.parametrize("watched", [("--placement", "auto")], indirect=True)
async def test_the_last_requests_placed_by_cost_are_explained(watched: Watched) -> None:
    await watched.until("state", "serving")
    all_do(watched.proxy.decodes, streams_at_once)
    await watched.proxy.serves(2, stream=True)
    await watched.until("placed", r"Placed by cost: \d at one instance, \d at a pair; .*error of [\d,]+ %\.$")
    shown = await watched.shows("placed-last")
    assert len(re.findall(r"cost [\d.]+, .*?first token [\d.]+ m?s, predicted [\d.]+ m?s", shown)) == 2
    assert watched.browser.complaints == []


@in_a_browser
async def test_failures_and_missing_instances_are_said(watched: Watched) -> None:
    await watched.until("state", "serving")
    all_do(watched.proxy.decodes, dies)
    assert (await watched.proxy.post()).status == 502
    await watched.until("failures", "^1$")
    for instance in watched.proxy.decodes:
        instance.health = 503
        await instance.stop()
    await watched.proxy.post()
    await watched.until("state", "unavailable")
    assert "No decode instance is ready" in await watched.shows("missing")
    watched.proxy.command.process.kill()
    await watched.until("state", "no answer")
    assert "last answer" in await watched.shows("missing")


@in_a_browser
@pytest.mark.parametrize("watched", [("--admin-token", "secret", "--private")], indirect=True)
async def test_an_operator_drains_an_instance_from_the_page(watched: Watched) -> None:
    browser = watched.browser
    await browser.waits("document.getElementById('ask').open")
    await browser.value("document.getElementById('token').value = 'secret'")
    await browser.value("document.getElementById('ask-yes').click()")
    await watched.until("state", "serving")
    await browser.value("window.confirm = () => true")
    address = watched.proxy.decodes[0].http_address
    row = f"[...document.querySelectorAll('#decode tr')].find(row => row.textContent.includes('{address}'))"
    await browser.value(f"{row}.querySelector('button').click()")
    await browser.waits(f"{row}.textContent.includes('drained')")
    await watched.serves(4)
    assert watched.proxy.decodes[0].requests == [] and len(watched.proxy.decodes[1].requests) == 4
    await browser.value(f"{row}.querySelector('button').click()")
    await browser.waits(f"{row}.textContent.includes('ready')")


@in_a_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (320, 600)])
async def test_it_fits_a_laptop_and_a_phone(watched: Watched, width: int, height: int) -> None:
    await watched.browser.size(width, height)
    assert (await watched.proxy.post()).status == 200
    await watched.until("answered", "^1$")
    for scheme in ("light", "dark"):
        await watched.browser.scheme(scheme)
        across = await watched.browser.value("document.documentElement.scrollWidth")
        assert across <= width, "nothing has to be scrolled sideways"
        everything = "[...document.querySelectorAll('main *')]"
        wide = f"{everything}.filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        assert await watched.browser.value(f"{wide}.length") == 0
    dark = await watched.browser.value("getComputedStyle(document.body).backgroundColor")
    await watched.browser.scheme("light")
    assert dark != await watched.browser.value("getComputedStyle(document.body).backgroundColor")
