"""What the client gets to see of D's answer: all of it, as it comes, except ids and addresses."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from .errors import error_event
from .given_up import STOPPED, Watch
from .headers import REQUEST_ID, Headers, to_client
from .rewriter import Rewriter
from .routing import Choice
from .upstream import EVENT_STREAM, Reply

logger = logging.getLogger(__name__)


# A client that takes nothing of what waits for it, for so long, is taken for dead.
STALL_SECONDS = 60.0


class ClientGone(Exception):
    """The client's connection broke while we wrote to it."""


@dataclass(frozen=True)
class Scrubber:
    """Takes out of an answer what names instances.

    Attributes:
        request_id: the id that the instances know this request by.
        unique: what the client sees in its place.
    """

    choice: Choice
    request_id: str
    unique: str

    def rewriter(self) -> Rewriter:
        """For the body of a success, which is the model's: nothing but the id is replaced."""
        return Rewriter(self.request_id.encode(), self.unique.encode())

    def text(self, text: str) -> str:
        """For headers and errors: the id and the addresses are replaced."""
        text = text.replace(self.request_id, self.unique)
        for name, instance in (("prefill", self.choice.prefill), ("decode", self.choice.decode)):
            if instance is not None:
                for address in (
                    instance.ping.http_address,
                    instance.ping.zmq_address,
                    str(instance.zmq_address),
                ):
                    text = text.replace(address, f"({name} instance)")
        return text

    def headers(self, headers: Headers) -> Headers:
        """An instance's headers without its names, and with the id that the client may know."""
        scrubbed = type(headers)((name, self.text(value)) for name, value in headers.items())
        scrubbed[REQUEST_ID] = self.unique
        return scrubbed


def refusal(reply: Reply, scrubber: Scrubber) -> web.Response:
    """An instance's own error, with its status."""
    headers = scrubber.headers(to_client(reply.headers))
    body = scrubber.text(reply.body.decode("utf-8", "replace")).encode()
    return web.Response(status=reply.status, headers=headers, body=body)


class Relay:
    """One successful answer on its way to the client; `run` it once.

    Args:
        head: the part of the answer's body that has been read already.

    Attributes:
        complete: the client has got all of it.
        broken: the instance ended it too early, by itself.
    """

    def __init__(
        self, request: web.Request, answer: aiohttp.ClientResponse, head: bytes, scrubber: Scrubber
    ) -> None:
        self._request = request
        self._answer = answer
        self._head = head
        self._watch = Watch()
        self._rewriter = scrubber.rewriter()
        self._response = web.StreamResponse(
            status=answer.status, headers=scrubber.headers(to_client(answer.headers))
        )
        self._last_bytes = b""
        self._status = 502
        self._why = "The decode instance died in the middle of its answer."
        self._interrupted = False
        self.complete = False
        self.broken = False

    def interrupt(self, why: str, status: int = 502) -> None:
        """Breaks the answer off with an error, for a reason that lies elsewhere."""
        self._interrupted = True
        self._status, self._why = status, why
        self._answer.close()

    async def run(self) -> web.StreamResponse:
        """Relays the answer to its end, or until either side breaks."""
        try:
            await self._pass_on(self._head)
            if await self._relay_rest():
                await self._send(self._rewriter.flush())
                self.complete = True
            else:
                await self._break_off()
        except ClientGone:
            logger.debug("a client left in the middle of its answer")
        return self._response

    async def _relay_rest(self) -> bool:
        """Whether D's answer came to its end. Raises ClientGone."""
        try:
            async for chunk in self._answer.content.iter_any():
                await self._pass_on(chunk)
                if self._watch.given_up:
                    self._why = f"The decode instance {STOPPED}."
                    return self._broke_off(None)
        except (aiohttp.ClientError, OSError) as error:
            return self._broke_off(error)
        return True

    def _broke_off(self, error: Exception | None) -> bool:
        logger.warning("an answer broke off: %s (%r)", self._why, error)
        self.broken = not self._interrupted
        return False

    async def _pass_on(self, chunk: bytes) -> None:
        await self._send(self._rewriter.feed(self._watch.sound(chunk)))

    async def _send(self, data: bytes) -> None:
        try:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            if data:
                async with asyncio.timeout(STALL_SECONDS):
                    await self._response.write(data)
        except TimeoutError as error:
            # It would keep its place for ever, and D's answer with it.
            logger.info("a client has read nothing for %g s: its connection is closed", STALL_SECONDS)
            self._abort()
            raise ClientGone from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClientGone from error
        self._last_bytes = (self._last_bytes + data)[-4:]

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _break_off(self) -> None:
        """An event stream ends with an error event. Any other body is left visibly unfinished."""
        if self._answer.content_type != EVENT_STREAM:
            self._abort()
            return
        await self._send(self._rewriter.flush())
        between_events = self._last_bytes.endswith((b"\n\n", b"\r\n\r\n"))
        await self._send((b"" if between_events else b"\n\n") + error_event(self._status, self._why))
