"""Fences: free on a CPU, an event on CUDA."""

from __future__ import annotations

import pytest
import torch

from p2pkv.kv import make_recorder, own_stream


def test_a_cpu_fence_is_one_shared_object_and_ready() -> None:
    record = make_recorder(torch.device("cpu"))
    assert record() is record()
    assert record().ready()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'meta': only cpu and cuda"):
        make_recorder(torch.device("meta"))


def test_a_cpu_fence_is_passed_when_it_is_made() -> None:
    fence = make_recorder(torch.device("cpu"))()
    fence.wait()
    with own_stream(torch.device("cpu")):
        assert fence.ready()
