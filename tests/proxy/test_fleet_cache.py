"""What the router keeps of all instances between two requests is what it would compute anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace
from proxy_fakes import Line, fleet, ping

from p2pkv.control.discovery import Ping, goodbye
from p2pkv_proxy.membership import registry as registry_module
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import Full, NoInstance, PrefillMode, Router, UnknownModel

LIFE, LEASE = 10.0, 30.0


class TwoRouters:
    """A few instances to which things happen, and two routers: one keeps what it can, one is always new."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.registry = Registry(LIFE, lease=LEASE)
        self.kept = Router(self.registry, room=3, decode_alone=2)
        self.now = 0.0
        self.sources: dict[Ping, Line] = {}
        pings = [
            ping(role, 10 + number, model=model, incarnation="first")
            for role in ("P", "D")
            for number, model in enumerate(["a", "a", "a", "b"])
        ]
        self.pings = {each.http_address + each.type: each for each in pings}
        for each in pings:
            self.ping(each)

    def ping(self, message: Ping) -> None:
        source = self.sources.get(message)
        if source is None or not source.open:
            source = self.sources[message] = Line()
        if (found := self.registry.observe(message, self.now, source)) is not None:
            found.healthy = True

    def step(self) -> None:
        """One thing happens."""
        key = self.dice.choice(sorted(self.pings))
        message = self.pings[key]
        instance = self.registry.of(message)
        match self.dice.randrange(11):
            case 0 | 1 | 2:
                self.ping(message)
            case 3:
                self.now += self.dice.choice([0.1, 1.0, LIFE + 0.1])
            case 4:
                self.pings[key] = replace(message, incarnation=str(self.dice.random()))
                self.ping(self.pings[key])
            case 5 if instance is not None:
                self.ping(replace(message, paused=not instance.paused))
            case 6 if instance is not None:
                self.registry.drain(instance, not instance.drained)
            case 7 if instance is not None:
                for _ in range(5):
                    instance.breaker.failed(self.now, "trial")
            case 8 if instance is not None:
                instance.breaker.sent("trial", self.now)
                instance.breaker.succeeded(self.now, "trial")
            case 9 if instance is not None:
                instance.healthy = self.dice.random() < 0.8
            case 10:
                self.sources[message].open = False
                if self.dice.random() < 0.5:
                    self.registry.observe(goodbye(message), self.now, self.sources[message])
                elif self.dice.random() < 0.5:
                    self.registry.expire(self.now)
        if instance is not None and instance.role == "D":
            places = self.dice.randrange(4) - instance.places
            for _ in range(abs(places)):
                instance.count_place(1 if places > 0 else -1, decode_alone=False)

    def able(self, router: Router, model: str | None, mode: PrefillMode) -> Any:
        try:
            prefillers, decoders = router.able(RoutingRequest(model), self.now, mode=mode)
        except (NoInstance, UnknownModel, Full) as error:
            return type(error), str(error)
        return {each.name for each in prefillers}, {each.name for each in decoders}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_is_what_is_true(seed: int) -> None:
    routers = TwoRouters(seed)
    reused = 0
    for _ in range(200):
        before = routers.kept._last
        for model in ("a", "b", "c", None):
            for mode in PrefillMode:
                anew = Router(routers.registry, room=3, decode_alone=2)
                assert routers.able(routers.kept, model, mode) == routers.able(anew, model, mode)
        reused += before is routers.kept._last
        routers.step()
    assert reused > 30, "something is kept at all"


def test_requests_compute_nothing_anew_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    (router, _), looked = fleet(*"PD" * 50, registry=Registry(LIFE, lease=LEASE)), 0
    candidates = Registry.candidates

    def counted(self: Registry) -> Any:
        nonlocal looked
        looked += 1
        return candidates(self)

    monkeypatch.setattr(registry_module.Registry, "candidates", counted)
    for turn in range(100):
        choice = router.choose(RoutingRequest("m"), turn / 100)
        assert choice.prefill is not None
        choice.decode.count_place(1, decode_alone=False)
    assert looked <= 3


@pytest.mark.parametrize("more", [{}, {"model": "m"}])
def test_names_that_are_unknown_make_no_entries(more: dict[str, str]) -> None:
    """One may be that of an adapter that was loaded since."""
    router, _ = fleet(("P", more), ("D", more))
    router.able(RoutingRequest(), 0.0, mode=PrefillMode.WANTED)
    assert router._last is not None
    known = dict(router._last._fleets)
    for number in range(100):
        router.able(RoutingRequest(f"unknown {number}"), 0.0, mode=PrefillMode.WANTED)
    assert router._last._fleets == known
