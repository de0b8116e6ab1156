"""Endpoints, and the headers of requests and answers that the proxy passes on. No IO."""

from __future__ import annotations

import re

from multidict import CIMultiDict, CIMultiDictProxy

from .registry import Instance

# Where P computes the prompt, and where one instance does all there is.
PAIRED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
SINGLE = frozenset({"/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# The streams in which each event has a name, errors too.
NAMED_EVENTS = frozenset({"/v1/messages", "/v1/responses"})

# Headers.

REQUEST_ID = "X-Request-Id"
# Under which the client's own id reaches the instances, for their logs.
CLIENT_ID = "X-Client-Request-Id"
REPLICA = "X-data-parallel-rank"

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Headers with which vLLM's caller controls it (all that vLLM 0.32 reads in `entrypoints/`). That caller is
# the proxy: it alone chooses what names a replica or a transfer, and the load of one instance is none of a
# client's concerns. A client's priority stands in its body, where vLLM reads it, too. Two others go through:
# Authorization, and X-Session-ID, which only names a session in vLLM's cache events.
_CONTROLS = {REQUEST_ID.lower(), REPLICA.lower(), "x-vllm-priority", "endpoint-load-metrics-format"}
# The proxy writes each body anew.
_NOT_TO_INSTANCE = _CONTROLS | {
    "host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect",
}  # fmt: skip
# A client may send none of these, and an instance should not; aiohttp writes no such header.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_NOT_TO_CLIENT = {"content-length", "content-encoding", REQUEST_ID.lower()}

Headers = CIMultiDict[str]


def to_instance(client: CIMultiDictProxy[str], instance: Instance, request_id: str) -> Headers:
    """The client's end-to-end headers, with the id that this proxy has chosen."""
    headers = _end_to_end(client, _NOT_TO_INSTANCE)
    headers[REQUEST_ID] = request_id
    # Anthropic's clients show their key so, and vLLM looks for it in the other header only.
    if (key := headers.get("X-Api-Key")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    if theirs := client.get(REQUEST_ID):
        headers.setdefault(CLIENT_ID, theirs)
    headers["Content-Type"] = "application/json"
    # Ids are rewritten in the answer, so it must come as it is.
    headers["Accept-Encoding"] = "identity"
    if instance.ping.dp_size > 1:
        headers[REPLICA] = str(instance.ping.dp_rank)
    return headers


def to_client(instance: CIMultiDictProxy[str]) -> Headers:
    """The instance's end-to-end headers; addresses in their values are the caller's to remove."""
    headers = _end_to_end(instance, _NOT_TO_CLIENT)
    return CIMultiDict((name, value) for name, value in headers.items() if not _CONTROL.search(value))


def _end_to_end(headers: CIMultiDictProxy[str], others: set[str]) -> Headers:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = _HOP_BY_HOP | others | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
