"""What pipeline stages exchange, over vLLM's own groups of processes."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from p2pkv.connector.stage_layers import Described, exchange_with_stages
from p2pkv.demo.processes import free_ports
from p2pkv.protocol.messages import KvGroup

FORK = multiprocessing.get_context("fork")


def stage(rank: int, port: int, said: Connection) -> None:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(1, 2)
    shape = KvGroup((rank + 1,), 2, 64, 1, "float32", "dense", "")
    mine = Described(f"of rank {rank}", "", shape, (f"model.layers.{rank}.attn",))
    said.send(
        [(part.kind, part.shape.layers, part.names) for each in exchange_with_stages([mine]) for part in each]
    )


def test_each_stage_learns_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports()
    monkeypatch.setenv("VLLM_DIST_IDENT", str(port))  # as vLLM 0.33's executor sets it
    pipes = [FORK.Pipe(duplex=False) for _ in range(2)]
    ranks = [FORK.Process(target=stage, args=(rank, port, pipes[rank][1]), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        found = [hears.recv() for hears, _ in pipes if hears.poll(90.0)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert (
        found == [[(f"of rank {each}", (each + 1,), (f"model.layers.{each}.attn",)) for each in range(2)]] * 2
    )
