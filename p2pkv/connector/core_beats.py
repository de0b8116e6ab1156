"""The engine core's beats: how the ranks of an instance learn whether its scheduler gets on.

A thread in the engine core's process sends each rank on this host a `Beat` several times in a second, as a
datagram to a Unix socket whose name is made of that rank's address. docs/design.md, "Who vouches for an
engine", has why, and what follows from beats and from their absence.
"""

import logging
import multiprocessing
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreRequestType

from p2pkv.control.discovery import Workload
from p2pkv.engine.core_liveness import Beat
from p2pkv.log import RateLimit

log = logging.getLogger("p2pkv")

BEAT_SECONDS = 0.5

_COMPLAIN_SECONDS = 600.0

_MAX_BYTES = 512
_AT_ONCE = 64
_CREDENTIALS = struct.Struct("iII")
"""Of the sender, as the kernel fills them in: process, user, group."""

_NOBODY = (-1, -1, -1)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Beat)


def _socket_name(rank: str) -> str:
    """An abstract one: it ends with the socket, and like `rank`, a TCP address, is unique on the host."""
    return f"\0p2pkv-core-{rank}"


class BeatListener:
    """A rank's end. `rank`: its address. Without the socket no beat comes, which is logged. After the first
    beat the kernel refuses what other sockets send, which could leave no room for beats."""

    def __init__(self, rank: str) -> None:
        parent = multiprocessing.parent_process()
        self._senders = {os.getpid(), *([parent.pid] if parent is not None else [])}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        pass_credentials(self._socket)
        try:
            self._socket.bind(_socket_name(rank))
        except OSError as error:
            log.warning(
                f"{rank} cannot take its engine core's beats ({error}): an engine core that is stopped or "
                "hung between two steps will not be noticed"
            )

    def read(self) -> list[Beat]:
        """The beats that have come since the last call. Does not wait."""
        beats: list[Beat] = []
        for _ in range(_AT_ONCE):
            try:
                data, process, _, sender = receive_from(self._socket, _MAX_BYTES)
            except OSError:  # no more; or it is closed
                break
            if process not in self._senders:
                continue
            try:
                beats.append(_decoder.decode(data))
                self._socket.connect_ex(sender)
            except msgspec.MsgspecError as error:
                log.debug("an engine core's beat cannot be read: %s", error)
        return beats

    def close(self) -> None:
        self._socket.close()


def pass_credentials(receiver: socket.socket) -> None:
    """Have a socket show who sends, as `receive_from` needs it. Raises OSError."""
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive_from(receiver: socket.socket, most: int) -> tuple[bytes, int, int, Any]:
    """So many bytes of a datagram; its sender's process, user (-1: unknown) and address. Raises OSError."""
    data, ancillary, _, sender = receiver.recvmsg(most, socket.CMSG_SPACE(_CREDENTIALS.size))
    shown = [each for _, kind, each in ancillary if kind == socket.SCM_CREDENTIALS]
    process, user, _ = _CREDENTIALS.unpack_from(shown[0]) if shown else _NOBODY
    return data, process, user, sender


class BeatSender:
    """The engine core's end: a daemon thread that sends what `state` returns to each of `ranks`.

    It ends with `close`, or when the object that `state` is a method of is gone. The argument of `state` is
    whether the process that has started this one is gone.
    """

    def __init__(self, ranks: Sequence[str], state: Callable[[bool], Beat]) -> None:
        assert isinstance(state, MethodType)
        self._names = [_socket_name(rank) for rank in ranks]
        # vLLM's server starts its engine core by `multiprocessing`; an engine in a user's own process may
        # outlive the shell that it was started from.
        self._parent = os.getppid() if multiprocessing.parent_process() is not None else None
        self._complaints = RateLimit(seconds=_COMPLAIN_SECONDS)
        self._state = weakref.WeakMethod(state)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-core-beats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            # Who waits (0.3 s) gets its turn, although a stranger leaves no room.
            out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 300_000))
            out.bind("")  # an address of its own, which the system chooses
            while not self._closing.wait(BEAT_SECONDS):
                state = self._state()
                if state is None:
                    return
                try:
                    data = _encoder.encode(state(self._parent not in (None, os.getppid())))
                except Exception:
                    if self._complaints.admits():
                        log.exception("the engine core's state cannot be read, so its ranks get no beat")
                    continue
                finally:
                    del state
                for name in self._names:
                    try:
                        out.sendto(data, name)
                    except OSError as error:  # a rank that is gone, or that reads nothing for now
                        log.debug("no beat for the rank at %s: %s", name[1:], error)

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()


def state_of(
    core: Any, *, steps: int, transfers: bool, orphaned: bool, is_loaded: Callable[[str], bool]
) -> Beat:
    """The beat of this process's engine core.

    Args:
        core: vLLM's EngineCoreProc; None where it is not known.
        transfers: p2pkv's own requests are under way, which is all that is known without `core`.
        is_loaded: whether the KV of a request's prompt comes from another instance.
    """
    beat = Beat(steps=steps, work=transfers, orphaned=orphaned, at=time.monotonic())
    if core is None:
        return beat
    work = bool(core.scheduler.has_requests()) or not core.input_queue.empty()
    paused, stopping = bool(core.scheduler.pause_state), not core.is_running()
    beat = msgspec.structs.replace(beat, work=work, paused=paused, stopping=stopping)
    try:
        return msgspec.structs.replace(beat, workload=workload_of(core, is_loaded))
    except Exception as error:  # another vLLM's scheduler: a beat without it is worth as much
        log.debug("what the scheduler has to do cannot be read: %r", error)
        return beat


def workload_of(core: Any, is_loaded: Callable[[str], bool]) -> Workload:
    """What is left to do for the requests in the core's scheduler, and for those in its input queue."""
    # Copies that no other thread can disturb. A request may go from one to the other in between.
    items = list(core.input_queue.queue)
    queued = {item[0].request_id: item[0] for kind, item in items if kind is EngineCoreRequestType.ADD}
    running, waiting = core.scheduler.get_request_counts()
    prompts = tokens = answers = 0
    for request in (queued | core.scheduler.requests).values():
        if request.is_finished():  # its blocks are held
            continue
        answers += request.max_tokens > 1
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left > 0 and not is_loaded(request.request_id):
            prompts, tokens = prompts + 1, tokens + left
    waiting += len(queued)
    return Workload(running=running, waiting=waiting, prompts=prompts, tokens=tokens, answers=answers)
