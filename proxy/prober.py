"""Asks newcomers for their /health: a ping comes from a worker, which starts before the API listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from .registry import Instance, Registry
from .upstream import CallFailed, read_whole

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_PERIOD_SECONDS = 1.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Prober:
    """Makes instances routable, and keeps the registry free of dead ones. `clock` is the registry's."""

    def __init__(
        self, session: aiohttp.ClientSession, registry: Registry, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._registry = registry
        self._clock = clock
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """There is a newcomer: do not wait for the next round."""
        self._hurry.set()

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            self._hurry.clear()
            self._registry.expire(self._clock())
            await asyncio.gather(*(self._probe(instance) for instance in self._registry.unready()))
            try:
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    async def _probe(self, instance: Instance) -> None:
        try:
            async with self._session.get(
                f"{instance.url}/health", timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                ready = answer.status == 200
            if ready:
                instance.learn(await self._served_names(instance))
        except (aiohttp.ClientError, OSError, CallFailed) as error:
            logger.debug("%s is not ready: %r", instance, error)
            return
        except Exception:  # one instance's answer must not end the probing of all
            logger.exception("%s could not be probed", instance)
            return
        if ready:
            instance.healthy = True
            logger.info("%s is ready", instance)

    async def _served_names(self, instance: Instance) -> frozenset[str]:
        """The models it lists; nothing if it lists them only for those who have its key."""
        async with self._session.get(
            f"{instance.url}/v1/models", timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                return frozenset()
            try:
                return frozenset(model.id for model in _models.decode((await read_whole(answer)).body).data)
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                logger.warning("%s: its list of models cannot be read: %s", instance, error)
                return frozenset()
