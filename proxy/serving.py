"""What becomes of one client's request: taken in, given a place, dispatched, perhaps a second time."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
from .registry import Instance, Registry, Role, Source
from .retries import Budget, pause
from .routing import Help, NoInstance, Router, UnknownModel
from .upstream import Client, Reply

logger = logging.getLogger(__name__)

Dispatch = Literal["concurrent", "sequential"]

_ROLES: dict[str, Role] = {"prefill": "P", "decode": "D"}


@dataclass
class Proxy:
    """All that the handlers share.

    Attributes:
        dispatch: whether P and D get a request at once or one after the other.
        lingering: P's calls whose client has its answer already.
        clock: monotonic seconds.
    """

    session: Client
    registry: Registry
    dispatch: Dispatch
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    lingering: set[asyncio.Task[Reply]] = field(default_factory=set)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.router = Router(self.registry, room=self.limits.max_requests, alone=self.limits.alone)
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
        tries = 1
        lucky = True
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
            )
            response = await self._dispatch(exchange)
            if exchange.culprit is None or self.desk.stopping:
                return response
            if exchange.unlucky and lucky:
                # Under a new id neither side takes it for the one that was aborted. Nobody is blamed.
                lucky = False
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
        self, place: Place, culprit: Instance, failed: frozenset[Instance], tries: int
    ) -> bool:
        """Moves a request away from those that failed it. False if that was its last try."""
        if tries > self.limits.retries:
            return False
        help = _help(place, culprit)
        if not self.admission.can_move(place, help, failed):
            return False
        if not self._budget.spend(self.clock()):
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
        logger.info("request %s is turned away: no D may take it alone", exchange.unique)
        raise Failure(
            503,
            "The prefill instance failed, no other can serve this request, and the decode instances compute "
            "as many prompts by themselves as they may; try again in a few seconds.",
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        with self.desk.work(request):
            decoders = self.registry.routable("D", self.clock())
            if not decoders:
                raise Failure(503, " ".join(self.router.missing(self.clock())))
            return await merged(self.session, request, decoders, uuid.uuid4().hex)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request can be served, else 503; and what is missing.

        With `?prefill=1&decode=2` it is 200 only if so many are there.
        """
        now = self.clock()
        missing = [STOPPING] if self.desk.stopping else self.router.missing(now)
        there = {role: self.registry.routable(role, now) for role in _ROLES.values()}
        serves = not self.desk.stopping and bool(there["D"]) and (bool(there["P"]) or self.limits.alone > 0)
        enough = all(len(there[role]) >= _number(request, name) for name, role in _ROLES.items())
        counters = {
            **asdict(self.counters),
            "reconnected": self.session.reconnected,
            "claims_refused": self.registry.claims_refused,
        }
        report: dict[str, Any] = {
            "status": "unavailable" if not serves else "degraded" if missing else "ok",
            **{name: len(there[role]) for name, role in _ROLES.items()},
            "missing": missing,
            "gauges": self.gauges(),
            "counters": counters,
        }
        good = serves and enough
        return web.json_response(report, status=200 if good else 503, headers=None if good else retry_after())

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 when nothing is under way."""
        everyone = self.registry.known("P") + self.registry.known("D")
        return {
            "under_way": self.admission.under_way,
            "waiting": self.admission.waiting,
            "held_bytes": self.intake.held,
            "calls": sum(instance.in_flight for instance in everyone),
            "alone": sum(instance.alone for instance in everyone),
            "silent": sum(instance.silent(self.clock()) for instance in everyone),
            "breakers_open": sum(not instance.breaker.closed for instance in everyone),
        }

    async def stop(self, seconds: float, hurry: asyncio.Event) -> int:
        """Takes no more requests, turns away those who wait, gives the others `seconds`; see Desk.clear."""
        self.desk.stopping = True
        self.admission.close(Failure(503, STOPPING, last=True))
        return await self.desk.clear(seconds, hurry)


def _help(place: Place, culprit: Instance) -> Help:
    """What a second try needs of P. Without one, D alone is asked, which no budget of retries bounds."""
    if place.choice.missed:
        return Help.MISSED
    if not place.paired:
        return Help.NONE
    return Help.NEEDED if culprit.role == "P" else Help.WANTED


def _number(request: web.Request, name: str) -> int:
    """How many instances of one kind a question about health asks for."""
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise Failure(400, f"`{name}` in /health?{name}=... is a number of instances, such as 1.")
    return int(text)
