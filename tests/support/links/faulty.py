"""Faults on purpose, for tests: a wrapper round any factory, whose links misbehave alike for one seed."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from p2pkv.links.base import Inbound, LinkError, LinkFactory, Outbound, Receive, Send
from p2pkv.links.staging import StagingShare


class WrappedLinks(LinkFactory):
    """Links of `inner`; a subclass changes something of them."""

    def __init__(self, inner: LinkFactory) -> None:
        self.kind, self.staging, self.inner = inner.kind, inner.staging, inner

    def invite(self) -> bytes:
        return self.inner.invite()

    def accept(self, invitation: bytes, window: int) -> tuple[Inbound, bytes]:
        return self.inner.accept(invitation, window)

    def complete(self, invitation: bytes, acceptance: bytes) -> Outbound:
        return self.inner.complete(invitation, acceptance)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. Operations are posts and reserves, counted from 0 on each end of each link."""

    delay_polls: int = 0
    """An operation that has completed says so 0 to this many polls later."""
    break_at: int | None = None
    """From this operation on every call but `abort` and `release` raises LinkError."""
    flip_at: int | None = None
    """In this operation one byte is sent, or has arrived, with a flipped bit."""
    flip_place: float = 0.5
    """Which byte: 0 is the first of the message, 1 the last."""
    flip_bit: int = 0
    """Which bit of it, 0 to 7."""
    refuse_invite: bool = False


class FaultyLinks(WrappedLinks):
    """Links of `inner` with `faults`. `frozen` may be set and cleared at any time, as SIGSTOP and SIGCONT."""

    def __init__(self, inner: LinkFactory, faults: Faults, seed: int = 0) -> None:
        super().__init__(inner)
        self.faults = faults
        self.frozen = False
        self._seed = seed
        self._ends = 0
        self._fates: weakref.WeakSet[_Fate] = weakref.WeakSet()

    def change(self, **faults: Any) -> None:
        """Give the links that there are now these faults; operations count from each end's next one.
        `break_at` and its like may be None, for never."""
        for fate in list(self._fates):
            later = {
                name: value + fate.operations if name.endswith("_at") and value is not None else value
                for name, value in faults.items()
            }
            fate.faults = replace(fate.faults, **later)

    def mend(self) -> None:
        """What has not gone wrong yet will not; links that are broken stay so."""
        for fate in list(self._fates):
            broken = fate.faults.break_at is not None and fate.operations > fate.faults.break_at
            fate.faults = replace(
                fate.faults, break_at=fate.faults.break_at if broken else None, flip_at=None
            )

    def invite(self) -> bytes:
        if self.faults.refuse_invite:
            raise LinkError("injected fault: no interface of this name")
        return super().invite()

    def accept(self, invitation: bytes, window: int) -> tuple[FaultyInbound, bytes]:
        inbound, acceptance = super().accept(invitation, window)
        return FaultyInbound(inbound, self._fate()), acceptance

    def complete(self, invitation: bytes, acceptance: bytes) -> FaultyOutbound:
        return FaultyOutbound(super().complete(invitation, acceptance), self._fate())

    def _fate(self) -> _Fate:
        self._ends += 1
        fate = _Fate(self, random.Random(f"{self._seed}/{self._ends}"))
        self._fates.add(fate)
        return fate


class _Fate:
    """What becomes of one end of a link."""

    def __init__(self, factory: FaultyLinks, dice: random.Random) -> None:
        self.faults = factory.faults
        self.polls = 0
        self.operations = 0
        self._factory = factory
        self._dice = dice

    @property
    def still(self) -> bool:
        return self._factory.frozen

    def check(self) -> None:
        """Raises LinkError once this end is broken."""
        break_at = self.faults.break_at
        if break_at is not None and self.operations > break_at:
            raise LinkError(f"injected fault: the link broke at operation {break_at}")

    def next(self) -> _Lot:
        """The lot of the next operation, which takes place."""
        lot = _Lot(
            delay=self._dice.randint(0, self.faults.delay_polls),
            flip=self.faults if self.operations == self.faults.flip_at else None,
        )
        self.operations += 1
        return lot


@dataclass(frozen=True)
class _Lot:
    delay: int
    flip: Faults | None

    def spoil(self, buffer: torch.Tensor) -> None:
        """Flip the bit, if this operation's lot is that."""
        if self.flip is not None:
            buffer[int(self.flip.flip_place * (buffer.numel() - 1))] ^= 1 << self.flip.flip_bit


class _Operation:
    """What faulty receives and sends have in common: when they may say that they are done."""

    def __init__(self, inner: Receive | Send, fate: _Fate, lot: _Lot) -> None:
        self.buffer = inner.buffer
        self._inner_done = inner.done
        self._fate = fate
        self._lot = lot
        self._done_at: int | None = None

    def done(self) -> bool:
        """The inner operation's, or later."""
        self._fate.check()
        if self._fate.still or not self._inner_done():
            return False
        if self._done_at is None:
            self._done_at = self._fate.polls + self._lot.delay
            self._when_done()
        return self._fate.polls >= self._done_at

    def _when_done(self) -> None:
        """Called once, when the inner operation has completed."""


class FaultyReceive(_Operation):
    """A receive that may be done late, or with a wrong byte."""

    def __init__(self, inner: Receive, fate: _Fate, lot: _Lot) -> None:
        super().__init__(inner, fate, lot)
        self.remote_slot, self.release = inner.remote_slot, inner.release

    def _when_done(self) -> None:
        self._lot.spoil(self.buffer)


class FaultySend(_Operation):
    """A send that may be done late, or leave with a wrong byte."""

    def __init__(self, inner: Send, fate: _Fate, lot: _Lot) -> None:
        super().__init__(inner, fate, lot)
        self._commit = inner.commit
        self._held = False
        self._passed = False

    def commit(self) -> None:
        """The inner send's, now or when the end moves again."""
        self._fate.check()
        self._held = True
        self.pass_on()

    def pass_on(self) -> bool:
        """Commit what was held while the end stood still. Returns whether it has been committed."""
        if self._held and not self._passed and not self._fate.still:
            self._passed = True
            self._lot.spoil(self.buffer)
            self._commit()
        return self._passed


class _FaultyEnd:
    """What both faulty ends have in common: they stand still, and they break."""

    def __init__(self, inner: Any, fate: _Fate) -> None:
        self.inner = inner
        self._fate = fate

    @property
    def share(self) -> StagingShare:
        return self.inner.share  # type: ignore[no-any-return]

    @property
    def used(self) -> int:
        return int(self.inner.used)

    def ready(self) -> bool:
        self._fate.check()
        return not self._fate.still and bool(self.inner.ready())

    def poll(self) -> None:
        self._fate.check()
        self._fate.polls += 1
        if not self._fate.still:
            self.inner.poll()

    def abort(self) -> None:
        self.inner.abort()

    def _free(self) -> None:
        raise AssertionError("the end within frees what it holds")


class FaultyInbound(_FaultyEnd, Inbound):  # type: ignore[misc]
    def post(self, nbytes: int) -> FaultyReceive | None:
        self._fate.check()
        receive = self.inner.post(nbytes)
        return None if receive is None else FaultyReceive(receive, self._fate, self._fate.next())


class FaultyOutbound(_FaultyEnd, Outbound):
    def __init__(self, inner: Outbound, fate: _Fate) -> None:
        super().__init__(inner, fate)
        self._sends: list[FaultySend] = []

    def reserve(self, nbytes: int, remote_slot: int) -> FaultySend | None:
        self._fate.check()
        inner = self.inner.reserve(nbytes, remote_slot)
        if inner is None:
            return None
        send = FaultySend(inner, self._fate, self._fate.next())
        self._sends.append(send)
        return send

    def poll(self) -> None:
        self._fate.check()
        self._sends = [send for send in self._sends if not send.pass_on()]
        super().poll()

    def abort(self) -> None:
        super().abort()
        self._sends.clear()
