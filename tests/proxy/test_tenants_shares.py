"""What a tenant notices of another that sends ten times its share: the proxy's own queue and limits in
virtual time, in front of a P and a D that are only modelled. By HTTP: docs/decisions/figures.md."""

from __future__ import annotations

import asyncio
import random
import statistics
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from fleet_engines import COSTS, Decode, Prefill, VirtualLoop
from proxy_fakes import fleet, prompt_of

from p2pkv_proxy.admission import Admission
from p2pkv_proxy.errors import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policy import RoutingRequest
from p2pkv_proxy.tenants import Tenant, Tenants, TenantSettings

PROMPT = prompt_of({"prompt": [7] * 1000})
ANSWER, SHARE, SECONDS = 24, 8000, 120.0
"""Tokens of an answer; prompt tokens a second; seconds of a run, which are virtual."""


@dataclass
class Pool:
    """A P and a D behind a proxy that has no HTTP."""

    loop: VirtualLoop
    settings: TenantSettings | None
    first: list[float] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        router, _ = fleet("P", "D", registry=Registry(float("inf")), room=1024)
        self.admission = Admission(router, Limits(), RequestCounters(), self.loop.time)
        self.prefill, self.decode = Prefill(self.loop), Decode(self.loop, {})
        every = {name: self.settings or TenantSettings() for name in ("modest", "greedy")}
        self.tenants = Tenants(every, clock=self.loop.time).by_name

    async def serve(self, of: Tenant) -> float:
        """Seconds until the first token; raises ProxyError if it is turned away."""
        began = self.loop.time()
        with of.enter():
            of.spend(PROMPT.tokens)
            wants = RoutingRequest(None, PROMPT, "", None if self.settings is None else of, ANSWER)
            async with self.admission.place(wants, paired=True) as place:
                place.sent()
                await self.prefill.compute((), PROMPT.tokens)
                await asyncio.sleep(COSTS.exposed + COSTS.step)
                first = self.loop.time() - began
                await self.decode.generate(ANSWER, PROMPT.tokens, lambda _: None)
                return first

    async def modest(self, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.expovariate(1 / 0.3))
            with suppress(ProxyError):  # where there are no tenants, the queue may be full
                self.first.append(await self.serve(self.tenants["modest"]))

    async def greedy(self, dice: random.Random) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(dice.expovariate(10 * SHARE / PROMPT.tokens))
                tasks.create_task(self.try_one())

    async def try_one(self) -> None:
        try:
            await self.serve(self.tenants["greedy"])
        except ProxyError:
            self.refused += 1


def run(settings: TenantSettings | None, *, both: bool) -> tuple[int, float, int]:
    """Requests of `modest` that were answered, its median first token, and how many of the other were not."""
    loop = VirtualLoop()
    pool = Pool(loop, settings)

    async def all_of_them() -> None:
        clients = [pool.modest(random.Random(client)) for client in range(4)]
        if both:
            clients.append(pool.greedy(random.Random(99)))
        tasks = [asyncio.create_task(each) for each in clients]
        done, _ = await asyncio.wait(tasks, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not done, [each.exception() for each in done]

    try:
        loop.run_until_complete(all_of_them())
    finally:
        loop.close()
    assert (pool.admission.under_way, pool.admission.waiting) == (0, 0)
    assert [(each.under_way, each.waiting) for each in pool.tenants.values()] == [(0, 0)] * 3
    return len(pool.first), statistics.median(pool.first), pool.refused


@pytest.fixture(scope="module")
def alone() -> tuple[int, float, int]:
    return run(TenantSettings(prompt_tokens=SHARE), both=False)


def test_with_limits_who_sends_ten_times_its_share_changes_little_for_another(
    alone: tuple[int, float, int],
) -> None:
    requests, first, refused = run(TenantSettings(prompt_tokens=SHARE), both=True)
    assert 0.9 <= requests / alone[0] <= 1.15 and 0.9 <= first / alone[1] <= 1.15
    assert refused > 8 * SHARE / PROMPT.tokens * SECONDS, "the other gets its share, and 429 for the rest"


def test_without_tenants_it_does(alone: tuple[int, float, int]) -> None:
    requests, first, _ = run(None, both=True)
    assert requests < 0.5 * alone[0] and first > 5 * alone[1]
