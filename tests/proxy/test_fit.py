"""Only a P and a D that fit make a pair; and the proxy says who fits nobody, and why."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_fakes import deployed, fleet, join, ping

from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance, differences
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import Choice, Full, NoInstance, PrefillMode, Router

OLD = "protocol=1, weights=aa, link=host"
NEW = "protocol=2, weights=aa, link=host"
OTHER_LINK = "protocol=1, weights=aa, link=nccl 2.27.3"


def pools(p: list[str], d: list[str], **options: Any) -> tuple[Router, list[Instance], list[Instance]]:
    """A router, and a P and a D for each of these fingerprints."""
    roles = [(role, {"fit": fit, "model": "m"}) for role, fits in (("P", p), ("D", d)) for fit in fits]
    router, pool = fleet(*roles, **options)
    return router, pool[: len(p)], pool[len(p) :]


def pair(choice: Choice) -> tuple[str, str]:
    assert choice.prefill is not None
    return choice.prefill.ping.fit, choice.decode.ping.fit


def test_of_several_fingerprints_only_equal_ones_make_a_pair() -> None:
    router, *_ = pools([OLD, NEW, OLD], [NEW, OLD, NEW, NEW])
    pairs = {pair(router.choose(RoutingRequest("m"), 0.0)) for _ in range(20)}
    assert pairs == {(OLD, OLD), (NEW, NEW)}


def test_a_p_is_chosen_among_those_that_fit_a_d_with_room() -> None:
    router, _, (old, new) = pools([OLD, NEW], [OLD, NEW], room=1)
    old.count_place(1, decode_alone=False)
    assert [pair(router.choose(RoutingRequest("m"), 0.0)) for _ in range(4)] == [(NEW, NEW)] * 4
    new.count_place(1, decode_alone=False)
    with pytest.raises(Full):
        router.choose(RoutingRequest("m"), 0.0)


def test_a_retry_too_goes_to_a_pair_that_fits() -> None:
    router, (old, new), _ = pools([OLD, NEW], [OLD, NEW])
    assert pair(router.choose(RoutingRequest("m"), 0.0, mode=PrefillMode.NEEDED, avoid=frozenset({old}))) == (
        NEW,
        NEW,
    )
    with pytest.raises(NoInstance):
        router.choose(RoutingRequest("m"), 0.0, mode=PrefillMode.NEEDED, avoid=frozenset({old, new}))


@pytest.mark.parametrize("alone", [0, 1])
def test_where_no_p_fits_d_alone_is_chosen_or_the_error_says_why(alone: int) -> None:
    router, *_ = pools([OLD, OLD], [OTHER_LINK], decode_alone=alone)
    if alone:
        choice = router.choose(RoutingRequest("m"), 0.0)
        assert (choice.prefill, choice.prefill_unavailable) == (None, True)
    else:
        with pytest.raises(NoInstance, match=r"fits a decode instance for this model: they differ in link\."):
            router.choose(RoutingRequest("m"), 0.0)


@pytest.mark.parametrize(
    ("p", "d", "fits"),
    [
        ({}, {}, True),
        ({}, {"protocol": 1, "fit": OLD}, True),
        ({}, {"protocol": 2, "fit": NEW}, False),
        ({"protocol": 2, "fit": NEW}, {}, False),
        ({"version": 0}, {"version": 1}, True),
        ({"protocol": 2, "fit": NEW}, {"protocol": 2, "fit": NEW}, True),
    ],
)
def test_a_ping_that_does_not_say_is_one_of_protocol_1(p: Any, d: Any, fits: bool) -> None:
    registry = Registry()
    prefill, decode = join(registry, ping("P", 1, **p)), join(registry, ping("D", 2, **d))
    assert prefill.matches(decode) == decode.matches(prefill) == fits
    if not fits:
        assert registry.misfits() == {prefill: ("protocol",), decode: ("protocol",)}


def test_the_words_are_those_of_the_nearest_and_another_models_are_no_misfits() -> None:
    registry = Registry()
    _, (p,), _ = pools([OLD], [NEW.replace("aa", "bb"), OTHER_LINK], registry=registry)
    assert registry.misfits()[p] == ("link",)
    registry = Registry()
    join(registry, ping("P", 1, fit=OLD, model="a"))
    join(registry, ping("D", 2, fit=NEW, model="b"))
    assert registry.misfits() == {}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("protocol=1, weights=bb, link=nccl", ("weights", "link")),
        ("protocol=1, weights=aa", ("link",)),
        ("link=host, weights=aa, protocol=1", ("the order of words",)),
        ("nonsense", ("protocol", "weights", "link", "nonsense")),
    ],
)
def test_what_two_pings_differ_in(other: str, words: tuple[str, ...]) -> None:
    instances = [Instance(ping(fit=fit), 0.0) for fit in (OLD, other)]
    assert differences(*instances) == words


def test_a_large_fleet_that_does_not_fit_is_looked_at_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, registry = 0, Registry()
    router, *_ = pools([OLD] * 30, [NEW] * 15 + [OTHER_LINK] * 15, registry=registry)

    def counted(one: Instance, other: Instance) -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        return differences(one, other)

    for module in ("membership.registry", "routing"):
        monkeypatch.setattr(f"p2pkv_proxy.{module}.differences", counted)
    with pytest.raises(NoInstance):
        router.choose(RoutingRequest("m"), 0.0)
    assert len(registry.misfits()) == 60
    assert looks <= 8


def test_who_fits_nobody_is_said_once_and_again_when_that_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    registry = Registry()
    router, *_ = pools([OLD, NEW], [OLD], registry=registry)
    registry.expire(0.0)
    registry.expire(1.0)
    said = [each.getMessage() for each in caplog.records if "fits no" in each.getMessage()]
    assert said == [
        "prefill instance 10.0.0.1:11 fits no decode instance, so it gets no requests: the nearest differs "
        f"in protocol; use the same version of p2pkv; this one needs: {NEW}"
    ]
    assert router.missing(0.0) == ["1 prefill instance fits no decode instance: they differ in protocol."]
    join(registry, ping("D", 60, fit=NEW, model="m"))
    registry.expire(2.0)
    assert "prefill instance 10.0.0.1:11 now has an instance that it fits" in caplog.messages
    assert router.missing(0.0) == []


# Over real pings.


async def test_the_client_and_health_are_told_that_nobody_fits() -> None:
    async with deployed("concurrent", limits=Limits(alone_share=0)) as deployment:
        await deployment.add("P", fit=OLD)
        await deployment.add("D", fit=OTHER_LINK)
        await deployment.ready(prefill=1, decode=1)
        assert await deployment.refusal(503) == (
            "No prefill instance that is ready fits a decode instance for this model: they differ in link. "
            "Try again in a few seconds."
        )
        status, report = await deployment.get("/health")
        assert (status, report["status"]) == (503, "unavailable")
        assert report["missing"] == [
            "1 decode instance fits no prefill instance: they differ in link.",
            "1 prefill instance fits no decode instance: they differ in link.",
        ]
        assert deployment.p.requests == deployment.d.requests == []
