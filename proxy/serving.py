"""What becomes of one client's request: it is taken in, given a place and dispatched, perhaps a second time
at other instances; and how all requests end when the proxy is told to stop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from aiohttp import web

from p2pkv.control.discovery import Ping

from .admission import Admission, Intake, Limits, RequestCounters, RequestPlace
from .dispatch import Exchange, alone, concurrent, sequential
from .errors import ProxyError, retry_after
from .http import BadBody, Body, parse
from .instances import state_of
from .metrics import Metrics
from .partners import PartnerLists
from .prober import Prober
from .records import RECORD
from .registry import Instance, PingSource, Registry, Role
from .relay import merged_models
from .routing import Asked, NoInstance, Router, Routing, UnknownModel
from .upstream import Client, Reply

logger = logging.getLogger(__name__)

Dispatch = Literal["concurrent", "sequential"]

_ROLES: dict[str, Role] = {"prefill": "P", "decode": "D"}

UNAVAILABLE = "unavailable"
STOPPING = "This proxy is stopping; try again in a few seconds."
_CUT_OFF = "This proxy had to stop before the answer was complete."
# After the end of what was under way: for the errors to be sent.
_LAST_WORDS_SECONDS = 2.0


@dataclass
class Proxy:
    """All that the handlers share.

    Attributes:
        dispatch: whether P and D get a request at once or one after the other.
        lingering: calls to P that are still open although the client has its answer.
        clock: monotonic seconds.
    """

    session: Client
    registry: Registry
    dispatch: Dispatch
    limits: Limits = field(default_factory=Limits)
    routing: Routing = field(default_factory=Routing)
    clock: Callable[[], float] = time.monotonic
    lingering: set[asyncio.Task[Reply]] = field(default_factory=set)
    metrics: Metrics = field(default_factory=Metrics)
    counters: RequestCounters = field(default_factory=RequestCounters)

    def __post_init__(self) -> None:
        room, alone = self.limits.max_requests, self.limits.alone
        self.router = Router(self.registry, self.routing, room=room, alone=alone)
        self.admission = Admission(self.router, self.limits, self.counters, self.clock)
        self.intake = Intake(self.limits, self.counters)
        self.desk = Desk(self.counters)
        self.prober = Prober(self.session, self.registry, self.clock, self.admission.advance)
        self.partners = PartnerLists(self.registry)
        self._budget = RetryBudget()
        self.metrics.show(self)

    def take(self, ping: Ping, source: PingSource) -> None:
        """One ping, from a discovery socket or made up for a listed instance."""
        now = self.clock()
        if self.registry.observe(ping, now, source) is not None:
            self.prober.hurry()
        self.partners.answer(ping, source, now)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A POST that one D answers, with a P's help or without."""
        with self.desk.work(request) as work, self.intake.reader() as reader:
            try:
                body = parse(await reader.read(request), request.path)
            except BadBody as error:
                raise ProxyError(400, str(error)) from None
            asked = Asked(body.model, body.prompt, request.headers.get(self.routing.session_header, ""))
            request[RECORD].model = body.model
            try:
                async with self.admission.place(asked, paired=body.wants_pair) as place:
                    return await self._serve(request, body, place, work)
            except NoInstance as error:
                raise ProxyError(503, f"{error} Try again in a few seconds.") from None
            except UnknownModel as error:
                raise ProxyError(404, str(error)) from None

    async def _serve(
        self, request: web.Request, body: Body, place: RequestPlace, work: Work
    ) -> web.StreamResponse:
        self._budget.request(self.clock())
        failed: set[Instance] = set()
        tries = 1
        may_resend = True
        while True:
            work.exchange = exchange = Exchange(
                self.session,
                request,
                body,
                place.choice,
                uuid.uuid4().hex,
                self.lingering,
                self.clock,
                self.counters,
                place.sent,
                request[RECORD],
            )
            response = await self._dispatch(exchange)
            if exchange.culprit is None or self.desk.stopping:
                return response
            if exchange.maybe_aborted and may_resend:
                # Under a new id neither side takes it for the one that was aborted. Nobody is blamed.
                may_resend = False
                continue
            failed.add(exchange.culprit)
            if await self._elsewhere(place, exchange.culprit, frozenset(failed), tries):
                tries += 1
                logger.info("request %s is tried again elsewhere", exchange.unique)
                continue
            if exchange.culprit is not exchange.choice.prefill or not self.limits.alone:
                return response
            if not self.admission.stay_alone(place, frozenset(failed)):
                return self._shed(exchange, response)
            logger.info("request %s is left to %s alone", exchange.unique, place.choice.decode)

    async def _dispatch(self, exchange: Exchange) -> web.StreamResponse:
        if exchange.choice.prefill is None:
            return await alone(exchange)
        return await (concurrent if self.dispatch == "concurrent" else sequential)(exchange)

    async def _elsewhere(
        self, place: RequestPlace, culprit: Instance, failed: frozenset[Instance], tries: int
    ) -> bool:
        """Moves a request away from those that failed it. False if that was its last try."""
        if tries > self.limits.retries:
            return False
        help = place.help_after(culprit)
        if not self.admission.can_move(place, help, failed):
            return False
        # The budget is for outages; who has said goodbye is none.
        if culprit.left is None and not self._budget.spend(self.clock()):
            self.counters.retries_refused += 1
            return False
        await asyncio.sleep(pause(tries))
        if not self.admission.move(place, help, failed):
            return False
        self.counters.retried += 1
        return True

    def _shed(self, exchange: Exchange, response: web.StreamResponse) -> web.StreamResponse:
        """P has failed, and D may not take the request alone: because of its share, or it is gone, too."""
        if not self.registry.routable("D", self.clock()):
            return response
        self.counters.refused_alone += 1
        exchange.record.end("shed")
        logger.info("request %s is turned away: no D may take it alone", exchange.unique)
        raise ProxyError(
            503,
            "The prefill instance failed, no other can serve this request, and the decode instances compute "
            "as many prompts by themselves as they may; try again in a few seconds.",
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        with self.desk.work(request):
            decoders = self.registry.routable("D", self.clock())
            if not decoders:
                raise ProxyError(503, " ".join(self.router.missing(self.clock())))
            return await merged_models(self.session, request, decoders, uuid.uuid4().hex)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request can be served, else 503; and what is missing.

        With `?prefill=1&decode=2` it is 200 only if so many are there.
        """
        report = self.report()
        good = report["status"] != UNAVAILABLE
        good &= all(report[name] >= _number(request, name) for name in _ROLES)
        return web.json_response(report, status=200 if good else 503, headers=None if good else retry_after())

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 200 if a request can be served, and by whom it is; else 503."""
        report = self.report()
        good = report["status"] != UNAVAILABLE
        answer = {
            "ready": good,
            "needs": "a decode instance" if self.limits.alone else "a prefill and a decode instance",
            **{name: report[name] for name in ("prefill", "decode", "missing")},
        }
        return web.json_response(answer, status=200 if good else 503, headers=None if good else retry_after())

    def report(self) -> dict[str, Any]:
        """Whether requests can be served, who is missing, what is held and what was counted."""
        now = self.clock()
        missing = [STOPPING] if self.desk.stopping else self.router.missing(now)
        there = {name: len(self.registry.routable(role, now)) for name, role in _ROLES.items()}
        able = there["decode"] > 0 and (self.limits.alone > 0 or self.router.helped(now))
        serves = able and not self.desk.stopping
        return {
            "status": UNAVAILABLE if not serves else "degraded" if missing else "ok",
            **there,
            "missing": missing,
            "gauges": self.gauges(),
            "counters": self.counted(),
        }

    def counted(self) -> dict[str, int]:
        """What has been counted since the start, by whoever counts it."""
        return {
            **asdict(self.counters),
            "reconnected": self.session.reconnected,
            "claims_refused": self.registry.claims_refused,
        }

    def instances(self) -> list[Instance]:
        """The living ones."""
        return self.registry.known("P") + self.registry.known("D")

    def state_of(self, instance: Instance) -> str:
        """One of metrics.STATES. A drained P may be stopped only when the D's have all that they need."""
        needed = instance.load > 0 or (instance.drained and self.desk.needs(instance))
        return state_of(instance, self.clock(), needed=needed)

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 when nothing is under way."""
        everyone = self.instances()
        return {
            "under_way": self.admission.under_way,
            "waiting": self.admission.waiting,
            "held_bytes": self.intake.held,
            "calls": sum(instance.in_flight for instance in everyone),
            "alone": sum(instance.alone for instance in everyone),
            "silent": sum(instance.silent(self.clock()) for instance in everyone),
            "engines_paused": sum(instance.paused for instance in everyone),
            "breakers_open": sum(not instance.breaker.closed for instance in everyone),
        }

    async def stop(self, seconds: float, hurry: asyncio.Event) -> int:
        """Takes no more requests, turns away those who wait, gives the others `seconds`; see Desk.clear."""
        self.desk.stopping = True
        self.admission.close(ProxyError(503, STOPPING, last=True))
        return await self.desk.clear(seconds, hurry)


def _number(request: web.Request, name: str) -> int:
    """How many instances of one kind a question about health asks for."""
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise ProxyError(400, f"`{name}` in /health?{name}=... is a number of instances, such as 1.")
    return int(text)


# Second tries.

_RETRY_WINDOW_SECONDS = 10.0
_RETRY_SHARE = 0.2
_RETRIES_PER_SECOND = 1.0
# Requests and retries are counted together within so many seconds.
_RETRY_TICK_SECONDS = 0.1
_FIRST_RETRY_PAUSE = 0.05
_LONGEST_RETRY_PAUSE = 1.0


class RetryBudget:
    """Counts requests and retries of the last ten seconds.

    What it allows is a share of the requests: in an outage, when everything fails, retries add that share to
    the load and do not multiply it.
    """

    def __init__(self) -> None:
        self._asked = _Recent()
        self._retried = _Recent()

    def request(self, now: float) -> None:
        """One request has been admitted."""
        self._asked.add(now)

    def spend(self, now: float) -> bool:
        """Whether one retry is within the budget; if so it is counted."""
        allowed = max(_RETRY_SHARE * self._asked.total(now), _RETRIES_PER_SECOND * _RETRY_WINDOW_SECONDS)
        if self._retried.total(now) + 1 > allowed:
            return False
        self._retried.add(now)
        return True


class _Recent:
    """How many things happened in the last window, in bounded memory."""

    def __init__(self) -> None:
        self._ticks: deque[list[float]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        if not self._ticks or now - self._ticks[-1][0] >= _RETRY_TICK_SECONDS:
            self._ticks.append([now, 0])
        self._ticks[-1][1] += 1
        self._total += 1
        self.total(now)

    def total(self, now: float) -> int:
        while self._ticks and now - self._ticks[0][0] > _RETRY_WINDOW_SECONDS:
            self._total -= int(self._ticks.popleft()[1])
        return self._total


def pause(tries: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before the next try, after `tries` (at least 1) have failed: random, so that what failed
    together does not come back together."""
    return uniform(0.0, min(_LONGEST_RETRY_PAUSE, _FIRST_RETRY_PAUSE * 2.0 ** (tries - 1)))


# What is under way, and its end.


@dataclass(eq=False)
class Work:
    """One client's request.

    Attributes:
        exchange: its present try at instances, if it has got so far.
        cut: it was ended because the proxy stops.
    """

    task: asyncio.Task[Any]
    request: web.Request
    exchange: Exchange | None = None
    cut: bool = False

    def cut_off(self) -> None:
        """Ends it with an error, whatever it is at."""
        self.cut = True
        if self.exchange is not None and self.exchange.relay is not None:
            self.exchange.relay.interrupt(_CUT_OFF, 503)
        else:
            self.task.cancel()

    def hang_up(self) -> None:
        """Closes the client's connection, whatever it has not read yet."""
        if self.request.transport is not None:
            self.request.transport.abort()


class Desk:
    """All the work there is.

    Attributes:
        stopping: no more is taken on.
    """

    def __init__(self, counters: RequestCounters) -> None:
        self._counters = counters
        self._open: set[Work] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    def needs(self, prefill: Instance) -> bool:
        """Whether a request waits for KV of this P."""
        return any(work.exchange is not None and work.exchange.needs(prefill) for work in self._open)

    @contextmanager
    def work(self, request: web.Request) -> Iterator[Work]:
        """One request, from its head to its end. Raises ProxyError if the proxy stops."""
        if self.stopping:
            raise ProxyError(503, STOPPING, last=True)
        task = asyncio.current_task()
        assert task is not None
        work = Work(task, request)
        self._open.add(work)
        self._empty.clear()
        try:
            yield work
        except asyncio.CancelledError:
            if not work.cut:
                raise
            task.uncancel()
            raise ProxyError(503, _CUT_OFF, last=True) from None
        finally:
            self._open.discard(work)
            if not self._open:
                self._empty.set()

    async def clear(self, seconds: float, hurry: asyncio.Event) -> int:
        """Waits for the work to end by itself, for `seconds` at most and not once there is a `hurry`; ends
        the rest, and returns how much that was."""
        self.stopping = True
        waits = [asyncio.create_task(self._empty.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        rest = list(self._open)
        self._counters.cut_off += len(rest)
        for work in rest:
            work.cut_off()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._empty.wait()
        for work in list(self._open):
            work.hang_up()
        return len(rest)
