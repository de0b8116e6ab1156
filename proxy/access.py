"""Access: who may send requests, see instances and drain them. Tenants: whose request it is, what limits the
proxy holds it to, and whose waiting request goes next.

A tenant is one or several API keys, or what a gateway in front names in a header. A tenant at its limit gets
a 429 with Retry-After. Among those with waiting requests the tenant that has used the least goes next: each
place costs it the tokens of prompt and answer, divided by its weight. A tenant that returns after a pause
starts at the cost of the latest place, so it cannot save up. Costs are kept apart for each base model, as
some are served faster than others.
"""

import hashlib
import hmac
import math
import re
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated

import msgspec
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .http import ProxyError
from .settings import read_toml


@dataclass(frozen=True)
class Access:
    """Who may ask for, see and change what.

    Attributes:
        token: the operators' bearer token; "" if there is none: then no request drains or resumes.
        private: whether requests that see instances need the token, too.
        keys: a client has to show one of them; without any, all clients are served.
    """

    token: str = ""
    private: bool = False
    keys: tuple[str, ...] = ()

    def ask(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not be served by an instance."""
        if self.keys and not any(digest(each) in self._digests for each in shown_keys(request)):
            how = "send one as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."
            raise ProxyError(401, f"This request needs an API key of this proxy: {how}")

    @cached_property
    def _digests(self) -> frozenset[bytes]:
        return frozenset(digest(key) for key in self.keys if key)

    def look(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not see instances."""
        if self.private:
            self._check(request)

    def change(self, request: web.Request) -> None:
        """Raises ProxyError if this request may not drain or resume instances."""
        if not self.token:
            why = "This proxy was started without an admin token, so no request can drain or resume instances"
            raise ProxyError(403, f"{why}: start it with --admin-token, or set P2PKV_PROXY_ADMIN_TOKEN.")
        self._check(request)

    def _check(self, request: web.Request) -> None:
        # So the time does not show how much of a token is right.
        if not self.token or not hmac.compare_digest(digest(_bearer(request)), digest(self.token)):
            how = "send it as `Authorization: Bearer TOKEN`."
            raise ProxyError(401, f"This request needs the proxy's admin token: {how}")


def shown_keys(request: web.Request) -> tuple[str, str]:
    """What a client shows as API keys, Anthropic's in a header of their own; "" where it shows none."""
    return _bearer(request), request.headers.get("X-Api-Key", "")


def digest(key: str) -> bytes:
    """Keys are looked up by this digest, so the time does not show how much of a key is right."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _bearer(request: web.Request) -> str:
    kind, _, shown = request.headers.get("Authorization", "").partition(" ")
    return shown.strip() if kind.lower() == "bearer" else ""


# Tenants.

OTHER = "other"
"""The tenant of all requests that belong to none in the file."""
_MOST = 1000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ANSWER = 64.0
"""Tokens that an answer is taken to have, until answers have been seen."""
_RECENT = 0.05
"""Weight of the latest request in a moving average."""
_LONGEST_WAIT = 60
"""The largest Retry-After, in seconds, where a request has to wait for another one to end."""

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class TenantSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; 0 is no limit.

    Attributes:
        keys: API keys; a request that shows one is this tenant's.
        weight: its share of the places, relative to the other tenants with waiting requests.
        requests: the most under way at a time, including those that wait.
        prompt_tokens: the most per second, as the proxy estimates them.
        burst_seconds: seconds whose `prompt_tokens` may come at once.
        priority: vLLM's, for a request whose body has none; None: vLLM's default.
    """

    keys: tuple[str, ...] = ()
    weight: _Positive = 1.0
    requests: _Count = 0
    prompt_tokens: _Count = 0
    burst_seconds: _Positive = 2.0
    priority: _Priority | None = None


def read_tenants(path: str) -> dict[str, TenantSettings]:
    """The tenants of a TOML file, by name. Raises ValueError, with a sentence, if the file is wrong."""
    tables = read_toml(path)
    if not 0 < len(tables) <= _MOST:
        raise ValueError(f"{path} has {len(tables)} tenants: expected at least one and at most {_MOST}")
    found, owners = {}, dict[str, str]()
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            rule = "a name has letters, digits, `.`, `_` and `-`, at most 64 characters"
            raise ValueError(f"{path} has a tenant {name!r}: {rule}")
        try:
            found[name] = msgspec.convert(table, TenantSettings)
        except msgspec.ValidationError as error:
            raise ValueError(f"tenant `{name}` in {path}: {str(error).replace('$.', '')}") from None
        for key in found[name].keys:
            if not (key and key.isascii() and key.isprintable() and " " not in key):
                rule = "each key needs at least one character, and only printable ASCII without spaces"
                raise ValueError(f"tenant `{name}` in {path}: {rule}")
            if owners.setdefault(key, name) != name:
                raise ValueError(f"tenants `{owners[key]}` and `{name}` in {path} have the same key")
    return found


@dataclass(eq=False)
class Tenant:
    """One tenant, and what it has and uses.

    Attributes:
        used: by base model, what its places have cost; of those that wait, who has the least goes next.
        under_way: its requests, including those that wait for a place.
        waiting: requests that wait for a place, by base model.
        answer: tokens of an answer, a moving average.
        prompt_tokens: of all prompts that got a place.
        refused: requests that got a 429, by reason.
    """

    name: str
    settings: TenantSettings
    _clock: Callable[[], float]
    _now: defaultdict[str, float]
    """By base model, the cost at the latest place: a tenant that comes back starts with no less."""
    used: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    under_way: int = 0
    waiting: Tally[str] = field(default_factory=Tally)
    answer: float = _ANSWER
    prompt_tokens: int = 0
    refused: Tally[str] = field(default_factory=Tally)
    _seconds: float = 1.0
    """From the head of a request to its end, a moving average."""

    def __post_init__(self) -> None:
        self._left = self.settings.prompt_tokens * self.settings.burst_seconds
        self._filled = self._clock()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One of its requests, from its head to its end. Raises ProxyError at its limit of requests."""
        most = self.settings.requests
        if most and self.under_way >= most:
            why = f"has {most} requests under way, the most that it may have at a time"
            raise self._full("requests", why, self._place_seconds())
        self.under_way += 1
        began = self._clock()
        try:
            yield
        finally:
            self.under_way -= 1
            self._seconds += _RECENT * (self._clock() - began - self._seconds)

    def spend(self, tokens: int) -> None:
        """A prompt comes; it may use more tokens than are left. Raises ProxyError if none are left."""
        rate, now = self.settings.prompt_tokens, self._clock()
        if rate:
            most = rate * self.settings.burst_seconds
            self._left = min(most, self._left + rate * (now - self._filled))
            self._filled = now
            if self._left <= 0:
                why = f"has used up its limit of {rate} prompt tokens a second"
                raise self._full("tokens", why, math.ceil(-self._left / rate))
            self._left -= tokens

    def let_in(self, tokens: int) -> None:
        """A prompt of so many has got its place."""
        self.prompt_tokens += tokens

    def give_back(self, tokens: int) -> None:
        """Undoes `spend` for a prompt that no instance was asked for."""
        self._left += tokens

    def wait(self, base: str, more: int) -> None:
        """`more` of its requests wait for a place; -1: one has stopped waiting."""
        self._come(base)
        self.waiting[base] += more

    def pay(self, base: str, prompt: int, asked: int) -> float:
        """Charges it for a place: for the prompt's tokens, and for as many of the answer as are expected,
        which are returned. `asked`: the most that the request allows; 0: it names no bound."""
        self._come(base)
        self._now[base] = max(self._now[base], self.used[base])
        expected = min(asked or math.inf, self.answer)
        self.used[base] += (1 + prompt + expected) / self.settings.weight
        return expected

    def settle(self, base: str, expected: float, came: int) -> None:
        """Corrects the charge for an answer: `expected` tokens were paid for, and so many `came`."""
        self.used[base] += (came - expected) / self.settings.weight
        self.answer += _RECENT * (came - self.answer)

    def crowd_out(self) -> ProxyError:
        """The error for its newest request, where the queue is full and it has the most in it by weight."""
        why = "has the most waiting requests for its weight, and the proxy's queue (--max-waiting) is full"
        return self._full("queue", why, self._place_seconds())

    @property
    def crowd(self) -> float:
        """Its waiting requests, divided by its weight."""
        return self.waiting.total() / self.settings.weight

    def _come(self, base: str) -> None:
        if not self.waiting[base]:
            self.used[base] = max(self.used[base], self._now[base])

    def _place_seconds(self) -> int:
        """Seconds until the next one of its requests ends, on average."""
        return min(_LONGEST_WAIT, math.ceil(self._seconds / max(1, self.under_way - self.waiting.total())))

    def _full(self, reason: str, why: str, seconds: int) -> ProxyError:
        self.refused[reason] += 1
        seconds = max(1, seconds)
        return ProxyError(429, f"Tenant `{self.name}` {why}; try again in {seconds} s.", retry_after=seconds)


class Tenants:
    """All tenants of a proxy. To Prometheus's library it is one of its collectors.

    Args:
        settings: by name; requests of no tenant are `other`'s, without limits unless the file has it.
        header: in which a gateway names the tenant; "" if there is none. A tenant's key counts more.
    """

    def __init__(
        self,
        settings: Mapping[str, TenantSettings],
        header: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = defaultdict[str, float](float)
        every = {OTHER: TenantSettings(), **settings}
        self.by_name = {name: Tenant(name, each, clock, now) for name, each in every.items()}
        self._by_key = {digest(key): self.by_name[name] for name in every for key in every[name].keys}
        self._header = header

    def of(self, request: web.Request) -> Tenant:
        """The tenant whose request this is."""
        for key in shown_keys(request):
            if found := self._by_key.get(digest(key)):
                return found
        named = request.headers.get(self._header, "") if self._header else ""
        return self.by_name.get(named) or self.by_name[OTHER]

    def collect(self) -> Sequence[Metric]:
        what = "Prompt tokens of requests that got a place at an instance, as the proxy estimates them."
        tokens = CounterMetricFamily("p2pkv_proxy_tenant_prompt_tokens", what, labels=["tenant"])
        what = (
            "Requests turned away with 429: the tenant had as many under way as it may (requests), sent too "
            "many prompt tokens a second (tokens), or had most of a full queue for its weight (queue)."
        )
        refused = CounterMetricFamily("p2pkv_proxy_tenant_refused", what, labels=["tenant", "reason"])
        gauge = partial(GaugeMetricFamily, labels=["tenant"])
        running = gauge("p2pkv_proxy_tenant_requests", "Requests under way, including those that wait.")
        waiting = gauge("p2pkv_proxy_tenant_requests_waiting", "Requests that wait for a place.")
        for name, each in self.by_name.items():
            tokens.add_metric([name], each.prompt_tokens)
            running.add_metric([name], each.under_way)
            waiting.add_metric([name], each.waiting.total())
            for reason in ("requests", "tokens", "queue"):
                refused.add_metric([name, reason], each.refused[reason])
        return tokens, refused, running, waiting
