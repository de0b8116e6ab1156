"""One attempt to serve a request: by P and D at once, by P and then D, or by D alone.

An attempt calls its instances, passes D's answer on to the client, and returns an `Outcome`: the response,
who is to blame (blame.py decides), and whether the request may be sent again. It ensures that:

- Nothing goes to the client before D's first token, so any failure becomes a whole error response. The one
  exception is P's token where it begins the answer (first_token.py): D is asked for the rest, or was asked
  for the whole answer, and its failure breaks a stream that has begun.
- The end of the attempt closes the calls to D and P; P's may go on for a moment if D's answer is complete.
  A client that leaves ends the attempt, since that cancels the handler.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from uuid import uuid4

import msgspec
from aiohttp import ClientResponse, web

from p2pkv.first_token import FirstToken, params
from p2pkv.pairing import mint

from .admission import Admission, RequestPlace
from .blame import REFUSALS, Blame, CallEnd, Charge, RetryKind, Verdict, assign_blame
from .bodies import Body, Content, Fields
from .continuation import Continuation, RepeatedAnswer, ending
from .first_token import FirstTokenPlan, FirstTokens
from .http import AGAIN, PRIORITY, REQUEST_ID, error_response
from .limits import Limits, RequestCounters
from .membership.instance import Instance, Role
from .metrics import RECORD
from .prompt_usage import answer_tokens, last_usage
from .relay import ClientGone, Relay, Scrubber, refusal, to_instance
from .transcript import COMPLETIONS, Transcript
from .upstream import EVENT_END, EVENT_STREAM, Begun, Call, CallFailed, Client, Reply, shown, split_prompt

logger = logging.getLogger(__name__)

Dispatch = Literal["concurrent", "sequential"]

# After one call ends, how long to wait for the other: the news of P's failure, which made D fail, may still
# be under way; and after P's refusal D, whose verdict decides, may still read the request.
_VERDICT_SECONDS = 1.0
_ANSWERED = assign_blame("D", CallEnd.ANSWERED)
# After these ends of D's call the client gets D's answer, whatever has become of P.
_DECIDED_BY_D = REFUSALS | {CallEnd.ANSWERED}
# How long P may go on after D's answer is complete, for its own last step and response.
_GRACE_SECONDS = 10.0
# vLLM's message for every failure within its engine, such as KV that did not come.
_NO_REASON = "internal server error"
_NO_SOCKET = f"This proxy has no file descriptor, port or memory left to call an instance; {AGAIN}"


@dataclass(frozen=True)
class Outcome:
    """What became of one attempt.

    Attributes:
        response: what the client has got, or gets if no other attempt follows.
        culprit: the instance that is to blame; None if none is.
    """

    response: web.StreamResponse
    verdict: Verdict
    end: CallEnd
    culprit: Instance | None = None

    @property
    def moved(self) -> bool:
        """Whether the proxy took the request away from an instance that is drained, and has not failed."""
        return self.end is CallEnd.STOPPED and self.culprit is not None and self.culprit.drained

    @property
    def uncounted(self) -> bool:
        """Whether it counts neither as a try nor in the budget of retries: the instance's port refused the
        connection, so nothing was computed, or the proxy itself moved the request."""
        return self.moved or self.end is CallEnd.CLOSED


class ProxyServices(Protocol):
    """What all attempts share, see `Proxy`. `background`: calls to P that may outlive their attempt."""

    session: Client
    clock: Callable[[], float]
    limits: Limits
    counters: RequestCounters
    dispatch: Dispatch
    admission: Admission
    first_tokens: FirstTokens
    background: set[asyncio.Task[Any]]


_Prefilled = Reply | Begun | Outcome
"""How P's part has ended: with its answer, with the beginning of one whose token may go to the client, or
with a failure, as the attempt's outcome unless D goes on."""


@dataclass(eq=False)
class Attempt:
    """One try to serve a request at the instances of its place; `run` it once.

    Attributes:
        may_leave: whether the request could be served without this instance, should that hang.
        may_resend: whether the request may be sent to the same instances again, under a new id.
        doubted: P's that refused this request in earlier attempts, and what would prove them wrong.
        transcript, continuation, former: as the `relay` gets them; a continuation has its own `body`.
        unique: 32 hex digits, made here; the id that log lines and the client have.
        request_id: the id that the instances have.
        relay: the answer on its way to the client; None before it begins.
    """

    services: ProxyServices
    request: web.Request
    body: Body
    place: RequestPlace
    may_leave: Callable[[Instance], bool]
    may_resend: bool = True
    doubted: tuple[tuple[Instance, Charge], ...] = ()
    transcript: Transcript | None = None
    continuation: Continuation | None = None
    former: Relay | None = None
    unique: str = field(init=False, default_factory=lambda: uuid4().hex)
    relay: Relay | None = field(init=False, default=None)
    _prefilled: asyncio.Future[bytes | None] = field(init=False, default_factory=asyncio.Future)
    """P's answer to the prompt; None if P has failed."""
    _plan: FirstTokenPlan | None = field(init=False, default=None)
    _handed_on: Relay | None = field(init=False, default=None)
    """The relay that has sent P's token to the client."""
    _repeated: RepeatedAnswer | None = field(init=False, default=None)
    """Takes P's token out of the answer of D, which was asked for all of it."""
    _rest: asyncio.Task[bytes] | None = field(init=False, default=None)
    """Reads what P's answer has after its token."""
    _prefilling: Call | None = field(init=False, default=None)
    _decoding: Call | None = field(init=False, default=None)
    _sent_twice: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.choice, self.record = self.place.choice, self.request[RECORD]
        decode, self.request_id = self.choice.decode, self.unique
        if self.transcript is not None:
            self.transcript.comes_from(decode.ping.resumes)
        # An id that names one instance twice is a plain request for its engine.
        if prefill := decode if self.choice.single_instance else self.choice.prefill:
            self.request_id = mint(prefill.zmq_address, decode.zmq_address, self.unique)
        previous = self.body.previous_name, self.body.previous
        self._scrubber = Scrubber(self.choice, self.request_id, self.unique, previous)
        self._began = asyncio.get_running_loop().time()
        self.record.begins(self.choice, self.unique)

    async def run(self) -> Outcome:
        """Serves the request, or fails to."""
        if self.choice.prefill is None:
            return await self._by_decode()
        if self.continuation is None:
            self._plan = self.services.first_tokens.plan(self.body, self.transcript, self.choice)
        plan = self._plan
        at_once = plan.what is None if plan is not None else self.services.dispatch == "concurrent"
        try:
            return await (self._concurrent() if at_once else self._in_turn(plan))
        finally:
            if plan is not None:
                plan.leave()

    def resumed_by(self, continuation: Continuation) -> "Attempt":
        """The attempt after this one, which goes on with the answer that this one has begun."""
        return replace(
            self,
            body=continuation.body,
            doubted=(),
            may_leave=lambda _: False,
            may_resend=False,
            continuation=continuation,
            former=self.relay or self.former,
        )

    def move(self) -> bool:
        """Frees D: a stream goes on elsewhere, a request without an answer is tried there. False if not."""
        if self.relay is not None and self.relay is not self._handed_on:
            return self.relay.move()
        if self._decoding is None or self.body.acts:
            return False
        self._decoding.lose("moved")
        return True

    def needs(self, prefill: Instance) -> bool:
        """Whether D may wait for KV of this P: until its first token or, of several prompts, to the end."""
        begun = self.relay is not None and self.relay is not self._handed_on
        return self.choice.prefill is prefill and not (begun and self.body.one_prompt)

    async def _by_decode(self, kv_transfer_params: Fields | None = None, seed: int | None = None) -> Outcome:
        """D's part, where P has none or has done it."""
        with self._decode_call() as call:
            try:
                answer = await self._decode(call, kv_transfer_params, seed)
            except CallFailed as error:
                return self._decode_failed(error)
            return await self._pass_on(answer)

    async def _in_turn(self, plan: FirstTokenPlan | None) -> Outcome:
        """P, then D, which gets the kv_transfer_params that P returned, if any. With a plan the client gets
        P's token as its first one where that is exact, and D is asked for the rest, if there is any."""
        ended = await self._prefill()
        if isinstance(ended, Outcome):
            if plan is not None:
                self.services.first_tokens.count_from_decode("failed")
            return ended
        if isinstance(ended, Reply):
            return await self._by_decode(ended.kv_transfer_params)
        assert plan is not None
        if plan.what is FirstToken.WHOLE:
            return await self._pass_on_ps(*ended)
        if (outcome := await self._hand_on(ended, plan)) is not None:
            return outcome
        if self._handed_on is None:
            return await self._by_decode(seed=plan.seed)
        self._go_on()
        return await self._by_decode(params(FirstToken.IN_PROMPT))

    async def _pass_on_ps(self, answered: ClientResponse, head: bytes) -> Outcome:
        """P's one token is the whole answer."""
        assert self._prefilling is not None
        self.services.counters.first_tokens += 1
        self.body.let_go()
        pace = None
        if answered.content_type == EVENT_STREAM:
            pace = self.record.streams(head, by_prefill=True)
            self._prefilling.streams(pace)
            self.place.streams(pace)
        silence = (pace and self.services.limits.event_seconds) or math.inf
        relay = self.relay = Relay(self.request, answered, head, self._scrubber, pace, silence, role="P")
        try:
            response = await relay.run()
        finally:
            self._prefilling.close("" if relay.complete else "the answer is not complete")
        if relay.broken is None:
            return Outcome(response, _ANSWERED, CallEnd.ANSWERED)
        return self._outcome(response, Verdict(Blame.P, RetryKind.NO, Charge.NOW), relay.broken)

    def _go_on(self) -> None:
        """Makes D's request one for what follows P's token."""
        assert self.transcript is not None
        self.body.let_go()
        goes_on = Continuation(self.transcript, self.choice.decode.context, None)
        self.body, self.continuation = goes_on.body, goes_on
        self._began = asyncio.get_running_loop().time()

    async def _hand_on(self, begun: Begun, plan: FirstTokenPlan) -> Outcome | None:
        """The client gets P's token where that is exact: `_handed_on` is then set. The outcome if it ends."""
        assert self.transcript is not None and self._rest is not None
        head, context = begun[1], self.choice.decode.context
        token = self.services.first_tokens.of(head, plan, self.body, self.transcript, context)
        if token is None:
            return None
        pace, ends = self.record.streams(token.events, by_prefill=True), plan.ends_with(token, context)
        if ends or plan.what is not None:  # else D's answer has it, too
            self.place.streams(pace)
        if self.place.progress is not None:
            self.place.progress.first_token(self.services.clock())
        relay = self.relay = self._handed_on = self.former = Relay(
            self.request, *begun, self._scrubber, pace, transcript=self.transcript, prefilled=self._prefilled
        )
        kept = plan.keeps(token)
        try:
            if ends:
                # P may hang or die after its token; then the proxy writes the answer's end itself.
                await asyncio.wait((self._rest,), timeout=_VERDICT_SECONDS)
                ended = self._rest.done() and not self._rest.cancelled()
                events, end, _ = (head + (self._rest.result() if ended else b"")).rpartition(EVENT_END)
                await relay.begin(events + end)
                await relay.finish(b"" if self.transcript.done else ending(self.transcript))
                return Outcome(relay.response, _ANSWERED, CallEnd.ANSWERED)
            await relay.begin(token.going_on, token.prompt)
            kept = False  # D asks for the blocks, or is gone
        except ClientGone:
            return Outcome(relay.response, _ANSWERED, CallEnd.ANSWERED)
        finally:
            if kept:
                self._finish_later(asyncio.create_task(self._release()))
        self.transcript.settle()
        self._repeated = RepeatedAnswer(self.transcript, token.choice)
        return None

    async def _release(self) -> None:
        """Tells P that no D will ask for the blocks it keeps."""
        prefill = self.choice.prefill
        assert prefill is not None
        call = self._call("P", prefill, path=COMPLETIONS)
        said = params(FirstToken.RELEASED)
        fields = {"model": self.body.model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": said}
        try:
            await call.read_answer(Content((msgspec.json.encode(fields),)))
        except CallFailed as error:
            logger.info(f"request {self.unique}: {prefill} keeps the prompt's blocks for a lease: it {error}")
        finally:
            call.close(call.why)

    async def _rest_of_prefill(self, call: Call, answered: ClientResponse, head: bytes) -> bytes:
        """What P's answer has after its token; it is read so that the connection can be used again."""
        try:
            for _ in range(2):  # the client gets the token first
                await asyncio.sleep(0)
            rest = await call.read_rest(answered)
        except CallFailed as error:
            logger.info("request %s, after its first token: %s %s", self.unique, call.instance, error)
            rest = b""
        finally:
            call.close()
        if not self._prefilled.done():
            self._prefilled.set_result(last_usage(head + rest))
        return rest

    async def _concurrent(self) -> Outcome:
        """P and D at once; D waits for P's KV by itself."""
        with self._decode_call() as call, ExitStack() as cleanup:
            prefilling = asyncio.create_task(self._prefill())
            cleanup.callback(self._end_prefill, prefilling)
            for _ in range(2):  # P's request goes out first, as D waits for P anyway
                await asyncio.sleep(0)
            decoding = asyncio.create_task(self._decode(call))
            # Nobody may read D's failure, if P's came first.
            decoding.add_done_callback(lambda done: done.cancelled() or done.exception())
            cleanup.callback(decoding.cancel)
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            d_first = not prefilling.done() or call.end in _DECIDED_BY_D
            if not d_first:
                ended = prefilling.result()
                if isinstance(ended, Outcome):
                    if self._plan is not None:
                        self.services.first_tokens.count_from_decode("failed")
                    if ended.verdict.again is not RetryKind.GOES_ON:
                        return ended
                elif self._plan is not None and not isinstance(ended, Reply):
                    outcome = await self._hand_on(ended, self._plan)
                    if outcome is not None:
                        return outcome
            try:
                answer = await decoding
            except CallFailed as error:
                # In streams of /v1/responses vLLM reports a client's mistake so, after a head of success.
                broken = error.end is CallEnd.BROKEN and self.body.path == "/v1/responses"
                if error.end is CallEnd.ERROR or broken:
                    await asyncio.wait((self._rest or prefilling,), timeout=_VERDICT_SECONDS)
                    prefilled = prefilling.done() and prefilling.result()
                    if isinstance(prefilled, Outcome) and prefilled.end in REFUSALS:
                        return prefilled
                return self._decode_failed(error)
            if d_first and self._plan is not None:
                self.services.first_tokens.count_from_decode("late")
            outcome = await self._pass_on(answer, prefilling)
            if self.relay is None or not self.relay.diverged:
                return outcome
        logger.info("request %s: D had another first token than P, and goes on behind P's", self.unique)
        # D has the KV already, so P has no part in this.
        self.request_id, self._prefilling = self.unique, None
        self.relay, self.doubted = self._handed_on, ()
        self._scrubber = replace(self._scrubber, request_id=self.unique)
        self._go_on()
        return await self._by_decode()

    def _call(self, role: Role, instance: Instance, tokens: int = 0, path: str = "") -> Call:
        # If P hangs once D has been asked, D's own lease ends D's wait.
        may_leave = (role == "D" or self._decoding is None) and not self.body.acts
        headers = to_instance(self.request.headers, instance, self.request_id)
        tenant = self.place.request.tenant
        if tenant is not None and tenant.settings.priority is not None and "priority" not in self.body.fields:
            headers[PRIORITY] = str(tenant.settings.priority)
        return Call(
            self.services.session,
            instance,
            path or self.body.path,
            headers,
            self.record.span.call(instance, role, headers),
            tokens,
            may_repeat=self._may_repeat,
            may_leave=lambda: may_leave and self.may_leave(instance),
        )

    @property
    def _deadline(self) -> float | None:
        """When a stream's first token is due, by the loop's clock; None: no deadline."""
        seconds = self.body.streams and self.services.limits.first_token_seconds
        return self._began + seconds if seconds else None

    def _may_repeat(self) -> bool:
        again = self.services.admission.spend()
        self._sent_twice |= again
        return again

    # P's part.

    async def _prefill(self) -> _Prefilled:
        instance, services = self.choice.prefill, self.services
        assert instance is not None
        self._prefilling = call = self._call("P", instance, self.choice.prefill_tokens)
        self.place.sent()
        asked = services.clock()
        reply: Reply | Begun
        try:
            if self._plan is None:
                # If D has been asked, its call has the deadline.
                deadline = self._deadline if self._decoding is None else None
                reply = await call.read_answer(self.body.for_prefill(self.request_id), deadline)
                self._prefilled.set_result(reply.body)
            else:
                what = self._plan.what
                said = None if what is None else params(what)
                if what is FirstToken.WHOLE:
                    reply = await call.begin(self.body.for_decode(self.request_id, said), self._deadline)
                else:
                    body = self.body.for_first_token(said, self._plan.seed)
                    reply = await call.begin(body, self._deadline)
                    self._rest = asyncio.create_task(self._rest_of_prefill(call, *reply))
                    self._finish_later(self._rest)
            if self.place.progress is not None:
                self.place.progress.computed(services.clock())
            self.record.metrics.prefilled(instance, services.clock() - asked)
            self._count(instance, success=True)
            self._charge_doubted(Charge.IF_P_ACCEPTS)
            return reply
        except CallFailed as error:
            failed = error
            logger.warning("request %s: %s %s%s", self.unique, instance, error, shown(error.__cause__))
        finally:
            if self._plan is None or call.end is not CallEnd.ANSWERED:
                call.close(call.why)
                if not self._prefilled.done():
                    self._prefilled.set_result(None)
        if failed.end in REFUSALS and self._decoding is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_VERDICT_SECONDS):
                    await self._decoding.known.wait()
        decode = CallEnd.NOT_MADE if self._decoding is None else self._decoding.end
        begun = decode is CallEnd.ANSWERED
        verdict = assign_blame("P", failed.end, decode, begun=begun, one_prompt=self.body.one_prompt)
        if failed.end in REFUSALS and failed.reply is not None:
            response = refusal(failed.reply, self._scrubber)
        else:
            status = 504 if failed.end is CallEnd.LATE else 502
            response = self._failed(f"The prefill instance failed: it {failed}.", status)
        return self._outcome(response, verdict, failed.end)

    def _end_prefill(self, prefilling: asyncio.Task[_Prefilled]) -> None:
        """Ends P's part: at once if the attempt has failed; else lets it end by itself, within a deadline."""
        if self.relay is None or not self.relay.complete:
            prefilling.cancel()
        elif not prefilling.done():
            self._finish_later(prefilling)

    def _finish_later(self, task: asyncio.Task[Any]) -> None:
        """Lets a task outlive this attempt, within a deadline."""
        self.services.background.add(task)
        task.add_done_callback(self.services.background.discard)
        deadline = asyncio.get_running_loop().call_later(_GRACE_SECONDS, task.cancel)
        # A timer left behind would keep P's answer and the whole request in memory until it fires.
        task.add_done_callback(lambda _: deadline.cancel())

    # D's part.

    @contextmanager
    def _decode_call(self) -> Iterator[Call]:
        """The call to D, closed at the end whatever happens."""
        self._decoding = call = self._call("D", self.choice.decode)
        prediction, progress, timer = self.choice.prediction, self.place.progress, None
        alone = self.choice.prefill is None and not self.body.streams
        if alone and prediction is not None and progress is not None:
            # An answer that is no stream does not show when its prompt has been computed.
            timer = asyncio.get_running_loop().call_later(
                prediction.first_token, lambda: progress.computed(self.services.clock(), learn=False)
            )
        try:
            yield call
        finally:
            if timer is not None:
                timer.cancel()
            complete = self.relay is not None and self.relay.complete and self.relay is not self._handed_on
            call.close("" if complete else "the answer is not complete")

    async def _decode(
        self, call: Call, kv_transfer_params: Fields | None = None, seed: int | None = None
    ) -> Begun:
        """D's answer from its first token on. Raises CallFailed."""
        token_ids = self.transcript is not None
        body = self.body.for_decode(self.request_id, kv_transfer_params, token_ids=token_ids, seed=seed)
        answer = await call.begin(body, self._deadline)
        self._count(call.instance, success=True)
        self._charge_doubted(Charge.IF_D_ACCEPTS)
        return answer

    def _decode_failed(self, error: CallFailed) -> Outcome:
        """D has not answered, and nothing has gone to the client."""
        cause = shown(error.__cause__)
        logger.warning("request %s: %s %s%s", self.unique, self.choice.decode, error, cause)
        twice = self.may_resend and self._sent_twice
        verdict = assign_blame("D", error.end, self._state_of_prefill(), sent_twice=twice)
        return self._outcome(self._to_ds_failure(error, verdict), verdict, error.end)

    def _state_of_prefill(self) -> CallEnd:
        """How P's call has ended, or how far it is, for `assign_blame`."""
        call = self._prefilling
        if call is None:
            refused = self.body.streams and any(each is Charge.IF_P_ACCEPTS for _, each in self.doubted)
            return CallEnd.REFUSED if refused else CallEnd.NOT_MADE
        # If P's token went to the client, D was asked later and needs P although P has answered.
        if call.end is CallEnd.PENDING or (self._handed_on is not None and call.end is CallEnd.ANSWERED):
            if call.instance.left is not None:
                return CallEnd.STOPPED
            if call.instance.silent(self.services.clock()):
                return CallEnd.SILENT
        hangs = self._rest is not None and (not self._rest.done() or self._rest.cancelled())
        return CallEnd.ACCEPTED if hangs else call.end

    def _to_ds_failure(self, error: CallFailed, verdict: Verdict) -> web.Response:
        if error.reply is not None:
            status = error.reply.status
            if status == 500 and _names_no_reason(error.reply.error_message):
                return self._failed(self._why_decode_failed(verdict), 500)
            if not 400 <= status < 600:
                # Not passed on: a redirection would send the client to the instance.
                why = f"The decode instance answered {status}, which is neither a success nor an error."
                return self._failed(why)
            return refusal(error.reply, self._scrubber)
        if error.end is CallEnd.ERROR:
            if _names_no_reason(error.detail):
                return self._failed(self._why_decode_failed(verdict))
            return self._failed(self._scrubber.text(f"The decode instance {error}: {error.detail}"))
        return self._failed(f"The decode instance {error}.", 504 if error.end is CallEnd.LATE else 502)

    def _why_decode_failed(self, verdict: Verdict) -> str:
        """What the client gets in place of D's own message, which names no reason."""
        call, now = self._prefilling, self.services.clock()
        if call is None:
            return "The decode instance failed with an internal error; see its log."
        if verdict.blame is Blame.P:
            instance, more = call.instance, ""
            if instance.left is not None and call.end is CallEnd.PENDING:
                more = " and has stopped"
            elif instance.silent(now):
                more = f" and has not pinged for {now - instance.last_seen:.0f} s"
            return (
                f"The prefill instance {call.why}{more}, and the decode instance could not go on without it."
            )
        return (
            "The decode instance failed with an internal error; see its log. If its kv_load_failure_policy "
            "is `fail`, it also fails so when KV does not arrive from the prefill instance."
        )

    # The answer.

    async def _pass_on(self, answer: Begun, prefilling: asyncio.Task[_Prefilled] | None = None) -> Outcome:
        self.body.let_go()  # from here on nothing is tried again
        if self._plan is not None:
            self._plan.leave()
        answered, head = answer
        head = split_prompt(head)[0] if self._repeated else head  # P's answer had it, too
        streamed = answered.content_type == EVENT_STREAM
        # A D that goes on with a chat first sends an event without a token.
        begun = self.continuation is not None and self.body.path != COMPLETIONS
        new = head.partition(EVENT_END)[2] if begun else head
        pace = self.record.streams(new, again=self.former is not None) if streamed else None
        if pace is not None and self._decoding is not None:
            self._decoding.streams(pace)
            self.place.streams(pace)
        elif self.place.request.tenant is not None and answered.content.at_eof():
            self.place.answered(answer_tokens(head))
        progress = self.place.progress
        if progress is not None and streamed:
            progress.decodes(self.services.clock())
        silence = (streamed and self.services.limits.event_seconds) or math.inf
        held, goes_on = self.transcript if streamed else None, self.continuation or self._repeated
        ps = None if self.choice.prefill is None else self._prefilled
        relay = self.relay = Relay(
            self.request, answered, head, self._scrubber, pace, silence, held, goes_on, ps, self.former
        )
        if prefilling is not None and not self.body.one_prompt:
            prefilling.add_done_callback(self._interrupt)
        response = await relay.run()
        if relay.broken is not None:
            verdict = assign_blame("D", relay.broken, self._state_of_prefill(), begun=True)
            return self._outcome(response, verdict, relay.broken)
        if progress is not None and pace is not None and relay.complete:
            progress.ended(pace.events - 1, self.services.clock())
        return Outcome(response, _ANSWERED, CallEnd.ANSWERED)

    def _interrupt(self, prefilling: asyncio.Task[_Prefilled]) -> None:
        """P's part has ended: the prompts that D has not begun, of several, still need P."""
        ended = None if prefilling.cancelled() or prefilling.exception() else prefilling.result()
        if isinstance(ended, Outcome) and ended.verdict.again is not RetryKind.GOES_ON:
            assert self.relay is not None and self._prefilling is not None
            self.relay.interrupt(f"The prefill instance failed: it {self._prefilling.why}.")

    # Who is to blame, and what follows for breakers.

    def _outcome(self, response: web.StreamResponse, verdict: Verdict, end: CallEnd) -> Outcome:
        culprit = {Blame.P: self.choice.prefill, Blame.D: self.choice.decode}.get(verdict.blame)
        if verdict.blame is Blame.PROXY:
            response = self._failed(_NO_SOCKET, 503)
        if culprit is not None and verdict.charge is Charge.NOW and not culprit.drained:
            self._count(culprit, success=False)  # streams of a drained one may just have been moved
        return Outcome(response, verdict, end, culprit)

    def _charge_doubted(self, proof: Charge) -> None:
        for instance, charge in self.doubted:
            if charge is proof:
                self._count(instance, success=False)

    def _count(self, instance: Instance, *, success: bool) -> None:
        """Tells the metrics and the instance's breaker how a call went."""
        now = self.services.clock()
        self.record.metrics.record_outcome(instance, success)
        if instance.left is not None:
            return  # it gets no more requests anyway
        if success:
            instance.answered(now)
            if instance.breaker.succeeded(now, self.place.key):
                logger.info("%s answers again, and gets requests as before", instance)
        elif instance.breaker.failed(now, self.place.key):
            self.services.counters.breakers_opened += 1
            logger.warning(f"{instance} has failed too often: for now others, if any, get its requests")

    def _failed(self, why: str, status: int = 502) -> web.Response:
        """An error of the proxy's own, with the id under which the log has the details."""
        response = error_response(status, why)
        response.headers[REQUEST_ID] = self.unique
        return response


def _names_no_reason(message: str) -> bool:
    return not message or message.lower().rstrip(".") == _NO_REASON
