"""Instances of several data-parallel engines: real schedulers, connectors, ranks and blocks, without vLLM's
servers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import zmq
from connector_support import BLOCK, inner_id, pair_id, tokens
from real_ranks_support import data_parallel, finish, run_all

from p2pkv.pairing import Address
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.messages import Elsewhere, Referral, encode

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2)])
def test_each_engine_of_p_serves_each_engine_of_d(tp_p: int, tp_d: int) -> None:
    """The id names the two engines; every block that D reads is what the prompt's tokens make."""
    with data_parallel(2, 2, tp_p, tp_d, budget=48) as engines:
        for p in engines[:2]:
            for d in engines[2:]:
                outer = pair_id(f"{p.address} {d.address}", prefill=p.address, decode=d.address)
                for index, length in enumerate((1, 17, 100)):
                    prompt = tokens(length, f"{outer} {index}")
                    p.ask(inner_id(outer, prompt=index), prompt, max_tokens=1)
                    d.ask(inner_id(outer, prompt=index), prompt, max_tokens=9)
        finish(*engines)
        for d in engines[2:]:
            assert set(d.ended.values()) == {"length"}
            assert sum(d.computed.values()) == 9 * 6, "D computed one token of each prompt"


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2)])
def test_a_router_that_knows_no_ranks(first: str, tp_p: int, tp_d: int) -> None:
    """Each id names the first engines of P and D, and the HTTP servers give the request to any."""
    with data_parallel(2, 2, tp_p, tp_d, budget=48, lease_seconds=5.0) as engines:
        named_p, named_d = engines[0].address, engines[2].address
        prompts: dict[tuple[int, int, int], list[int]] = {
            (p, d, length): tokens(length, f"{p} {d} {length}")
            for p in (0, 1)
            for d in (2, 3)
            for length in (1, 17, 100)
        }
        ids = {each: pair_id(f"{each}", prefill=named_p, decode=named_d) for each in prompts}

        def ask_p() -> None:
            for (p, d, length), prompt in prompts.items():
                engines[p].ask(inner_id(ids[p, d, length]), prompt, max_tokens=1)

        def ask_d() -> None:
            for (p, d, length), prompt in prompts.items():
                engines[d].ask(inner_id(ids[p, d, length]), prompt, max_tokens=9)

        if first == "P":
            ask_p()
            run_all(engines, lambda: len(engines[0].ended) == len(engines[1].ended) == 6)
            ask_d()
        else:
            ask_d()
            end = time.monotonic() + 0.5
            run_all(engines, lambda: time.monotonic() > end)
            ask_p()
        finish(*engines)
        for d in engines[2:]:
            assert set(d.ended.values()) == {"length"}
            assert sum(d.computed.values()) == 9 * 6, "D computed one token of each prompt"


@pytest.mark.parametrize("why", ["cached", "aborted"])
def test_p_is_released_whichever_of_its_engines_d_has_asked(why: str) -> None:
    """D ends its part while only the engine that the id names knows of it: the one with the request frees its
    blocks at once, and not after a lease."""
    with data_parallel(2, 2, lease_seconds=1000.0) as engines:
        p, d = engines[1], engines[3]
        named = {"prefill": engines[0].address, "decode": engines[2].address}
        prompt = tokens(6 * BLOCK + 1, why)
        if why == "cached":
            d.ask("cmpl-alone-0-12345678", prompt)
            run_all(engines, lambda: not d.scheduler.requests)
        asked = d.ask(inner_id(outer := pair_id(why, **named)), prompt, max_tokens=3)
        claims = engines[0].workers[0].rank.counters.snapshot
        run_all(engines, lambda: claims()["early_claims"] == 1)
        if why == "aborted":
            d.abort(asked)
        run_all(engines, lambda: not d.scheduler.requests)
        p.ask(inner_id(outer), prompt, max_tokens=1)
        finish(*engines)
        assert set(d.ended.values()) <= {"length", "abort"}


def test_referrals_to_engines_of_other_instances_are_refused() -> None:
    """`Elsewhere` to a P, and `Referral` to a D."""
    with data_parallel(2, 1) as engines:
        p, d = engines[0], engines[2]
        counted = p.workers[0].rank.counters.values
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            line.connect(f"tcp://{p.address}")
            for stranger in (str(p.address), "10.0.0.9:21001", "no address"):
                before = counted["messages_refused"]
                line.send(encode(Elsewhere(stranger, ("k",))))
                run_all(engines, lambda before=before: counted["messages_refused"] == before + 1)
        assert not p.workers[0].rank.core.roles[0].transfers._referrals._elsewhere
        peer = SimpleNamespace(hello=p.workers[0].rank.context.hello, address=str(p.address))
        with pytest.raises(RemoteProtocolError, match="no engine of"):
            d.workers[0].rank.core.roles[0].transfers.referred(peer, Referral("k", 1, "10.0.0.9:21001"), 0.0)


def test_an_id_that_names_another_instance_is_served_alone(caplog: pytest.LogCaptureFixture) -> None:
    with data_parallel(1, 1, 2, 1) as engines:
        p, d = engines
        for name in (p.address.shifted(1), Address("127.0.0.1", p.address.port - 2), Address("10.0.0.9", 1)):
            p.ask(inner_id(pair_id(f"{name}", prefill=name, decode=d.address)), tokens(20), max_tokens=1)
            assert p.scheduler.connector.producing is not None
            assert not p.scheduler.connector.producing.busy
            assert "served here, alone" in caplog.text
            caplog.clear()
