"""GET /v1/models: what the decode instances serve, as one list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from .errors import error_response
from .headers import to_instance
from .registry import Instance
from .relay import Scrubber, refusal
from .routing import Choice
from .upstream import CallFailed, Client, Reply, read_whole

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _Listing(msgspec.Struct):
    data: list[dict[str, Any]]


_listing = msgspec.json.Decoder(_Listing)


async def merged(
    session: Client, request: web.Request, decoders: Sequence[Instance], unique: str
) -> web.Response:
    """Every model once, asked for with the client's own headers. If no instance lists any, the first
    instance's own error, such as 401 without its key."""
    replies = await asyncio.gather(*(_ask(session, request, instance, unique) for instance in decoders))
    answers = [reply for reply in replies if reply is not None]
    listings = [models for reply in answers if reply.ok and (models := _read(reply)) is not None]
    if listings:
        by_name = {str(model.get("id")): model for listing in reversed(listings) for model in listing}
        data = {"object": "list", "data": list(by_name.values())}
        return web.Response(body=msgspec.json.encode(data), content_type="application/json")
    for instance, reply in zip(decoders, replies, strict=True):
        if reply is not None and reply.status >= 400:
            return refusal(reply, Scrubber(Choice(None, instance), unique, unique))
    return error_response(502, "No decode instance listed its models.")


async def _ask(session: Client, request: web.Request, instance: Instance, unique: str) -> Reply | None:
    headers = to_instance(request.headers, instance, unique)
    try:
        async with session.get(
            f"{instance.url}/v1/models", headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            return await read_whole(answer)
    except (aiohttp.ClientError, OSError, CallFailed) as error:
        logger.warning("%s did not list its models: %r", instance, error)
        return None


def _read(reply: Reply) -> list[dict[str, Any]] | None:
    try:
        return _listing.decode(reply.body).data
    except (msgspec.MsgspecError, RecursionError, ValueError):
        logger.warning("a list of models could not be read")
        return None
