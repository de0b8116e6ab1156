"""Modules that look like NCCL's Python bindings and do nothing but write down what they were asked.

Their functions have the parameters of CuPy 14.2.0 and nccl4py 0.6.0; a test compares them with the real
modules where those can be imported.
"""

import inspect
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

    def function(self, name: str, parameters: str = "", answer: Any = None) -> Any:
        """What has these parameters, notes them, and answers so."""

        def called(*arguments: Any) -> Any:
            self.note(name, *arguments)
            return answer

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        said = [inspect.Parameter(each, kind) for each in parameters.split()]
        vars(called)["__signature__"] = inspect.Signature(said)
        return staticmethod(called)


def fake_cupy(version: str) -> tuple[types.ModuleType, types.ModuleType, Asked]:
    """`cupy` and `cupy.cuda.nccl`; before version 14 unique ids are tuples of signed numbers."""
    asked = Asked()
    as_bytes = int(version.split(".")[0]) >= 14

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: Any, rank: int, config: Any = None) -> None:
            asked.note("init", ndev, commId, rank)

        send = asked.function("send", "sendbuf count datatype peer stream")
        recv = asked.function("recv", "recvbuf count datatype peer stream")
        abort = asked.function("abort")

    signed = tuple(part - 256 if part > 127 else part for part in UNIQUE_ID)
    nccl, cupy = types.ModuleType("cupy.cuda.nccl"), types.ModuleType("cupy")
    vars(nccl).update(
        NcclCommunicator=NcclCommunicator,
        get_unique_id=asked.function("get_unique_id", answer=UNIQUE_ID if as_bytes else signed),
    )
    vars(cupy).update(__version__=version)
    return cupy, nccl, asked


def fake_nccl4py() -> tuple[types.ModuleType, Asked]:
    """`nccl.bindings.nccl`."""
    asked = Asked()

    class Config:
        def __init__(self) -> None:
            self.blocking = self.min_ctas = self.max_ctas = self.nvls_ctas = -(1 << 31)

    class UniqueId:
        def __init__(self, data: bytes = UNIQUE_ID) -> None:
            self.data = data

        @staticmethod
        def from_buffer(buffer: bytes) -> "UniqueId":
            return UniqueId(bytes(buffer))

        def __bytes__(self) -> bytes:
            return self.data

    def comm_init_rank_config(nranks: int, comm_id: UniqueId, rank: int, config: Config) -> object:
        asked.note("init", nranks, bytes(comm_id), rank, config.blocking, config.max_ctas, config.nvls_ctas)
        return "a Comm"

    module = types.ModuleType("nccl.bindings.nccl")
    vars(module).update(
        NCCLError=FakeNcclError, Config=Config, UniqueId=UniqueId,
        get_version=asked.function("get_version", answer=23203),
        get_unique_id=asked.function("get_unique_id", answer=UniqueId()),
        comm_init_rank_config=comm_init_rank_config,
        send=asked.function("send", "sendbuff count datatype peer comm stream"),
        recv=asked.function("recv", "recvbuff count datatype peer comm stream"),
        comm_get_async_error=asked.function("comm_get_async_error", "comm", answer=7),
        comm_abort=asked.function("comm_abort", "comm"),
        group_start=asked.function("group_start"), group_end=asked.function("group_end"),
    )  # fmt: skip
    return module, asked


def install(patch: pytest.MonkeyPatch, **modules: types.ModuleType | None) -> None:
    """Make `import` find these, by their dotted names with __ for the dots; None: not installed."""
    for name, module in modules.items():
        patch.setitem(sys.modules, name.replace("__", "."), module)
