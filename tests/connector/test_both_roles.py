"""Instances of kv_both, each P of some requests and D of others at the same time: whole but for the model."""

import random
from typing import Any

import pytest

from p2pkv.control.discovery import encode_partners
from support.connector.instances import inner_id, make_request, pair_id, tokens
from support.connector.real_ranks import ask, ask_both, finish, listening, pings, run
from support.waiting import wait_for

BOTH = ("both", "both")


@pytest.mark.parametrize("roles", [BOTH, ("both", "D"), ("P", "both")], ids="-".join)
@pytest.mark.parametrize(("tp_a", "tp_b"), [(1, 1), (2, 1)])
def test_each_pushes_to_the_other_at_once(engines: Any, roles: Any, tp_a: int, tp_b: int) -> None:
    a, b = engines(tp_a, tp_b, roles=roles, budget=48)
    lengths = (1, 16, 17, 100)
    for index, length in enumerate(lengths):
        ask_both(a, b, f"there {index}", tokens(length, f"there {index}"))
        if roles == BOTH:
            ask_both(b, a, f"back {index}", tokens(length, f"back {index}"))
    finish(a, b)
    for p, d in [(a, b), (b, a)] if roles == BOTH else [(a, b)]:
        at_d = 5 * len(lengths)
        at_p = sum(lengths) if roles == BOTH else 0
        assert sum(d.computed.values()) == at_d + at_p, "of each prompt D computes one token"
        assert p.count("transfers_sent") == len(lengths)


def test_a_request_that_names_the_instance_twice_is_a_plain_one(engines: Any) -> None:
    a, b = engines(1, 1, roles=BOTH)
    request = ask(a, a, a, "named twice", tokens(40), 5)
    a.ask("a plain one", tokens(40, 1), max_tokens=5)
    finish(a, b)
    assert a.ended == {request.request_id: "length", "a plain one": "length"}
    assert sum(a.computed.values()) == 88
    assert not [meta for meta in a.metas if meta.has_commands], "no transfer"


@pytest.mark.parametrize("seed", range(3))
def test_traffic_both_ways_with_prefixes_and_aborts(engines: Any, seed: int) -> None:
    """Every block that any forward reads holds what it should: `Engine.forward` looks."""
    draw = random.Random(seed)
    a, b = engines(*draw.choice([(1, 1), (2, 1)]), roles=BOTH, blocks=40, budget=48, lease_seconds=1)
    prefixes = [tokens(48, f"prefix {n}") for n in range(3)]
    for index in range(24):
        p, d = draw.sample([a, b], 2)
        prompt = draw.choice(prefixes) + tokens(draw.randrange(1, 60), index)
        if draw.random() < 0.2:
            ask(p, p, p, index, prompt, 5)
            continue
        asked = ask_both(p, d, index, prompt, tokens=draw.randrange(1, 12))
        for _ in range(draw.randrange(4)):
            p.step()
            d.step()
        if draw.random() < 0.2:
            engine, request = draw.choice(list(zip((p, d), asked, strict=True)))
            engine.abort(request)
    finish(a, b)


def test_a_key_may_go_in_both_directions(engines: Any) -> None:
    """A router that gives each conversation one transfer_id sends its turns now here and now there."""
    a, b = engines(1, 1, roles=BOTH)
    same = {"transfer_id": "a conversation"}
    for p, d in [(a, b), (b, a)]:
        outer = pair_id(str(p.address), prefill=p.address, decode=d.address)
        for engine, count in ((p, 1), (d, 5)):
            engine.add(make_request(inner_id(outer), tokens(70, str(p.address)), count, params=same))
    run([a, b], lambda: len(a.ended) + len(b.ended) == 4)
    finish(a, b)
    assert sum(a.computed.values()) == sum(b.computed.values()) == 75


def test_each_preconnects_to_the_other_and_not_to_itself(engines: Any) -> None:
    with listening() as (proxy, place):
        a, b = engines(1, 2, roles=BOTH, **place)
        for sender, ping in pings(proxy, 2).items():
            assert (ping.type, ping.partners) == ("both", 64)
            proxy.send_multipart([sender, encode_partners([str(a.address), str(b.address)])])
        workers = [*a.workers, *b.workers]
        wait_for(lambda: all(worker.rank.counters.values["links_preconnected"] for worker in workers))
        ask_both(a, b, "there", tokens(40))
        ask_both(b, a, "back", tokens(40, 1))
        finish(a, b)
        mine = {str(a.address): a, str(b.address): b}
        for address, engine in mine.items():
            assert all(worker.rank.core.decode.peers.get(address) is None for worker in engine.workers)
