"""Instances of both roles: the proxy makes each of them P or D of a request, or lets it serve it whole."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from proxy_fakes import deployed, fleet, ping, prompt_of
from test_partners import PartnerRig

from p2pkv.pairing import find_pair
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import Choice

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


def test_no_other_instance_may_take_its_address() -> None:
    rig = PartnerRig()
    rig.join("both", 8100)
    thief = ping("D", 8101)
    same = type(thief)(type="D", http_address=thief.http_address, zmq_address=ping("both", 8100).zmq_address)
    assert rig.registry.observe(same, 0.1, type(rig.join("P", 8300)[1])()) is None
    assert rig.registry.claims_refused == 1


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
