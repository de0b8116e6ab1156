"""What the scheduler's side and the workers' side tell each other, step by step.

vLLM carries these objects between its own processes. Requests are named by vLLM's request id where
vLLM is to hear of them, and by the transfer key everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from p2pkv.engine.commands import Expect, Hold, Load, OfferPrompt, PromptBlocks


@dataclass
class Prefill:
    """P: what this step does to one prompt.

    Attributes:
        cached: its blocks hold tokens [0, cached) already, and no step will touch them again.
        start, stop: this step computes tokens [start, stop).
    """

    blocks: PromptBlocks
    cached: int
    start: int
    stop: int


@dataclass
class Ended:
    """A request that is over, and why if it was cut short.

    Attributes:
        report: vLLM keeps the request's blocks until it hears that nobody uses them any more.
    """

    request_id: str
    key: str
    reason: str
    report: bool = True


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    work: bool = False
    """Whether this step computes anything."""
    idle: bool = False
    """Whether it computes nothing, no step before it is still out, and only news can change that."""
    idle_wait: float = 0.0
    """Seconds that this step may wait for news of the transfers; 0 unless it is idle."""
    bell: str = ""
    """Where to ring when there is news after this step (`idle_steps.Bell`); "" unless it is idle."""

    # P
    holds: list[Hold] = field(default_factory=list)
    offers: list[OfferPrompt] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    sent: list[Ended] = field(default_factory=list)

    # D
    expects: list[tuple[str, Expect]] = field(default_factory=list)
    loads: list[tuple[str, Load]] = field(default_factory=list)
    drops: list[Ended] = field(default_factory=list)

    @property
    def orders(self) -> bool:
        """Whether the workers hear of anything new."""
        return bool(
            self.holds
            or self.offers
            or self.prefills
            or self.revoked
            or self.sent
            or self.expects
            or self.loads
            or self.drops
        )


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """Workers to scheduler, each step: requests of D by vLLM's id.

    Attributes:
        begun: how many ranks have heard that P has begun.
        failed: transfers that failed before D had blocks for them, and why.
    """

    begun: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        assert isinstance(other, WorkerNews)
        begun = dict(self.begun)
        for request_id, ranks in other.begun.items():
            begun[request_id] = begun.get(request_id, 0) + ranks
        return WorkerNews(begun, {**self.failed, **other.failed})
