"""All ranks of one engine as its scheduler has them: an order goes to all, and an outcome is that of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from p2pkv.device import Fence
from p2pkv.engine import commands as do
from p2pkv.engine.core import Core


@dataclass
class _Key:
    """What the ranks have said of one key. `ended`: by rank, why its load failed, "" if it did not."""

    begun: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    ordered: bool = False
    """Whether the ranks know what is to be loaded."""


class Crew:
    """`broken` is told what must not be. `layers`: those of each rank; by default all have all."""

    def __init__(
        self, ranks: Sequence[Core], broken: Callable[[str], None], layers: Sequence[range] | None = None
    ) -> None:
        self.ranks = ranks
        self._layers = layers or [range(1 << 20)] * len(ranks)
        self._broken = broken
        self._keys: dict[str, _Key] = {}

    def do(self, command: do.Command) -> None:
        match command:
            case do.Expect(key) | do.HoldPrompt(key):
                self._keys[key] = _Key()
            case do.Load(key):
                self._keys[key].ordered = True
            case do.Forget(key):
                del self._keys[key]
        for rank in self.ranks:
            rank.do(command)

    def computed(self, prompts: tuple[tuple[str, int], ...], layer: int, fence: Fence) -> None:
        for rank, layers in zip(self.ranks, self._layers, strict=True):
            if layer in layers:
                number = layer - layers.start
                rank.do(do.Computed(prompts, number, number + 1, fence))

    def ordered(self, key: str) -> bool:
        """Whether the ranks know what is to be loaded; nothing, after a failure."""
        return self._keys[key].ordered

    def revoke(self, keys: list[str]) -> None:
        """On return no rank reads these prompts' blocks."""
        for rank in self.ranks:
            rank.revoke(keys)

    def begin_step(self, now: float) -> None:
        for rank in self.ranks:
            rank.steps.begin(now)

    def end_step(self) -> None:
        for rank in self.ranks:
            rank.steps.end()

    def events(self) -> Iterator[do.Event]:
        """What all ranks have said by now; one failed load is enough for all."""
        for number, rank in enumerate(self.ranks):
            for event in rank.events():
                if not isinstance(event, do.PrefetchComplete):  # of a prompt without a request yet
                    yield from self._hear(number, event)

    def _hear(self, number: int, event: do.Event) -> Iterable[do.Event]:
        key = self._keys.get(event.key)
        if key is None or number in key.ended or number in key.free:
            self._broken(f"a second outcome on rank {number}: {event}")
            return ()
        match event:
            case do.Begun():
                key.begun.add(number)
                return (event,) if len(key.begun) == len(self.ranks) else ()
            case do.BlocksFree():
                key.free.add(number)
                return (event,) if len(key.free) == len(self.ranks) else ()
            case do.Loaded():
                key.ended[number] = ""
            case do.LoadFailed(_, reason):
                key.ended[number] = reason
                if not key.ordered:
                    # As p2pkv's scheduler: the request is computed here, so nothing is wanted of P.
                    self.do(do.Load(event.key, 0, 0, ()))
        if len(key.ended) < len(self.ranks):
            return ()
        reasons = [reason for reason in key.ended.values() if reason]
        return (do.LoadFailed(event.key, reasons[0]) if reasons else do.Loaded(event.key),)
