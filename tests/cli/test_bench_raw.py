"""How `p2pkv bench` calls NCCL by itself, by a pretend CuPy of each age."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from p2pkv.bench.harness import RawNccl, new_name

NAME = bytes(range(128, 256)) + bytes(0)
SIGNED = tuple(part - 256 for part in NAME)


class Communicator:
    """Of one test: what it was made with, and its calls."""

    made: list[Any] = []  # noqa: RUF012
    calls: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, ranks: int, name: Any, rank: int) -> None:
        self.made.append((ranks, name, rank))

    def send(self, *args: int) -> None:
        self.calls.append(("send", *args))

    def recv(self, *args: int) -> None:
        self.calls.append(("recv", *args))

    def abort(self) -> None:
        self.calls.append(("abort",))


@pytest.mark.parametrize(("version", "given"), [("13.6.0", SIGNED), ("14.2.0", NAME)])
def test_messages_go_one_after_the_other(version: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = types.SimpleNamespace(get_unique_id=lambda: given, NcclCommunicator=Communicator)
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__version__, cuda.nccl = version, nccl
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    waited = []
    stream = types.SimpleNamespace(cuda_stream=77, synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(Communicator, "made", [])
    monkeypatch.setattr(Communicator, "calls", [])

    assert new_name() == NAME.hex()
    raw = RawNccl(bytes.fromhex(new_name()), rank=0)
    assert Communicator.made == [(2, given, 0)]
    flat = torch.zeros(300, dtype=torch.uint8)
    raw.send(flat, [100, 200])
    raw.receive(flat, [300])
    raw.close()
    start = flat.data_ptr()
    assert Communicator.calls == [
        ("send", start, 100, 1, 1, 77),
        ("send", start + 100, 200, 1, 1, 77),
        ("recv", start, 300, 1, 0, 77),
        ("abort",),
    ]
    assert len(waited) == 2
