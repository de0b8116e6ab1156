"""How often the way of one layer's bytes crosses from one file of p2pkv to another, by a real trace.

Two cores, one of P and one of D, push one prompt of several layers over a link in memory. What is counted
are the turns in which one layer in the middle is announced, granted, sent and written: all calls in them
whose caller and callee are in different files, less those that the turn would have made without it. A
package of links counts as one file. The tests' network and link stand for `control/endpoint.py` and `links/`.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

from virtual.pair import VirtualPair

from p2pkv.engine import commands as do
from support.engine.engines import READY, Geometry
from support.engine.transfers import expect, load, value

PRODUCT = Path(do.__file__).parents[1]
STANDS_FOR = {"virtual/network.py": "control/endpoint.py", "support/links/memory.py": "links/"}
PHASES = ("announce", "grant", "send", "write")

Crossing = tuple[str, str, str]
"""The caller's file, the callee's, and the callee's name."""


def file_of(frame: FrameType) -> str | None:
    """The file of p2pkv in which this frame runs, or that it stands for; None: of neither."""
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(PRODUCT):
        name = str(path.relative_to(PRODUCT))
        return "links/" if name.startswith("links/") else name
    return next((name for end, name in STANDS_FOR.items() if str(path).endswith(f"tests/{end}")), None)


@contextmanager
def counted() -> Iterator[Counter[Crossing]]:
    into: Counter[Crossing] = Counter()
    generators: set[FrameType] = set()  # each counts once, however often it is resumed

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (to := file_of(frame)) is None:
            return
        if frame.f_code.co_flags & CO_GENERATOR:
            if frame in generators:
                return
            generators.add(frame)
        caller = frame.f_back
        while caller is not None and (came := file_of(caller)) is None:
            caller = caller.f_back
        if caller is not None and came is not None and came != to:
            into[came, to, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield into
    finally:
        sys.setprofile(None)


def crossings() -> dict[str, tuple[Counter[Crossing], Counter[Crossing]]]:
    """By phase, for a layer amid a prompt: its way, and what that turn would have done anyway."""
    pair = VirtualPair(Geometry(blocks=8), chunk_bytes=2048)  # the bytes of one layer
    p, d, tokens, blocks = pair.p, pair.d, 33, [0, 1, 2]
    expect(p, d, tokens=tokens)
    p.do(do.HoldPrompt("k", d.address))
    pair.lasts(lambda: True, 3.0)
    p.do(do.OfferPrompt("k", d.address, tokens, b"digest"))
    p.do(do.PromptBlocks("k", (blocks,)))
    load(d, tokens=tokens, blocks=blocks)
    p.do(do.Computed((("k", tokens),), 0, 1, READY))
    pair.until(lambda: value(d, "chunks_scattered") == 1)
    pair.lasts(lambda: True, 0.1)
    command = do.Computed((("k", tokens),), 1, 2, READY)
    before, now = value(p, "chunks_sent"), pair.clock.now
    found = {}
    cores = [each.rank.core for each in (p, d, p, d)]
    for phase, core in zip(PHASES, cores, strict=True):
        with counted() as anyway:
            core.turn(now)
        deliver(pair.network)
        if phase == "announce":
            core.do(command)
        with counted() as whole:
            core.turn(now)
        found[phase] = whole - anyway, whole & anyway
        if phase == "send":
            core.turn(now)  # the tests' link carries in a poll what was committed before
    assert value(p, "chunks_sent") == before + 1
    assert value(d, "chunks_scattered") == 2
    return found


def deliver(network: Any) -> None:
    """What is on its way arrives at once."""
    for way in network.ways:
        while way._flying:
            _, data = way._flying.popleft()
            way.target.take(way.connection, data)
