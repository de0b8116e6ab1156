"""Whether a copy lets other Python threads run meanwhile."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable


def lets_others_run(copy: Callable[[], None], seconds: float = 20.0) -> bool:
    """Tried for so many seconds, as a busy machine may have no core for this thread just then."""
    end = time.monotonic() + seconds
    while not (seen := _seen_in_the_middle(copy)) and time.monotonic() < end:
        continue
    return seen


def _seen_in_the_middle(copy: Callable[[], None], times: int = 20) -> bool:
    """With a switch interval of an hour, this thread runs only while the one that copies has let go of
    the GIL; the turns that count are those in the middle of a copy."""
    copies: list[tuple[float, float]] = []
    turns: list[float] = []

    def work() -> None:
        for _ in range(times):
            start = time.perf_counter()
            copy()
            copies.append((start, time.perf_counter()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            turns.append(time.perf_counter())
            time.sleep(0.0002)
    finally:
        sys.setswitchinterval(interval)
    assert len(copies) == times
    middles = [(start + (stop - start) / 4, stop - (stop - start) / 4) for start, stop in copies]
    return any(start < turn < stop for start, stop in middles for turn in turns)


def hold_lock(seconds: float) -> None:
    """Keep the interpreter's lock, as a compilation in one long call does: no other thread runs meanwhile."""
    # PyDLL, unlike CDLL, calls without letting go of the lock.
    assert ctypes.PyDLL(None).usleep(int(seconds * 1e6)) == 0
