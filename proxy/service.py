"""What becomes of one client's request: it is taken in, given a place and tried at instances, perhaps a
second time at others."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from p2pkv.control.discovery import Ping

from .active import STOPPING, ActiveRequest, ActiveRequests
from .admission import Admission, Limits, RequestCounters, RequestPlace
from .attempt import Attempt, Dispatch, Means, Outcome
from .blame import Again, CallEnd, Charge
from .bodies import BadBody, Body, parse
from .errors import ProxyError, retry_after
from .instances import state_of
from .intake import Intake
from .metrics import Metrics
from .models import ModelLists
from .partners import PartnerLists
from .prober import Prober
from .records import RECORD, RequestRecord
from .registry import Instance, PingSource, Registry, Role
from .retries import Retries
from .routing import Asked, NoInstance, Router, Routing, UnknownModel
from .upstream import Client

logger = logging.getLogger(__name__)

_ROLES: dict[str, Role] = {"prefill": "P", "decode": "D"}

UNAVAILABLE = "unavailable"


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
    lingering: set[asyncio.Task[Any]] = field(default_factory=set)
    metrics: Metrics = field(default_factory=Metrics)
    counters: RequestCounters = field(default_factory=RequestCounters)

    def __post_init__(self) -> None:
        room, alone = self.limits.max_requests, self.limits.alone
        self.router = Router(self.registry, self.routing, room=room, alone=alone)
        self.admission = Admission(self.router, self.limits, self.counters, self.clock)
        self.intake = Intake(self.limits, self.counters)
        self.active = ActiveRequests(self.counters)
        self.prober = Prober(self.session, self.registry, self.clock, self.admission.advance)
        self.partners = PartnerLists(self.registry)
        self.model_lists = ModelLists(self.session)
        self._retries = Retries(self.admission, self.limits, self.counters, self.clock)
        self._means = Means(
            session=self.session,
            clock=self.clock,
            counters=self.counters,
            lingering=self.lingering,
            may_repeat=self._retries.spend,
            first_token_seconds=self.limits.first_token_seconds,
            event_seconds=self.limits.event_seconds,
        )
        self.metrics.show(self)

    def take(self, ping: Ping, source: PingSource) -> None:
        """One ping, from a discovery socket or made up for a listed instance."""
        now = self.clock()
        if self.registry.observe(ping, now, source) is not None:
            self.prober.hurry()
        self.partners.answer(ping, source, now)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A POST that one D answers, with a P's help or without."""
        with self.active.enter(request) as active, self.intake.reader() as reader:
            try:
                body = parse(await reader.read(request), request.path)
            except BadBody as error:
                raise ProxyError(400, str(error)) from None
            body.released = reader.release
            if body.messages(self.limits.max_messages) > self.limits.max_messages:
                raise ProxyError(
                    413,
                    f"The request has more than {self.limits.max_messages} messages or items of its input; "
                    "this proxy takes no more in one request (--max-messages).",
                )
            asked = Asked(body.model, body.prompt, request.headers.get(self.routing.session_header, ""))
            request[RECORD].model = body.model
            try:
                async with self.admission.place(asked, paired=body.wants_pair) as place:
                    return await self._serve(request, body, place, active)
            except NoInstance as error:
                raise ProxyError(503, f"{error} Try again in a few seconds.") from None
            except UnknownModel as error:
                raise ProxyError(404, str(error)) from None
            finally:
                body.let_go()

    async def _serve(
        self, request: web.Request, body: Body, place: RequestPlace, active: ActiveRequest
    ) -> web.StreamResponse:
        """Attempts until one is the last."""
        self._retries.admitted()
        record = request[RECORD]
        failed: frozenset[Instance] = frozenset()
        doubted: tuple[tuple[Instance, Charge], ...] = ()
        tries, may_resend = 1, True
        while True:
            may_leave = partial(self._retries.may_leave, place, failed=failed, tries=tries)
            active.attempt = attempt = Attempt(
                self._means, request, body, place, record, may_leave, may_resend, doubted
            )
            outcome = await attempt.run(self.dispatch)
            if outcome.ended is not None:
                record.end(outcome.ended)
            if outcome.again is Again.NO or self.active.stopping:
                return outcome.response
            if outcome.again is Again.SAME:
                # Under a new id neither side takes it for the one that was aborted.
                may_resend = False
                continue
            culprit = outcome.culprit
            assert culprit is not None
            failed |= {culprit}
            doubted += ((culprit, outcome.charge),)
            decides = outcome.again is Again.ALONE
            if decides and self.limits.alone and self.admission.stay_alone(place, failed):
                logger.info("request %s: %s decides alone", attempt.unique, place.choice.decode)
                continue
            free = culprit.left is not None or outcome.end is CallEnd.HUNG
            if await self._retries.elsewhere(place, culprit, failed, tries, free=free):
                tries += 1
                logger.info("request %s is tried again elsewhere", attempt.unique)
                continue
            if decides or culprit is not attempt.choice.prefill or not self.limits.alone:
                return outcome.response
            if not self.admission.stay_alone(place, failed):
                return self._shed(attempt, outcome, record)
            logger.info("request %s is left to %s alone", attempt.unique, place.choice.decode)

    def _shed(self, attempt: Attempt, outcome: Outcome, record: RequestRecord) -> web.StreamResponse:
        """P has failed, and D may not take the request alone: because of its share, or it is gone, too."""
        if not self.registry.routable("D", self.clock()):
            return outcome.response
        self.counters.refused_alone += 1
        record.end("shed")
        logger.info("request %s is turned away: no D may take it alone", attempt.unique)
        raise ProxyError(
            503,
            "The prefill instance failed, no other can serve this request, and the decode instances compute "
            "as many prompts by themselves as they may; try again in a few seconds.",
        )

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        with self.active.enter(request):
            decoders = self.registry.routable("D", self.clock())
            if not decoders:
                raise ProxyError(503, " ".join(self.router.missing(self.clock())))
            return await self.model_lists.merged(request, decoders, uuid.uuid4().hex)

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
        missing = [STOPPING] if self.active.stopping else self.router.missing(now)
        there = {name: len(self.registry.routable(role, now)) for name, role in _ROLES.items()}
        able = there["decode"] > 0 and (self.limits.alone > 0 or self.router.helped(now))
        serves = able and not self.active.stopping
        return {
            "status": UNAVAILABLE if not serves else "degraded" if missing else "ok",
            **there,
            "missing": missing,
            "gauges": self.gauges(),
            "counters": self.counted(),
        }

    def counted(self) -> dict[str, int]:
        """What has been counted since the start, wherever it is counted."""
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
        needed = instance.load > 0 or (instance.drained and self.active.needs(instance))
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
        """Takes no more requests, turns away those who wait, gives the others `seconds`; see
        ActiveRequests.clear."""
        self.active.stopping = True
        self.admission.close(ProxyError(503, STOPPING, last=True))
        return await self.active.clear(seconds, hurry)


def _number(request: web.Request, name: str) -> int:
    """How many instances of one kind a question about health asks for."""
    text = request.query.get(name, "0")
    if not text.isdecimal():
        raise ProxyError(400, f"`{name}` in /health?{name}=... is a number of instances, such as 1.")
    return int(text)
