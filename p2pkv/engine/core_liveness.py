"""Whether this instance's engine gets on: what its worker's steps and its engine core's beats show.

docs/design.md, "Who vouches for an engine", has what follows.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from p2pkv.control.discovery import Workload

LATE_BEAT_SECONDS = 4.0
"""An engine core without a beat for so long is not announced. Leases are renewed until `stall_seconds`."""


class Beat(Struct, frozen=True, kw_only=True):
    """What vLLM's engine core sends each of its ranks, from a thread of its own, several times in a second:
    how many steps it has scheduled, and whether there is `work`, so that it must make steps. `paused`: by
    vLLM's /pause. `stopping`: it has been told to stop, finishes what it has, and takes nothing new.
    `orphaned`: the process that started it, which has the HTTP server, is gone. `workload`: of its scheduler,
    None if that is not known; `at`: the time of it, by this host's monotonic clock."""

    steps: int
    work: bool
    paused: bool = False
    stopping: bool = False
    orphaned: bool = False
    workload: Workload | None = None
    at: float = 0.0


class Liveness:
    """Whether the engine makes progress. The forward thread writes steps, the engine thread all else, and any
    thread may read: single attributes, so without a lock.

    Where no beat ever comes (workers that Ray started), the steps alone decide.

    Attributes:
        stall: seconds without progress after which an engine that has work counts as hung.
        held: seconds by which the engine thread's clock is behind the forward thread's; set by Core.turn.
        beat: the last one.
        read_beats: returns the beats that have come since its last call; called by the engine thread.
        paused_since: when the engine core was paused, by the engine thread's clock; None if it is not.
        serving: False while vLLM still warms up and captures graphs: to build a link meanwhile would end a
            capture. The first beat or the first step is after that, since vLLM makes its scheduler then.
    """

    def __init__(self, stall: float, serving: bool = True) -> None:
        self.stall = stall
        self.serving = serving
        self.held = 0.0
        self.read_beats: Callable[[], Iterable[Beat]] = lambda: ()
        self.paused_since: float | None = None
        self._number = 0
        self._since: float | None = None
        self.beat: Beat | None = None
        self._beaten = 0.0
        self._moved = 0.0

    # The forward thread's steps.

    def begin(self, now: float) -> None:
        self._number += 1
        self._since = now
        self.serving = True

    def end(self) -> None:
        self._since = None

    @property
    def running(self) -> int | None:
        """The number of the step that runs now; None between steps."""
        number = self._number
        return number if self._since is not None else None

    # The engine core's beats.

    def look(self, now: float) -> None:
        for beat in self.read_beats():
            self.note(beat, now)

    def note(self, beat: Beat, now: float) -> None:
        if self.beat is None or beat.steps != self.beat.steps or not beat.work:
            self._moved = now
        if not beat.paused:
            self.paused_since = None
        elif self.paused_since is None:
            self.paused_since = now
        self._beaten, self.beat = now, beat
        self.serving = True

    @property
    def scheduled(self) -> int:
        """How many steps the engine core has scheduled, by its last beat."""
        return self.beat.steps if self.beat is not None else 0

    @property
    def paused(self) -> bool:
        return self.paused_since is not None

    def trouble(self, now: float, silence: float | None = None) -> str:
        """Why the engine stands still, or "". `silence`: seconds allowed without a beat; None: `stall`."""
        since, stall = self._since, self.stall
        if since is not None and now + self.held - since > stall:
            return f"its engine has been in one step for more than {stall:g} s"
        if self.beat is None:
            return ""
        silence = stall if silence is None else silence
        if self.beat.orphaned:
            return "the process that started its engine core is gone, and with it the HTTP server"
        if now - self._beaten > silence:
            return f"its engine core has sent no beat for more than {silence:g} s: it is stopped or dead"
        if self.beat.work and now - self._moved > stall:
            return f"its engine core has work and has made no step for more than {stall:g} s"
        if self.paused_since is not None and now - self.paused_since > stall:
            return f"its engine core has been paused for more than {stall:g} s"
        return ""
