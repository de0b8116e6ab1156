"""One client's request from arrival to end: it gets a place, and is tried at one pair after another."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from .access import Access, Tenants
from .admission import ALONE_FULL, Admission, Demand, RequestPlace
from .attempt import Attempt, Dispatch, Outcome
from .blame import Blame, CallEnd, Charge, RetryKind
from .bodies import Body, BodyBudget, BodyReader, parse, response_id
from .continuation import Continuation, ending
from .first_token import REASONS, FirstTokens
from .http import PAIRED, UNCOMPUTED, ProxyError
from .limits import Limits, RequestCounters
from .membership import Membership
from .membership.instance import Instance
from .metrics import RECORD, Metrics, RequestRecord
from .models import ModelLists, StoredResponses
from .policies import Routing, RoutingRequest
from .relay import ClientGone, hang_up
from .routing import NoInstance, PrefillMode, Router, UnknownModel
from .transcript import Transcript, TranscriptMemory
from .upstream import Client

logger = logging.getLogger(__name__)

_MOVE_SECONDS = 1.0
"""How often the proxy tries again to move requests away from drained instances."""


@dataclass
class Proxy:
    """What all handlers share.

    Attributes:
        dispatch: whether P and D get a request at once or one after the other.
        background: tasks that may outlive a request: calls to P, and looks at the lists of models.
    """

    session: Client
    membership: Membership
    dispatch: Dispatch
    limits: Limits = field(default_factory=Limits)
    routing: Routing = field(default_factory=Routing)
    guard: Access = field(default_factory=Access)
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    metrics: Metrics = field(default_factory=Metrics)
    counters: RequestCounters = field(default_factory=RequestCounters)
    tenants: Tenants | None = None

    def __post_init__(self) -> None:
        self.registry, self.clock = self.membership.registry, self.membership.clock
        room, alone, on_error = self.limits.max_requests, self.limits.decode_alone, self.metrics.predicted
        self.router = Router(self.registry, self.routing, room, alone, on_error)
        self.admission = Admission(self.router, self.limits, self.counters, self.clock)
        self.intake = BodyBudget(self.limits, self.counters)
        self.active = ActiveRequests(self.counters)
        self.membership.on_change(self.admission.advance)
        self.model_lists = ModelLists(self.session)
        self.responses = StoredResponses(self.registry)
        self.transcripts = TranscriptMemory(self.limits.resume_bytes, self.limits.resume_bytes_each)
        handed_on = self.limits.first_token == "prefill" and self.limits.resumes > 0
        self.first_tokens = FirstTokens(handed_on, self.counters, self.dispatch == "concurrent")
        self.metrics.follow(self.instances)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Any POST that a D answers, with a P's help or without."""
        if self.guard.keys:
            self.guard.ask(request)
        record = request[RECORD]
        tenant = None if self.tenants is None else self.tenants.of(request)
        record.tenant = "" if tenant is None else tenant.name
        entered = nullcontext() if tenant is None else tenant.enter()
        with self.active.enter(request) as active, entered, closing(BodyReader(self.intake)) as reader:
            body = parse(await reader.read(request), request.path, reader.close)
            if body.messages(self.limits.max_messages) > self.limits.max_messages:
                many = f"more than {self.limits.max_messages} messages or items of its input"
                why = "this proxy takes no more in one request (--max-messages)."
                raise ProxyError(413, f"The request has {many}; {why}")
            session = request.headers.get(self.routing.session_header, "")
            only, asked, spent = None, 0, 0
            if body.previous:
                only, name = self.responses.find(body.previous)
                body.go_on_from(name)
            context = self.router.fleet_cache(self.clock()).context
            if context is not None and body.one_prompt and request.path in PAIRED:
                body.prompt.bound(context)
            record.model = body.model
            if not self.router.fleet_cache(self.clock()).knows(body.model):
                await asyncio.shield(self._look_at_models(request))
            elif context is None and ("Authorization" in request.headers or "X-Api-Key" in request.headers):
                self._look_at_models(request)  # instances may list their models only for this client's key
            if tenant is not None and request.path not in UNCOMPUTED:
                tenant.spend(spent := body.prompt.tokens)
                asked = body.asked
            base = "" if tenant is None else self.router.fleet_cache(self.clock()).base_of(body.model)
            wants = RoutingRequest(body.model, body.prompt, session, tenant, asked, only, base)
            try:
                async with self.admission.place(wants, paired=body.wants_pair) as place:
                    if tenant is not None:
                        tenant.let_in(spent)
                    response = await self._serve(request, body, place, active)
                    if response.status == 404:  # the adapter may have been unloaded there
                        self._look_at_models(request)
                    return response
            except NoInstance as error:
                raise ProxyError(503, f"{error} Try again in a few seconds.") from None
            except UnknownModel as error:
                raise ProxyError(404, str(error)) from None
            finally:
                if tenant is not None and not record.tries:
                    tenant.give_back(spent)
                body.let_go()
                if active.transcript is not None:
                    active.transcript.drop()

    def _look_at_models(self, request: web.Request) -> asyncio.Task[None]:
        look = self.model_lists.look(request, self.registry.candidates)
        self.background.add(look)
        look.add_done_callback(self.background.discard)
        return look

    async def _serve(
        self, request: web.Request, body: Body, place: RequestPlace, active: "ActiveRequest"
    ) -> web.StreamResponse:
        record = request[RECORD]
        doubted: tuple[tuple[Instance, Charge], ...] = ()
        tries, may_resend = 1, True
        refusal: web.StreamResponse | None = None
        if self.limits.resumes:
            active.transcript = Transcript.of(body, self.transcripts)
        while True:
            may_leave = partial(self.admission.may_leave, place, failed=active.failed, tries=tries)
            attempt = Attempt(self, request, body, place, may_leave, may_resend, doubted, active.transcript)
            active.attempt = attempt
            if body.stored:
                name = response_id(attempt.request_id)
                self.responses.note(response_id(attempt.unique), place.choice.decode, name)
            try:
                outcome = await attempt.run()
                if attempt.relay is not None and attempt.relay.resumable:
                    with suppress(ClientGone):
                        await self._go_on(attempt, outcome, active)
                    return attempt.relay.response
            except asyncio.CancelledError:
                # The proxy stops, and the client has a part of its answer.
                if not active.cut or attempt.relay is None:
                    raise
                active.task.uncancel()
                with suppress(ClientGone):
                    await attempt.relay.give_up(_CUT_OFF, 503)
                return attempt.relay.response
            if outcome.verdict.blame is Blame.PROXY:
                record.end("shed")
            again = outcome.verdict.again
            acted = body.acts and outcome.end not in (CallEnd.CLOSED, CallEnd.UNREACHABLE)
            if again is RetryKind.NO or acted or self.active.stopping:
                return outcome.response
            if again is RetryKind.SAME:
                # Under a new id neither P nor D takes it for the one that was aborted.
                may_resend = False
                continue
            culprit = outcome.culprit
            assert culprit is not None
            active.note_failure(outcome)
            refusal = outcome.response if outcome.end is CallEnd.REFUSED else refusal
            if outcome.response.status == 404:  # as in `generate`, but from a P
                self._look_at_models(request)
            doubted += ((culprit, outcome.verdict.charge),)
            decides, alone = again is RetryKind.ALONE, self.limits.decode_alone > 0
            if decides and alone and self.admission.move(place, PrefillMode.UNAVAILABLE, active.failed):
                logger.info(f"request {attempt.unique}: {culprit} refused it; {place.choice.decode} decides")
                continue
            uncounted, tried = outcome.uncounted, tries - outcome.uncounted
            free = uncounted or culprit.left is not None or culprit.drained or outcome.end is CallEnd.HUNG
            if await self.admission.try_elsewhere(place, culprit, active.failed, tried, free=free):
                tries = tried + 1
                there = " and ".join(map(str, place.choice.instances))
                logger.info("request %s is tried again at %s", attempt.unique, there)
                continue
            if outcome.moved:
                continue  # no other instance has room: the request stays
            if decides or culprit is not attempt.choice.prefill or not alone:
                doubtful = outcome.verdict.charge is Charge.IF_D_ACCEPTS
                return refusal if doubtful and refusal is not None else outcome.response
            if not self.admission.move(place, PrefillMode.UNAVAILABLE, active.failed):
                return self._shed(attempt, outcome, record)
            logger.info(f"request {attempt.unique}: {place.choice.decode} computes its prompt, too")

    async def _go_on(self, attempt: Attempt, outcome: Outcome, active: "ActiveRequest") -> None:
        """Goes on with a broken stream elsewhere (continuation.py), or ends it. Raises ClientGone."""
        transcript, place = attempt.transcript, attempt.place
        assert transcript is not None
        tries = 0
        while not transcript.finished:
            active.note_failure(outcome)
            free = outcome.uncounted
            if not await self.admission.resume(place, self._unable(active), tries, free=free):
                break
            tries += not free
            self.counters.resume_tries += 1
            decode = place.choice.decode
            goes_on = Continuation(transcript, decode.context, attempt.continuation)
            logger.info("request %s goes on at %s after %d tokens", attempt.unique, decode, goes_on.before)
            active.attempt = attempt = attempt.resumed_by(goes_on)
            outcome = await attempt.run()
            if attempt.relay is None:
                if outcome.culprit is None or outcome.verdict.again is RetryKind.NO:
                    break
            elif not attempt.relay.resumable:
                self.counters.resumed += attempt.relay.complete
                return
        last = attempt.relay or attempt.former
        assert last is not None
        if transcript.finished:
            await last.finish(ending(transcript))
        else:
            self.counters.not_resumed += 1
            await last.give_up()

    def _unable(self, active: "ActiveRequest") -> frozenset[Instance]:
        """Instances that cannot go on with this request: they failed it, or only the model's context bounds
        its answer, which has begun, and theirs is unknown."""
        if active.transcript is None or not active.transcript.needs_context:
            return active.failed
        return active.failed.union(each for each in self.registry.known("D") if not each.context)

    def _shed(self, attempt: Attempt, outcome: Outcome, record: RequestRecord) -> web.StreamResponse:
        """P has failed, and no D may serve the request alone: their share is full, or they are gone, too."""
        if not self.registry.routable("D", self.clock()):
            return outcome.response
        self.counters.refused_alone += 1
        record.end("shed")
        logger.info("request %s gets a 503: no decode instance may compute its prompt", attempt.unique)
        why = "The prefill instance failed, no other can serve this request"
        raise ProxyError(503, f"{why}, and {ALONE_FULL}")

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self.guard.ask(request)
        with self.active.enter(request):
            decoders = self.registry.routable("D", self.clock())
            if not decoders:
                raise ProxyError(503, " ".join(self.router.missing(self.clock())))
            return await self.model_lists.merged(request, decoders)

    def move_away(self, drained: Sequence[Instance]) -> None:
        """Moves requests from these D's to others, now and again until the D's are empty or resumed."""
        leaving = frozenset(each for each in drained if each.drained and each.load)
        if leaving:
            asyncio.get_running_loop().call_later(_MOVE_SECONDS, self.move_away, [*leaving])
        moved = Counter[Demand]()  # these take their new places only when their part here has ended
        for active in self.active:
            attempt = active.attempt
            if attempt is None or attempt.choice.decode not in leaving:
                continue
            place = attempt.place
            mode, avoid = place.mode_after(place.choice.decode), self._unable(active)
            wants = place.request.model, mode, place.request.only
            if self.admission.has_room(place.request, mode, avoid, moved[wants]):
                moved[wants] += attempt.move()

    def counted(self) -> dict[str, int]:
        return {
            **asdict(self.counters),
            **{f"first_token_{why}": self.first_tokens.from_decode[why] for why in REASONS},
            "reconnected": self.session.reconnected,
            "claims_refused": self.registry.claims_refused,
        }

    def instances(self) -> list[Instance]:
        """All that are registered, each once."""
        return list(dict.fromkeys(self.registry.known("P") + self.registry.known("D")))

    def state_of(self, instance: Instance) -> str:
        """One of STATES. A P counts as drained only once the D's have all of its KV that they need."""
        needed = instance.load > 0 or (instance.drained and self.active.needs(instance))
        return instance.state(self.clock(), needed=needed)

    def prefill_work(self, instance: Instance) -> tuple[float | None, float | None]:
        """Its queued prompts' seconds, and the share of its time that prompts take; None without `auto`."""
        if self.routing.placement != "auto":
            return None, None
        engine, now = self.router.costs.of(instance), self.clock()
        return engine.queued_seconds(now), engine.prefill_share(now)

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 when nothing is under way."""
        everyone = self.instances()
        held = (each.transcript.bytes_held for each in self.active if each.transcript is not None)
        return {
            "under_way": self.admission.under_way,
            "waiting": self.admission.waiting,
            "held_bytes": self.intake.held,
            "calls": sum(instance.in_flight for instance in everyone),
            "decode_alone": sum(instance.decode_alone for instance in everyone),
            "resume_bytes": self.transcripts.held,
            "resume_bytes_largest": max(held, default=0),
            "silent": sum(instance.silent(self.clock()) for instance in everyone),
            "engines_paused": sum(instance.paused for instance in everyone),
            "breakers_open": sum(not instance.breaker.closed for instance in everyone),
        }

    async def stop(self, seconds: float, cut_short: asyncio.Event) -> int:
        """Takes no more requests, turns away those that wait, gives the others `seconds`; see `clear`."""
        self.active.stopping = True
        self.admission.close(ProxyError(503, STOPPING, last=True))
        return await self.active.clear(seconds, cut_short)


PROXY = web.AppKey("proxy", Proxy)


def by_proxy(serve: Callable[[Proxy, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await serve(request.app[PROXY], request)

    return handler


# Requests that are under way, and how they end when the proxy stops.

STOPPING = "This proxy is stopping; try again in a few seconds."
_CUT_OFF = "This proxy had to stop before the answer was complete."
# How long the requests that were cut off have to send their errors.
_LAST_ERRORS_SECONDS = 2.0


@dataclass(eq=False)
class ActiveRequest:
    """One client's request.

    Attributes:
        transcript: what the client has of its answer; None if no other instance could go on with it.
        failed: instances that failed it, and are not asked again for it.
        cut: whether the proxy cut it off because it stops.
    """

    task: asyncio.Task[Any]
    request: web.Request
    attempt: Attempt | None = None
    transcript: Transcript | None = None
    failed: frozenset[Instance] = frozenset()
    cut: bool = False

    def note_failure(self, outcome: Outcome) -> None:
        """Adds the culprit to `failed`; one that is only drained may be asked again once it is resumed."""
        if outcome.culprit is not None and not outcome.moved:
            self.failed |= {outcome.culprit}

    def cut_off(self) -> None:
        """Ends the request with an error, at whatever stage it is."""
        self.cut = True
        relay = self.attempt.relay if self.attempt is not None else None
        if relay is not None and not relay.resumable:
            relay.interrupt(_CUT_OFF, 503)
        else:
            self.task.cancel()


class ActiveRequests:
    """All requests that are under way; while `stopping`, new ones are refused."""

    def __init__(self, counters: RequestCounters) -> None:
        self._counters = counters
        self._open: set[ActiveRequest] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._open))

    def needs(self, prefill: Instance) -> bool:
        """Whether any request waits for KV from this P."""
        return any(each.attempt is not None and each.attempt.needs(prefill) for each in self._open)

    @contextmanager
    def enter(self, request: web.Request) -> Iterator[ActiveRequest]:
        """One request, from its head to its end. Raises ProxyError if the proxy stops before it ends."""
        if self.stopping:
            raise ProxyError(503, STOPPING, last=True)
        task = asyncio.current_task()
        assert task is not None
        active = ActiveRequest(task, request)
        self._open.add(active)
        self._empty.clear()
        try:
            yield active
        except asyncio.CancelledError:
            if not active.cut:
                raise
            task.uncancel()
            raise ProxyError(503, _CUT_OFF, last=True) from None
        finally:
            self._open.discard(active)
            if not self._open:
                self._empty.set()

    async def clear(self, seconds: float, cut_short: asyncio.Event) -> int:
        """Waits `seconds`, or until `cut_short`, for requests to end; cuts off the rest, and counts it."""
        waits = [asyncio.create_task(self._empty.wait()), asyncio.create_task(cut_short.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        rest = list(self._open)
        self._counters.cut_off += len(rest)
        for each in rest:
            each.cut_off()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ERRORS_SECONDS):
                await self._empty.wait()
        for each in list(self._open):
            hang_up(each.request)
        return len(rest)
