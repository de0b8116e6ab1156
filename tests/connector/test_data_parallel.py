"""Instances of several data-parallel engines: real schedulers, connectors, ranks and blocks, without vLLM's
servers."""

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from p2pkv.engine.decode import MAX_RELEASES
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PromptOwner, Redirect, encode
from p2pkv.protocol.state_machine import RemoteProtocolError
from support.connector.instances import BLOCK, inner_id, pair_id, tokens
from support.connector.real_ranks import ask, finish, run
from support.engine.engines import on_engine_thread
from support.hostile import dealer


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize(
    ("named", "tp_p", "tp_d"),
    [("the engines", 1, 1), *(("the first engines", *tps) for tps in ((1, 1), (2, 1), (1, 2)))],
)
def test_each_engine_of_p_serves_each_engine_of_d(
    engines: Any, first: str, named: str, tp_p: int, tp_d: int
) -> None:
    """Whichever of them the ids name: for a router that knows no ranks they name the first ones, and the HTTP
    servers give the request to any. Every block that D reads is what the prompt's tokens make."""
    group = engines(tp_p, tp_d, data_parallel=(2, 2), budget=48, lease_seconds=5.0)
    p_engines, d_engines = group[:2], group[2:]
    asked = list(product(p_engines, d_engines, (1, 17, 100)))
    prompts = [tokens(length, f"{number}") for number, (_, _, length) in enumerate(asked)]

    def ask_side(side: int, most: int) -> None:
        for number, ((p, d, _), prompt) in enumerate(zip(asked, prompts, strict=True)):
            of = (p, d) if named == "the engines" else (p_engines[0], d_engines[0])
            ask((p, d)[side], *of, number, prompt, most)

    if first == "P":
        ask_side(0, 1)
        run(group, lambda: all(len(p.ended) == 6 for p in p_engines))
        ask_side(1, 9)
    else:
        ask_side(1, 9)
        end = time.monotonic() + 0.5
        run(group, lambda: time.monotonic() > end)
        ask_side(0, 1)
    finish(*group)
    for d in d_engines:
        assert set(d.ended.values()) == {"length"}
        assert sum(d.computed.values()) == 9 * 6, "D computed one token of each prompt"


def test_engines_of_both_roles_serve_an_instance_behind_theirs_on_the_host(engines: Any) -> None:
    """The ids name their first engine; the other instance's address could be another engine of theirs."""
    first, second, other = engines(1, 1, data_parallel=(2, 1), roles=("both", "both"), lease_seconds=3.0)
    for number, (p, d, named) in enumerate(
        [(second, other, (first, other)), (other, second, (other, first))]
    ):
        ask(p, *named, number, tokens(40, number), 1)
        ask(d, *named, number, tokens(40, number), 5)
    finish(first, second, other)
    assert {*second.ended.values(), *other.ended.values()} == {"length"}
    assert second.count("transfers_loaded") == other.count("transfers_loaded") == 1


@pytest.mark.parametrize("why", ["cached", "aborted"])
def test_p_is_released_whichever_of_its_engines_d_has_asked(engines: Any, why: str) -> None:
    """D ends its part while only the engine in the id knows of it: the blocks are free at once."""
    group = engines(1, 1, data_parallel=(2, 2), lease_seconds=1000.0)
    p, d = group[1], group[3]
    named = {"prefill": group[0].address, "decode": group[2].address}
    prompt = tokens(6 * BLOCK + 1, why)
    if why == "cached":
        d.ask("cmpl-alone-0-12345678", prompt)
        run(group, lambda: not d.scheduler.requests)
    asked = d.ask(inner_id(outer := pair_id(why, **named)), prompt, max_tokens=3)
    claims = group[0].workers[0].rank.counters.snapshot
    run(group, lambda: claims()["early_claims"] == 1)
    if why == "aborted":
        d.abort(asked)
    run(group, lambda: not d.scheduler.requests)
    p.ask(inner_id(outer), prompt, max_tokens=1)
    finish(*group)
    assert set(d.ended.values()) <= {"length", "abort"}


def test_referrals_to_engines_of_other_instances_are_refused(engines: Any) -> None:
    """`PromptOwner` to a P, and `Redirect` to a D."""
    group = engines(1, 1, data_parallel=(2, 1))
    p, d = group[0], group[2]
    counted = p.workers[0].rank.counters.values
    with dealer(p.address) as line:
        for stranger in (str(p.address), "10.0.0.9:21001", "no address"):
            before = counted["messages_refused"]
            line.send(encode(PromptOwner(stranger, ("k",))))
            run(group, lambda before=before: counted["messages_refused"] == before + 1)
    assert not p.workers[0].rank.core.roles[0].transfers._redirects._owners
    peer = SimpleNamespace(hello=p.workers[0].rank.context.hello, address=str(p.address))
    loads = d.workers[0].rank.core.roles[0].transfers
    with pytest.raises(RemoteProtocolError, match="no engine of"):
        loads.redirected(peer, Redirect("k", 1, "10.0.0.9:21001"), 0.0)
    counts: list[int] = []

    def refer_requests_that_d_does_not_have() -> None:
        for number in range(MAX_RELEASES + 10):
            loads.redirected(peer, Redirect(f"k{number}", 1, str(group[1].address)), 0.0)
        counts.append(len(loads.entries))

    on_engine_thread(d.workers[0].rank, refer_requests_that_d_does_not_have)
    assert counts == [MAX_RELEASES]


def test_an_id_that_names_another_instance_is_served_alone(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engines(2, 1, data_parallel=(1, 1))
    for name in (p.address.shifted(1), Address("127.0.0.1", p.address.port - 2), Address("10.0.0.9", 1)):
        p.ask(inner_id(pair_id(f"{name}", prefill=name, decode=d.address)), tokens(20), max_tokens=1)
        assert not p.scheduler.connector.producer.busy
        assert "served here, alone" in caplog.text
        caplog.clear()
