"""Strangers and bad peers at a rank that runs: it counts, drops, and serves the next transfer."""

import contextlib
import logging
import socket
import threading
import time

import msgspec
import pytest
import zmq
from protocol.samples import KINDS, example

from p2pkv.control.endpoint import MAX_TOGETHER, inspect
from p2pkv.control.security import Members, Server
from p2pkv.engine import commands as do
from p2pkv.engine import early_claims, to_decode
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import negotiate
from p2pkv.trust import Networks
from support.engine.engines import Geometry, engines, on_engine_thread, plain_links, prefill, step
from support.engine.transfers import BLOCKS, arrives, expect, failure, half, push, rest, value
from support.hostile import RAW, ZMTP_3_CURVE, ZMTP_3_NULL, Canary, dealer, nonsense, router, shout
from support.waiting import wait_for

SECRET, OTHER = b"a secret of the tests", b"another secret of the tests"


class Pair:
    def __init__(self, p, d):
        self.p, self.d = p, d
        self._number = 0

    @property
    def both(self):
        return {"P": self.p, "D": self.d}

    def counters(self, role):
        return self.both[role].ranks[0].rank.counters.snapshot()

    def hello(self, role):
        return self.both[role].ranks[0].hello

    def serves(self):
        """Both threads live and move a prompt, of which every number is checked."""
        self._number += 1
        assert all(engine.ranks[0].rank.alive for engine in self.both.values())
        push(self.p, self.d, f"honest-{self._number}")
        rest(self.p, self.d)


@contextlib.contextmanager
def a_pair(**options):
    with engines(Geometry(), Geometry(), plain_links("memory"), **options) as made:
        yield Pair(*made)


@pytest.fixture
def pair():
    with a_pair() as made:
        yield made


def reported(line: zmq.Socket[bytes]) -> bool:
    """Whether everything sent on `line` so far has been read: the answer to an Inspect comes after it."""
    line.send(m.encode(m.Inspect()))
    while line.poll(10_000):
        if isinstance(m.decode(line.recv()), m.Report):
            return True
    return False


def say_nonsense(line: zmq.Socket[bytes]) -> int:
    """How many messages of nonsense have been said, and read."""
    count = 0
    for count, data in enumerate(nonsense(), 1):
        line.send(data)
        assert count % 1000 or reported(line)
    assert reported(line)
    return count


@pytest.mark.parametrize("role", ["P", "D"])
def test_every_truncation_and_wrong_value_from_a_stranger(pair, role):
    with dealer(pair.both[role].address) as line:
        count = say_nonsense(line)
    assert count > 1500
    assert pair.counters(role)["messages_bad"] > 0.9 * count
    assert pair.counters(role)["peers"] == 0
    pair.serves()


def test_every_truncation_and_wrong_value_from_a_d_that_was_welcomed(pair):
    hello = msgspec.structs.replace(pair.hello("D"), incarnation="f" * 32, to=str(pair.p.address))
    with dealer(pair.p.address) as line:
        line.send(m.encode(hello))
        wait_for(lambda: pair.counters("P")["peers"])
        say_nonsense(line)
        for kind in KINDS:  # each of them right in form and wrong in its place
            line.send(m.encode(example(kind)))
        assert reported(line)
    assert pair.counters("P")["messages_refused"] > 0
    for command in (do.HoldPrompt("x", pair.d.address), do.Abort("x", "the test is over"), do.Forget("x")):
        pair.p.do(command)  # P would keep for ten leases what was said of this key
    pair.serves()


def test_every_truncation_and_wrong_value_from_a_p_that_was_welcomed(pair):
    with router() as (false, place):
        pair.d.do(do.Expect("k", place, 32, b"digest"))
        line, data = false.recv_multipart()
        hello = m.decode(data)
        mine = msgspec.structs.replace(pair.hello("P"), address=str(place), addresses=(str(place),))
        false.send_multipart(
            [line, m.encode(m.Welcome(hello.incarnation, mine, negotiate(hello, mine).digest))]
        )
        wait_for(lambda: pair.d.ranks[0].rank.core.roles[0].peers.get(str(place)).dialing.open)
        bad = pair.counters("D")["messages_bad"]
        everything = list(nonsense())
        for data in everything:
            false.send_multipart([line, data])
        for kind in KINDS:
            false.send_multipart([line, m.encode(example(kind))])
        wait_for(lambda: pair.counters("D")["messages_bad"] - bad > 0.9 * len(everything))
        pair.d.do(do.Drop("k", "the test is over"))
        pair.d.do(do.Forget("k"))
        pair.serves()


@pytest.mark.parametrize("role", ["P", "D"])
def test_empty_frames_and_many(pair, role):
    with dealer(pair.both[role].address) as line:
        for frames in ([b""], [b"", b""], [b"", b"x"], [b"x"] * 20_000, [m.encode(m.Inspect())] * 2):
            line.send_multipart(frames)
        assert reported(line)
    assert pair.counters(role)["messages_bad"] == 1 + 2 + 2 + MAX_TOGETHER
    pair.serves()


def test_a_message_beyond_the_limit_costs_its_sender_the_connection(pair):
    with dealer(pair.p.address) as line:
        line.send(b"x" * (m.MAX_MESSAGE_BYTES + 1))
        with dealer(pair.p.address) as other:
            assert reported(other)
    assert pair.counters("P")["messages_bad"] == 0
    pair.serves()


@pytest.mark.parametrize(("role", "secret"), [("P", None), ("D", None), ("P", SECRET)])
@pytest.mark.parametrize("kind", RAW)
def test_raw_bytes(role, secret, kind):
    """With a secret they never reach the decoder."""
    with a_pair(secret=secret) as pair:
        with shout(pair.both[role].address, RAW[kind]):
            pair.serves()
        counters = pair.counters(role)
        assert secret is None or counters["messages_bad"] == counters["messages_refused"] == 0


def test_idle_connections_are_closed_and_disturb_nobody():
    with a_pair(lease_seconds=2.0) as pair:
        idle = [shout(pair.p.address, b"") for _ in range(300)]
        pair.serves()
        for each in idle:
            each.settimeout(10)
            while each.recv(4096):  # the greeting, and then the end
                pass
            each.close()
        wait_for(lambda: pair.counters("P")["handshakes_failed"] >= 300)
        pair.serves()


def test_connections_that_come_and_go(pair):
    for _ in range(300):
        shout(pair.p.address, b"\xff").close()
    for _ in range(30):
        with socket.create_connection((pair.p.address.host, pair.p.address.port)) as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    pair.serves()


def test_one_connection_that_says_it_is_many(pair, monkeypatch):
    monkeypatch.setattr(to_decode, "MAX_PEERS", 8)
    monkeypatch.setattr(early_claims, "MAX_CLAIMS", 100)
    claims = pair.p.ranks[0].rank.core.prefill.transfers._claims._claims
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(dealer(pair.p.address)) for _ in range(12)]
        for number in range(240):
            place = f"10.0.0.1:{number + 1}"
            said = msgspec.structs.replace(
                pair.hello("D"), to=str(pair.p.address), address=place, addresses=(place,)
            )
            lines[number % 12].send(m.encode(said))
            lines[number % 12].send(m.encode(m.Heartbeat((("k", 1), ("l", 1)))))
        for line in lines:
            assert reported(line)
        assert pair.counters("P")["peers"] <= 8
        assert sum(map(len, claims.values())) == 100
        pair.serves()


def test_a_d_has_no_say_in_the_transfers_of_another(make_memory):
    """Whatever it says about them, with the right numbers, the other D's transfer goes on and arrives."""
    p, d, other = (make_memory(role) for role in "PDD")
    expect(p, other, "its own")
    p.do(do.OfferPrompt("its own", other.address, 96, b"digest"))
    other.wait(do.Begun("its own"))
    half(p, d)
    (line,) = [peer.connection for peer in other.ranks[0].rank.core.roles[0].peers]
    context = other.ranks[0].rank.context
    for message in (
        m.Heartbeat((("k", 1),)),
        m.Want("k", 1, 0, 16),
        m.Done("k", 1),
        m.Grant("k", 1, 0, 4096, 1, 0),
        m.Grant("k", 1, 9, 4096, 1, 9),
        m.Cancel("k", 1, "not mine"),
    ):
        on_engine_thread(other.ranks[0].rank, lambda message=message: context.answer(line, message))
    wait_for(lambda: value(p, "chunks_filler") or value(p, "links_aborted"))
    step(p, "k", BLOCKS, 48, 96)
    arrives(d)
    p.wait(do.BlocksFree("k"))
    assert value(d, "links_aborted") == 0


def test_grants_without_end_end_the_link(pair, monkeypatch):
    monkeypatch.setattr(to_decode, "MAX_ORDERS", 100)
    said = msgspec.structs.replace(pair.hello("D"), incarnation="f" * 32, to=str(pair.p.address))
    with dealer(pair.p.address) as line:
        line.send(m.encode(said))
        wait_for(lambda: pair.counters("P")["peers"])
        for chunk in range(1000):
            line.send(m.encode(m.Grant("absent", 1, chunk, 1024, 1, 0)))
        assert reported(line)
        assert pair.counters("P")["sends_under_way"] <= 100
    pair.serves()


def test_what_strangers_make_a_rank_say_does_not_fill_the_log(pair, caplog):
    caplog.set_level(logging.INFO, "p2pkv")
    unfit = msgspec.structs.replace(pair.hello("D"), to=str(pair.p.address), version=999)
    with dealer(pair.p.address) as line:
        for _ in range(500):
            line.send(m.encode(unfit))
        assert reported(line)
    assert pair.counters("P")["messages_refused"] == 500
    assert 1 <= len([r for r in caplog.records if "refused" in r.getMessage()]) <= 40
    pair.serves()


def test_a_hello_that_only_another_version_can_read_is_refused_with_both_versions(pair):
    newer = msgspec.msgpack.decode(m.encode(pair.hello("D"))) | {"version": 6, "cache": "in another form"}
    with dealer(pair.p.address) as line:
        line.send(msgspec.msgpack.encode(newer))
        assert line.poll(10_000)
        reason = m.decode(line.recv()).reason
    assert f"differ: 5 at {pair.p.address}, 6 at {pair.d.address}; install the same p2pkv" in reason
    pair.serves()


# Ranks with a secret: members transfer, strangers get nothing, and both sides say why.

ONE = Geometry()
ELSEWHERE = Networks.parse(["10.0.0.0/8"])


@pytest.fixture
def lone(make_memory):
    return lambda role, secret=SECRET, **options: make_memory(role, secret=secret, **options)


def test_a_member_may_ask_a_rank_what_it_counts(lone):
    p = lone("P")
    report = inspect(p.address, members=Members(SECRET))
    assert (report["role"], report["rank"], report["protocol"]) == ("P", 0, m.PROTOCOL_VERSION)
    assert f"protocol={m.PROTOCOL_VERSION}, weights=" in str(report["fit"]), "what its pings would say"
    for members, reason in ((None, "does it need a secret"), (Members(OTHER), "it have the same secret")):
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
    with router(Members(SECRET)) as (proxy, place):
        d.do(do.Expect("k", place, 32, b"digest"))
        assert "same secret" in failure(d, "k")
        assert not proxy.poll(0)


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
        for host in ("127.0.0.1", "node-7"):
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
