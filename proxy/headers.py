"""Which headers cross the proxy, either way."""

from __future__ import annotations

import re

from multidict import CIMultiDict, CIMultiDictProxy

from .registry import Instance

REQUEST_ID = "X-Request-Id"
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
# The body is written anew on each side, and what names an instance or a transfer is the proxy's choice.
_NOT_TO_INSTANCE = {
    "host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect",
    REQUEST_ID.lower(), REPLICA.lower(),
}  # fmt: skip
# A client may send none of these, and an instance should not; aiohttp writes no such header.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_NOT_TO_CLIENT = {"content-length", "content-encoding", REQUEST_ID.lower()}

Headers = CIMultiDict[str]


def to_instance(client: CIMultiDictProxy[str], instance: Instance, request_id: str) -> Headers:
    """The client's end-to-end headers, with the id that this proxy has chosen."""
    headers = _end_to_end(client, _NOT_TO_INSTANCE)
    headers[REQUEST_ID] = request_id
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
