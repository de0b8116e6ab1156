"""Engines whose ranks listen on several hosts (addresses of loopback), at any ports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from p2pkv.cli import link_check
from p2pkv.control.security import members_of
from p2pkv.demo.processes import free_ports
from p2pkv.links import make_factory
from p2pkv.pairing import Address
from support.engine.engines import Engine, Geometry, make_rank
from support.engine.transfers import push

HOSTS = ("127.0.0.2", "127.0.0.3")
SECRET = b"a secret of the tests"

Make = Callable[[str, Geometry], Engine]


@pytest.fixture(params=[None, SECRET], ids=["open", "with a secret"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(role: str, geometry: Geometry) -> Engine:
            hosts = [HOSTS[rank % 2] for rank in reversed(range(geometry.world))]
            addresses = [Address(host, free_ports()) for host in hosts]
            ranks = [
                make_rank(
                    role,
                    geometry,
                    rank,
                    address.port,
                    make_factory("host", host=address.host, staging_bytes=1 << 20),
                    fill=0.0 if role == "P" else -1.0,
                    host=address.host,
                    addresses=addresses,
                    secret=request.param,
                )
                for rank, address in enumerate(addresses)
            ]
            engine = Engine(addresses[0], geometry, ranks)
            stack.callback(engine.stop)
            return engine

        yield made


SHAPES = {
    "TP 2 to TP 1": (Geometry(tp=2), Geometry()),
    "TP 1 to TP 2": (Geometry(), Geometry(tp=2)),
    "TP 2 to TP 2": (Geometry(tp=2), Geometry(tp=2)),
    "PP 2 to TP 2": (Geometry(layers=(2, 2)), Geometry(layers=(4,), tp=2)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_ranks_on_several_hosts(make: Make, shapes: tuple[Geometry, Geometry]) -> None:
    """D has the address of P's rank 0, and learns the others from it."""
    p, d = make("P", shapes[0]), make("D", shapes[1])
    for salt in range(2):
        push(p, d, f"prompt {salt}", salt)
    members = members_of(p.ranks[0].rank.core.context.options.secret)
    findings = list(link_check.ask_instances(p.address, d.address, members))
    assert all(found.ok for found in findings), findings
