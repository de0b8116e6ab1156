"""A chunk that has come to D, and what is known about its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2pkv.engine.inlet import Inlet
from p2pkv.pages.dense import Rectangles
from p2pkv.pages.digest import Digest
from p2pkv.protocol.messages import Chunk, Sent


@dataclass(frozen=True, slots=True)
class Check:
    """The checksum of what has come, and what P said."""

    digest: Digest
    said: Sent

    @property
    def refuted(self) -> bool:
        """Whether it is known by now that they differ."""
        return self.digest.known and self.differs()

    def differs(self) -> bool:
        """Only when the device has computed ours. P may not leave its own out."""
        return self.digest.value() != self.said.digest


@dataclass(frozen=True, eq=False, slots=True)
class Arrived:
    """One chunk, uint8 [nbytes]. The peer may be gone, or another, when it is written to the pages.

    `rank` is the peer's, `pages` our cache in the form that the bytes have, `check` None where nobody
    wants one.
    """

    peer: Inlet
    rank: int
    chunk: Chunk
    buffer: torch.Tensor
    pages: Rectangles
    check: Check | None
