"""How much a proxy takes on."""

from __future__ import annotations

from dataclasses import dataclass

from .registry import LEASE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one proxy.

    Attributes:
        max_requests: requests under way at one decode instance; more than its batch holds, or it would idle.
        max_waiting: requests that wait for a place, in all.
        max_wait: seconds that one of them waits at most.
        max_body: bytes of the largest request.
        max_held: bytes of the bodies of all requests that have arrived and not ended.
        body_patience: seconds without a byte after which a body is not waited for any longer.
        retries: how often one request is tried again elsewhere, before its first byte.
        lease: seconds for which an instance may be silent while its connection stands, before it is gone.
        alone_share: of one decode instance's places, the share for requests that no prefill instance can
            serve, and whose prompts it computes itself; 0 for none.
    """

    max_requests: int = 1024
    max_waiting: int = 1024
    max_wait: float = 30.0
    max_body: int = 64 << 20
    max_held: int = 1 << 30
    body_patience: float = 30.0
    retries: int = 1
    lease: float = LEASE
    alone_share: float = 0.25

    @property
    def alone(self) -> int:
        """The places of that share: at least one, unless there is none."""
        return max(1, int(self.max_requests * self.alone_share)) if self.alone_share > 0 else 0
