"""Endpoints, headers that the proxy passes on, and errors in JSON, as OpenAI's clients expect them. No IO."""

import random

import msgspec
from aiohttp import web
from multidict import CIMultiDict

# Endpoints where P computes the prompt, and those where one instance does everything.
PAIRED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
SINGLE = frozenset({"/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# Of SINGLE, those where the engine computes nothing.
UNCOMPUTED = SINGLE - {"/v1/embeddings"}
# Endpoints in whose streams each event has a name, error events too.
NAMED_EVENTS = frozenset({"/v1/messages", "/v1/responses"})

# Headers.

REQUEST_ID = "X-Request-Id"
# The client's own id, on its way to the instances, for their logs.
CLIENT_ID = "X-Client-Request-Id"
PRIORITY = "X-Vllm-Priority"
REPLICA = "X-data-parallel-rank"

Headers = CIMultiDict[str]

# Errors.

AGAIN = "try again in a few seconds."
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
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


class ProxyError(Exception):
    """Ends a request with an error; `last`: its connection, too; `retry_after`: seconds of a 429; else 0."""

    def __init__(self, status: int, message: str, *, last: bool = False, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status, self.last, self.retry_after = status, last, retry_after


def retry_after() -> dict[str, str]:
    """Headers of a 503: every living instance pings within 3 s, and clients should not all return at once."""
    return {"Retry-After": str(random.randint(3, 6))}


def error_json(status: int, message: str) -> bytes:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(status: int, message: str, *, named: bool = False) -> bytes:
    """The error as an event of a stream that has already begun; `named`: its events have names."""
    body = error_json(status, message)
    if named:
        return b'event: error\ndata: {"type":"error",' + body[1:] + b"\n\n"
    return b"data: " + body + b"\n\n"


def error_response(status: int, message: str) -> web.Response:
    headers = retry_after() if status == 503 else None
    body = error_json(status, message)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    allowed = ", ".join(sorted(error.allowed_methods)) if isinstance(error, web.HTTPMethodNotAllowed) else ""
    template = _SENTENCES.get(error.status)
    if template is None:
        return error.text or error.reason
    path, limit = request.path[:200], request.client_max_size
    return template.format(path=path, method=request.method, allowed=allowed, limit=limit)
