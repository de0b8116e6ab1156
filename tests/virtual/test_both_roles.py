"""Two ranks of both roles, each P and D of the other at once."""

import pytest
from virtual.pair import BLOCKS, HALF, LEASE, TOKENS, VirtualPair, value

from p2pkv.engine import commands as do
from p2pkv.protocol import messages as m
from support.engine.engines import step
from support.engine.transfers import arrives, begin, load


@pytest.fixture
def pair() -> VirtualPair:
    return VirtualPair(both=True, lease_seconds=LEASE)


def test_ranks_with_both_roles_push_and_load(pair: VirtualPair) -> None:
    pair.half_a_push()
    assert [value(each, "peers") for each in (pair.p, pair.d)] == [1, 1]
    assert [value(each, "links") for each in (pair.p, pair.d)] == [1, 1]
    for engine in (pair.p, pair.d):
        core = engine.rank.core
        assert len(core.prefill.peers) + len(core.decode.peers) == 1
    pair.nothing_was_lost()


def exchange(pair: VirtualPair, keys: list[str]) -> None:
    """Prompts with these keys go both ways at once; what arrives is what was sent."""
    there, back, loaded = BLOCKS, [each + 10 for each in BLOCKS], [each + 20 for each in BLOCKS]
    ways = [(pair.p, pair.d, "there", there, 0), (pair.d, pair.p, "back", back, 1)]
    for p, d, name, blocks, salt in ways:
        for key in keys:
            begin(p, d, f"{name} {key}", blocks=blocks, salt=salt)
    for _, d, name, _, _ in ways:
        for key in keys:
            load(d, f"{name} {key}", blocks=loaded)
    for _, d, name, _, salt in ways:
        for key in keys:
            arrives(d, f"{name} {key}", blocks=loaded, salt=salt)


@pytest.mark.parametrize("count", [1, 8])
def test_both_ways_at_once_on_two_links(pair: VirtualPair, count: int) -> None:
    exchange(pair, [str(n) for n in range(count)])
    assert [value(each, "peers") for each in (pair.p, pair.d)] == [2, 2]
    assert [value(each, "links") for each in (pair.p, pair.d)] == [2, 2]
    for engine in (pair.p, pair.d):
        pair.until(lambda engine=engine: value(engine, "staging_bytes") == 0, what="no staging is held")


def test_a_stranger_is_not_answered_with_a_stranger(pair: VirtualPair) -> None:
    """Two ranks of both roles would answer each other without end."""
    taken: list[object] = []
    for engine in (pair.p, pair.d):
        core = engine.rank.core
        take = core._receive_unowned
        core._receive_unowned = lambda *args, take=take: (taken.append(args), take(*args))  # type: ignore
    connection = pair.p.rank.endpoint.dial(pair.d.address)
    pair.until(lambda: connection.send(m.encode(m.UnknownPeer())), what="a connection")
    pair.until(lambda: taken, what="its arrival")
    pair.lasts(lambda: len(taken) == 1, 1.0)


def test_to_forget_a_key_of_one_role_leaves_that_of_the_other(pair: VirtualPair) -> None:
    """Two transfers, one in each direction, may have one key: a router's `transfer_id`."""
    pair.half_a_push()
    pair.p.do(do.Expect("k", pair.d.address, TOKENS, b"digest"))
    pair.p.do(do.Drop("k", "the request has ended"))
    pair.p.wait(do.LoadFailed("k", "the request has ended"))
    pair.p.do(do.Forget("k", "D"))
    step(pair.p, "k", BLOCKS, HALF, TOKENS)
    pair.d.wait(do.Loaded("k"))
