"""P's side of one transfer: a prompt whose KV this rank computes and pushes to the ranks of one D.

The Sender follows the prompt; one DecodeLeg for each D rank follows the conversation with it. All moves go
through the two tables in sender_states.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv.protocol.effects import Effect, Finished, Released, Tell, Transmit
from p2pkv.protocol.legs import DecodeLeg
from p2pkv.protocol.machine import LocalProtocolError, Machine, RemoteProtocolError
from p2pkv.protocol.messages import Cancel, Done, Failed, Grant, Offer, Sent, Want
from p2pkv.protocol.sender_states import LEG, PROMPT, Leg, Of, On, Prompt
from p2pkv.protocol.wire import Debt


@dataclass(frozen=True)
class Terms:
    """What holds for every transfer of a rank.

    Attributes:
        chunk_bytes: what a message is filled up to.
        lease: seconds for which pages wait for a D that says nothing.
        whole: push nothing before the whole prompt is computed.
    """

    chunk_bytes: int
    lease: float
    whole: bool = False


class Sender:
    """One prompt on one P rank.

    `expects` is set by the engine once D's shape is known: the D ranks that this rank serves.
    """

    def __init__(self, key: str, layers: int, terms: Terms) -> None:
        self.key = key
        self.terms = terms
        self.prompt = Machine(f"prompt {key}", PROMPT, Prompt.HELD)
        self.legs: dict[int, DecodeLeg] = {}
        self._withdrawn: dict[int, DecodeLeg] = {}
        """Of ranks of D that took it ahead and have let go, or lost it: that attempt does not come back."""
        self.expects: frozenset[int] | None = None
        self.tokens = 0
        self.digest = b""
        self.reason = ""
        self._computed = [0] * layers
        self._since: float | None = None

    # What P's own engine does.

    def offer(self, tokens: int, digest: bytes) -> list[Effect]:
        """The prefill begins, or begins again after a `revoke`: `tokens` in the prompt."""
        if self.prompt.ended:
            return []
        self.prompt.local(Of.OFFER)
        self.tokens, self.digest = tokens, digest
        return [*(self._offer(rank, leg) for rank, leg in self._open()), *self._settle()]

    def computed(self, layer: int, layer_stop: int, stop: int, now: float) -> list[Effect]:
        """Local layers [layer, layer_stop) now hold KV for the prompt's tokens [0, stop)."""
        if self.prompt.ended:
            return []
        if self.prompt.state is Prompt.HELD:
            raise LocalProtocolError(f"{self.key}: tokens are computed before the prompt was offered")
        for index in range(layer, layer_stop):
            self._computed[index] = max(self._computed[index], stop)
        if self.prompt.state is Prompt.OFFERED and min(self._computed) >= self.tokens:
            self.prompt.local(Of.COMPLETE)
            self._since = now
            return self.flush()
        return self._announce_all(flush=False)

    def flush(self) -> list[Effect]:
        """The step is over: announce what is ready even if it does not fill a message."""
        return self._announce_all(flush=True) + self._settle()

    def revoke(self) -> None:
        """The pages have been taken back (preemption); what was granted goes out void."""
        if not self.prompt.ended:
            self.prompt.local(Of.REVOKE)
        self._computed = [0] * len(self._computed)
        self._since = None

    def abort(self, reason: str) -> list[Effect]:
        """End the transfer towards every D rank; the pages are free."""
        if self.prompt.ended:
            return []
        self.prompt.local(Of.END)
        self.reason = reason
        out: list[Effect] = []
        for rank, leg in self._open():
            leg.machine.local(On.END)
            out.append(Tell(rank, Failed(self.key, leg.attempt, reason)))
        return [*out, Released(), Finished(False, reason)]

    # What a D rank says.

    def claim(self, rank: int, debt: Debt, attempt: int, limit: int, now: float) -> list[Effect]:
        """D's rank waits for this prompt; it says so again and again, which renews the lease.

        Who asks for what has ended is told so each time. A later attempt takes the place of the one
        before.

        Args:
            debt: what this rank owes it.
            limit: the most bytes of one chunk; 0 while it is not known, and nothing is announced.
        """
        leg = self.legs.get(rank)
        known = leg is not None and leg.attempt == attempt and not leg.gone
        if leg is not None and known and leg.machine.state is not Leg.ENDED:
            return self._renew(rank, leg, limit, now)
        past = leg or self._withdrawn.get(rank)
        if self.prompt.ended or (past is not None and attempt <= past.attempt):
            reason = self.reason or "P has let this prompt's KV go; ask with a new request"
            return [Tell(rank, Failed(self.key, attempt, reason))]
        if leg is not None and not leg.machine.ended:
            leg.machine.remote(On.END)
        leg = DecodeLeg(debt, attempt, limit, now, Machine(f"leg {self.key}/{rank}", LEG, Leg.CLAIMED))
        self.legs[rank] = leg
        self._withdrawn.pop(rank, None)
        if self._since is not None:
            self._since = now
        return [] if self.prompt.state is Prompt.HELD else [self._offer(rank, leg)]

    def _renew(self, rank: int, leg: DecodeLeg, limit: int, now: float) -> list[Effect]:
        opened = limit > 0 and not leg.limit
        leg.heard, leg.limit = now, limit or leg.limit
        return self._announce(rank, leg, flush=opened or self.prompt.state is Prompt.COMPUTED)

    @property
    def awaited(self) -> bool:
        """Whether all of it is computed, and a rank of D has something to wait for."""
        return self.prompt.state is Prompt.COMPUTED and bool(self._open())

    def vouches(self, rank: int, attempt: int) -> bool:
        """Whether this transfer is alive here, so that D may go on waiting: what Holding says."""
        return self._leg(rank, attempt) is not None

    def want(self, rank: int, message: Want, now: float) -> list[Effect]:
        if message.empty:
            return self._let_go(rank, message)
        leg = self._leg(rank, message.attempt)
        if leg is None:
            return []
        leg.heard = now
        if self.prompt.state is Prompt.HELD or message.stop > self.tokens:
            raise RemoteProtocolError(
                f"{self.key}: {message} goes beyond the {self.tokens} tokens of the offer"
            )
        leg.want(message)
        return self._announce(rank, leg, flush=True) + self._settle()

    def _let_go(self, rank: int, message: Want) -> list[Effect]:
        """D wants nothing more: it has all, or no request has come, and one may still."""
        past = self._withdrawn.get(rank)
        if past is not None and past.attempt == message.attempt:
            self.legs[rank] = self._withdrawn.pop(rank)
        leg = self._leg(rank, message.attempt)
        if leg is None:
            return []
        if message.ahead:
            self._withdraw(rank)
            return []
        leg.machine.remote(On.NOTHING)
        return self._settle()

    def grant(self, rank: int, message: Grant, now: float) -> list[Effect]:
        """A receive is posted for this chunk. It is obeyed even by an ended transfer: void then."""
        leg = self._leg(rank, message.attempt)
        if leg is None:
            return [Transmit(rank, message, ())]
        pieces = leg.grant(message)
        leg.heard = now
        return [Transmit(rank, message, pieces)]

    def done(self, rank: int, message: Done, now: float) -> list[Effect]:
        leg = self._leg(rank, message.attempt)
        if leg is None:
            return []
        leg.heard = now
        leg.machine.remote(On.DONE)
        return self._settle()

    def cancel(self, rank: int, message: Cancel) -> list[Effect]:
        leg = self._leg(rank, message.attempt)
        if leg is None:
            return []
        leg.machine.remote(On.END)
        self.reason = self.reason or f"D cancelled: {message.reason}"
        return self._settle()

    def lost(self, rank: int, reason: str, restarted: bool = False) -> list[Effect]:
        """D's rank is gone, or broke the protocol; nothing of it may be waited for.

        `restarted`: what it says from now on is another incarnation's, or follows a new Hello.
        """
        if restarted:
            self._withdrawn.pop(rank, None)
        leg = self.legs.get(rank)
        if leg is None:
            return []
        if leg.machine.state is Leg.AHEAD:
            self._withdraw(rank, restarted)
            return [Tell(rank, Failed(self.key, leg.attempt, reason))]
        # Who comes after a restart may count its attempts from the start: it is not this one.
        leg.gone = True
        if leg.machine.ended:
            return []
        leg.machine.local(On.END)
        self.reason = self.reason or reason
        return [Tell(rank, Failed(self.key, leg.attempt, reason)), *self._settle()]

    def unlinked(self, rank: int, reason: str) -> list[Effect]:
        """The link to D's rank is gone, with what it carried. Nothing is announced before the next is up."""
        leg = self.legs.get(rank)
        if leg is None or leg.machine.state is not Leg.CLAIMED:
            return self.lost(rank, reason)
        leg.limit = 0
        return []

    # What the engine reports back.

    def readable(self, order: Transmit) -> bool:
        """Whether the pages still hold what was announced and granted."""
        leg = self._leg(order.rank, order.grant.attempt)
        return leg is not None and not order.void and leg.readable(self._computed, order.pieces)

    def sent(self, order: Transmit, void: bool, digest: bytes = b"") -> list[Effect]:
        """This chunk has been gathered (unless `void`), with this checksum, and handed to the link."""
        grant = order.grant
        said = Sent(self.key, grant.attempt, grant.chunk, grant.link, void, digest)
        out: list[Effect] = [Tell(order.rank, said)]
        leg = self._leg(order.rank, grant.attempt)
        if leg is None or order.void:
            return out
        leg.sent(grant.chunk, void)
        flush = self.prompt.state is Prompt.COMPUTED
        return out + self._announce(order.rank, leg, flush) + self._settle()

    # Time.

    @property
    def deadline(self) -> float | None:
        """When to call `tick`: the end of the earliest lease, None while no lease runs.

        A leg's lease runs from D's last word. Once the prompt is computed another runs until every
        rank of D has claimed it, anew from each rank that does.
        """
        if self.prompt.ended:
            return None
        heard = [leg.heard for _, leg in self._open()]
        if self._since is not None and not self._all_claimed():
            heard.append(self._since)
        return min(heard) + self.terms.lease if heard else None

    def tick(self, now: float) -> list[Effect]:
        """End what has outlived its lease."""
        for rank, leg in self._open():
            if leg.machine.state is Leg.AHEAD and now - leg.heard >= self.terms.lease:
                self._withdraw(rank)
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        return self.abort(
            f"D did not answer in time: no word from it about this request for {self.terms.lease:g} s; P has "
            "let its KV go"
        )

    # Inside.

    def _open(self) -> list[tuple[int, DecodeLeg]]:
        return [(rank, leg) for rank, leg in self.legs.items() if not leg.machine.ended]

    def _leg(self, rank: int, attempt: int) -> DecodeLeg | None:
        """The live leg that a message means; None for a stale one."""
        leg = self.legs.get(rank)
        return leg if leg is not None and leg.attempt == attempt and not leg.machine.ended else None

    def _withdraw(self, rank: int, restarted: bool = False) -> None:
        """D lets go of what no request has asked for: as if it had never claimed it."""
        leg = self.legs.pop(rank)
        if not restarted:
            # D may go on with this attempt for a while, with chunks that a new leg would not know.
            self._withdrawn[rank] = leg

    def _offer(self, rank: int, leg: DecodeLeg) -> Effect:
        return Tell(rank, Offer(self.key, leg.attempt, self.tokens, self.digest))

    def _announce_all(self, flush: bool) -> list[Effect]:
        out: list[Effect] = []
        for rank, leg in self._open():
            out += self._announce(rank, leg, flush)
        return out

    def _announce(self, rank: int, leg: DecodeLeg, flush: bool) -> list[Effect]:
        if leg.cutter is None or (self.terms.whole and self.prompt.state is not Prompt.COMPUTED):
            return []
        chunks = leg.announce(self.key, self._computed, self.terms.chunk_bytes, flush)
        return [Tell(rank, chunk) for chunk in chunks]

    def _settle(self) -> list[Effect]:
        """Note which legs need the pages no more, and whether any does."""
        for _, leg in self._open():
            if leg.machine.state is Leg.SENDING and leg.drained:
                leg.machine.local(On.DRAIN)
        if self.prompt.state not in (Prompt.OFFERED, Prompt.COMPUTED) or not self._all_claimed():
            return []
        if any(leg.machine.state in (Leg.CLAIMED, Leg.AHEAD, Leg.SENDING) for leg in self.legs.values()):
            return []
        self.prompt.local(Of.RELEASE)
        failed = any(leg.machine.state is Leg.ENDED for leg in self.legs.values())
        return [Released(), Finished(not failed, self.reason if failed else "")]

    def _all_claimed(self) -> bool:
        return self.expects is not None and self.expects <= self.legs.keys()

    def __repr__(self) -> str:
        return f"<{self.prompt} {' '.join(map(repr, (leg.machine for leg in self.legs.values())))}>"
