"""The bounds of one proxy, and what it counts of those that were met."""

from __future__ import annotations

from dataclasses import dataclass

from .membership.registry import LEASE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one proxy.

    Attributes:
        max_requests: requests under way at one decode instance. It should be more than the instance's batch
            holds, or the batch runs empty.
        max_waiting: requests that wait for a place, in all.
        max_wait: seconds that one of them waits at most.
        max_body: bytes of the largest request.
        max_values: values (objects, lists, texts, fields) in the largest request.
        max_messages: messages, or items of the input of /v1/responses, in the largest request.
        max_held: bytes of the bodies of all requests that an instance may still be sent.
        body_seconds: how long a body may take to come, from its head to its last byte.
        max_connections: of clients, at a time.
        retries: how often one request is tried again elsewhere, before its first byte.
        resumes: how often the answer of one request goes on at another decode instance; 0: never.
        resume_bytes: what is held for that, of all answers together.
        resume_bytes_each: of one.
        lease: seconds for which an instance may be silent while its connection stands, before it is gone.
        first_token_seconds: for the first token of a streamed answer; 0: no deadline.
        event_seconds: from one event of a streamed answer to the next; 0: no deadline.
        alone_share: of one decode instance's places, the share for requests whose prompts it computes in a
            prefill instance's place, because none can or because they are short; 0 for none.
    """

    max_requests: int = 1024
    max_waiting: int = 1024
    max_wait: float = 30.0
    max_body: int = 64 << 20
    max_values: int = 1 << 17
    max_messages: int = 4096
    max_held: int = 1 << 30
    body_seconds: float = 60.0
    max_connections: int = 16384
    retries: int = 1
    resumes: int = 2
    resume_bytes: int = 256 << 20
    resume_bytes_each: int = 2 << 20
    lease: float = LEASE
    first_token_seconds: float = 0.0
    event_seconds: float = 0.0
    alone_share: float = 0.25

    @property
    def alone(self) -> int:
        """The places of that share: at least one, unless there is none."""
        return max(1, int(self.max_requests * self.alone_share)) if self.alone_share > 0 else 0


@dataclass
class RequestCounters:
    """What the proxy has counted since it started; GET /health shows it.

    Attributes:
        admitted: requests that were given a place at an instance.
        refused_full: turned away because too many waited, or their bodies held too much.
        refused_late: turned away after the longest wait.
        left_waiting: whose client left while they waited.
        alone: requests that a decode instance was given because no prefill instance could serve them.
        refused_alone: turned away because as many of those as may were under way.
        spared: requests that a decode instance was given because their prompts are short.
        retried: tries at another instance.
        retries_refused: failures that were not tried again because the budget of retries was spent.
        resume_tries: tries to go on with a streamed answer at another decode instance.
        resumed: streamed answers that went on at another decode instance, to their end.
        not_resumed: streamed answers that could have, and ended with an error.
        breakers_opened: how often an instance was given a pause.
        cut_off: requests that were ended because the proxy stopped.
    """

    admitted: int = 0
    refused_full: int = 0
    refused_late: int = 0
    left_waiting: int = 0
    alone: int = 0
    refused_alone: int = 0
    spared: int = 0
    retried: int = 0
    retries_refused: int = 0
    resume_tries: int = 0
    resumed: int = 0
    not_resumed: int = 0
    breakers_opened: int = 0
    cut_off: int = 0
