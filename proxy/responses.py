"""Which decode instance has which stored response of /v1/responses, so that the next one can go on with it.

vLLM stores a response in the process that made it (VLLM_ENABLE_RESPONSES_API_STORE=1), under the id that the
request had there. Clients know it by another id.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from .errors import ProxyError
from .membership.instance import Instance
from .membership.registry import Registry

MAX_RESPONSES = 1 << 16
"""That are known; of more the oldest is forgotten. Each takes about 300 bytes."""


class StoredResponse(NamedTuple):
    """A response, and its id as its instance knows it."""

    decode: Instance
    name: str


class StoredResponses:
    """By the ids that clients know; at most `most`."""

    def __init__(self, registry: Registry, most: int = MAX_RESPONSES) -> None:
        self._registry, self._most = registry, most
        self._known: OrderedDict[str, StoredResponse] = OrderedDict()

    def note(self, shown: str, decode: Instance, name: str) -> None:
        """This instance is about to make it."""
        self._known[shown] = StoredResponse(decode, name)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def find(self, shown: str, now: float) -> StoredResponse:
        """Raises ProxyError if no decode instance could go on with it."""
        found = self._known.get(shown)
        if found is not None and found.decode in self._registry.routable("D", now):
            return found
        why = (
            "the decode instance that has it takes no requests any more"
            if found is not None
            else "this proxy has not passed it on, or not since it was started"
        )
        raise ProxyError(400, f"Previous response with id '{shown[:100]}' not found: {why}.")
