"""The bounds of one proxy, and the counters of its requests."""

from dataclasses import dataclass, field
from typing import Any

from .membership.registry import LEASE
from .settings import at_least, mib, option, seconds, share


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one proxy, each given by an option."""

    # fmt: off
    # This should be more than an instance's batch holds, or the batch runs empty.
    max_requests: int = option("--max-requests", 1024, at_least(1), "N",
        "requests under way at each decode instance; others wait")
    max_waiting: int = option("--max-waiting", 1024, at_least(0), "N",
        "requests that wait, in all; others get a 503")
    max_wait: float = option("--max-wait", 30.0, seconds, "SECONDS",
        "how long a request waits before it gets a 503")
    max_body: int = option("--max-body-mib", "64", mib, "MIB",
        "MiB of one request's body; a larger one gets a 413")
    max_values: int = option("--max-body-values", 1 << 17, at_least(1), "N",
        "JSON values in one request's body, token ids not counted; more get a 413")
    max_messages: int = option("--max-messages", 4096, at_least(1), "N",
        "messages, or items of the input of /v1/responses, in one request's body; more get a 413")
    body_seconds: float = option("--body-seconds", 60.0, seconds, "SECONDS",
        "how long a request's body may take to come; then it gets a 408")
    max_connections: int = option("--max-connections", 16384, at_least(1), "N",
        "connections of clients; one more takes the place of an idle one, or gets a 503")
    max_held: int = option("--max-held-mib", "1024", mib, "MIB",
        "MiB of the bodies of all requests without an answer yet; others get a 503")
    retries: int = option("--retries", 1, at_least(0), "N",
        "tries at other instances if one fails before the first byte, not counting refused connections")
    resumes: int = option("--resume-limit", 2, at_least(0), "N",
        "how often a streamed answer whose decode instance is lost goes on at another one; 0: never")
    resume_bytes: int = option("--resume-mib", "256", mib, "MIB",
        "MiB of token ids held for --resume-limit; answers beyond it do not go on")
    resume_bytes_each: int = 2 << 20
    """The same for one answer; no option sets it."""
    alone_share: float = option("--alone-share", 0.25, share, "SHARE",
        "share of each decode instance's --max-requests for requests whose prompts it computes, because no "
        "prefill instance can or they are short")
    lease: float = option("--lease-seconds", LEASE, seconds, "SECONDS",
        "how long an instance whose connection is open may be silent until it counts as gone")
    first_token_seconds: float = option("--first-token-seconds", 0.0, seconds, "SECONDS",
        "how long a stream may take to its first token, and to the decode instance's first, before it is "
        "tried elsewhere or ends with a 504: more than a long prompt takes under load; 0: no deadline")
    event_seconds: float = option("--event-seconds", 0.0, seconds, "SECONDS",
        "how long a stream may pause once its decode instance begins, before it goes on at another, or "
        "ends with an error event; 0: no deadline")
    drain_seconds: float = option("--drain-seconds", 25.0, seconds, "SECONDS",
        "after SIGTERM, how long requests under way may go on")
    first_token: str = option("--first-token", "prefill", str, None,
        "prefill: the client gets the prefill instance's token as soon as it is there, where the answer is "
        "the same (docs: operations.md); decode: always the decode instance's. Needs --resume-limit of at "
        "least 1", choices=("prefill", "decode"))
    # fmt: on

    @property
    def decode_alone(self) -> int:
        """Places of a D for prompts that it computes alone: at least one, unless `alone_share` is 0."""
        return max(1, int(self.max_requests * self.alone_share)) if self.alone_share > 0 else 0


def _count(what: str, name: str = "") -> Any:
    return field(default=0, metadata={"name": name, "what": what})


@dataclass
class RequestCounters:
    """What the proxy has counted since it started. GET /health shows each under the name of its field,
    /metrics under the same name or the one that follows the description."""

    # fmt: off
    admitted: int = _count("Requests that got a place at an instance.")
    # Requests turned away: too many waited, or their bodies held too much memory; none had room within
    # --max-wait; the D's computed as many prompts as --alone-share allows. In /metrics: reasons of `shed`.
    refused_full: int = 0
    refused_late: int = 0
    refused_alone: int = 0
    first_tokens: int = _count(
        "Answers whose first token came from the prefill instance.", "first_tokens_from_prefill")
    decode_alone: int = _count(
        "Requests given to a decode instance alone: no prefill instance could help.")
    prefill_skipped: int = _count("Requests given to a decode instance alone: their prompts are short.")
    retried: int = _count("Requests sent to another instance after a failure.", "retries")
    retries_refused: int = _count("Requests that failed and were not tried again: the budget was spent.")
    resume_tries: int = _count("Times that a streamed answer was sent to another decode instance.")
    resumed: int = _count("Streamed answers that went on at another decode instance, to their end.")
    not_resumed: int = _count("Streamed answers that could have gone on, and ended with an error.")
    breakers_opened: int = _count("Pauses given to instances whose requests failed.", "breaker_opened")
    left_waiting: int = _count("Requests whose client left while they waited for a place.")
    cut_off: int = _count("Requests that the proxy cut off because it stopped.")
    # fmt: on
