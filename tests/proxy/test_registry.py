"""Who exists, under which address, who fits whom, who is chosen, and which P's are named to a D."""

import logging
import random
import re
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import proxy_fakes
import pytest
from proxy_fakes import Deployment, Line, deployed, fail, fleet, join, ping, pinging, prompt_of

from p2pkv.control.discovery import PING_INTERVAL, Ping, Workload, decode_partners, encode_ping, goodbye
from p2pkv.control.security import Members
from p2pkv.pairing import Address, find_pair
from p2pkv_proxy.membership.instance import LIFE, Instance, ListedSource, Role, differences, least_busy
from p2pkv_proxy.membership.partner_lists import REPEAT_SECONDS, RING_SECONDS, LinkedPairs, PartnerLists
from p2pkv_proxy.membership.registry import LEASE, Registry
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import Choice, Full, NoInstance, PrefillMode, Router
from support.hostile import dealer
from support.waiting import eventually


def test_life_is_more_than_three_intervals_and_each_ping_renews_it() -> None:
    late = 3 * PING_INTERVAL + 0.5
    assert late < LIFE
    registry = Registry()
    instance = join(registry, ping(), 91.0)
    registry.observe(ping(), 100.0)
    registry.observe(ping(), 99.0)  # a late one does not shorten it
    assert registry.expire(100.0 + late) == []
    assert registry.routable("P", 100.0 + late) == [instance]
    later = join(registry, ping(port=2), 105.0)
    assert registry.routable("P", 100.0 + LIFE + 0.1) == [later]
    assert registry.expire(100.0 + LIFE + 0.1) == [instance]
    assert registry.known("P") == [later]


@pytest.mark.parametrize("change", [{"incarnation": "second"}, {"model": "other"}, {"tp_size": 2}])
def test_a_restart_is_a_newcomer_which_a_goodbye_of_the_former_leaves(change: dict[str, Any]) -> None:
    registry, first = Registry(), ping(incarnation="first")
    assert registry.observe(goodbye(first), 0.0) is None and registry.known("P") == [], "a stranger's"
    old = join(registry, first, 0.0)
    new = registry.observe(msgspec.structs.replace(first, **change), 1.0)
    assert new is not None and new is not old
    assert registry.routable("P", 1.0) == []
    registry.observe(goodbye(first), 2.0)
    assert registry.known("P") == [new]


def test_the_registry_is_bounded_and_what_it_refuses_is_said_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, line = Registry(capacity=2), Line()
    holder, _ = (join(registry, ping(port=port), 0.0, line) for port in (1, 2))
    for second in range(100):
        assert registry.observe(ping(port=3 + second), float(second)) is None
        registry.observe(holder.ping, float(second), line)
        registry.observe(ping(port=1, incarnation="second"), float(second), Line())
    assert len(registry.known("P")) == 2 and registry.claims_refused == 100
    assert registry.observe(ping(port=2, incarnation="again"), 100.0, line) is not None
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    full, claims = ([each for each in said if text in each] for text in ("are known already", "belongs to"))
    assert len(full) == len(claims) == 2
    assert re.search(r"10\.0\.0\.1:1 refused \(1 such .* 10\.0\.0\.1:10001 belongs to prefill", claims[0])
    registry.observe(goodbye(holder.ping), 101.0, line)
    for port in range(1, 9):
        registry.observe(comes := ping(port=port), 101.0, line)
        registry.observe(goodbye(comes), 101.0, line)
    assert len(registry.lost) == 2


def test_p_and_d_are_chosen_independently() -> None:
    router, _ = fleet(*"PPDD")
    choices = [router.choose(RoutingRequest(), 0.0) for _ in range(2)]
    router.choose(RoutingRequest(), 0.0, mode=PrefillMode.NONE)  # takes D's turn, not P's
    choices += [router.choose(RoutingRequest(), 0.0) for _ in range(2)]
    pairs = {(c.prefill.ping.http_address, c.decode.ping.http_address) for c in choices if c.prefill}
    assert len(pairs) == 4


def test_of_very_many_some_are_compared() -> None:
    """Nobody gets a request who has more to do than 128 that are drawn, and all get some."""
    registry, chosen = Registry(1e9), Counter[Instance]()
    pool = [join(registry, ping("D", 1000 + number)) for number in range(512)]
    for busy in pool[::2]:
        busy.count_place(1, decode_alone=False)
    for turn in range(600):
        least = least_busy(pool)
        chosen[least] += 1
        least.take_turn(turn + 1)
    assert set(chosen) == set(pool[1::2]) and max(chosen.values()) < 8


def test_only_those_with_requests_are_missed_before_their_life_ends() -> None:
    registry = Registry()
    idle, busy = join(registry, ping("D", 1)), join(registry, ping("D", 2))
    with busy.busy(lambda loss: None):
        assert registry.late(LIFE * 0.6) == []
        assert registry.late(LIFE * 0.7) == [busy]
    assert idle.healthy


def serving(*models: str) -> Router:
    return fleet(*((role, {"model": model}) for model in models for role in "PD"))[0]


def test_the_requests_model_chooses_the_pool_and_without_one_the_two_still_match() -> None:
    """An unknown one is left to the only pool."""
    router = serving("a", "b")
    for model in (*"abab", *[None] * 4):
        choice = router.choose(RoutingRequest(model), 0.0)
        assert choice.prefill.ping.model == choice.decode.ping.model
        assert model in (None, choice.decode.ping.model)
    for served, asked in (("a", "an-adapter"), ("", "whatever")):
        choice = serving(served).choose(RoutingRequest(asked), 0.0)
        assert choice.prefill is not None and choice.decode.ping.model == served


def test_two_models_that_do_not_match_make_no_pair() -> None:
    registry = Registry()
    both = ("P", {"model": "a"}), ("D", {"model": "b"})
    router, (_, d) = fleet(*both, registry=registry, decode_alone=1)
    choice = router.choose(RoutingRequest("b"), 0.0)
    assert (choice.prefill, choice.decode) == (None, d)
    with pytest.raises(NoInstance, match="serve different models"):
        Router(registry).choose(RoutingRequest(), 0.0)


@pytest.mark.parametrize(
    ("incarnations", "stays"),
    [
        (("", "first"), True),
        (("first", ""), True),
        (("first", "", "first"), True),
        (("first", "second"), False),
        (("", "first", "second"), False),
        (("first", "", "second"), False),
    ],
)
def test_a_listed_instance_stays_drained(incarnations: tuple[str, ...], stays: bool) -> None:
    registry, source = Registry(), ListedSource()
    first, *later = (ping("D", incarnation=each) for each in incarnations)
    instance = registry.observe(first, 0.0, source)
    registry.drain(instance, True)
    for each in later:
        registry.observe(each, 0.0, source)
    assert registry.known("D")[0].drained == stays


@pytest.mark.parametrize(("listed", "drained"), [("", True), ("first", True), ("another", False)])
def test_who_is_listed_with_each_role_and_pings_with_both_is_one(listed: str, drained: bool) -> None:
    registry, sources = Registry(), [ListedSource(), ListedSource()]
    roles: tuple[Role, ...] = "P", "D"
    for role, source in zip(roles, sources, strict=True):
        registry.drain(join(registry, ping(role, incarnation=listed), 0.0, source), True)
    other = join(registry, ping("D", 1), 0.0, ListedSource())
    both = join(registry, ping("both", incarnation="first"), 1.0, Line())  # type: ignore[arg-type]
    assert registry.known("P") == [both] and registry.known("D") == [other, both]
    assert all(source.pinged for source in sources)
    assert both.drained == drained, "a restart ends it"


# Only a P and a D that fit make a pair; and the proxy says who fits nobody, and why.


OLD = "protocol=1, weights=aa, link=host"
NEW = "protocol=2, weights=aa, link=host"
OTHER_LINK = "protocol=1, weights=aa, link=nccl 2.27.3"


def pools(p: list[str], d: list[str], **options: Any) -> tuple[Router, list[Instance], list[Instance]]:
    roles = [(role, {"fit": fit, "model": "m"}) for role, fits in (("P", p), ("D", d)) for fit in fits]
    router, pool = fleet(*roles, **options)
    return router, pool[: len(p)], pool[len(p) :]


def pair(choice: Choice) -> tuple[str, str]:
    return choice.prefill.ping.fit, choice.decode.ping.fit


def test_a_p_is_chosen_among_those_that_fit_a_d_with_room() -> None:
    """A second try goes to a pair that fits, too."""
    router, (old_p, new_p), (old, new) = pools([OLD, NEW], [OLD, NEW], room=1)
    need = partial(router.choose, RoutingRequest("m"), 0.0, mode=PrefillMode.NEEDED)
    assert pair(need(avoid=frozenset({old_p}))) == (NEW, NEW)
    with pytest.raises(NoInstance):
        need(avoid=frozenset({old_p, new_p}))
    old.count_place(1, decode_alone=False)
    assert [pair(router.choose(RoutingRequest("m"), 0.0)) for _ in range(4)] == [(NEW, NEW)] * 4
    new.count_place(1, decode_alone=False)
    with pytest.raises(Full):
        router.choose(RoutingRequest("m"), 0.0)


def test_where_no_p_fits_d_alone_is_chosen() -> None:
    router, *_ = pools([OLD, OLD], [OTHER_LINK], decode_alone=1)
    choice = router.choose(RoutingRequest("m"), 0.0)
    assert (choice.prefill, choice.prefill_unavailable) == (None, True)


@pytest.mark.parametrize(
    ("p", "d", "fits"), [("", "", True), ("", NEW, False), (OLD, NEW, False), (NEW, NEW, True)]
)
def test_a_p_and_a_d_of_the_same_words_fit(p: str, d: str, fits: bool) -> None:
    registry = Registry()
    prefill, decode = join(registry, ping("P", 1, fit=p)), join(registry, ping("D", 2, fit=d))
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


async def test_the_client_and_health_are_told_that_nobody_fits() -> None:
    async with deployed("concurrent", alone_share=0) as deployment:
        await deployment.add("P", fit=OLD)
        await deployment.add("D", fit=OTHER_LINK)
        await deployment.ready(prefill=1, decode=1)
        assert await deployment.refusal(503) == (
            "No prefill instance that is ready fits a decode instance for this model: the nearest two "
            "differ in link. Try again in a few seconds."
        )
        status, report = await deployment.get("/health")
        assert (status, report["status"]) == (503, "unavailable")
        assert report["missing"] == [
            "1 decode instance fits no prefill instance: they differ in link.",
            "1 prefill instance fits no decode instance: they differ in link.",
        ]
        assert deployment.p.requests == deployment.d.requests == []


# Two who ping under one address: the first keeps it while it lives, and its successor gets it at once.


MEMBERS = Members(b"a secret of the tests")


def held(**more: Any) -> tuple[Registry, Instance, Line]:
    registry, line = Registry(), Line()
    return registry, join(registry, ping(incarnation="first", **more), 0.0, line), line


@pytest.mark.parametrize(
    ("address", "spelled"),
    [
        ("10.0.0.1:21001", "10.0.0.1:21001"),
        ("node-7:21001", "NODE-7.:21001"),
        ("[fd00::1]:21001", "[fd00:0::1]:21001"),
    ],
)
def test_a_zmq_address_is_its_holders_too(address: str, spelled: str) -> None:
    registry = Registry()
    holder = join(registry, msgspec.structs.replace(ping(), zmq_address=address), 0.0, Line())
    thief = msgspec.structs.replace(ping(port=1), zmq_address=spelled)
    assert registry.observe(thief, 1.0, Line()) is None
    assert registry.known("P") == [holder] and registry.claims_refused == 1
    assert registry.observe(msgspec.structs.replace(thief, type="D"), 1.0, Line()) is not None
    both = join(registry, msgspec.structs.replace(ping("both", 2), zmq_address="b:1"), 0.0, Line())
    thief = msgspec.structs.replace(ping("D", 3), zmq_address="b:1")
    assert registry.observe(thief, 1.0, Line()) is None and both in registry.known("D")


def test_who_may_take_an_address_over() -> None:
    """Its successor when its pings are late, and a member; not who replays a ping."""
    registry, holder, line = held()
    replayer = Line()
    registry.observe(holder.ping, 0.0, replayer)
    for source in (Line(), replayer):
        assert registry.observe(ping(incarnation="second"), 2 * PING_INTERVAL, source) is None
    assert holder.source is line
    assert registry.observe(ping(incarnation="second"), 3 * PING_INTERVAL, Line()) is not None
    assert 3 * PING_INTERVAL < LIFE
    registry, _, _ = held()
    member = registry.observe(ping(incarnation="second"), 0.1, Line(member=True))
    assert registry.observe(ping(incarnation="third"), 0.2, Line()) is None
    assert registry.known("P") == [member]


def test_what_comes_from_elsewhere_removes_and_alters_nobody_who_lives() -> None:
    registry, holder, line = held()
    registry.observe(goodbye(holder.ping), 1.0, Line())
    assert registry.known("P") == [holder]
    pause = msgspec.structs.replace(holder.ping, paused=True, workload=Workload(tokens=9))
    registry.observe(pause, 1.0, Line())
    assert (holder.paused, holder.report, holder.last_seen) == (False, None, 0.0)
    line.open, anew = False, Line()
    registry.observe(pause, 1.0, anew)
    assert holder.paused and holder.source is anew, "it has dialed anew"
    assert registry.observe(ping(incarnation="second"), 1.0, Line()) is None
    anew.open = False  # again, and the goodbye is the first that it says
    registry.observe(goodbye(holder.ping), 1.0, Line())
    assert registry.known("P") == []


def test_it_is_silent_while_its_connection_stands_and_then_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry, holder, line = held()
    for second in range(12, 25):
        assert registry.expire(float(second)) == []
        assert holder.silent(float(second)) and registry.routable("P", float(second)) == [holder]
    line.open = False
    assert registry.routable("P", 25.0) == []
    assert registry.expire(25.0) == [holder]
    (silent, removed) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert "is silent: no ping for 12 s, but its connection stands" in silent
    assert removed.endswith("removed: no ping for 25 s, and its connection is closed")


def test_it_speaks_again_and_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """A closed connection alone is a reconnection; after a lease of silence it is gone whatever stands."""
    caplog.set_level(logging.INFO)
    registry, holder, line = held()
    registry.expire(20.0)
    assert registry.observe(holder.ping, 21.0, line) is None
    registry.expire(22.0)
    assert not holder.silent(22.0)
    assert caplog.records[-1].getMessage().endswith("pings again")
    line.open = False
    assert registry.expire(21.0 + LIFE - 0.1) == [] and not holder.silent(21.0 + LIFE - 0.1)
    assert registry.observe(holder.ping, 31.0, Line()) is None
    assert registry.expire(31.0 + LIFE + 5.0) == []
    assert registry.expire(31.0 + LEASE - 0.1) == []
    assert registry.routable("P", 31.0 + LEASE - 0.1) == [holder]
    assert registry.routable("P", 31.0 + LEASE + 0.1) == []
    assert registry.expire(31.0 + LEASE + 0.1) == [holder]


def test_an_instance_that_answers_is_not_silent_although_its_pings_are_lost() -> None:
    """Else the half of a fleet whose pings still come would get all requests."""
    registry, line = Registry(), Line()
    p, lost, pings = (join(registry, ping(role, n), 0.0, line) for n, role in enumerate("PDD", 1))
    router = Router(registry)

    def chosen(now: float) -> set[Instance]:
        for each in (p, pings):
            each.pinged(each.ping, now)
        return {router.choose(RoutingRequest(), now).decode for _ in range(4)}

    for now in (LIFE - 1.0, 2.0 * LIFE - 2.0, 3.0 * LIFE - 3.0, 3.0 * LIFE + 30.0):
        lost.answered(now)
        assert chosen(now + 1.0) == {lost, pings} and not registry.overdue(lost, now + 1.0)
    assert chosen(now + LIFE + 1.0) == {pings}
    assert registry.expire(now + LIFE + 1.0) == []


@pytest.mark.parametrize("role", ["P", "D"])
def test_others_are_preferred_to_a_silent_one_and_it_is_better_than_nobody(role: Role) -> None:
    registry, line = Registry(), Line()
    for port, kind in ((1, "P"), (2, "D"), (3, role)):
        join(registry, ping(kind, port), 0.0, line)
    both = registry.known(role)
    router = Router(registry)

    def chosen() -> set[Instance]:
        return {
            each for _ in range(4) for each in router.choose(RoutingRequest(), 20.0).instances if each in both
        }

    assert chosen() == set(both), "all are silent"
    both[1].pinged(both[1].ping, 19.0)
    assert chosen() == {both[1]}
    fail(both[1], 20.0)
    assert chosen() == {both[0]}, "rather one that says nothing than one that fails"


@pytest.fixture(params=[None, MEMBERS], ids=["plain", "members"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """A proxy with one P and one D that ping, with and without a secret."""
    async with deployed("concurrent", 1, 1, members=request.param) as deployment:
        yield deployment


async def test_a_member_that_registers_anothers_address_is_refused(place: Deployment) -> None:
    holder, p = place.registry.known("P"), place.p.ping
    changes: list[dict[str, str]] = [
        *({"incarnation": "second"}, {"incarnation": ""}, {"model": "other"}),
        *({"zmq_address": "127.0.0.1:9"}, {"http_address": "127.0.0.1:9"}),
    ]
    claims = [*(msgspec.structs.replace(p, **change) for change in changes), goodbye(p)]
    with dealer(Address.parse(place.discovery), place.members, "proxy") as socket:
        for claim in claims * 100:
            socket.send(encode_ping(claim))
        await eventually(lambda: place.registry.claims_refused == 600)
        seen = holder[0].last_seen
        await eventually(lambda: holder[0].last_seen > seen, "its pings still count")
        assert place.registry.known("P") == holder
        assert place.registry.routable("P", place.proxy.clock()) == holder
        assert (await place.post()).status == 200
    assert (await place.get("/health"))[1]["counters"]["claims_refused"] == 600
    assert place.refused == 0


async def test_a_process_that_was_killed_is_followed_at_once(place: Deployment) -> None:
    place.pingers[place.p.http_address].stop()
    await eventually(lambda: place.registry.known("P") == [])
    for number in range(10):
        ping = msgspec.structs.replace(place.p.ping, incarnation=f"number {number}")
        # Its end closes the connection, without a goodbye, as a kill does.
        with dealer(Address.parse(place.discovery), place.members, "proxy") as socket:
            socket.send(encode_ping(ping))
            await eventually(lambda ping=ping: [each.ping for each in place.registry.known("P")] == [ping])
    assert place.registry.claims_refused == 0


# Which P's the proxy names to a D in answer to its pings; and instances of both roles.


@dataclass(eq=False)
class PartnerLine(proxy_fakes.Line):
    member: bool = True

    @property
    def said(self) -> list[tuple[str, ...]]:
        return [decode_partners(each) for each in self.told]


class PartnerRig:
    def __init__(self) -> None:
        self.registry = Registry()
        self.partners = PartnerLists(self.registry)
        self.now = 0.0

    def join(
        self, role: Any, port: int, line: PartnerLine | None = None, **more: Any
    ) -> tuple[Instance, PartnerLine]:
        line = line or PartnerLine()
        return join(self.registry, ping(role, port, **more), self.now, line), line

    def hear(self, instance: Instance, line: PartnerLine, message: Ping | None = None) -> None:
        """It pings, once the ring is made anew."""
        self.now += RING_SECONDS
        self.registry.observe(message or instance.ping, self.now, line)
        self.partners.answer(message or instance.ping, line, self.now)


def of(*instances: tuple[Instance, PartnerLine]) -> set[str]:
    return {instance.ping.zmq_address for instance, _ in instances}


def test_a_d_hears_of_the_ps_that_it_fits_and_of_changes_only() -> None:
    rig = PartnerRig()
    d = rig.join("D", 8200, partners=8, fit="weights=one")
    rig.hear(*d)
    ps = [rig.join("P", 8100 + each, fit="weights=one") for each in range(3)]
    rig.join("P", 8150, fit="weights=another")
    for _ in range(3):
        rig.hear(*d)
    line = d[1]
    assert line.said[0] == () and set(line.said[1]) == of(*ps) and len(line.said) == 2
    rig.registry.observe(goodbye(ps[0][0].ping), rig.now, ps[0][1])
    rig.hear(*d)
    assert set(line.said[2]) == of(*ps[1:]) and len(line.said) == 3


def test_partners_are_sent_again_at_times_and_on_another_connection() -> None:
    """And at the next ping if they could not be sent."""
    rig = PartnerRig()
    p, d = rig.join("P", 8100), rig.join("D", 8200, line=PartnerLine(full=True), partners=8)
    rig.hear(*d)
    d[1].full = False
    rig.hear(*d)
    assert d[1].said == [tuple(of(p))]
    for _ in range(int(REPEAT_SECONDS / RING_SECONDS) + 3):
        rig.hear(*p)
        rig.hear(*d)
    assert len(d[1].said) > 1 and set(d[1].said) == {tuple(of(p))}
    d[1].open = False
    again = PartnerLine()
    rig.hear(d[0], again)
    assert again.said == [tuple(of(p))]


@pytest.mark.parametrize(
    ("role", "more"), [("D", {}), ("D", {"partners": 0}), ("P", {"partners": 8})], ids=["older", "off", "P"]
)
def test_who_does_not_ask_or_leaves_or_claims_anothers_address_hears_nothing(
    role: Any, more: dict[str, Any]
) -> None:
    rig = PartnerRig()
    rig.join("P", 8100)
    one = rig.join(role, 8200, **more)
    rig.hear(*one)
    d, line = rig.join("D", 8201, partners=8)
    thief = PartnerLine()
    rig.hear(d, thief)
    rig.hear(d, thief, msgspec.structs.replace(d.ping, incarnation="another"))
    rig.hear(d, line, goodbye(d.ping))
    assert one[1].said == thief.said == line.said == []


def test_those_that_get_requests_come_first_and_drained_ones_not_at_all() -> None:
    rig = PartnerRig()
    d = rig.join("D", 8200, partners=8)
    ps = [rig.join("P", 8100 + each) for each in range(6)]
    ps[0][0].healthy = ps[1][0].healthy = False
    rig.registry.drain(ps[2][0], True)
    rig.hear(*d)
    (said,) = d[1].said
    assert set(said[:3]) == of(*ps[3:]) and set(said[3:]) == of(*ps[:2])


def test_many_ps_are_spread_over_the_ds_and_one_more_changes_few_lists() -> None:
    rig = PartnerRig()
    ds = [rig.join("D", 10_000 + each, partners=8) for each in range(200)]
    ps = [rig.join("P", 20_000 + each) for each in range(100)]

    def lists() -> list[tuple[str, ...]]:
        rig.now += RING_SECONDS
        return [tuple(rig.partners.of(d, rig.now)) for d, _ in ds]

    before = lists()
    assert all(len(set(one)) == 8 for one in before)
    links = Counter(address for one in before for address in one)
    assert links.keys() == of(*ps), "a P that nobody hears of"
    assert max(links.values()) < 6 * 200 * 8 / 100
    rig.join("P", 30_000)
    after = lists()
    assert sum(set(one) != set(other) for one, other in zip(before, after, strict=True)) < 60


@pytest.mark.parametrize(("p_count", "d_count"), [(100, 40), (30, 200), (40, 5)])
def test_in_a_large_fleet_requests_go_to_pairs_that_have_links(p_count: int, d_count: int) -> None:
    rig = PartnerRig()
    ds = [rig.join("D", 10_000 + each, partners=16)[0] for each in range(d_count)]
    for each in range(p_count):
        rig.join("P", 20_000 + each)
    router, pairs, loads = Router(rig.registry), set(), Counter[Instance]()
    connected = {d: set(rig.partners.of(d, rig.now)) for d in ds}
    for _ in range(40 * p_count):
        choice = router.choose(RoutingRequest(), rig.now)
        assert choice.prefill is not None
        choice.decode.count_place(1, decode_alone=False)
        loads[choice.decode] += 1
        pairs.add((choice.prefill, choice.decode))
    of_p, of_d = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    assert max(of_d.values()) <= 2 * 16 and max(of_p.values()) <= 2 * 16
    assert max(loads.values()) <= 2 * 40 * p_count / d_count + 10
    linked = sum(p.ping.zmq_address in connected[d] for p, d in pairs)
    assert linked > 0.7 * len(pairs)


def test_a_large_pool_placed_by_cost_pairs_those_that_have_links() -> None:
    """The costs of all are alike but for answers, which two have and others not."""
    rig = PartnerRig()
    pool = [rig.join("both", 10_000 + each, partners=8)[0] for each in range(60)]
    connected = {d: set(rig.partners.of(d, rig.now)) for d in pool}
    router = Router(rig.registry, Routing(placement="auto", pause_weight=10.0))
    pairs = Counter[tuple[str, Instance]]()
    for each in pool:
        router.costs.of(each).hand_over.weights = [0.0, 0.0]
    for _ in range(2000):
        choice = router.choose(RoutingRequest(prompt=prompt_of({"prompt": [*range(400)]})), rig.now)
        router.track(choice, rig.now)
        if choice.prefill is not None:
            pairs[choice.prefill.ping.zmq_address, choice.decode] += 1
    linked = sum(number for (p, d), number in pairs.items() if p in connected[d])
    assert linked > 0.7 * pairs.total() > 100


def test_where_all_pairs_keep_their_links_any_d_is_chosen() -> None:
    rig = PartnerRig()
    ps = [rig.join("P", 8100 + each)[0] for each in range(16)]
    ds = [rig.join("D", 8200 + each, partners=16)[0] for each in range(16)]
    assert LinkedPairs.of(ps, ds) is None
    assert LinkedPairs.of([*ps, rig.join("P", 8300)[0]], ds) is not None


def test_if_all_that_have_links_are_full_another_d_is_chosen() -> None:
    rig = PartnerRig()
    ds = [rig.join("D", 10_000 + each, partners=1)[0] for each in range(20)]
    for each in range(2):
        rig.join("P", 20_000 + each)
    router = Router(rig.registry, room=1)
    for _ in ds:
        router.choose(RoutingRequest(), rig.now).decode.count_place(1, decode_alone=False)
    assert [d.places for d in ds] == [1] * 20


async def test_a_d_hears_of_them_through_the_discovery_socket(lonely: Deployment) -> None:
    heard: list[tuple[str, ...]] = []
    d = ping("D", 8200, partners=8, version=1)
    with pinging(lonely.discovery, d, on_partners=heard.append):
        ps = [await lonely.add("P") for _ in range(2)]
        expected = {p.ping.zmq_address for p in ps}
        await eventually(lambda: bool(heard) and set(heard[-1]) == expected, "both P's")


# Instances of both roles: each is P or D of a request, or serves it whole.


REQUEST = RoutingRequest("m", prompt_of({"prompt": [*range(100)]}), "")


def test_the_one_that_is_far_less_busy_serves_a_request_whole() -> None:
    router, (busy, idle) = fleet("both", "both")
    busy.count_place(1, decode_alone=False, tokens=10_000)
    choice = router.choose(REQUEST, 0.0)
    assert (choice.prefill, choice.decode, choice.single_instance) == (None, idle, True)
    assert not (choice.prefill_unavailable or choice.in_share), "it takes no place of a D without P"


def test_each_of_a_pool_comes_to_have_either_role() -> None:
    """Each request ends when eight more have come."""
    router, pool = fleet("both", "both", "both")
    draw, under_way = random.Random(1), deque[tuple[Choice, int]]()
    as_p, as_d = Counter[Instance | None](), Counter[Instance]()
    for _ in range(200):
        tokens = draw.randrange(1, 5000)
        choice = router.choose(RoutingRequest("m", prompt_of({"prompt": [*range(tokens)]}), ""), 0.0)
        as_p[choice.prefill] += 1
        as_d[choice.decode] += 1
        choice.decode.count_place(1, decode_alone=False, tokens=tokens)
        under_way.append((choice, tokens))
        if len(under_way) > 8:
            ended, tokens = under_way.popleft()
            ended.decode.count_place(-1, decode_alone=False, tokens=tokens)
    assert min(as_p[each] for each in pool) > 10 < min(as_d[each] for each in pool)


@pytest.mark.parametrize("roles", [("both", "D"), ("P", "both")], ids="-".join)
def test_beside_a_fixed_role_it_takes_the_other_one(roles: tuple[str, str]) -> None:
    router, (first, second) = fleet(*roles)
    choice = router.choose(REQUEST, 0.0)
    assert (choice.prefill, choice.decode) == (first, second)


def test_it_is_named_the_others_and_not_itself() -> None:
    rig = PartnerRig()
    pool = [rig.join("both", 8100 + n, partners=8) for n in range(3)]
    p = rig.join("P", 8200)
    for each in pool:
        rig.hear(*each)
        others = {other[0].ping.zmq_address for other in (*pool, p) if other is not each}
        assert set(each[1].said[-1]) == others


async def test_requests_through_a_pool(dispatch: Any) -> None:
    async with deployed(dispatch) as pool:
        for _ in range(2):
            await pool.add("both")  # type: ignore[arg-type]
        await pool.ready(2, 2)
        await pool.serves(6)
        both = {each.zmq_address for each in pool.decodes}
        seen = [request for each in pool.decodes for request in each.requests]
        pairs = Counter(request.headers["X-Request-Id"] for request in seen)
        assert set(pairs.values()) == {2}
        found = [find_pair(name) for name in pairs]
        assert all(each and {str(each.prefill), str(each.decode)} == both for each in found)
        page = (await pool.get("/instances"))[1]
        assert [each["role"] for each in page["instances"]] == ["both", "both"]
        lines = (await pool.text("/metrics")).splitlines()
        shown = f'"{pool.decodes[0].http_address}"'
        served = [line for line in lines if shown in line and 'role="both"' in line]
        assert len(served) == len(set(served)) > 0
        assert 'p2pkv_proxy_instances{role="both",state="ready"} 2.0' in lines


async def test_a_request_served_whole_names_the_instance_twice() -> None:
    async with deployed("concurrent") as pool:
        one = await pool.add("both")  # type: ignore[arg-type]
        await pool.ready(1, 1)
        await pool.serves(1)
        assert (await pool.get("/health"))[1]["missing"] == []
        (request,) = one.requests
        pair = find_pair(request.headers["X-Request-Id"])
        assert pair is not None and str(pair.prefill) == str(pair.decode) == one.zmq_address
