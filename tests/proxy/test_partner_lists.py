"""Which P's the proxy names to a D in answer to its pings; and instances of both roles."""

import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
import proxy_fakes
import pytest
from proxy_fakes import Deployment, deployed, fleet, join, ping, pinging, prompt_of

from p2pkv.control.discovery import Ping, decode_partners, goodbye
from p2pkv.pairing import find_pair
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.membership.partner_lists import REPEAT_SECONDS, RING_SECONDS, LinkedPairs, PartnerLists
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import Choice, Router
from support.waiting import eventually


@dataclass(eq=False)
class Line(proxy_fakes.Line):
    member: bool = True

    @property
    def said(self) -> list[tuple[str, ...]]:
        return [decode_partners(each) for each in self.told]


class PartnerRig:
    def __init__(self) -> None:
        self.registry = Registry()
        self.partners = PartnerLists(self.registry)
        self.now = 0.0

    def join(self, role: Any, port: int, line: Line | None = None, **more: Any) -> tuple[Instance, Line]:
        line = line or Line()
        return join(self.registry, ping(role, port, **more), self.now, line), line

    def hear(self, instance: Instance, line: Line, message: Ping | None = None) -> None:
        """It pings, once the ring is made anew."""
        self.now += RING_SECONDS
        self.registry.observe(message or instance.ping, self.now, line)
        self.partners.answer(message or instance.ping, line, self.now)


def of(*instances: tuple[Instance, Line]) -> set[str]:
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
    p, d = rig.join("P", 8100), rig.join("D", 8200, line=Line(full=True), partners=8)
    rig.hear(*d)
    d[1].full = False
    rig.hear(*d)
    assert d[1].said == [tuple(of(p))]
    for _ in range(int(REPEAT_SECONDS / RING_SECONDS) + 3):
        rig.hear(*p)
        rig.hear(*d)
    assert len(d[1].said) > 1 and set(d[1].said) == {tuple(of(p))}
    d[1].open = False
    again = Line()
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
    thief = Line()
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
    d = ping("D", 8200, partners=8)
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
