"""Methods of vLLM that p2pkv replaces: why, what each must look like, and how to switch it off."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, Protocol, runtime_checkable

from p2pkv.connector.generation import Generation

log = logging.getLogger("p2pkv")


# Weights that change.


@runtime_checkable
class Watcher(Protocol):
    """A connector, in the engine core, that has to know of the weights."""

    generation: Generation
    """Of its weights."""

    watches: bool
    """False: it is not to be told."""


class WeightWatch:
    """Lets the connector know of all that may change the weights, since vLLM has no hook for that.

    All ways to change them (`/update_weights`, `reload_weights`, `/collective_rpc`, `LLM.apply_model`) end in
    `EngineCore.collective_rpc`. The workers carry it out after the steps that were scheduled before it, and
    before those that are scheduled after it. `watch_weights: false` leaves vLLM as it is.
    """

    PARAMETERS: Final = {
        "collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
        "set_weight_version": ("self", "weight_version"),
        "sleep": ("self", "level", "mode"),
        "wake_up": ("self", "tags"),
    }

    def __init__(self) -> None:
        self._installed = False

    def install(self) -> None:
        """Watch the engine cores of this process, once; a warning where they do not fit."""
        if self._installed:
            return
        from vllm.v1.engine.core import EngineCore

        if reason := self._misfit(EngineCore):
            log.warning(
                "p2pkv would not notice if the weights changed while this instance runs: %s; start P and D "
                "anew after each change",
                reason,
            )
            return
        self._installed = True
        for name in self.PARAMETERS:
            setattr(EngineCore, name, getattr(self, f"_{name}")(getattr(EngineCore, name)))

    def _misfit(self, core: type) -> str:
        """Why this vLLM is left alone; "" if it is one that we know."""
        for name, parameters in self.PARAMETERS.items():
            method = getattr(core, name, None)
            if not inspect.isfunction(method) or tuple(inspect.signature(method).parameters) != parameters:
                return f"this vLLM has no EngineCore.{name}({', '.join(parameters[1:])})"
        return ""

    # What takes the place of vLLM's methods.

    def _collective_rpc(self, vllms: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(vllms)
        def collective_rpc(
            core: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            with _watching(core) as generation:
                if generation is None:
                    return vllms(core, method, timeout, args, kwargs)
                return generation.call(
                    method, args, kwargs or {}, lambda: vllms(core, method, timeout, args, kwargs)
                )

        return collective_rpc

    def _set_weight_version(self, vllms: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(vllms)
        def set_weight_version(core: Any, weight_version: str) -> Any:
            with _watching(core) as generation:
                if generation is not None:
                    generation.version(str(weight_version))
                return vllms(core, weight_version)

        return set_weight_version

    def _sleep(self, vllms: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(vllms)
        def sleep(core: Any, level: int = 1, mode: Any = "abort") -> Any:
            with _watching(core) as generation:
                if generation is not None:
                    generation.sleeps(level)
                return vllms(core, level, mode)

        return sleep

    def _wake_up(self, vllms: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(vllms)
        def wake_up(core: Any, tags: list[str] | None = None) -> Any:
            with _watching(core) as generation:
                if generation is not None:
                    generation.wakes(tags)
                return vllms(core, tags)

        return wake_up


@contextmanager
def _watching(core: Any) -> Iterator[Generation | None]:
    """The generation of this engine core's weights; None without p2pkv.

    If it changes meanwhile, all connectors empty their caches, also those beside p2pkv in a MultiConnector.
    """
    scheduler = getattr(core, "scheduler", None)
    connector = scheduler.get_kv_connector() if scheduler is not None else None
    parts = getattr(connector, "_connectors", (connector,))
    generation = next((each.generation for each in parts if isinstance(each, Watcher) and each.watches), None)
    if scheduler is None or generation is None:
        yield None
        return
    before = generation.changes
    try:
        yield generation
    finally:
        if generation.changes > before and not scheduler.reset_connector_cache():
            log.warning(
                "the weights have changed, and a connector beside p2pkv has not emptied its cache: KV of "
                "former weights may come from it; call /reset_prefix_cache?reset_external=true until it "
                "succeeds"
            )


WEIGHTS = WeightWatch()
"""Of this process: its engine cores share one class."""
