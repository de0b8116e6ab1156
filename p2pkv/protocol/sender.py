"""P's side of one transfer: a prompt whose KV this rank computes and pushes to the ranks of one D.

The Sender follows the prompt; one SendState for each D rank follows the conversation with it.

prompt:  HELD -> OFFERED <-> COMPUTED -> RELEASED        (any) -> ENDED
send:     CLAIMED -> SENDING -> DRAINED -> DONE           (any) -> ENDED
         CLAIMED -> AHEAD -> SENDING or DONE
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from msgspec import UNSET, UnsetType

from p2pkv.protocol import messages as m
from p2pkv.protocol import state_machine
from p2pkv.protocol.extents import Computed, Cutter
from p2pkv.protocol.handshake import Assignment
from p2pkv.protocol.state_machine import Decision, LocalProtocolError, RemoteProtocolError, SendTo, Transmit


class PromptPhase(Enum):
    HELD = auto()  # in P's queue
    OFFERED = auto()  # its prefill has begun
    COMPUTED = auto()  # all its tokens are in the blocks
    RELEASED = auto()  # nothing will be read from the blocks any more
    ENDED = auto()  # failed, aborted or cancelled


PromptEvent = Literal["OFFER", "COMPLETE", "REVOKE", "RELEASE", "END"]

_P = PromptPhase
PROMPT: state_machine.Table[PromptPhase, PromptEvent] = {
    _P.HELD: {"OFFER": _P.OFFERED, "REVOKE": _P.HELD, "END": _P.ENDED},
    _P.OFFERED: {
        "OFFER": _P.OFFERED,
        "COMPLETE": _P.COMPUTED,
        "REVOKE": _P.OFFERED,
        "RELEASE": _P.RELEASED,
        "END": _P.ENDED,
    },
    _P.COMPUTED: {"OFFER": _P.COMPUTED, "REVOKE": _P.OFFERED, "RELEASE": _P.RELEASED, "END": _P.ENDED},
    _P.RELEASED: {},
    _P.ENDED: {},
}


class SendPhase(Enum):
    CLAIMED = auto()  # D's rank waits for this prompt
    PREFETCHING = auto()  # it takes all of it, although no request for it has come; the blocks stay
    SENDING = auto()  # it said which tokens it wants
    DRAINED = auto()  # all of them have been read from the blocks
    DONE = auto()  # and are in D's blocks
    ENDED = auto()  # failed or cancelled


SendEvent = Literal["PREFETCHING", "WANT", "NOTHING", "DRAIN", "DONE", "END"]

_S = SendPhase
SEND: state_machine.Table[SendPhase, SendEvent] = {
    _S.CLAIMED: {"PREFETCHING": _S.PREFETCHING, "WANT": _S.SENDING, "NOTHING": _S.DONE, "END": _S.ENDED},
    _S.PREFETCHING: {"WANT": _S.SENDING, "NOTHING": _S.DONE, "END": _S.ENDED},
    _S.SENDING: {"DRAIN": _S.DRAINED, "END": _S.ENDED},
    _S.DRAINED: {"DONE": _S.DONE, "END": _S.ENDED},
    _S.DONE: {},
    _S.ENDED: {},
}

MAX_ANNOUNCED = 64
"""Chunks for one rank of D that may be announced and not yet sent; bounds what D has to remember."""


@dataclass
class SendState:
    """What this rank owes a rank of D, under one attempt.

    `computed`, an argument of its methods: for each layer here, how many first tokens are in the blocks.

    Attributes:
        layers: by KV group, the numbers on this rank of the layers that it owes.
        limit: the most bytes of one chunk; 0 while it is not known, and nothing is announced.
        ready: the most bytes of a chunk that D's rank cuts itself; 0 while it may not.
        gone: that rank has restarted or broken the protocol; the next one is another rank.
        cutter: what of the tokens that it wants has not been announced yet; None before it has said which.
        announced: bytes and pieces of each chunk that has not been sent.
    """

    assignment: Assignment
    layers: Mapping[int, Sequence[int]]
    attempt: int
    limit: int
    last_heard: float
    machine: state_machine.Machine[SendPhase, SendEvent]
    ready: int = 0
    gone: bool = False
    cutter: Cutter | None = None
    _chunks: int = 0
    announced: dict[int, tuple[int, tuple[m.Piece, ...]]] = field(default_factory=dict)
    _granted: set[int] = field(default_factory=set)

    def want(self, message: m.Want) -> None:
        """D's rank names the tokens that it wants. Chunks that it has cut of them count as announced. Raises
        RemoteProtocolError if it named others before, or may not have cut them so."""
        extents = self.assignment.extents(message.start, message.stop)
        if self.cutter is not None and self.cutter.extents != extents:
            raise RemoteProtocolError(f"{message} is not what was wanted ahead, {self.cutter.extents}")
        if message.cut and (self.cutter is not None or not self.ready):
            raise RemoteProtocolError(f"{message} cuts what was cut before, or is not ready")
        self.machine.remote("PREFETCHING" if message.prefetch else "WANT")
        self.cutter = self.cutter or Cutter(extents)
        for pieces in message.cut or ():
            self.announced[self._chunks] = self.cutter.take(pieces, self.ready), pieces
            self._chunks += 1

    def announce(self, key: str, computed: Sequence[int], limit: int, flush: bool) -> Iterator[m.Chunk]:
        """Chunks to announce now: full ones, and with `flush` the rest."""
        limit = min(limit, self.limit)
        if self.cutter is None or not self.cutter.left or self.machine.ended or not limit:
            return
        room = MAX_ANNOUNCED - len(self.announced)
        for nbytes, pieces in self.cutter.chunks(self._owed(computed, self.layers), limit, flush, room):
            yield m.Chunk(key, self.attempt, self._chunks, nbytes, pieces)
            self.announced[self._chunks] = (nbytes, pieces)
            self._chunks += 1

    def grant(self, message: m.Grant) -> tuple[m.Piece, ...]:
        """A receive is posted for this chunk; what is in it. Raises RemoteProtocolError."""
        announced = self.announced.get(message.chunk)
        if announced is None or announced[0] != message.nbytes or message.chunk in self._granted:
            raise RemoteProtocolError(f"{message} grants what was not announced, or grants it twice")
        self._granted.add(message.chunk)
        return announced[1]

    def awaits_grant(self, chunk: m.Chunk) -> bool:
        """Whether this chunk has been announced, and no receive for it is known to be posted."""
        known = self.attempt == chunk.attempt and chunk.chunk in self.announced
        return known and chunk.chunk not in self._granted

    def readable(self, computed: Sequence[int], pieces: Sequence[m.Piece]) -> bool:
        """Whether the blocks still hold all of these pieces."""
        owed = self._owed(computed, {piece.group for piece in pieces})
        return self.cutter is not None and self.cutter.extents.readable(owed, pieces)

    def sent(self, chunk: int, filler: bool) -> None:
        """The chunk has been handed to the link; if it was filler, it will be announced again."""
        assert self.cutter is not None
        _, pieces = self.announced.pop(chunk)
        self._granted.remove(chunk)
        if filler:
            self.cutter.put_back(pieces)

    @property
    def drained(self) -> bool:
        """Whether all that is wanted has been read from the blocks."""
        return self.cutter is not None and not self.cutter.left and not self.announced

    def _owed(self, computed: Sequence[int], groups: Iterable[int]) -> Computed:
        return {group: [computed[layer] for layer in self.layers[group]] for group in groups}


class Sender:
    """One prompt on one P rank."""

    def __init__(self, key: str, layers: Sequence[Sequence[int]], terms: state_machine.Terms) -> None:
        """`layers`: of each KV group, the numbers of its layers on this rank."""
        self._layers = layers
        self.key = key
        self.terms = terms
        self.prompt = state_machine.Machine(f"prompt {key}", PROMPT, PromptPhase.HELD)
        self.sends: dict[int, SendState] = {}
        self._withdrawn: dict[int, SendState] = {}
        """Of ranks of D that took the prompt ahead and let it go: that attempt does not come back."""
        self.expects: frozenset[int] | None = None
        self.tokens = 0
        self.digest = b""
        self.generation = ""
        self.reason = ""
        self._computed = [0] * (1 + max(max(numbers, default=-1) for numbers in layers))
        self._since: float | None = None
        self._moved = 0.0
        """When all of it was computed, or D took a part of it after that."""

    # What P's own engine does.

    def offer(self, tokens: int, digest: bytes, generation: str = "") -> list[Decision]:
        """The prefill begins, or begins again after a `revoke`: `tokens` in the prompt."""
        if self.prompt.ended:
            return []
        self.prompt.local("OFFER")
        self.tokens, self.digest, self.generation = tokens, digest, generation
        return [*(self._offer(rank, send) for rank, send in self._open()), *self._settle()]

    def computed(self, layer: int, layer_stop: int, stop: int, now: float) -> list[Decision]:
        """Local layers [layer, layer_stop) now hold KV for the prompt's tokens [0, stop)."""
        if self.prompt.ended:
            return []
        if self.prompt.state is PromptPhase.HELD:
            raise LocalProtocolError(f"{self.key}: tokens are computed before the prompt was offered")
        for index in range(layer, layer_stop):
            self._computed[index] = max(self._computed[index], stop)
        # A pipeline stage may have no KV layers.
        if self.prompt.state is PromptPhase.OFFERED and min(self._computed, default=stop) >= self.tokens:
            self.prompt.local("COMPLETE")
            self._since = self._moved = now
            # Ranks of D that have not said what they want may ask with grants now.
            ready = [(rank, send) for rank, send in self._open() if send.cutter is None and send.limit]
            return [*(self._offer(rank, send) for rank, send in ready), *self.flush()]
        return self._announce_all(flush=False)

    def serves(self, ranks: frozenset[int]) -> None:
        """D's shape is known: the ranks of D that this rank serves."""
        self.expects = ranks

    def flush(self) -> list[Decision]:
        """The step is over: announce what is ready even if it does not fill a message."""
        return self._announce_all(flush=True) + self._settle()

    def revoke(self) -> None:
        """The blocks have been taken back (preemption); for what was granted filler goes out."""
        if not self.prompt.ended:
            self.prompt.local("REVOKE")
        self._computed = [0] * len(self._computed)
        self._since = None

    def abort(self, reason: str) -> list[Decision]:
        """End the transfer towards every D rank; the blocks are free."""
        return [] if self.prompt.ended else self._end("END", reason, state_machine.Finished(False, reason))

    def release(self, reason: str) -> list[Decision]:
        """No D will ask for it: the blocks are free, and nothing has failed. What a D has taken ahead it
        discards by itself. A prompt that is not computed is aborted."""
        if self.prompt.state is not PromptPhase.COMPUTED:
            return self.abort(reason)
        return self._end("RELEASE", reason, state_machine.Finished(True))

    def _end(self, event: PromptEvent, reason: str, outcome: state_machine.Finished) -> list[Decision]:
        self.prompt.local(event)
        self.reason = reason
        out: list[Decision] = []
        for rank, send in self._open():
            send.machine.local("END")
            out.append(SendTo(rank, m.Failed(self.key, send.attempt, reason)))
        return [*out, outcome]

    # What a D rank says.

    def claim(
        self, rank: int, assignment: Assignment, attempt: int, limit: int, now: float
    ) -> list[Decision]:
        """A rank of D waits for this prompt. Each of its heartbeats claims it again, which renews the lease.
        A transfer that has ended is answered with Failed each time. A later attempt replaces the last."""
        send = self.sends.get(rank)
        known = send is not None and send.attempt == attempt and not send.gone
        if send is not None and known and send.machine.state is not SendPhase.ENDED:
            return self._renew(rank, send, limit, now)
        past = send or self._withdrawn.get(rank)
        if self.prompt.ended or (past is not None and attempt <= past.attempt):
            reason = self.reason or "P has freed this prompt's blocks; send a new request"
            return [SendTo(rank, m.Failed(self.key, attempt, reason))]
        if send is not None and not send.machine.ended:
            send.machine.remote("END")
        machine = state_machine.Machine(f"send {self.key}/{rank}", SEND, SendPhase.CLAIMED)
        layers = {
            group: self._layers[group][edge.source_layer : edge.source_layer + len(edge.layers)]
            for group, edge in assignment.edges.items()
        }
        send = SendState(assignment, layers, attempt, limit, now, machine)
        self.sends[rank] = send
        self._withdrawn.pop(rank, None)
        if self._since is not None:
            self._since = now
        return [] if self.prompt.state is PromptPhase.HELD else [self._offer(rank, send)]

    def _renew(self, rank: int, send: SendState, limit: int, now: float) -> list[Decision]:
        opened = limit > 0 and not send.limit
        send.last_heard, send.limit = now, limit or send.limit
        computed = self.prompt.state is PromptPhase.COMPUTED
        if opened and computed and send.cutter is None:
            return [self._offer(rank, send)]
        return self._announce(rank, send, flush=opened or computed)

    @property
    def awaited(self) -> bool:
        """Whether all of it is computed, and a rank of D has something to wait for."""
        return self.prompt.state is PromptPhase.COMPUTED and bool(self._open())

    def vouches(self, rank: int, attempt: int) -> bool:
        """Whether this transfer is alive here, so that D may go on waiting: what HeartbeatAck says."""
        return self._live(rank, attempt) is not None

    def want(self, rank: int, message: m.Want, now: float) -> list[Decision]:
        if message.empty:
            return self._let_go(rank, message)
        send = self._live(rank, message.attempt)
        if send is None:
            return []
        send.last_heard = now
        if self.prompt.state is PromptPhase.HELD or message.stop > self.tokens:
            raise RemoteProtocolError(
                f"{self.key}: {message} goes beyond the {self.tokens} tokens of the offer"
            )
        send.want(message)
        if message.cut:  # the rest once the first of these is on its way, which D waits for
            return self._settle()
        return self._announce(rank, send, flush=True) + self._settle()

    def _let_go(self, rank: int, message: m.Want) -> list[Decision]:
        """D wants nothing more: it has all of it; or no request has come yet, and one still may."""
        past = self._withdrawn.get(rank)
        if past is not None and past.attempt == message.attempt:
            self.sends[rank] = self._withdrawn.pop(rank)
        send = self._live(rank, message.attempt)
        if send is None:
            return []
        if message.prefetch:
            self._withdraw(rank)
            return []
        send.machine.remote("NOTHING")
        return self._settle()

    def grant(self, rank: int, message: m.Grant, now: float) -> list[Decision]:
        """A receive is posted for this chunk. An ended transfer obeys it, too, with filler."""
        send = self._live(rank, message.attempt)
        if send is None:
            return [Transmit(rank, message, ())]
        pieces = send.grant(message)
        send.last_heard = self._moved = now
        return [Transmit(rank, message, pieces)]

    def done(self, rank: int, message: m.Done, now: float) -> list[Decision]:
        if (send := self._live(rank, message.attempt)) is None:
            return []
        send.last_heard = now
        send.machine.remote("DONE")
        return self._settle()

    def cancel(self, rank: int, message: m.Cancel) -> list[Decision]:
        if (send := self._live(rank, message.attempt)) is None:
            return []
        send.machine.remote("END")
        self.reason = self.reason or f"D cancelled: {message.reason}"
        return self._settle()

    def lost(self, rank: int, reason: str, restarted: bool = False) -> list[Decision]:
        """D's rank is gone, or broke the protocol; nothing of it may be waited for. `restarted`: what it says
        from now on is another incarnation's, or follows a new Hello."""
        if restarted:
            self._withdrawn.pop(rank, None)
        send = self.sends.get(rank)
        if send is None:
            return []
        if send.machine.state is SendPhase.PREFETCHING:
            self._withdraw(rank, restarted)
            return [SendTo(rank, m.Failed(self.key, send.attempt, reason))]
        # After a restart D may count its attempts from the start again.
        send.gone = True
        if send.machine.ended:
            return []
        send.machine.local("END")
        self.reason = self.reason or reason
        return [SendTo(rank, m.Failed(self.key, send.attempt, reason)), *self._settle()]

    def unlinked(self, rank: int, reason: str) -> list[Decision]:
        """The link to D's rank is gone, with what it carried. Nothing is announced before the next is up."""
        send = self.sends.get(rank)
        if send is None or send.machine.state is not SendPhase.CLAIMED:
            return self.lost(rank, reason)
        send.limit = 0
        return []

    # What the engine reports back.

    def readable(self, order: Transmit) -> bool:
        """Whether the blocks still hold what was announced and granted."""
        send = self._live(order.rank, order.grant.attempt)
        return send is not None and bool(order.pieces) and send.readable(self._computed, order.pieces)

    def sent(
        self, order: Transmit, filler: bool, digest: bytes = b"", together: int | UnsetType = UNSET
    ) -> list[Decision]:
        """This chunk has been gathered (unless `filler`) and handed to the link; the rest is as in Sent."""
        grant = order.grant
        sent = m.Sent(self.key, grant.attempt, grant.chunk, grant.link, filler, digest, together)
        out: list[Decision] = [SendTo(order.rank, sent)]
        send = self._live(order.rank, grant.attempt)
        if send is None or not order.pieces:
            return out
        send.sent(grant.chunk, filler)
        flush = self.prompt.state is PromptPhase.COMPUTED
        return out + self._announce(order.rank, send, flush) + self._settle()

    # Time.

    @property
    def deadline(self) -> float | None:
        """When to call `tick`: the end of the earliest lease, or of P's patience; None while neither runs.
        The lease of a send runs from D's last word. Once the prompt is computed another runs until every rank
        of D has claimed it, anew from each rank that does."""
        ends = [end for end in (self._leased_until, self.kept_until()) if end is not None]
        return min(ends, default=None)

    @property
    def _leased_until(self) -> float | None:
        if self.prompt.ended:
            return None
        times = [send.last_heard for _, send in self._open()]
        if self._since is not None and not self._all_claimed():
            times.append(self._since)
        return min(times) + self.terms.lease if times else None

    def kept_until(self, paused_since: float | None = None) -> float | None:
        """Until when P keeps the blocks of the whole prompt although D takes nothing; None while it is not
        computed. `paused_since`: when P was paused, if it is: /pause may wait until all blocks are free."""
        if self.prompt.state is not PromptPhase.COMPUTED:
            return None
        end = self._moved + self.terms.wait
        return end if paused_since is None else min(end, max(self._moved, paused_since) + self.terms.lease)

    def tick(self, now: float, paused_since: float | None = None) -> list[Decision]:
        """End what has outlived its lease, or P's patience."""
        for rank, send in self._open():
            if send.machine.state is SendPhase.PREFETCHING and now - send.last_heard >= self.terms.lease:
                self._withdraw(rank)
        leased, kept = self._leased_until, self.kept_until(paused_since)
        if leased is not None and now >= leased:
            return self.abort(
                f"D did not answer in time: no word from it about this request for {self.terms.lease:g} s; P "
                "has freed its blocks"
            )
        if kept is None or now < kept:
            return []
        if paused_since is not None:
            return self.abort(
                f"P is paused, and D has taken nothing of this prompt for {self.terms.lease:g} s: P has "
                "freed its blocks, since the pause may wait for them"
            )
        nothing = f"D has taken nothing of this prompt for {self.terms.wait:g} s (wait_seconds)"
        return self.abort(f"{nothing}: P has freed its blocks")

    def _open(self) -> list[tuple[int, SendState]]:
        return [(rank, send) for rank, send in self.sends.items() if not send.machine.ended]

    def _live(self, rank: int, attempt: int) -> SendState | None:
        """The live send that a message means; None for a stale one."""
        send = self.sends.get(rank)
        return send if send is not None and send.attempt == attempt and not send.machine.ended else None

    def _withdraw(self, rank: int, restarted: bool = False) -> None:
        """D lets go of a prompt that no request has asked for: as if it had never claimed it."""
        send = self.sends.pop(rank)
        if not restarted:
            # D may go on with this attempt for a while, with chunks that a new send would not know.
            self._withdrawn[rank] = send

    def _offer(self, rank: int, send: SendState) -> Decision:
        ready: int | UnsetType = UNSET
        if self.prompt.state is PromptPhase.COMPUTED and send.limit:
            send.ready = min(self.terms.chunk_bytes, send.limit)
            ready = send.ready or UNSET
        return SendTo(rank, m.Offer(self.key, send.attempt, self.tokens, self.digest, self.generation, ready))

    def foresee(self, send: SendState, limit: int) -> Iterator[tuple[m.Piece, ...]]:
        """The pieces of the first chunks that this rank of D may cut of all the prompt but its last token."""
        extents = send.assignment.extents(0, self.tokens - 1)
        yield from (pieces for _, pieces in Cutter(extents).whole(self.tokens, limit, m.MAX_CUT))

    def _announce_all(self, flush: bool) -> list[Decision]:
        return [each for rank, send in self._open() for each in self._announce(rank, send, flush)]

    def _announce(self, rank: int, send: SendState, flush: bool) -> list[Decision]:
        chunks = send.announce(self.key, self._computed, self.terms.chunk_bytes, flush)
        return [SendTo(rank, chunk) for chunk in chunks]

    def _settle(self) -> list[Decision]:
        """Note which sends need the blocks no more, and whether any does."""
        for _, send in self._open():
            if send.machine.state is SendPhase.SENDING and send.drained:
                send.machine.local("DRAIN")
        if self.prompt.state not in (PromptPhase.OFFERED, PromptPhase.COMPUTED) or not self._all_claimed():
            return []
        reading = SendPhase.CLAIMED, SendPhase.PREFETCHING, SendPhase.SENDING
        if any(send.machine.state in reading for send in self.sends.values()):
            return []
        self.prompt.local("RELEASE")
        failed = any(send.machine.state is SendPhase.ENDED for send in self.sends.values())
        return [state_machine.Finished(not failed, self.reason if failed else "")]

    def _all_claimed(self) -> bool:
        return self.expects is not None and self.expects <= self.sends.keys()
