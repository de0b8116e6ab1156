"""The forward thread's part of a push: which layers of a step are computed, in runs that fill a message."""

import sys
from collections.abc import Callable

from p2pkv.device import PASSED, Fence
from p2pkv.engine import commands as do

Prompts = tuple[tuple[str, int], ...]
"""For each prompt of a step its key, and the number of its tokens that are computed after the step."""

Order = Callable[[do.Command], None]
"""Hands a command to the rank."""


BEHIND = 4
"""With more layers than these to compute a GPU does not notice that a push holds up the forward thread."""


class ComputedLayers:
    """The layers of one step. They wake the engine once they fill a message; on a device that waits for the
    forward thread to launch its kernels, only once the last one is computed."""

    def __init__(self, layers: int, record: Callable[[], Fence]) -> None:
        """`layers`: in the rank's cache; `record`: makes a fence behind the current stream's work."""
        self.record = record
        self._layers = layers
        self._last = self._reached = layers - 1
        """The last layer with a hook, by the step before; that of the last hook that was called."""
        self.prompts: Prompts = ()
        """Of the step under way; () where `computed` is not to be called."""
        self._stride = 1
        # The runs of layers that are computed and that the engine does not know of, and how many layers.
        self._runs = list[tuple[int, int]]()
        self._count = 0
        self.failure = ""
        """Why no step may follow: vLLM's scheduler takes what one that failed should compute for computed."""
        self._whole = False
        """The step's forward has not failed."""
        self._handled: BaseException | None = None
        """What was being handled when the step began: vLLM may run within an `except`."""
        self._launched: Fence = PASSED
        """Recorded BEHIND layers before a message is full, or at its first layer if it has no more."""

    def begin(self, prompts: Prompts, stride: int) -> None:
        """A step begins. `prompts`: () if it computes none that P sends; `stride`: layers of a message."""
        self.prompts, self._stride, self._count = prompts, stride, 0
        self._runs.clear()
        self._last = self._reached
        self._whole, self._handled = False, sys.exception()
        if prompts and stride < self._layers:
            self._launched = self.record()

    def computed(self, index: int, order: Order) -> None:
        """This layer's KV of the step is written, or queued on the current stream."""
        first = index
        if self._runs and self._runs[-1][1] == index:  # else layers without a hook lie between
            first, _ = self._runs.pop()
        self._runs.append((first, index + 1))
        self._count, self._reached = self._count + 1, index
        full = self._count % self._stride == 0
        # The last layer's too: the step's end may come only after sampling.
        if index == self._last or (full and not self._device_waits()):
            self._hand_over(order)
        if self._count % self._stride == max(self._stride - BEHIND, 0):
            self._launched = self.record()

    def _device_waits(self) -> bool:
        """Whether the GPU is so close behind the forward thread that it would wait, too, if a push took the
        interpreter's lock from that thread."""
        return self._launched is not PASSED and self._launched.ready()

    def _hand_over(self, order: Order) -> None:
        fence = self.record()
        for first, stop in self._runs:
            order(do.Computed(self.prompts, first, stop, fence))
        self._runs.clear()
        self._count = 0

    def ended(self) -> None:
        """vLLM reports the end of the step's forward; its V1 runner does so even if that has raised."""
        self._whole = sys.exception() in (None, self._handled)

    def end(self, order: Order) -> None:
        """All layers of the step are computed, also those that were not reported, unless its forward has
        failed. Idempotent."""
        prompts, self.prompts = self.prompts, ()
        if prompts and self._whole:
            order(do.Computed(prompts, 0, self._layers, self.record()))
            order(do.Flush(tuple(key for key, _ in prompts)))
        elif prompts:
            self.failure = "a step of P has failed in its forward: see P's log, and restart that instance"
            for key, _ in prompts:
                order(do.Abort(key, self.failure))
