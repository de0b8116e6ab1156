"""What goes wrong with a conversation: of all of it, a number chooses what."""

from __future__ import annotations

from collections.abc import Callable

from protocol.world import LEASE, World


def _choose(world: World, which: int) -> str:
    keys = list(world.requests)
    return keys[which % len(keys)]


def freeze(world: World, which: int, one: bool, other: bool) -> None:
    """Nothing moves for a while."""
    world.disturb()
    world.advance(LEASE * (which % 4 + 1) / 2)


def abort_on_p(world: World, which: int, one: bool, other: bool) -> None:
    key = _choose(world, which)
    world.requests[key].disturbed = True
    for rank in world.p:
        if key in rank.senders:
            rank.abort(key, "the client of P left")


def abort_on_d(world: World, which: int, one: bool, other: bool) -> None:
    key = _choose(world, which)
    world.requests[key].disturbed = True
    for rank in world.d:
        rank.cancel(key, "the client of D left")


def cut(world: World, which: int, tell_p: bool, tell_d: bool) -> None:
    """A control connection breaks; the transport mends it."""
    pairs = sorted(world.lines)
    if pairs and world.d:
        world.cut(pairs[which % len(pairs)], tell_p, tell_d)


def replay(world: World, which: int, one: bool, other: bool) -> None:
    """Something that was delivered comes again."""
    pairs = sorted(world.lines)
    if pairs:
        world.disturb()
        world.lines[pairs[which % len(pairs)]].replay(which // len(pairs))


def break_link(world: World, which: int, one: bool, other: bool) -> None:
    links = list(world.links.values())
    if links:
        world.disturb()
        links[which % len(links)].broken = True


def spoil(world: World, which: int, one: bool, other: bool) -> None:
    """What a link carries changes on the way; without checksums D would believe it."""
    links = list(world.links.values())
    if links and world.verify:
        world.disturb()
        links[which % len(links)].spoil = which // len(links)


def kill_p(world: World, which: int, loud: bool, again: bool) -> None:
    world.kill_p(loud)
    if again:
        world.start_p()


def kill_d(world: World, which: int, loud: bool, again: bool) -> None:
    world.kill_d(loud)
    if again:
        world.start_d()


FAULTS: dict[str, Callable[[World, int, bool, bool], None]] = {
    fault.__name__: fault
    for fault in (freeze, abort_on_p, abort_on_d, cut, replay, replay, break_link, spoil, kill_p, kill_d)
}
