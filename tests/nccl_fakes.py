"""Modules that look like NCCL's Python bindings and do nothing but write down what they were asked.

Their functions have the parameters of CuPy 14.2.0 and nccl4py 0.6.0; a test compares them with the real
modules where those can be imported.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

UNIQUE_ID = bytes(range(100, 228))


class FakeNcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"fake error {status}")
        self.status = status


class Asked:
    """What a fake module was asked, in order; `fail` names a call that fails next, and how."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}

    def note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.fail:
            raise self.fail.pop(name)


def fake_cupy(version: str, *, available: bool = True) -> tuple[types.ModuleType, types.ModuleType, Asked]:
    """`cupy` and `cupy.cuda.nccl`; before version 14 unique ids are tuples of signed numbers."""
    asked = Asked()
    as_bytes = int(version.split(".")[0]) >= 14

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: Any, rank: int, config: Any = None) -> None:
            asked.note("init", ndev, commId, rank)

        def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            asked.note("send", sendbuf, count, datatype, peer, stream)

        def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
            asked.note("recv", recvbuf, count, datatype, peer, stream)

        def check_async_error(self) -> None:
            asked.note("check_async_error")

        def abort(self) -> None:
            asked.note("abort")

    def get_unique_id() -> Any:
        asked.note("get_unique_id")
        signed = tuple(part - 256 if part > 127 else part for part in UNIQUE_ID)
        return UNIQUE_ID if as_bytes else signed

    nccl, cupy = types.ModuleType("cupy.cuda.nccl"), types.ModuleType("cupy")
    vars(nccl).update(
        available=available, NcclError=FakeNcclError, NcclCommunicator=NcclCommunicator,
        get_version=lambda: 23203, get_unique_id=get_unique_id,
        groupStart=lambda: asked.note("groupStart"), groupEnd=lambda: asked.note("groupEnd"),
    )  # fmt: skip
    vars(cupy).update(__version__=version)
    return cupy, nccl, asked


def fake_nccl4py() -> tuple[types.ModuleType, Asked]:
    """`nccl.bindings.nccl`."""
    asked = Asked()

    class Config:
        def __init__(self) -> None:
            self.blocking = self.min_ctas = self.max_ctas = -(1 << 31)

    class UniqueId:
        def __init__(self, data: bytes = UNIQUE_ID) -> None:
            self.data = data

        @staticmethod
        def from_buffer(buffer: bytes) -> UniqueId:
            return UniqueId(bytes(buffer))

        def __bytes__(self) -> bytes:
            return self.data

    def get_version() -> int:
        asked.note("get_version")
        return 23203

    def get_unique_id() -> UniqueId:
        asked.note("get_unique_id")
        return UniqueId()

    def comm_init_rank_config(nranks: int, comm_id: UniqueId, rank: int, config: Config) -> object:
        asked.note("init", nranks, bytes(comm_id), rank, config.blocking, config.max_ctas)
        return "a Comm"

    def send(sendbuff: int, count: int, datatype: int, peer: int, comm: object, stream: int) -> None:
        asked.note("send", sendbuff, count, datatype, peer, comm, stream)

    def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: object, stream: int) -> None:
        asked.note("recv", recvbuff, count, datatype, peer, comm, stream)

    def comm_get_async_error(comm: object) -> int:
        asked.note("comm_get_async_error", comm)
        return 7

    def comm_abort(comm: object) -> None:
        asked.note("comm_abort", comm)

    module = types.ModuleType("nccl.bindings.nccl")
    module.NCCLError = FakeNcclError  # type: ignore[attr-defined]
    for each in (
        Config, UniqueId, get_version, get_unique_id, comm_init_rank_config, send, recv,
        comm_get_async_error, comm_abort,
    ):  # fmt: skip
        setattr(module, each.__name__, each)
    return module, asked


def install(patch: pytest.MonkeyPatch, **modules: types.ModuleType | None) -> None:
    """Make `import` find these, by their dotted names with __ for the dots; None: not installed."""
    for name, module in modules.items():
        patch.setitem(sys.modules, name.replace("__", "."), module)
