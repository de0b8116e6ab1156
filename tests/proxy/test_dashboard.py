"""The dashboard: what is served, and what a real browser makes of it while requests pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from proxy_behaviours import dies, streams, streams_at_once
from proxy_browser import Browser, browsing, found
from proxy_fakes import Deployment, all_do
from proxy_process import Served, served

CHROMIUM = found()
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install one, or name it in P2PKV_CHROMIUM"
)
NASTY = "<img src=x onerror=alert(1)>"


@dataclass
class Watched:
    """A proxy, and a browser on its page."""

    proxy: Served
    browser: Browser

    async def shows(self, name: str) -> str:
        """The text of one element, by its id."""
        return str(await self.browser.value(f"document.getElementById('{name}').textContent"))

    async def until(self, name: str, pattern: str) -> str:
        text = f"document.getElementById('{name}').textContent"
        return str(await self.browser.waits(f"({text}.match(/{pattern}/) || [])[0]"))


@pytest.fixture(params=[()])
async def watched(request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    """With one P and two D; the fixture's parameter is more arguments for the proxy."""
    assert CHROMIUM is not None
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
async def test_a_model_name_is_text_whatever_it_looks_like(watched: Watched) -> None:
    await watched.until("decode", "onerror")
    assert NASTY in await watched.shows("decode")
    assert await watched.browser.value("document.querySelectorAll('main img').length") == 0
    assert watched.browser.complaints == []


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
