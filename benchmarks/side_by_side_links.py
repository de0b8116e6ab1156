"""GB/s of one link by message size, without vLLM: NIXL's UCX, Mooncake's TCP, or a memcpy in one process.

Run by side_by_side.py, with the Python that has what is measured. Prints one JSON object a size: the GB/s
of each message, the first one (which pays for connections and page faults) left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MIB = 1 << 20


def memcpy(sizes: list[int], repeat: int) -> Iterator[list[float]]:
    for nbytes in sizes:
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        yield _timed(lambda: np.copyto(target, source), nbytes, repeat)  # noqa: B023


def nixl(sizes: list[int], repeat: int) -> Iterator[list[float]]:
    """One agent writes into the memory of another process's."""
    from nixl._api import nixl_agent, nixl_agent_config

    with _Other(_nixl_target, max(sizes)) as pipe:
        agent = nixl_agent("source", nixl_agent_config(backends=["UCX"]))
        memory = np.ones(max(sizes), np.uint8)
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        metadata, address = pipe.recv()
        target = agent.add_remote_agent(metadata)
        for nbytes in sizes:
            ours = agent.get_xfer_descs([(memory.ctypes.data, nbytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")

            def write(ours: Any = ours, theirs: Any = theirs) -> None:
                handle = agent.initialize_xfer("WRITE", ours, theirs, target)
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise RuntimeError(f"NIXL's transfer ended as {state}")
                agent.release_xfer_handle(handle)

            yield _timed(write, nbytes, repeat)


def _nixl_target(pipe: Connection, nbytes: int) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(nbytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


def mooncake(sizes: list[int], repeat: int) -> Iterator[list[float]]:
    """One engine writes into the memory of another process's, by TCP."""
    with _Other(_mooncake_target, max(sizes)) as pipe:
        engine = _engine()
        memory = np.ones(max(sizes), np.uint8)
        engine.register_memory(memory.ctypes.data, memory.nbytes)
        port, address = pipe.recv()
        for nbytes in sizes:

            def write(nbytes: int = nbytes) -> None:
                status = engine.transfer_sync_write(f"127.0.0.1:{port}", memory.ctypes.data, address, nbytes)
                if status != 0:
                    raise RuntimeError(f"Mooncake's transfer ended with {status}")

            yield _timed(write, nbytes, repeat)


def _mooncake_target(pipe: Connection, nbytes: int) -> None:
    engine = _engine()
    memory = np.zeros(nbytes, np.uint8)
    engine.register_memory(memory.ctypes.data, nbytes)
    pipe.send((engine.get_rpc_port(), memory.ctypes.data))
    pipe.recv()


def _engine() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake's engine did not start")
    return engine


class _Other:
    """A second process; leaving ends it."""

    def __init__(self, target: Callable[[Connection, int], None], nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, nbytes), daemon=True)
        self._process.start()

    def __enter__(self) -> Connection:
        return self._pipe

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.join()


def _timed(move: Callable[[], Any], nbytes: int, repeat: int) -> list[float]:
    rates = []
    for _ in range(1 + repeat):
        begin = time.perf_counter()
        move()
        rates.append(nbytes / (time.perf_counter() - begin) / 1e9)
    return rates[1:]


LINKS = {"memcpy": memcpy, "nixl": nixl, "mooncake": mooncake}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("link", choices=list(LINKS))
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64, 256], help="message sizes in MiB")
    parser.add_argument("--repeat", type=int, default=5, help="messages of each size")
    args = parser.parse_args()
    each = LINKS[args.link]([mib * MIB for mib in args.mib], args.repeat)
    for mib, rates in zip(args.mib, each, strict=True):
        print(json.dumps({"link": args.link, "MiB": mib, "GB/s": rates}), flush=True)


if __name__ == "__main__":
    main()
