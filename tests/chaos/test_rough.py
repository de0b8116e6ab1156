"""A P and a D over TCP that is late, comes in slices, stalls, and ends in mid-message.

Real ranks in processes of their own. Either the control connection (ZMQ with CURVE) or the links go through a
relay that is rough with them.
"""

import asyncio
import dataclasses
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from chaos.engine import Build
from chaos.live_run import LiveRun
from chaos.machines import Machine
from chaos.model import ONE_GROUP, Group, Model
from chaos.rough import BACK, THERE, Manner, Relay, rough
from chaos.schedule import LEASE

from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address

BACK_SECONDS = 15.0
"""In which a transfer works again: a P that failed a handshake is left alone for five."""

Treat = Callable[..., None]

HYBRID = Model(
    (
        Group((0, 3), heads=4, content=32),
        Group((1,), heads=2, content=16, table=1, window=40),
        Group((2, 4), heads=2, content=6, table=2, once=True, moves=True),
        Group((2, 4), heads=4, content=22, table=2, once=True, moves=True),
    )
)
MODELS = {"one group": (ONE_GROUP, 1), "hybrid, 1 to 2": (HYBRID, 2)}
"""And D's ranks."""


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[LiveRun]:
    model, tp = MODELS[getattr(request, "param", "one group")]
    # A D has a relay before each of its links, and a P, as any machine, one before its control port.
    at = Address("127.0.0.1", free_ports(tp))
    machines = [Machine("P0", Build(model), links=rough), Machine("D0", Build(model, tp), at, links=rough)]
    with LiveRun(2, machines) as live:
        yield live
        live.stop_all()
        assert live.violations == []


@pytest.fixture
def live(engines: LiveRun) -> Iterator[LiveRun]:
    """Both engines have worked; after the test, in peace, they work again, and hold nothing."""
    engines.recover("P0", "D0", BACK_SECONDS)
    yield engines
    for plane in PLANES.values():
        plane(engines, **dataclasses.asdict(Manner()))
    engines.work_again("P0", "D0", BACK_SECONDS)


def control(live: LiveRun, **values: Any) -> None:
    vars(live.machines["P0"].door.manner).update(values)  # type: ignore[union-attr]


def data(live: LiveRun, **values: Any) -> None:
    assert live.machines["D0"].order("manner", values=values)


PLANES: dict[str, Treat] = {"control": control, "data": data}
planes = pytest.mark.parametrize("treat", PLANES.values(), ids=PLANES)
ways = pytest.mark.parametrize("way", [THERE, BACK])


@pytest.mark.slow
@planes
@pytest.mark.parametrize("values", [{"slice": 61}, {"late": 0.1, "slice": 997}], ids=str)
def test_late_and_in_slices_everything_comes(live: LiveRun, treat: Treat, values: dict[str, Any]) -> None:
    before = live.jobs.outcomes["loaded"]
    treat(live, **values)
    for _ in range(5):
        live.ask("P0", "D0")
    live.turn_until(lambda: not live.jobs.open, 10 * LEASE, "the end of every request")
    assert live.jobs.outcomes["loaded"] == before + 5 and live.violations == []


@pytest.mark.slow
@planes
def test_short_stalls_cost_nothing_but_time(live: LiveRun, treat: Treat) -> None:
    before = live.jobs.outcomes["loaded"]
    for _ in range(4):
        live.ask("P0", "D0")
        treat(live, held=[THERE, BACK])
        held = live.jobs.ask(*live.machines.values(), must=True, shortest=100, fresh=True)
        live.load(0.3 * LEASE, asks=False)
        assert not held.outcome, "nothing was held"
        treat(live, held=[])
        live.load(0.1, asks=False)
    live.turn_until(lambda: not live.jobs.open, 5 * LEASE, "the end of every request")
    assert live.jobs.outcomes["loaded"] == before + 8 and live.violations == []


@pytest.mark.slow
def test_a_cut_that_cuts_nothing_is_noticed(live: LiveRun) -> None:
    """So the tests of partitions cannot pass without one."""
    with pytest.raises(AssertionError, match="should have been cut"):
        for _ in range(10):  # on a busy machine a request may take longer than the first time
            live.nothing_comes_through(LEASE)


@pytest.mark.slow
@planes
def test_while_both_ways_are_held_nothing_comes_through(live: LiveRun, treat: Treat) -> None:
    live.load(0.5)
    treat(live, held=[THERE, BACK])
    live.nothing_comes_through(0.5 * LEASE)


@pytest.mark.slow
@planes
@ways
@pytest.mark.parametrize(("how", "leases"), [("held", 2), ("half", 1)])
def test_one_way_is_frozen_or_half_closed(
    live: LiveRun, treat: Treat, way: str, how: str, leases: int
) -> None:
    """Every request ends by itself while the connections are still treated so."""
    live.load(0.5)
    before = live.jobs.outcomes["failed"]
    treat(live, **{how: [way]})
    live.load(leases * LEASE)
    live.turn_until(lambda: not live.jobs.open, 10 * LEASE, "the end of every request")
    assert live.violations == []
    assert live.jobs.outcomes["failed"] > before, "nothing was frozen or cut"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engines", "treat", "most"),
    [("one group", control, 3_000), ("hybrid, 1 to 2", data, 200_000)],
    indirect=["engines"],
)
def test_connections_are_reset_in_the_middle_of_messages(live: LiveRun, treat: Treat, most: int) -> None:
    """Eight times. A load whose link broke is computed by D."""
    draw, failed, recomputed = random.Random(3), live.jobs.outcomes["failed"], live.jobs.recomputed
    for _ in range(8):
        treat(live, slice=997, reset_after=draw.randint(1, most))
        live.load(0.5)
    assert live.jobs.outcomes["failed"] > failed, "nothing was broken"
    assert treat is control or live.jobs.recomputed > recomputed, "no failed load was computed by D"


def test_a_relay_slices_and_delays_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[bytes] = []
    write = asyncio.StreamWriter.write
    monkeypatch.setattr(
        asyncio.StreamWriter, "write", lambda sink, data: slices.append(data) or write(sink, data)
    )
    sent, got = random.Random(1).randbytes(20_000), b""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        inside, outside = (Address("127.0.0.1", each) for each in (listener.getsockname()[1], free_ports()))
        relay = Relay(outside, inside, Manner(slice=13, late=0.01))
        stack.callback(relay.close)
        relay.start()
        client = stack.enter_context(socket.create_connection(("127.0.0.1", outside.port), timeout=5.0))
        server = stack.enter_context(listener.accept()[0])
        server.settimeout(5.0)
        client.sendall(sent)
        while len(got) < len(sent):
            got += server.recv(1 << 16)
    assert got == sent == b"".join(slices) and max(map(len, slices)) == 13
