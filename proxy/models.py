"""What only some instances have and a request may need: models, and stored responses.

GET /v1/models merges the lists of all decode instances, which also decide who gets a request for a model
that is new. vLLM stores a response of /v1/responses in the process that made it
(VLLM_ENABLE_RESPONSES_API_STORE=1), under the id that the request had there; clients know another id.
"""

import asyncio
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from aiohttp import web

from .http import ProxyError, error_response
from .membership.instance import Instance
from .membership.registry import Registry
from .relay import Scrubber, refusal, to_instance
from .routing import Choice
from .upstream import CallFailed, Client, Reply, read_whole, shown

logger = logging.getLogger(__name__)

# For the first instance to answer; and for the others, once one has listed its models or refused to.
_LIST_SECONDS, _OTHERS_SECONDS = 5.0, 0.5
# Clients whose lists are made at the same time: each takes a connection to every instance.
_AT_ONCE = 16
# At least so long from one look at all lists, for routing, to the next.
_LOOK_SECONDS = 1.0

Models = list[dict[str, Any]]


class _Listing(msgspec.Struct):
    data: Models


class ModelLists:
    """Merges the instances' lists of models; the latest list stands for an instance that does not answer."""

    def __init__(self, session: Client) -> None:
        self._session = session
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._latest: WeakKeyDictionary[Instance, Models] = WeakKeyDictionary()
        self._next: asyncio.Task[None] | None = None
        """A look at all lists that has yet to begin; None if there is none."""
        self._looked = -math.inf

    async def merged(self, request: web.Request, decoders: Sequence[Instance]) -> web.Response:
        """Every model once; instances are asked with the client's own headers. If none lists its models, the
        error of the first that has one, such as 401 without its key."""
        unique = uuid4().hex
        async with self._turns:
            replies = await self._replies_of(request, decoders, unique)
        read = {instance: _models_in(reply, instance) for instance, reply in replies.items()}
        if found := {instance: models for instance, models in read.items() if models is not None}:
            # This client may see models, so it also gets what was listed before.
            self._latest.update(found)
            lists = [self._latest.get(instance, []) for instance in decoders]
            by_name = {str(model.get("id")): model for each in reversed(lists) for model in each}
            data = {"object": "list", "data": list(by_name.values())}
            return web.Response(body=msgspec.json.encode(data), content_type="application/json")
        for instance in decoders:
            if instance in replies and 400 <= replies[instance].status < 600:
                return refusal(replies[instance], Scrubber(Choice(None, instance), unique, unique))
        return error_response(502, "No decode instance listed its models.")

    def look(self, request: web.Request, instances: Callable[[], Sequence[Instance]]) -> asyncio.Task[None]:
        """A task that asks instances for their models, with this client's headers: adapters come and go."""
        if self._next is None:
            self._next = asyncio.create_task(self._look(request, instances))
        return self._next

    async def _look(self, request: web.Request, instances: Callable[[], Sequence[Instance]]) -> None:
        now = asyncio.get_running_loop().time
        try:
            await asyncio.sleep(max(0.0, self._looked + _LOOK_SECONDS - now()))
        finally:
            self._next = None  # a later caller may know of later changes
        self._looked, engines = now(), defaultdict[str, list[Instance]](list)
        for each in instances():
            engines[each.url].append(each)
        servers = [each[0] for each in engines.values()]
        for asked, reply in (await self._replies_of(request, servers, uuid4().hex)).items():
            if (models := _models_in(reply, asked)) is None:
                continue
            names = frozenset(str(model.get("id")) for model in models)
            lengths = (length for model in models if isinstance(length := model.get("max_model_len"), int))
            context = max(lengths, default=0)
            for each in engines[asked.url]:
                if (each.names, each.context) != (names.union(filter(None, [each.ping.model])), context):
                    logger.info("%s now serves %s", each, ", ".join(sorted(names)))
                    each.learn(names, context)

    async def _replies_of(
        self, request: web.Request, instances: Sequence[Instance], unique: str
    ) -> dict[Instance, Reply]:
        """The replies of the instances that answer in time."""
        asking = {each: asyncio.create_task(self._ask(request, each, unique)) for each in instances}
        late, left = set(asking.values()), None
        try:
            while late:
                done, late = await asyncio.wait(late, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if left is None and any((said := task.result()) and said.status < 500 for task in done):
                    left = _OTHERS_SECONDS
        finally:
            for task in asking.values():
                task.cancel()
        there = {instance: task.result() for instance, task in asking.items() if task not in late}
        return {instance: reply for instance, reply in there.items() if reply is not None}

    async def _ask(self, request: web.Request, instance: Instance, unique: str) -> Reply | None:
        url, headers = f"{instance.url}/v1/models", to_instance(request.headers, instance, unique)
        within = aiohttp.ClientTimeout(total=_LIST_SECONDS)
        asked = self._session.pooled.get(url, headers=headers, timeout=within, allow_redirects=False)
        try:
            async with asked as answer:
                return await read_whole(answer)
        except (aiohttp.ClientError, OSError, CallFailed) as error:
            logger.warning("%s did not list its models%s", instance, shown(error))
            return None


def _models_in(reply: Reply, instance: Instance) -> Models | None:
    if not 200 <= reply.status < 300:
        return None
    try:
        return msgspec.json.decode(reply.body, type=_Listing).data
    except (msgspec.MsgspecError, RecursionError, ValueError):
        logger.warning("%s answered /v1/models with what is not a list of models", instance)
        return None


# Stored responses.

MAX_RESPONSES = 1 << 16
"""How many are remembered, the latest. Each takes about 300 bytes."""


class StoredResponses:
    """Which decode instance has which stored response, by the ids that clients know."""

    def __init__(self, registry: Registry, most: int = MAX_RESPONSES) -> None:
        self._registry, self._most = registry, most
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def note(self, shown: str, decode: Instance, name: str) -> None:
        """This instance is about to make the response, under this name."""
        self._known[shown] = decode.cache, name
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def find(self, shown: str) -> tuple[Instance, str]:
        """The instance that has it, and its id there. Raises ProxyError if no decode instance has it now."""
        holder, name = self._known.get(shown, ("", ""))
        for each in self._registry.known("D"):
            if each.cache == holder:
                return each, name
        unknown = f"this proxy has not passed it on since it started, or {self._most} others after it"
        why = "the decode instance that had it is gone or has restarted" if holder else unknown
        raise ProxyError(400, f"Previous response with id '{shown[:100]}' not found: {why}.")
