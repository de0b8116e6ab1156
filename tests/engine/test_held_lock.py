"""A worker that holds its interpreter's lock for long: its engine thread says nothing, and is not dead.

Here it does so while D first connects, which is the system's, ZMQ's and Python's together. A silence at other
moments is in tests/virtual/test_silence.py.
"""

from pathlib import Path

import pytest

from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.engine.engines import engine_maker, plain_links
from support.engine.transfers import TOKENS, arrives, load, rest
from support.links.pairs import starting

SCRIPT = Path(__file__).with_name("stop_peer.py")
SECRET = b"a secret of the tests"
LEASE = 30.0

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("secret", "held"), [(b"", 6.0), (SECRET, 13.0)], ids=["in the clear", "with the secret"]
)
def test_p_holds_its_lock_when_d_first_asks(secret: bytes, held: float) -> None:
    """With a secret the handshake waits for P's thread, without one the Hello does: for more seconds than any
    pause of either but the lease."""
    port = free_ports()
    address = Address("127.0.0.1", port)
    options = {"lease_seconds": LEASE, "secret": secret or None}
    with engine_maker(plain_links("shared-memory"), **options) as make, starting() as begin:
        d = make("D")
        nobody = str(free_ports())  # no proxy listens there
        p = begin("P", str(port), nobody, "shared-memory", str(LEASE), secret.decode(), script=SCRIPT)
        assert p.hear() == {"ready": True}
        p.tell(do="hold", seconds=held)  # from now on its process runs nothing but this
        assert p.hear() == {"holding": True}
        d.do(do.Expect("k", address, TOKENS, b"digest"))
        p.tell(do="prefill", key="k", peer=str(d.address), tokens=TOKENS)
        d.wait(do.Begun("k"), LEASE)
        load(d)
        arrives(d, seconds=LEASE)
        assert [p.hear(), p.hear()] == 2 * [{"done": True}]
        d.do(do.Forget("k"))
        rest(d)
        counters = d.ranks[0].rank.counters.values
        lost = "transfers_failed", "links_aborted", "handshakes_failed"
        assert {name: counters[name] for name in lost} == dict.fromkeys(lost, 0)
