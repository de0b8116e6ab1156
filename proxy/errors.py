"""Errors as OpenAI's clients expect them: JSON with one object `error`."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import msgspec
from aiohttp import web

logger = logging.getLogger(__name__)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    502: "bad_gateway_error",
    503: "service_unavailable_error",
}
_SENTENCES = {
    404: "There is no {path} here; this proxy serves POST /v1/completions, /v1/chat/completions, "
    "/v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/embeddings, /tokenize, /detokenize and "
    "/instances/{{address}}/drain and /resume, GET /v1/models, /health, /ready, /metrics, /status and "
    "/instances, and a dashboard at /.",
    405: "{path} does not take {method}; it takes {allowed}.",
    413: "The request body is larger than the {limit} bytes that this proxy takes (--max-body-mib).",
}

_begun: ContextVar[bool] = ContextVar("begun", default=False)
"""Whether the head of an answer to the request of this task has been sent."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProxyError(Exception):
    """A request that ends with an error of this proxy's own.

    Attributes:
        last: this connection is not used any more.
        ask: for a 401, what the client should show; else "".
    """

    def __init__(self, status: int, message: str, *, last: bool = False, ask: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.last = last
        self.ask = ask


def retry_after() -> dict[str, str]:
    """For a 503. Every living instance pings within 3 s; the rest is random, so that not all clients come
    back at once."""
    return {"Retry-After": str(random.randint(3, 6))}


def error_json(status: int, message: str) -> bytes:
    """The body of an error response."""
    kind = _KINDS.get(status, "internal_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(status: int, message: str, *, named: bool = False) -> bytes:
    """The same as a server-sent event, for an answer that has already begun; `named`: its events have
    names."""
    body = error_json(status, message)
    if named:
        return b'event: error\ndata: {"type":"error",' + body[1:] + b"\n\n"
    return b"data: " + body + b"\n\n"


def error_response(status: int, message: str) -> web.Response:
    headers = retry_after() if status == 503 else None
    body = error_json(status, message)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def note_begin(request: web.Request, response: web.StreamResponse) -> None:
    """To be called when an answer's head is about to be sent."""
    _begun.set(True)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into a response; an unexpected error becomes a 500 without details."""
    _begun.set(False)
    try:
        return await handler(request)
    except ProxyError as failure:
        response = error_response(failure.status, str(failure))
        if failure.last:
            response.force_close()
        if failure.ask:
            response.headers["WWW-Authenticate"] = failure.ask
        return response
    except web.HTTPException as error:
        response = error_response(error.status, _sentence(request, error))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise  # the client's own connection; there is nobody to answer
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        if _begun.get() and request.transport is not None:
            # A second head in the middle of an answer would be taken for the rest of it.
            request.transport.abort()
            raise ConnectionResetError from None
        return error_response(500, "The proxy itself failed; its log says how.")


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    allowed = ", ".join(sorted(error.allowed_methods)) if isinstance(error, web.HTTPMethodNotAllowed) else ""
    limit = request.client_max_size
    template = _SENTENCES.get(error.status)
    if template is None:
        return error.text or error.reason
    return template.format(path=request.path[:200], method=request.method, allowed=allowed, limit=limit)
