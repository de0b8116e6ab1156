"""Fences: free on a CPU, an event on CUDA."""

from __future__ import annotations

import pytest
import torch

from p2pkv.pages import make_recorder


def test_a_cpu_fence_is_one_shared_object_and_ready() -> None:
    record = make_recorder(torch.device("cpu"))
    assert record() is record()
    assert record().ready()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'meta': only cpu and cuda"):
        make_recorder(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_fence_is_passed_with_the_stream() -> None:
    record = make_recorder(torch.device("cuda"))
    torch.cuda._sleep(2_000_000_000)
    fence = record()
    assert not fence.ready()
    torch.cuda.synchronize()
    assert fence.ready()
