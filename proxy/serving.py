"""What becomes of one client's request: taken in, given a place, dispatched, perhaps a second time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

from p2pkv.control.discovery import Ping

from .admission import Admission, Place
from .bodies import BadBody, Body, parse
from .counters import Counters
from .dispatch import Exchange, alone, concurrent, sequential
from .errors import Failure, retry_after
from .intake import Intake
from .leaving import STOPPING, Desk, Work
from .limits import Limits
from .models import merged
from .prober import Prober
from .registry import Instance, Registry, Source
from .retries import Budget, pause
from .routing import NoInstance, Router, UnknownModel
from .upstream import Reply

logger = logging.getLogger(__name__)

Dispatch = Literal["concurrent", "sequential"]


@dataclass
class Proxy:
    """All that the handlers share.

    Attributes:
        dispatch: whether P and D get a request at once or one after the other.
        lingering: P's calls whose client has its answer already.
        clock: monotonic seconds.
    """

    session: aiohttp.ClientSession
    registry: Registry
    dispatch: Dispatch
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    lingering: set[asyncio.Task[Reply]] = field(default_factory=set)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.router = Router(self.registry, room=self.limits.max_requests)
        self.admission = Admission(self.router, self.limits, self.counters, self.clock)
        self.intake = Intake(self.limits, self.counters)
        self.desk = Desk(self.counters)
        self.prober = Prober(self.session, self.registry, self.clock, self.admission.advance)
        self._budget = Budget()

    def take(self, ping: Ping, source: Source) -> None:
        """One ping from a discovery socket."""
        if self.registry.observe(ping, self.clock(), source) is not None:
            self.prober.hurry()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        with self.desk.work(request) as work, self.intake.shelf() as shelf:
            try:
                body = parse(await shelf.read(request))
            except BadBody as error:
                raise Failure(400, str(error)) from None
            try:
                async with self.admission.place(body.model, paired=body.wants_pair) as place:
                    return await self._serve(request, body, place, work)
            except NoInstance as error:
                raise Failure(503, f"{error} Try again in a few seconds.") from None
            except UnknownModel as error:
                raise Failure(404, str(error)) from None

    async def _serve(self, request: web.Request, body: Body, place: Place, work: Work) -> web.StreamResponse:
        self._budget.request(self.clock())
        failed: set[Instance] = set()
        for tries in itertools.count(1):
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
            )
            response = await self._dispatch(exchange)
            if exchange.culprit is None:
                return response
            failed.add(exchange.culprit)
            if not await self._elsewhere(place, frozenset(failed), tries):
                return response
            logger.info("request %s is tried again elsewhere", exchange.unique)
        raise AssertionError("unreachable")

    async def _dispatch(self, exchange: Exchange) -> web.StreamResponse:
        if exchange.choice.prefill is None:
            return await alone(exchange)
        return await (concurrent if self.dispatch == "concurrent" else sequential)(exchange)

    async def _elsewhere(self, place: Place, failed: frozenset[Instance], tries: int) -> bool:
        """Moves a request away from those that failed it. False if that was its last try."""
        if tries > self.limits.retries or self.desk.stopping:
            return False
        if not self.admission.can_move(place, failed):
            return False
        if not self._budget.spend(self.clock()):
            self.counters.retries_refused += 1
            return False
        await asyncio.sleep(pause(tries))
        if not self.admission.move(place, failed):
            return False
        self.counters.retried += 1
        return True

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        with self.desk.work(request):
            decoders = self.registry.routable("D", self.clock())
            if not decoders:
                raise Failure(503, " ".join(self.router.missing(self.clock())))
            return await merged(self.session, request, decoders, uuid.uuid4().hex)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request can be served, else 503 and what is missing."""
        now = self.clock()
        missing = [STOPPING] if self.desk.stopping else self.router.missing(now)
        report: dict[str, Any] = {
            "status": "unavailable" if missing else "ok",
            "prefill": len(self.registry.routable("P", now)),
            "decode": len(self.registry.routable("D", now)),
            "missing": missing,
            "gauges": self.gauges(),
            "counters": asdict(self.counters) | {"claims_refused": self.registry.claims_refused},
        }
        return web.json_response(
            report, status=503 if missing else 200, headers=retry_after() if missing else None
        )

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 when nothing is under way."""
        everyone = self.registry.known("P") + self.registry.known("D")
        return {
            "under_way": self.admission.under_way,
            "waiting": self.admission.waiting,
            "held_bytes": self.intake.held,
            "calls": sum(instance.in_flight for instance in everyone),
            "breakers_open": sum(not instance.breaker.closed for instance in everyone),
        }

    async def stop(self, seconds: float, hurry: asyncio.Event) -> int:
        """Takes no more requests, turns away those who wait, gives the others `seconds`; see Desk.clear."""
        self.desk.stopping = True
        self.admission.close(Failure(503, STOPPING, last=True))
        return await self.desk.clear(seconds, hurry)
