"""A bad member of a run in one thread: it connects, and says what it should not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hostile_support import DEEP, nearly_right
from protocol.samples import KINDS, example
from virtual.network import Endpoint, Network

from p2pkv.pairing import Address
from p2pkv.protocol import messages as m

if TYPE_CHECKING:
    from virtual.machine import Machine

MESSAGES = 30


class Stranger:
    """It listens to nobody."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._endpoint = Endpoint("X", Address("127.0.0.1", 6000), network, lambda: None)
        self._wrong = [*DEEP, *(each for kind in KINDS for each in nearly_right(example(kind), m.encode))]
        self._right = [m.encode(example(kind)) for kind in KINDS]

    def harass(self, machine: Machine, draw: random.Random) -> None:
        """Connect, speak, and go at some time."""
        assert machine.life is not None
        connection = self._endpoint.dial(machine.outside.shifted(draw.randrange(machine.build.ranks)))
        said = draw.sample(self._wrong, MESSAGES) + draw.sample(self._right, 3)
        self._network.clock.after(draw.uniform(0.1, 0.5), lambda: [connection.send(data) for data in said])
        self._network.clock.after(draw.uniform(0.5, 3.0), lambda: self._endpoint.hang_up(connection))
