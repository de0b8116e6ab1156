"""The plug-in moe_dp, on two ranks in processes of their own: each rank gets the rows that are its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_plugins import moe_dp
from vllm_support import PLUGIN_FOLDER, plugin_environment

from p2pkv.demo.processes import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SIZES = ([1, 1], [3, 3], [1, 7], [7, 1], None)
"""Tokens of each rank; None: all have as many as this one, which is 2 here."""
GATHERED = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
SUMMED = (torch.float32, torch.bfloat16)
WIDTHS = (4, 1, 3)
"""Columns of the tensors that one call gathers."""


def draw_cases() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)

    def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        # Small enough that every type holds them and their sum exactly.
        return torch.randint(-100, 100, (count, width), generator=draw).to(dtype)

    gathered = [
        {
            "call": "all_gatherv",
            "sizes": sizes,
            "inputs": [[rows(count, width, dtype) for width in WIDTHS] for count in sizes or [2, 2]],
        }
        for dtype in GATHERED
        for sizes in SIZES
    ]
    summed = [
        {
            "call": "reduce_scatterv",
            "sizes": sizes,
            "inputs": [[rows(sum(sizes or [2, 2]), 4, dtype)] for _ in range(2)],
        }
        for dtype in SUMMED
        for sizes in SIZES
    ]
    experts = {
        "call": "experts",
        "tokens": torch.randn(9, 32, generator=draw),
        "w13": torch.randn(4, 64, 32, generator=draw),
        "w2": torch.randn(4, 32, 32, generator=draw),
        "weights": torch.rand(9, 2, generator=draw),
        "chosen": torch.rand(9, 4, generator=draw).argsort(dim=1)[:, :2].int().contiguous(),
    }
    return [*gathered, *summed, experts]


CASES = draw_cases()


def wanted(case: dict[str, Any], rank: int) -> list[torch.Tensor]:
    """What a collective gives this rank."""
    first, second = case["inputs"]
    if case["call"] == "all_gatherv":
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]
    sizes = case["sizes"] or [2, 2]
    return [(first[0] + second[0]).split(sizes)[rank]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[torch.Tensor]]]:
    """Of each rank, for each case."""
    folder = tmp_path_factory.mktemp("moe_dp")
    cases = folder / "cases.pt"
    torch.save(CASES, cases)
    peer, port = Path(PLUGIN_FOLDER) / "moe_dp_peer.py", str(free_ports())
    ranks = [
        subprocess.Popen(
            [sys.executable, peer, str(rank), port, cases, folder / f"{rank}.pt"],
            env={**os.environ, **plugin_environment("moe_dp")},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-2000:] for text in errors)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_give_each_rank_what_is_its_own(
    answers: list[list[list[torch.Tensor]]], rank: int
) -> None:
    for case, found in zip(CASES[:-1], answers[rank][:-1], strict=True):
        for have, want in zip(found, wanted(case, rank), strict=True):
            assert have.dtype == want.dtype, case
            assert torch.equal(have, want), case


def test_the_experts_of_both_ranks_add_up_to_all(answers: list[list[list[torch.Tensor]]]) -> None:
    case = CASES[-1]
    total = torch.zeros_like(case["tokens"])
    for token, row in enumerate(case["tokens"]):
        for weight, expert in zip(case["weights"][token], case["chosen"][token], strict=True):
            gate, up = (case["w13"][expert] @ row).chunk(2)
            total[token] += weight * (case["w2"][expert] @ (torch.nn.functional.silu(gate) * up))
    first, second = (answers[rank][-1][0] for rank in range(2))
    torch.testing.assert_close(first + second, total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["all_gatherv", "reduce_scatterv"])
def test_they_take_what_vllm_gives_them(name: str) -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    def arguments(function: Any) -> list[tuple[str, Any]]:
        return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]

    assert arguments(getattr(moe_dp, name)) == arguments(getattr(DeviceCommunicatorBase, name))
