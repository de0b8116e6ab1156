"""Ranks with a secret: members transfer, strangers get nothing, and both sides say why."""

import contextlib
import logging
import threading
import time

import msgspec
import pytest
import zmq

from p2pkv.control.endpoint import inspect
from p2pkv.control.security import Members, Server
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from p2pkv.trust import Networks
from support.engine.engines import Geometry, prefill
from support.engine.transfers import failure, push, value
from support.hostile import ZMTP_3_CURVE, ZMTP_3_NULL, Canary, dealer
from support.waiting import wait_for

ONE = Geometry()
BLOCKS = list(range(6))
SECRET, OTHER = b"a secret of the tests", b"another secret of the tests"
ELSEWHERE = Networks.parse(["10.0.0.0/8"])


@pytest.fixture
def lone(make_memory):
    return lambda role, secret=SECRET, **options: make_memory(role, secret=secret, **options)


def test_a_member_may_ask_a_rank_what_it_counts(lone):
    p = lone("P")
    report = inspect(p.address, members=Members(SECRET))
    assert (report["role"], report["rank"], report["protocol"]) == ("P", 0, m.PROTOCOL_VERSION)
    assert f"protocol={m.PROTOCOL_VERSION}, weights=" in str(report["fit"]), "what its pings would say"
    for members, reason in ((None, "does it need a secret"), (Members(OTHER), "has it the same secret")):
        with pytest.raises(TimeoutError, match=reason):
            inspect(p.address, members=members)


@pytest.mark.parametrize(
    ("prefill_secret", "decode_secret"),
    [(SECRET, OTHER), (SECRET, None), (None, SECRET)],
    ids=["another", "none on D", "none on P"],
)
def test_without_the_same_secret_no_kv_moves_and_both_sides_say_why(
    lone, prefill_secret, decode_secret, caplog
):
    caplog.set_level(logging.WARNING, "p2pkv")
    p, d = lone("P", prefill_secret), lone("D", decode_secret)
    prefill(p, "k", d.address, 32, BLOCKS, chunk=32)
    d.do(do.Expect("k", p.address, 32, b"digest"))
    reason = failure(d, "k")
    assert f"{p.address} refused the handshake" in reason and "secret" in reason
    wait_for(lambda: value(p, "handshakes_failed"))
    for line in (f"no transfers from {p.address}", f"a connection to {p.address} was refused"):
        wait_for(lambda line=line: line in caplog.text, what=f"the log to say {line!r}")
    assert all((page == -1.0).all() for page in d.ranks[0].pages)
    assert value(p, "bytes_sent") == 0
    assert p.ranks[0].rank.alive and d.ranks[0].rank.alive


CANARIES = {
    "hangs up": (b"", 64),
    "hangs up after a greeting": (ZMTP_3_CURVE, 64 + 202),
    "is no member and has no secret": (ZMTP_3_NULL, 64),
    "speaks something else": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, 64),
}


@pytest.mark.parametrize("kind", CANARIES)
def test_a_forged_request_id_brings_a_canary_one_connection_and_no_message(lone, kind, monkeypatch):
    monkeypatch.setattr("p2pkv.protocol.handshake.REFUSED_FOR", 60.0)  # however slow this machine is now
    greeting, most = CANARIES[kind]
    p, d = lone("P"), lone("D")
    with Canary(greeting, leave="hangs up" in kind) as canary:
        for key in ("forged", "again"):
            d.do(do.Expect(key, canary.address, 32, b"digest"))
            failure(d, key)
        push(p, d, "honest")
        d.do(do.Expect("once more", canary.address, 32, b"digest"))
        assert "refused the handshake" in failure(d, "once more")
        assert len(canary.heard) == 1
        assert len(canary.heard[0]) <= most
        incarnation = d.ranks[0].hello.incarnation.encode()
        assert incarnation not in canary.heard[0] and str(d.address).encode() not in canary.heard[0]
    assert d.ranks[0].rank.alive


@pytest.mark.parametrize(
    ("greeting", "most"),
    # The 200 bytes of CURVE's own hello, which say nothing but that we know another key than it does.
    [(b"", 64), (ZMTP_3_CURVE, 64 + 202)],
    ids=["says nothing", "claims to be a member"],
)
def test_a_canary_that_does_not_answer_gets_a_connection_per_lease_and_no_message(lone, greeting, most):
    """It may be a busy P: it is dialed again, while somebody waits for it."""
    p, d = lone("P"), lone("D", lease_seconds=2.0)
    with Canary(greeting) as canary:
        d.do(do.Expect("forged", canary.address, 32, b"digest"))
        reason = failure(d, "forged")
        assert "did not answer in time" in reason and "fit" not in reason
        assert 1 <= len(canary.heard) <= 2
        wait_for(lambda: value(d, "handshakes_failed"), what="the end of a handshake")
        push(p, d, "honest")
        assert 1 <= len(canary.heard) <= 2, "nobody waits for it any more"
        assert all(len(said) <= most for said in canary.heard)


def test_a_forged_request_id_that_names_another_service_of_ours(lone):
    """A proxy's discovery port has keys of its own: a rank does not get through its handshake."""
    d = lone("D")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        Members(SECRET).serve(router, "proxy")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        d.do(do.Expect("k", Address("127.0.0.1", port), 32, b"digest"))
        assert "same secret" in failure(d, "k")
        assert not router.poll(0)


class Knowing(Members):
    """Knows another secret, and somehow the key that ranks answer with."""

    def key_of(self, server: Server) -> bytes:
        return Members(SECRET).key_of(server)


def attackers() -> dict[str, Members | None]:
    """Ways to connect without the secret; the last knows, somehow, the key that ranks answer with."""
    ways = {"in the clear": None, "with another secret": Members(OTHER)}
    return ways | {"with the ranks' key": Knowing(OTHER)}


@pytest.mark.parametrize("way", attackers())
@pytest.mark.parametrize("role", ["P", "D"])
def test_an_attacker_is_not_answered_and_changes_nothing(lone, role, way):
    p, d = lone("P"), lone("D")
    victim = p if role == "P" else d
    prefill(p, "k", d.address, 32, BLOCKS, chunk=32)
    before = set(threading.enumerate())
    hello = msgspec.structs.replace(d.ranks[0].hello, to=str(victim.address))
    with dealer(victim.address, attackers()[way]) as socket:
        for message in (m.Inspect(), hello, m.Heartbeat((("k", 1),)), m.Want("k", 1, 0, 31)):
            with contextlib.suppress(zmq.Again):  # libzmq has given up the connection
                socket.send(m.encode(message), zmq.DONTWAIT)
        wait_for(lambda: value(victim, "handshakes_failed"))
        assert not socket.poll(300)
    counters = victim.ranks[0].rank.counters.snapshot()
    assert counters["peers"] == counters["messages_bad"] == counters["messages_refused"] == 0
    assert set(threading.enumerate()) >= before
    p.do(do.Abort("k", "the test is over"))
    p.do(do.Forget("k"))
    push(p, d, "next")


def test_networks_are_asked_before_any_connection(lone):
    d = lone("D", None, allowed_peers=ELSEWHERE)
    with Canary() as canary:
        for host in ("127.0.0.1", "localhost"):
            d.do(do.Expect(host, Address(host, canary.address.port), 32, b"digest"))
            assert "is not dialed: allowed_peers are 10.0.0.0/8" in failure(d, host)
        assert canary.heard == []


@pytest.mark.parametrize("secret", [None, SECRET], ids=["in the clear", "with the secret"])
def test_networks_are_asked_before_any_hello(lone, secret, caplog):
    p, d = lone("P", secret, allowed_peers=ELSEWHERE), lone("D", secret)
    d.do(do.Expect("k", p.address, 32, b"digest"))
    assert f"{p.address} refused us" in failure(d, "k")
    wait_for(lambda: "a connection from 127.0.0.1 was refused: allowed_peers are 10.0.0.0/8" in caplog.text)
    assert value(p, "peers") == 0


def test_networks_that_hold_the_peers_change_nothing(lone):
    here = Networks.parse(["127.0.0.0/8"])
    for number, secret in enumerate((None, SECRET)):
        push(lone("P", secret, allowed_peers=here), lone("D", secret, allowed_peers=here), f"k{number}")


def test_a_p_that_was_refused_is_asked_again_when_its_secret_is_mended(lone, monkeypatch):
    monkeypatch.setattr("p2pkv.protocol.handshake.REFUSED_FOR", 0.2)
    p, d = lone("P", OTHER), lone("D")
    d.do(do.Expect("k", p.address, 32, b"digest"))
    failure(d, "k")
    p.stop()
    transfer_to = lone("P", SECRET, kv_port=p.address.port)
    dialing = d.ranks[0].rank.core.roles[0].peers.get(str(p.address)).dialing
    wait_for(
        lambda: time.monotonic() > dialing.next_try, what="the time for which a refused peer is left alone"
    )
    push(transfer_to, d, "next")
