"""Asks instances for their /health.

It asks newcomers, as pings come from a worker, which starts before the API listens; and instances with
requests in flight whose pings have stopped. One whose port refuses is gone. One that does not answer is
frozen or busy: its requests go on until it has been silent for a lease. One whose /health answers is alive,
but its engine may hang: after a lease without a ping, requests that it has not begun to answer go elsewhere
if they can. From version 4 of the pings on, an instance sends none while its engine hangs: then requests that
cannot go elsewhere fail, and so do streams of which nothing comes.

An instance that has said goodbye computes nothing more. vLLM then closes its port but keeps connections,
sends what it has computed, and ends requests that never reached its engine only after 20 s.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from p2pkv.log import RateLimit

from .instance import Instance
from .registry import Registry

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_PERIOD_SECONDS = 1.0
_MAX_BYTES = 16 << 20  # of a list of models
_COMPLAIN_SECONDS = 600.0  # between two log lines about one instance
_GOODBYE_SECONDS = 1.0
"""After a goodbye, for answers that are complete to arrive."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


@dataclass(eq=False)
class Prober:
    """Makes instances routable, and removes dead ones from the registry, whose clock this is. `changed` is
    called when an instance may have become routable, and after each round."""

    _session: aiohttp.ClientSession
    _registry: Registry
    _clock: Callable[[], float]
    changed: Callable[[], None] = lambda: None
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    """Set for a new instance: the next round begins at once."""
    _complaints: RateLimit = field(default_factory=lambda: RateLimit(seconds=_COMPLAIN_SECONDS))
    _gone: set[Instance] = field(default_factory=set)
    """Instances that are no longer registered, but still have requests or were chosen for some."""

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            self.wakeup.clear()
            try:
                await self.round()
            except Exception:  # nothing else finds newcomers and the dead
                logger.exception("asking the instances for their /health failed; the next round comes")
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self.wakeup.wait()

    async def round(self) -> None:
        """Asks each instance once whose health is in doubt."""
        now = self._clock()
        self._gone = {each for each in self._gone.union(self._registry.expire(now)) if each.load}
        doubtful = {*self._registry.late(now), *self._gone}
        instances = {*self._registry.known("P"), *self._registry.known("D")}
        await asyncio.gather(
            *(self._probe(instance) for instance in instances if not instance.healthy),
            *(self._doubt(instance) for instance in doubtful),
        )
        self.changed()

    async def _doubt(self, instance: Instance) -> None:
        """Ends all requests of an instance whose port refuses, or that has neither pinged nor answered for a
        lease. If it has said goodbye, or only does not ping, it keeps those that `Call.lose` says."""
        try:
            await self._health(instance)
            if instance.left is None and self._overdue(instance, now := self._clock()):
                if self._complaints.admits(instance.name):
                    logger.warning(
                        f"{instance} has not pinged for {now - instance.last_seen:.0f} s, but its /health "
                        "answers: its engine may hang, so requests that it has not begun to answer go to "
                        "others, where there are any"
                    )
                instance.lost("hung")
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            now = self._clock()
            if instance.left is not None:
                if refused and now - instance.left >= _GOODBYE_SECONDS:
                    instance.lost("stopped")
                elif not refused and self._registry.overdue(instance, now):
                    instance.lost("silent")  # it is frozen, with its port open
            elif refused or self._overdue(instance, now):
                what = f"its {instance.in_flight} requests fail"
                logger.warning("%s neither pings nor answers (%r): %s", instance, error, what)
                instance.lost("gone" if refused else "silent")
        except Exception:  # as in `_probe`; it has answered something
            logger.exception("%s: asking its /health failed", instance)

    def _overdue(self, instance: Instance, now: float) -> bool:
        """Whether it is overdue; if it was removed and pings again, whether its new registration is."""
        return self._registry.overdue(self._registry.of(instance.ping) or instance, now)

    async def _health(self, instance: Instance) -> bool:
        url = f"{instance.url}/health"
        async with self._session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
            return bool(answer.status == 200)

    async def _probe(self, instance: Instance) -> None:
        try:
            if not await self._health(instance):
                return
            await self._learn_models(instance)
        except (aiohttp.ClientError, OSError) as error:
            new = not (instance.context or is_ours(error))
            if new and self._complaints.admits(("health", instance.name)):
                logger.warning(
                    f"{instance} gets no requests: its /health cannot be asked from here ({error!r}); is its "
                    "`host` one that this machine reaches, and http_port its --port?"
                )
        except Exception:  # one instance's answer must not end the probing of all
            logger.exception("%s: asking its /health and models failed", instance)
        else:
            instance.healthy = True
            logger.info("%s is ready", instance)
            self.changed()

    async def _learn_models(self, instance: Instance) -> None:
        """Takes in the models that it lists; none if it lists them only to clients with its key."""
        listed: list[_Model] = []
        url = f"{instance.url}/v1/models"
        async with self._session.get(url, timeout=_TIMEOUT, allow_redirects=False) as answer:
            try:
                if answer.status == 200:
                    body = bytearray()
                    async for chunk in answer.content.iter_any():
                        body += chunk
                        if len(body) > _MAX_BYTES:
                            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
                    listed = _models.decode(body).data
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                logger.warning("%s: its list of models cannot be read: %s", instance, error)
        context = max((model.max_model_len or 0 for model in listed), default=0)
        instance.learn(frozenset(model.id for model in listed), context)


# What this machine may lack for one more connection: file descriptors, ports, memory.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


def is_ours(error: BaseException) -> bool:
    """Whether a connection could not be made because this machine lacks something for it."""
    return isinstance(error, OSError) and error.errno in _OURS
