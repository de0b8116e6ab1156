"""A P engine and a D engine of several ranks, their wires and one virtual clock; a test moves them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from protocol.decode_side import DecodeRank
from protocol.prefill_side import PrefillRank
from protocol.wires import Line, Link, Violation

from p2pkv.protocol import receiver, sender
from p2pkv.protocol.handshake import Wire
from p2pkv.protocol.machine import Finished
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup
from p2pkv.protocol.sender import Terms
from p2pkv.sharding import Shape

LEASE = 30.0
BEAT = LEASE / 6
START = 1000.0

End = tuple[str, str, int, str, int]
"""Whose outcome: (role, incarnation, rank, key, attempt); P has no attempts of its own."""


@dataclass(frozen=True)
class Beside:
    """A KV group beside the first one, as a sliding window or a recurrent layer is one.

    Attributes:
        prefill, decode: its layers on each pipeline stage of P and of D.
        row: bytes of a row.
        window, once: as in a Hello.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    heads: int
    row: int
    window: int = 0
    once: bool = False


@dataclass
class Request:
    """What the two schedulers know of a request."""

    chunks: tuple[int, ...]
    on_p: bool = False
    on_d: bool = False
    since: float | None = None
    disturbed: bool = False

    @property
    def tokens(self) -> int:
        return self.chunks[-1]


@dataclass(eq=False)
class World:
    prefill: Shape
    decode: Shape
    unit: int
    chunk_bytes: int
    window: int
    beside: tuple[Beside, ...] = ()
    """Its other KV groups; units are of the first one."""
    ahead: bool = False
    """Whether D takes KV for which no request has come."""
    verify: bool = False
    """P says a checksum of each chunk, some time after it has sent it, and D compares."""
    now: float = START
    ends: dict[End, Finished] = field(default_factory=dict)
    links: dict[tuple[str, int, int, int], Link] = field(default_factory=dict)
    lines: dict[tuple[int, int], Line] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    wants: dict[str, tuple[int, int]] = field(default_factory=dict)
    p: list[PrefillRank] = field(default_factory=list)
    d: list[DecodeRank] = field(default_factory=list)
    breaches: int = 0
    corrupt: int = 0
    _starts: int = 0
    _trace: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def __post_init__(self) -> None:
        self.terms = Terms(self.chunk_bytes, LEASE)
        self.wires = (
            Wire("dense", self.unit, 8),
            *(Wire("dense", 1, each.row, each.once, each.window) for each in self.beside),
        )
        self.start_p()
        self.start_d()

    # The trace.

    def note(self, *words: object) -> None:
        """Something has happened."""
        self._trace.update(repr((self.now, *words)).encode())

    @property
    def trace(self) -> str:
        """What stands for all messages and effects so far: equal for equal walks."""
        return str(self._trace.hexdigest())

    # Processes.

    def start_p(self) -> None:
        self._starts += 1
        self.p = [PrefillRank(self, rank, f"prefill-{self._starts}") for rank in range(self.prefill.world)]

    def start_d(self) -> None:
        self._starts += 1
        self.d = [DecodeRank(self, rank, f"decode-{self._starts}") for rank in range(self.decode.world)]

    def kill_p(self, loud: bool) -> None:
        """P is gone; what it has said may still arrive. `loud`: D's transport notices."""
        self.p = []
        for request in self.requests.values():
            request.on_p, request.disturbed = False, True
        for link in self.links.values():
            link.abort("p")
        for line in self.lines.values():
            line.to_p.clear()
        for rank in self.d if loud else []:
            for peer in list(rank.peers):
                rank.lose(peer, "P is gone")

    def kill_d(self, loud: bool) -> None:
        self.d = []
        for request in self.requests.values():
            request.on_d, request.disturbed = False, True
        for link in self.links.values():
            link.abort("d")
        self.lines.clear()
        for rank in self.p if loud else []:
            for peer in list(rank.peers.values()):
                rank.drop(peer, "D is gone")

    def cut(self, pair: tuple[int, int], tell_p: bool, tell_d: bool) -> None:
        """This control connection breaks and is mended; either side may not notice by itself."""
        line = self.lines[pair]
        line.cut()
        self.disturb()
        if tell_p and self.p:
            peer = self.p[line.p].peers.get(line.d)
            if peer is not None:
                self.p[line.p].drop(peer, "connection lost")
        if tell_d and self.d[line.d].peers[line.p].dialing.open:
            self.d[line.d].lose(line.p, "connection lost")

    def disturb(self) -> None:
        for request in self.requests.values():
            request.disturbed = True

    # What the ranks ask of the world.

    @property
    def p_shapes(self) -> tuple[Shape, ...]:
        """How P divides its KV groups."""
        others = (Shape(each.prefill, each.heads, self.prefill.tp) for each in self.beside)
        return self.prefill, *others

    @property
    def d_shapes(self) -> tuple[Shape, ...]:
        others = (Shape(each.decode, each.heads, self.decode.tp) for each in self.beside)
        return self.decode, *others

    def p_hello(self, rank: int) -> Hello:
        return self._hello("P", rank, self.p[rank].incarnation, self.p_shapes)

    def d_hello(self, rank: int) -> Hello:
        return self._hello("D", rank, self.d[rank].incarnation, self.d_shapes)

    def _hello(self, role: str, rank: int, incarnation: str, shapes: tuple[Shape, ...]) -> Hello:
        groups = tuple(
            KvGroup(
                shape.layers, shape.heads, wire.row_bytes, wire.unit, "float32", "dense", "names",
                once=wire.once, window=wire.window,
            )
            for shape, wire in zip(shapes, self.wires, strict=True)
        )  # fmt: skip
        places = tuple(f"{role.lower()}:{7000 + each}" for each in range(shapes[0].world))
        assert role in ("P", "D")
        return Hello(
            PROTOCOL_VERSION,
            incarnation,
            "P" if role == "P" else "D",
            rank,
            "p:7000",
            places[rank],
            places,
            "model",
            "weights",
            Cache(shapes[0].tp, groups),
            "memory",
            "sum",
            self.verify,
        )

    def dial(self, p: int, d: int) -> Line:
        line = self.lines[p, d] = Line(p, d)
        return line

    def digest(self, key: str) -> bytes:
        return key.encode()

    def finished(self, end: End, outcome: Finished) -> None:
        if end in self.ends:
            raise Violation(f"{end} has two outcomes: {self.ends[end]} and {outcome}")
        if outcome.ok == bool(outcome.reason):
            raise Violation(f"{end}: {outcome} needs a reason if, and only if, it failed")
        self.ends[end] = outcome

    # The schedulers.

    def add(self, key: str, chunks: tuple[int, ...]) -> None:
        self.requests[key] = Request(chunks)

    def arrive_at_p(self, key: str) -> None:
        self._arrive(key)
        self.requests[key].on_p = True
        for rank in self.p:
            rank.hold(key, self.requests[key].chunks)

    def arrive_at_d(self, key: str) -> None:
        self._arrive(key)
        self.requests[key].on_d = True
        self.wants.pop(key, None)
        for rank in self.d:
            rank.expect(key, self.requests[key].tokens)

    def _arrive(self, key: str) -> None:
        """Who comes much later than the other may come too late."""
        request = self.requests[key]
        request.since = self.now if request.since is None else request.since
        request.disturbed |= self.now - request.since > self.terms.lease / 3

    def admissible(self, key: str) -> bool:
        """Whether D's scheduler has heard of the offer from all its ranks, and has not said what it wants."""
        return bool(self.d) and key not in self.wants and all(key in rank.offered for rank in self.d)

    def admit(self, key: str, start: int, stop: int) -> None:
        """Of a hybrid's prompt, whose last token P has left out, D wants all that is left or nothing."""
        if self.beside and stop > start:
            stop = self.requests[key].tokens
        self.wants[key] = (start, stop)
        for rank in self.d:
            if key in rank.receivers:
                rank.want(key, start, stop)

    def loading(self, key: str) -> bool:
        """Whether a rank of D has a load of this request that has not ended."""
        loads = [rank.receivers[key] for rank in self.d if key in rank.receivers]
        return any(not (load.load.ended or load.ahead) for load in loads)

    def give_up_failed(self) -> None:
        """D's scheduler hears that one rank's load failed, and ends the request on the others."""
        for key in self.requests:
            loads = [rank.receivers.get(key) for rank in self.d]
            if any(self.has_failed(rank, key) for rank in self.d) and any(loads):
                for rank in self.d:
                    rank.cancel(key, "another rank failed")

    def has_failed(self, rank: DecodeRank, key: str) -> bool:
        end = self.ends.get(("D", rank.incarnation, rank.rank, key, rank.attempts.get(key, 0)))
        return end is not None and not end.ok

    # Motion.

    def deliver(self, pair: tuple[int, int], to: str) -> bool:
        """One control message arrives; whether there was one."""
        line = self.lines.get(pair)
        if line is None or not (line.to_p if to == "p" else line.to_d):
            return False
        message = line.take(to)
        self.note(pair, to, message)
        if to == "p" and self.p:
            self.p[line.p].receive(line, message)
        elif to == "d" and self.d:
            self.d[line.d].receive(line, message)
        return True

    def move(self) -> bool:
        """Everything moves by one step, in a fair order; whether anything did."""
        moved = False
        for pair in list(self.lines):
            moved |= self.deliver(pair, "p")
            moved |= self.deliver(pair, "d")
        for rank in self.p:
            for peer in list(rank.peers.values()):
                moved |= rank.transmit(peer)
                moved |= rank.speak(peer)
        for link in list(self.links.values()):
            moved |= link.move()
        for decoder in self.d:
            for peer_rank in list(decoder.peers):
                moved |= decoder.pump(peer_rank)
        return moved

    def settle(self) -> None:
        """Move until nothing does. A conversation that never ends is an error."""
        for _ in range(20_000):
            if not self.move():
                return
        raise Violation("the two sides talk without end")

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.p:
            rank.tick()
        for decoder in self.d:
            decoder.tick()

    def prefill_all(self) -> None:
        for rank in self.p:
            for key in rank.senders:
                rank.step(key, 1000)

    def check(self) -> None:
        """The invariants that hold at any time."""
        for rank in self.p:
            for prompt in rank.senders.values():
                if any(len(send.announced) > sender.MAX_ANNOUNCED for send in prompt.sends.values()):
                    raise Violation("P has announced too many chunks")
        for decoder in self.d:
            for load in decoder.receivers.values():
                if any(len(source.chunks) > receiver.MAX_CHUNKS for source in load.sources.values()):
                    raise Violation("D remembers too many chunks")
            for peer in decoder.peers.values():
                if peer.link is not None and peer.link.used > peer.link.window:
                    raise Violation("D has posted more than its window")

    @property
    def at_rest(self) -> bool:
        return all(rank.at_rest for rank in [*self.p, *self.d])

    def drain(self) -> None:
        """Let what can end well do so, let the leases pass, and find everything at its baseline."""
        for _ in range(24):
            self.settle()
            self.give_up_failed()
            self.prefill_all()
            for key, request in self.requests.items():
                if self.admissible(key):
                    self.admit(key, 0, request.tokens - 1)
            self.settle()
            self.check()
            self.advance(BEAT)
        self.settle()
        if not self.at_rest:
            raise Violation(f"not at rest: {self}")

    def __repr__(self) -> str:
        lines = [f"t={self.now:g} P {self.prefill} D {self.decode} unit {self.unit} beside {self.beside}"]
        for rank in self.p:
            free = rank.pages.free
            lines += [f"  P{rank.rank} {each} free={key in free}" for key, each in rank.senders.items()]
            for d, to in rank.peers.items():
                busy = f"orders {len(to.orders)} flights {len(to.flights)}"
                lines.append(f"  P{rank.rank}->D{d} link {to.number} {busy}")
        for decoder in self.d:
            lines += [f"  D{decoder.rank} {load}" for load in decoder.receivers.values()]
            for p, source in decoder.peers.items():
                busy = f"asked {len(source.asked)} posted {len(source.posted)}"
                lines.append(f"  D{decoder.rank}<-P{p} {source.dialing.machine} link {source.number} {busy}")
        return "\n".join(lines)
