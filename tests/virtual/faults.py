"""What goes wrong in a run in one thread, and how often."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos.schedule import LEASE
from protocol.samples import KINDS, example
from virtual.network import Endpoint, Network

from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from support.hostile import nonsense

if TYPE_CHECKING:
    from virtual.machine import Machine
    from virtual.world import World

SHORT, LONG = (0.05, 0.7 * LEASE), (1.2 * LEASE, 2.0 * LEASE)
FULL = 3
"""Most messages that find a queue full."""

MESSAGES = 30
"""Of a stranger, before it goes."""

Heal = tuple[float, Callable[[], None]]
"""After so many seconds, do this."""


class UnknownPeer:
    """A bad member: it connects, says what it should not, and listens to nobody."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._endpoint = Endpoint("X", Address("127.0.0.1", 6000), network, lambda: None)
        self._wrong = list(nonsense())
        self._right = [m.encode(example(kind)) for kind in KINDS]

    def harass(self, machine: Machine, draw: random.Random) -> None:
        connection = self._endpoint.dial(machine.outside.shifted(draw.randrange(machine.build.ranks)))
        said = draw.sample(self._wrong, MESSAGES) + draw.sample(self._right, 3)
        self._network.clock.after(draw.uniform(0.1, 0.5), lambda: [connection.send(data) for data in said])
        self._network.clock.after(draw.uniform(0.5, 3.0), lambda: self._endpoint.hang_up(connection))


def kill(world: World, machine: Machine, draw: random.Random) -> Heal:
    machine.kill()
    world.jobs.lose(machine)
    return draw.uniform(0.05, 1.5), machine.start


def restart(world: World, machine: Machine, draw: random.Random) -> Heal:
    machine.stop()
    world.jobs.lose(machine)
    return draw.uniform(0.05, 1.0), machine.start


def freeze(world: World, machine: Machine, draw: random.Random) -> Heal:
    machine.freeze()
    return draw.uniform(*draw.choice([SHORT, LONG])), machine.thaw


def hang(world: World, machine: Machine, draw: random.Random) -> Heal:
    """The forward thread stands still, and the engine's does not."""
    seconds = draw.uniform(*draw.choice([SHORT, LONG]))
    machine.life.hang(world.clock.now + seconds)
    return seconds, machine.note_progress


def crawl(world: World, machine: Machine, draw: random.Random) -> Heal:
    """Its threads wait long for each turn."""
    machine.slow = draw.uniform(5.0, 60.0)
    return draw.uniform(0.2, LEASE), lambda: setattr(machine, "slow", 1.0)


def stall_links(world: World, machine: Machine, draw: random.Random) -> Heal:
    some = machine.some_links()
    for links in some:
        links.frozen = True

    def heal() -> None:
        for links in some:
            links.frozen = False

    return draw.uniform(0.1, 1.5 * LEASE), heal


def break_links(world: World, machine: Machine, draw: random.Random) -> Heal:
    """Now, or after some operations; in the worst case nobody can be told, for a queue is full."""
    for links in machine.some_links():
        links.change(break_at=draw.randint(-1, 3))
    for way in world.network.of(machine.name):
        way.connection.refuses = draw.choice([0, 0, 0, 1])
    return 0.0, lambda: None


def flip_bits(world: World, machine: Machine, draw: random.Random) -> Heal:
    """A coming message of each link is sent, or has arrived, with a wrong bit."""
    for links in machine.some_links():
        links.change(flip_at=draw.randint(0, 3), flip_place=draw.random(), flip_bit=draw.randrange(8))
    return 0.0, lambda: None


def partition(world: World, machine: Machine, draw: random.Random) -> Heal:
    """One way or both, to one other engine or to all of them: what is held arrives later."""
    others = [other for other in world.machines.values() if other.name[0] != machine.name[0]]
    some = others if draw.random() < 0.5 else [draw.choice(others)]
    ways = draw.choice([(True, True), (True, False), (False, True)])
    held = [
        pair
        for other in some
        for pair, cut in zip(((machine.name, other.name), (other.name, machine.name)), ways, strict=True)
        if cut
    ]
    for pair in held:
        world.network.hold(*pair, by=1)

    def heal() -> None:
        for pair in held:
            world.network.hold(*pair, by=-1)

    return draw.uniform(*draw.choice([SHORT, LONG])), heal


def reset(world: World, machine: Machine, draw: random.Random) -> Heal:
    """Connections end; what is on its way is lost."""
    for way in world.network.of(machine.name):
        if not way.dead and draw.random() < 0.7:
            world.network.cut(way)
    return 0.0, lambda: None


def deafen(world: World, machine: Machine, draw: random.Random) -> Heal:
    """A connection stays open, and nothing comes through one way any more."""
    ways = world.network.of(machine.name)
    if ways:
        draw.choice(ways).deaf = True
    return 0.0, lambda: None


def fill_queues(world: World, machine: Machine, draw: random.Random) -> Heal:
    ways = world.network.of(machine.name)
    if ways:
        draw.choice(ways).connection.refuses = draw.randint(1, FULL)
    return 0.0, lambda: None


def replay(world: World, machine: Machine, draw: random.Random) -> Heal:
    """A message that was delivered comes again, as from a peer that is mad."""
    ways = world.network.of(machine.name)
    if ways:
        draw.choice(ways).replay(draw)
    return 0.0, lambda: None


def slow_down(world: World, machine: Machine, draw: random.Random) -> Heal:
    world.network.slow = draw.uniform(0.01, 0.3)
    return draw.uniform(0.2, LEASE), lambda: setattr(world.network, "slow", 0.0)


def harass(world: World, machine: Machine, draw: random.Random) -> Heal:
    world.unknown_peer.harass(machine, draw)
    return 0.0, lambda: None


Fault = Callable[["World", "Machine", random.Random], Heal]

WEIGHTS: dict[Fault, int] = {
    kill: 4,
    restart: 2,
    freeze: 5,
    hang: 2,
    crawl: 2,
    stall_links: 3,
    break_links: 3,
    flip_bits: 2,
    partition: 6,
    reset: 3,
    deafen: 2,
    fill_queues: 2,
    slow_down: 2,
    replay: 3,
    harass: 2,
}
