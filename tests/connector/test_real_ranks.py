"""P and D whole but for the model: vLLM's schedulers, our connectors, real ranks, links and pages."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from connector_support import BLOCK, inner_id, pair_id, tokens
from real_ranks_support import abort_or_reset, ask_both, finish

from p2pkv.connector import connector
from p2pkv.control.announcer import Announcement, Announcer, Standing
from p2pkv.control.discovery import DISCOVERY_VERSION, decode_ping, encode_partners
from p2pkv.control.security import Members
from p2pkv.protocol.messages import PROTOCOL_VERSION
from support.waiting import wait_for

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_d_decodes_from_what_p_has_pushed(engines: Any, tp_p: int, tp_d: int) -> None:
    p, d = engines(tp_p, tp_d, budget=48)
    outer = pair_id(prefill=p.address, decode=d.address)
    prompts = [tokens(length, length) for length in (1, 2, 16, 17, 100)]
    for index, prompt in enumerate(prompts):
        p.ask(inner_id(outer, prompt=index), prompt, max_tokens=1)
        d.ask(inner_id(outer, prompt=index), prompt, max_tokens=20)
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert sum(d.computed.values()) == 20 * len(prompts), "D computed one token of each prompt"


def test_members_of_one_secret_transfer_and_ping_as_members(engines: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of the tests")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        Members(b"a secret of the tests").serve(proxy, "proxy")
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        place = {"proxy_ip": "127.0.0.1", "proxy_port": port, "http_port": 8100, "warm_up_seconds": 0}
        p, d = engines(1, 2, secret_file=str(tmp_path / "secret"), **place)
        ask_both(p, d, "k", tokens(40))
        finish(p, d)
        assert set(d.ended.values()) == {"length"} and sum(d.computed.values()) == 5
        roles = set()
        while roles != {"P", "D"}:
            assert proxy.poll(10_000)
            roles.add(decode_ping(proxy.recv_multipart()[1]).type)


def test_links_to_the_ps_that_the_proxy_names_are_up_before_the_first_request(engines: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.setsockopt(zmq.LINGER, 0)
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        place = {"proxy_ip": "127.0.0.1", "proxy_port": port, "http_port": 8100, "warm_up_seconds": 0}
        p, d = engines(1, 2, **place)
        roles: dict[str, bytes] = {}
        while roles.keys() != {"P", "D"}:
            assert proxy.poll(10_000)
            sender, frame = proxy.recv_multipart()
            ping = decode_ping(frame)
            roles[ping.type] = sender
            assert ping.partners == (64 if ping.type == "D" else 0)
        proxy.send_multipart([roles["D"], encode_partners([str(p.address)])])
        wait_for(lambda: all(worker.rank.counters.values["links_ahead"] for worker in d.workers))
        ask_both(p, d, "the first request", tokens(40))
        finish(p, d)
        assert set(d.ended.values()) == {"length"}
        built = [peer.link.number for peer in p.workers[0].rank.core.roles[0].peers]
        assert built == [1, 1], "the request has built links of its own"


@pytest.mark.parametrize("off", [False, True], ids=["warm", "as it is"])
def test_what_the_first_rank_announces(engines: Any, monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    made: list[Announcement] = []

    class Recorder(Announcer):
        def __init__(self, announcement: Announcement, hear: Any, standing: Any) -> None:
            made.append(announcement)
            assert standing() == Standing(), "both may get requests"
            super().__init__(announcement, hear, standing)

        def start(self) -> None:
            pass

    monkeypatch.setattr(connector, "Announcer", Recorder)
    more = {"warm_up_seconds": 0} if off else {"warm_up_tls": True, "stall_seconds": 70}
    engines(1, 2, proxy_ip="127.0.0.1", proxy_port=9, http_port=8100, **more)
    assert [each.ping.type for each in made] == ["P", "D"], "only the first rank of an instance announces it"
    assert made[0].ping.fit == made[1].ping.fit != "", "with another TP they fit all the same"
    assert f"protocol={PROTOCOL_VERSION}, weights=" in made[0].ping.fit
    assert {(each.ping.version, each.ping.protocol) for each in made} == {
        (DISCOVERY_VERSION, PROTOCOL_VERSION)
    }
    assert [each.ping.partners for each in made] == [0, 64]
    for each in made:
        assert (each.proxies, each.ping.http_address, each.secret) == (
            ("127.0.0.1:9",),
            "127.0.0.1:8100",
            None,
        )
        if off:
            assert each.warm_up is None
            continue
        assert each.stall_seconds == 70 and each.warm_up is not None
        assert (each.warm_up.url, each.warm_up.api_key) == ("https://127.0.0.1:8100", "a key")
        assert each.warm_up.tokens == 3 * BLOCK + 1 and each.warm_up.model == each.ping.model


def test_prompts_with_a_common_beginning_in_one_step(engines: Any) -> None:
    """P's later prompts take as cached what the first one computes in the same step, while D asks."""
    p, d = engines(1, 1, budget=400, chunk_bytes=4096)
    ask_both(p, d, "the link is built", tokens(20, "first"))
    finish(p, d)

    def let_d_ask_and_p_push() -> None:
        for _ in range(40):
            d.step()
            time.sleep(0.001)

    p.meanwhile = let_d_ask_and_p_push
    for index in range(4):
        ask_both(p, d, index, [*tokens(64), index, 1, 2, 3])
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert p.count("bytes_early") > 0, "nothing was pushed during the step"


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic(engines: Any, seed: int) -> None:
    """Little memory, common prefixes, chunks, aborts and preemptions on both sides, in any order."""
    draw = random.Random(seed)
    sizes = draw.choice([1, 2]), draw.choice([1, 2])
    # What D gives up before it has found P is P's to find out, and takes a lease.
    p, d = engines(*sizes, blocks=24, budget=40, policy="recompute", lease_seconds=2)
    starts = [tokens(50, f"start {each}") for each in range(2)]
    live = []
    for index in range(25):
        outer = pair_id(f"{seed} {index}", prefill=p.address, decode=d.address)
        prompt = draw.choice(starts)[: draw.randrange(51)] + tokens(draw.randrange(1, 60), index)
        live += [
            (p, p.ask(inner_id(outer), prompt, max_tokens=draw.choice([1, 1, 9]))),
            (d, d.ask(inner_id(outer), prompt, max_tokens=draw.randrange(1, 30))),
        ]
        for _ in range(draw.randrange(6)):
            draw.choice([p, d]).step()
        abort_or_reset(draw, p, d, live)
    finish(p, d)
    assert len(p.ended) == len(d.ended) == 25
    assert set(d.ended.values()) <= {"length", "abort"}
