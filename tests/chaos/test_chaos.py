"""A short chaos run, and what its parts promise."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from chaos.model import CANARY, LAYERS, SHAPE, Memory, Violation, kv
from chaos.relay import Door, Doors
from chaos.schedule import KINDS, LEASE, SETTLE, schedule

from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chaos", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"}


def test_the_seed_decides_the_schedule() -> None:
    """In every process alike, whatever its hashes are."""
    code = "from chaos.schedule import schedule; print(*schedule(7, 60), sep='\\n')"
    for hashes in ("1", "2"):
        said = subprocess.check_output(
            [sys.executable, "-c", code], env=environment() | {"PYTHONHASHSEED": hashes}, text=True
        )
        assert said.splitlines() == [str(fault) for fault in schedule(7, 60)]
    assert schedule(7, 60) == schedule(7, 60) != schedule(8, 60)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_of_five_minutes(seed: int) -> None:
    """Enough faults of every kind, and no engine suffers two at once."""
    faults = schedule(seed, 300)
    assert len(faults) >= 200
    assert Counter(fault.kind for fault in faults).keys() == KINDS.keys()
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    free: dict[str, float] = {}
    for fault in faults:
        assert fault.at >= free.get(fault.engine, 0.0) - 0.01
        free[fault.engine] = fault.at + fault.seconds + SETTLE
    long, short = (
        [f.seconds for f in faults if f.kind == f"freeze, {length}"] for length in ("long", "short")
    )
    assert min(long) > LEASE > max(short)


def test_the_memory_finds_a_wrong_byte_and_a_late_write() -> None:
    pages = [torch.zeros(SHAPE.blocks, SHAPE.kv_heads, SHAPE.block, SHAPE.content) for _ in range(LAYERS)]
    memory = Memory(pages)
    blocks = memory.take(40)
    assert blocks is not None and len(blocks) == 3
    for layer in range(LAYERS):
        memory.compute(5, layer, blocks, 0, 40)
    assert memory.wrong(5, blocks, 40) == 0
    assert memory.wrong(6, blocks, 40) > 0
    pages[1].view(torch.int32)[blocks[2], 1, 7, 3] ^= 1
    assert memory.wrong(5, blocks, 40) == 1
    memory.give_back(blocks)
    pages[0].view(torch.int32)[blocks[0], 0, 0, 0] = CANARY + 1
    with pytest.raises(Violation, match="after it had been given back"):
        memory.take(SHAPE.blocks * SHAPE.block)


def test_kv_differs_between_prompts_layers_tokens_heads_and_channels() -> None:
    every = torch.stack([kv(prompt, layer, 0, 64) for prompt in range(3) for layer in range(2)])
    assert len(torch.unique(every)) > 0.999 * every.numel()
    assert torch.equal(kv(1, 1, 10, 20), kv(1, 1, 0, 64)[10:20])


def test_a_door_holds_what_goes_through_and_gives_it_back_in_order() -> None:
    outside, inside = (Address("127.0.0.1", free_ports()) for _ in range(2))
    door = Door(outside, inside, open=True)
    with socket.create_server((inside.host, inside.port)) as behind, Doors({"P": door}):
        client = connect(outside)
        server, _ = behind.accept()
        for each in (client, server):
            each.settimeout(0.3)
        client.sendall(b"one")
        assert server.recv(10) == b"one"
        door.to_p = False
        client.sendall(b"two")
        server.sendall(b"back")
        assert client.recv(10) == b"back"
        with pytest.raises(TimeoutError):
            server.recv(10)
        door.to_p = True
        assert server.recv(10) == b"two"
        door.reset = True
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        client.close()
        server.close()


def connect(address: Address) -> socket.socket:
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((address.host, address.port), timeout=1)
        except OSError:
            assert time.monotonic() < end, "the door did not open in 10 s"


@pytest.mark.long
def test_a_short_run() -> None:
    run = subprocess.Popen(
        command("--seconds", "6", "--seed", "3"),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=100)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait(10)
    assert run.returncode == 0, said
    assert said.endswith("PASS\n") and " loaded" in said
