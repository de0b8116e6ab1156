"""Serving one request: by P and D at once, by P and then D, or by D alone.

The rules, wherever P or D fails:

- Before D's first token nothing has gone to the client, so any failure becomes a whole error response.
- P's failure then cancels D: D would wait for KV that never comes, and the caller may ask another P, or a D
  without one. In two cases D goes on, and may compute the prompt: a P that is told to stop tells D itself,
  and of a silent P nobody knows whether it is dead. If D fails then, P is to blame.
- D's first token proves that it has the KV of its prompt. From there on P's fate does not matter,
  unless the request has several prompts; then the stream ends with an error event.
- D's failure cancels P. So does the client when it leaves, which cancels the handler.
- A P that is still busy when D has answered is given a moment to end by itself, then closed.

If an instance may be at fault, and nothing has gone to the client, the exchange names it as its `culprit`, so
that the caller may try another instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from p2pkv.pairing import mint

from .admission import RequestCounters
from .answers import STOPPED, gave_up, message_of, returned_params
from .bodies import Body
from .errors import error_response
from .http import REQUEST_ID, Headers, to_instance
from .records import RequestRecord
from .registry import Instance, Role
from .relay import Relay, Scrubber, refusal
from .routing import Choice
from .tracing import CallSpan
from .upstream import (
    EVENT_STREAM,
    Call,
    CallFailed,
    Client,
    Errored,
    InstanceRefused,
    Reply,
    Silent,
    Stopped,
    first_words,
    read_whole,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long D's error is held back while P's part is open: D may have failed for want of P's KV, and the news
# of P's failure, which reached D first, may still be on its way to us.
_VERDICT_SECONDS = 1.0
_UNANSWERED = "has not answered"
# What vLLM says of every failure within its engine, KV that did not come included.
_SAYS_NOTHING = "internal server error"

# How long P may go on after D's answer is complete: its own last step and response.
_GRACE_SECONDS = 10.0


class PrefillFailed(Exception):
    """P did not do its part.

    Attributes:
        reply: P's own error, if the client's request caused it; else None.
        left_to_d: D goes on, and decides: P has told it that it stops, or nobody has seen P die.
    """

    def __init__(self, why: str, reply: Reply | None = None, *, left_to_d: bool = False) -> None:
        super().__init__(f"The prefill instance failed: {why}.")
        self.reply = reply
        self.left_to_d = left_to_d


@dataclass(frozen=True)
class DecodeAnswer:
    """D's answer, begun: a success with the start of its body, which holds the first token."""

    response: aiohttp.ClientResponse
    head: bytes

    @property
    def streamed(self) -> bool:
        return self.response.content_type == EVENT_STREAM


@dataclass
class Exchange:
    """One client's request and who serves it.

    Attributes:
        unique: 32 hex digits, made here.
        lingering: P's calls that may outlive their exchange.
        clock: monotonic seconds.
        sent: to be called when P is asked.
        record: takes down what becomes of it.
        complete: the client has got the whole answer.
        gave_up: P was told to stop before it had done its part.
        prefill_failure: what P has failed to do so far, in words; "" before it is asked, or if it has not.
        culprit: the instance that failed before anything of D's answer went to the client; None if none did.
        repeated: an instance was sent the request twice, because its connection was closed the first time.
        maybe_aborted: D failed after an instance was sent the request twice: vLLM may have aborted one.
        relay: D's answer on its way to the client; None before it begins.
    """

    session: Client
    request: web.Request
    body: Body
    choice: Choice
    unique: str
    lingering: set[asyncio.Task[Reply]]
    clock: Callable[[], float]
    counters: RequestCounters
    sent: Callable[[], None]
    record: RequestRecord
    complete: bool = False
    gave_up: bool = False
    prefill_failure: str = ""
    culprit: Instance | None = None
    repeated: bool = False
    maybe_aborted: bool = False
    relay: Relay | None = None
    _spans: dict[Role, CallSpan] = field(default_factory=dict)
    request_id: str = field(init=False)
    scrubber: Scrubber = field(init=False)

    def __post_init__(self) -> None:
        prefill, decode = self.choice.prefill, self.choice.decode
        self.request_id = (
            mint(prefill.zmq_address, decode.zmq_address, self.unique) if prefill else self.unique
        )
        self.scrubber = Scrubber(self.choice, self.request_id, self.unique)
        self.record.begins(self.choice, self.unique)

    async def prefill(self) -> Reply:
        """P's whole answer. Raises PrefillFailed."""
        instance = self.choice.prefill
        assert instance is not None
        call = Call(self.session, instance, self.request.path, self._sent_again, self.choice.prefill_tokens)
        self.sent()
        self.prefill_failure = _UNANSWERED
        asked = self.clock()
        try:
            reply = await call.whole(self.body.for_prefill(self.request_id), self._headers(instance))
            self.gave_up = gave_up(self.request.path, reply.body)
            self.prefill_failure = STOPPED if self.gave_up else ""
            self.judge(instance, not self.gave_up)
            self.record.prefilled(instance, self.clock() - asked)
            return reply
        except CallFailed as error:
            self.prefill_failure = str(error)
            self.judge(instance, False)
            logger.warning("request %s: %s %s (%r)", self.unique, instance, error, error.__cause__)
            raise PrefillFailed(f"it {error}", left_to_d=isinstance(error, Silent | Stopped)) from error
        except InstanceRefused as error:
            logger.warning("request %s: %s answered %d", self.unique, instance, error.reply.status)
            theirs = 400 <= error.reply.status < 500
            self.prefill_failure = "" if theirs else f"answered {error.reply.status}"
            self.judge(instance, theirs)
            raise PrefillFailed(str(error), error.reply if theirs else None) from error
        finally:
            call.close()
            self._ended("P", self.prefill_failure)

    @contextmanager
    def decode_call(self) -> Iterator[Call]:
        """The call to D, closed at the end whatever happens."""
        call = Call(self.session, self.choice.decode, self.request.path, self._sent_again)
        try:
            yield call
        finally:
            call.close()
            self._ended("D", "" if self.complete else "the answer is not complete")

    async def decode(self, call: Call, kv_transfer_params: dict[str, Any] | None = None) -> DecodeAnswer:
        """D's answer from its first token on. Raises InstanceRefused or CallFailed."""
        body = self.body.for_decode(self.request_id, kv_transfer_params)
        response = await call.open(body, self._headers(call.instance))
        if not 200 <= response.status < 300:
            raise InstanceRefused(await read_whole(response))
        answer = DecodeAnswer(response, await first_words(response, self.request.path))
        call.begun = True
        self.judge(call.instance, True)
        return answer

    def _sent_again(self) -> None:
        self.repeated = True

    def decode_failed(self, spoke: bool) -> None:
        """D has not answered, and nothing has gone to the client. `spoke`: it said itself that it failed."""
        if spoke and self.repeated:
            self.culprit, self.maybe_aborted = self.choice.decode, True
        elif spoke and self.blames_prefill:  # for want of KV it says so, and does not close the connection
            self.culprit = self.choice.prefill  # judged before, or only silent
        else:
            self.culprit = self.choice.decode
            self.judge(self.choice.decode, False)

    @property
    def blames_prefill(self) -> bool:
        """Whether D, if it fails, does so for want of KV: P has failed, has stopped or has fallen silent."""
        prefill = self.choice.prefill
        if prefill is None or not self.prefill_failure:
            return False
        stopped = prefill.left is not None
        return self.prefill_failure != _UNANSWERED or stopped or prefill.silent(self.clock())

    def judge(self, instance: Instance, success: bool) -> None:
        """Tells an instance's breaker what became of its part."""
        now = self.clock()
        self.record.judged(instance, success)
        if instance.left is not None:
            return  # it gets no more requests anyway
        if success:
            if instance.breaker.succeeded(now):
                logger.info("%s answers again: it gets requests as before", instance)
        elif instance.breaker.failed(now):
            self.counters.breakers_opened += 1
            logger.warning("%s fails too often: it gets a pause, unless there is no other", instance)

    def needs(self, prefill: Instance) -> bool:
        """Whether D may still wait for KV of this P: until its first token, or to the end where one token
        does not prove that all is there."""
        return self.choice.prefill is prefill and (self.relay is None or not self.body.one_prompt)

    def see_off(self, prefilling: asyncio.Task[Reply]) -> None:
        """Ends P's part: at once if the exchange has failed, else by itself, within a deadline."""
        if not self.complete:
            prefilling.cancel()
        elif not prefilling.done():
            self.lingering.add(prefilling)
            deadline = asyncio.get_running_loop().call_later(_GRACE_SECONDS, prefilling.cancel)

            def ended(_: asyncio.Task[Reply]) -> None:
                # A timer that stays would hold P's answer and all of this request until it fires.
                deadline.cancel()
                self.lingering.discard(prefilling)

            prefilling.add_done_callback(ended)

    def failed(self, why: str, status: int = 502) -> web.Response:
        """An error of ours, with the id under which the log has the details."""
        response = error_response(status, why)
        response.headers[REQUEST_ID] = self.unique
        return response

    def _headers(self, instance: Instance) -> Headers:
        headers = to_instance(self.request.headers, instance, self.request_id)
        self._spans[instance.role] = self.record.span.call(instance, headers)
        return headers

    def _ended(self, role: Role, failed: str) -> None:
        """The call to P or D has ended, if there has been one."""
        if role in self._spans:
            self._spans[role].end(failed)


async def alone(exchange: Exchange) -> web.StreamResponse:
    """D serves the request as if it were an ordinary instance."""
    with exchange.decode_call() as call:
        return await _answered(exchange, exchange.decode(call))


async def sequential(exchange: Exchange) -> web.StreamResponse:
    """P to its end, then D, which gets the kv_transfer_params that P has returned, if any."""
    try:
        reply = await exchange.prefill()
        if exchange.gave_up:
            raise PrefillFailed(f"it {STOPPED}")
    except PrefillFailed as failure:
        return _prefill_failed(exchange, failure)
    with exchange.decode_call() as call:
        return await _answered(exchange, exchange.decode(call, returned_params(reply.body)))


async def concurrent(exchange: Exchange) -> web.StreamResponse:
    """P and D at once; D waits for P's KV by itself."""
    with exchange.decode_call() as call, ExitStack() as cleanup:
        prefilling = _task(exchange.prefill())
        cleanup.callback(exchange.see_off, prefilling)
        decoding = _task(exchange.decode(call))
        cleanup.callback(decoding.cancel)
        try:
            await _first_token(prefilling, decoding)
        except PrefillFailed as failure:
            return _prefill_failed(exchange, failure)
        return await _answered(exchange, decoding, prefilling)


async def _first_token(prefilling: asyncio.Task[Reply], decoding: asyncio.Task[DecodeAnswer]) -> None:
    """Until D's part is settled, either way. Raises PrefillFailed if P is known to have failed before D
    succeeds."""
    await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
    if prefilling.done() and not (decoding.done() and decoding.exception() is None):
        error = prefilling.exception()
        if not (isinstance(error, PrefillFailed) and error.left_to_d):
            prefilling.result()
    if not decoding.done():
        await asyncio.wait((decoding,))


async def _answered(
    exchange: Exchange, decoding: Awaitable[DecodeAnswer], prefilling: asyncio.Task[Reply] | None = None
) -> web.StreamResponse:
    """The response to the client, once D's part is settled."""
    try:
        answer = await decoding
    except InstanceRefused as refused:
        logger.info(
            "request %s: %s answered %d", exchange.unique, exchange.choice.decode, refused.reply.status
        )
        if 400 <= refused.reply.status < 500:
            exchange.judge(exchange.choice.decode, True)
            return _refused(exchange, "decode", refused.reply)
        await _verdict(prefilling)
        exchange.decode_failed(spoke=True)
        if refused.reply.status == 500 and _says_nothing(message_of(refused.reply.body)):
            return exchange.failed(_why_decode_failed(exchange), 500)
        return _refused(exchange, "decode", refused.reply)
    except CallFailed as error:
        if isinstance(error, Errored):
            await _verdict(prefilling)
        exchange.decode_failed(spoke=isinstance(error, Errored))
        logger.warning(
            "request %s: %s %s (%r)", exchange.unique, exchange.choice.decode, error, error.__cause__
        )
        if isinstance(error, Errored):
            if _says_nothing(error.said):
                return exchange.failed(_why_decode_failed(exchange))
            return exchange.failed(exchange.scrubber.text(f"The decode instance {error}: {error.said}"))
        return exchange.failed(f"The decode instance {error}.")
    exchange.body.let_go()  # from here on nothing is tried again
    pace = exchange.record.streams(answer.head) if answer.streamed else None
    relay = exchange.relay = Relay(exchange.request, answer.response, answer.head, exchange.scrubber, pace)
    if prefilling is not None and not exchange.body.one_prompt:
        prefilling.add_done_callback(partial(_interrupt, relay))
    response = await relay.run()
    exchange.complete = relay.complete
    if not relay.complete:
        exchange.record.end("left" if relay.client_left else "broken")
    if relay.broken:
        exchange.judge(exchange.choice.decode, False)
    return response


async def _verdict(prefilling: asyncio.Task[Reply] | None) -> None:
    """Until P's part is settled, if that is soon."""
    if prefilling is not None:
        await asyncio.wait((prefilling,), timeout=_VERDICT_SECONDS)


def _says_nothing(message: str) -> bool:
    return not message or message.lower().rstrip(".") == _SAYS_NOTHING


def _why_decode_failed(exchange: Exchange) -> str:
    """In place of D's own words, which name no reason."""
    prefill, now = exchange.choice.prefill, exchange.clock()
    if prefill is None:
        return "The decode instance failed with an internal error; its log says how."
    if exchange.blames_prefill:
        silence = now - prefill.last_seen
        more = f" and has not pinged for {silence:.0f} s" if prefill.silent(now) else ""
        if prefill.left is not None and exchange.prefill_failure == _UNANSWERED:
            more = " and has stopped"
        return (
            f"The prefill instance {exchange.prefill_failure}{more}, "
            "and the decode instance could not go on without it."
        )
    return (
        "The decode instance failed with an internal error; its log says how. With kv_load_failure_policy "
        "`fail` it does so when KV of the prefill instance does not arrive."
    )


def _interrupt(relay: Relay, prefilling: asyncio.Task[Reply]) -> None:
    error = None if prefilling.cancelled() else prefilling.exception()
    if error is not None and not (isinstance(error, PrefillFailed) and error.left_to_d):
        relay.interrupt(str(error))


def _prefill_failed(exchange: Exchange, failure: PrefillFailed) -> web.Response:
    if failure.reply is None:
        exchange.culprit = exchange.choice.prefill
        return exchange.failed(str(failure))
    return _refused(exchange, "prefill", failure.reply)


def _refused(exchange: Exchange, name: str, reply: Reply) -> web.Response:
    """An instance's own error. A redirection is none: it would send the client to the instance."""
    if not 400 <= reply.status < 600:
        return exchange.failed(
            f"The {name} instance answered {reply.status}, which is no answer to a request."
        )
    return refusal(reply, exchange.scrubber)


def _task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure may go unread, because another one's came first."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
