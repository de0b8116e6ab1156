"""What pipeline stages exchange, over vLLM's own groups of processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from p2pkv.demo.processes import free_ports

RANK = """
import sys
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from p2pkv.connector.stage_layers import Described, exchange_with_stages
from p2pkv.protocol.messages import KvGroup

rank, port = int(sys.argv[1]), sys.argv[2]
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    ensure_model_parallel_initialized(1, 2)
shape = KvGroup((rank + 1,), 2, 64, 1, "float32", "dense", "")
found = exchange_with_stages([Described(f"of rank {rank}", "", shape, (f"model.layers.{rank}.attn",))])
print([(part.kind, part.shape.layers, part.names) for stage in found for part in stage])
"""


@pytest.mark.timeout(300)
def test_each_stage_learns_of_the_other() -> None:
    port = str(free_ports(1))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port],
            env=os.environ | {"VLLM_DIST_IDENT": port},  # as vLLM 0.33's executor sets it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    of_stages = [(f"of rank {each}", (each + 1,), (f"model.layers.{each}.attn",)) for each in range(2)]
    for out, errors in said:
        assert out.strip().splitlines()[-1:] == [str(of_stages)], errors[-2000:]
