"""A short chaos run, and what its parts promise."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chaos.jobs import Jobs
from chaos.model import CANARY, NULL, ONE_GROUP, Group, Memory, Model, Violation, kv, make_rank_pages
from chaos.schedule import KINDS, LEASE, SETTLE, schedule

ROOT = Path(__file__).parents[2]


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


HYBRID = Model(
    (
        Group((0, 3), heads=4, content=8),
        Group((1, 4), heads=2, content=10, table=1, block=8, window=17),
        Group((2,), heads=1, content=6, table=2, once=True),
        Group((2,), heads=4, content=22, table=2, once=True),
    )
)
PLANES = Model(
    (
        Group((0, 2), heads=1, content=6, tokens=4, plane=(0, 10)),
        Group((0, 2), heads=1, content=4, tokens=4, plane=(6, 10)),
        Group((1,), heads=2, content=10, table=1, block=8, window=17),
    )
)


@pytest.mark.parametrize("model", [ONE_GROUP, HYBRID, PLANES], ids=["one group", "hybrid", "planes"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_memory_finds_a_wrong_byte_of_any_group_and_a_late_write(model: Model, tp: int) -> None:
    ranks = [make_rank_pages(model, each, tp) for each in range(tp)]
    memory = Memory(model, ranks)
    tables = tuple(memory.take(1 if each.once else -(-40 // each.block)) or [] for each in model.tables)
    # The blocks before token 24, which no later token of a window of 17 needs.
    for table, each in zip(tables, model.tables, strict=True):
        if each.window:
            memory.give_back(table[:3])
            table[:3] = [NULL] * 3
    for layer in range(model.layers):
        memory.compute(5, layer, tables, 0, 40)
    assert memory.wrong(5, tables, 40) == 0
    assert memory.wrong(6, tables, 40) > 0
    for rank in ranks:
        for group, pages in zip(model.groups, rank.groups, strict=True):
            place = 0 if group.once else (39 // group.tokens) % group.rows
            page = pages[-1].view(torch.int32)
            page[tables[group.table][-1], 0, place, 3] ^= 1
            assert memory.wrong(5, tables, 40) == 1
            page[tables[group.table][-1], 0, place, 3] ^= 1
    assert memory.clean()
    memory.give_back(*tables)
    block = tables[-1][0]
    ranks[-1].groups[0][0].view(torch.int32)[block, 0, 0, 0] = CANARY + 1
    assert not memory.clean()
    with pytest.raises(Violation, match="after it had been given back"):
        memory.take(memory.free)


def test_kv_differs_between_prompts_groups_layers_tokens_heads_and_channels() -> None:
    heads = range(2)
    every = torch.stack(
        [
            kv(prompt, group, layer, 0, 64, heads, 32)
            for prompt in range(3)
            for group in range(2)
            for layer in range(2)
        ]
    )
    assert len(torch.unique(every)) > 0.999 * every.numel()
    assert torch.equal(kv(1, 0, 1, 10, 20, heads, 32), kv(1, 0, 1, 0, 64, heads, 32)[10:20])
    assert torch.equal(kv(1, 0, 1, 0, 64, range(1, 2), 32), kv(1, 0, 1, 0, 64, heads, 32)[:, 1:])


@pytest.mark.parametrize("busy", [True, False])
def test_a_failure_in_peace_counts_unless_the_machine_held_engines_up(busy: bool) -> None:
    broken: list[str] = []
    engine: Any = SimpleNamespace(
        name="P0", outside="P", named=("P",), continued=0.0, order=lambda *_, **order: True
    )
    jobs = Jobs(random.Random(1), lambda: 100.0, broken.append)
    jobs.held_up = 99.0 if busy else 90.0
    first = jobs.ask(engine, engine, must=True)
    jobs.heard(engine, {"loaded": first.key, "nbytes": 0, "reason": "no answer", "recomputed": False})
    assert (len(jobs.open), len(broken)) == ((2, 0) if busy else (1, 1))


@pytest.mark.slow
def test_a_short_run_of_a_hybrid_model_with_data_parallel_engines() -> None:
    """tests/chaos/test_rough.py has engines of one KV group."""
    run = subprocess.Popen(
        [sys.executable, "-m", "chaos", "--seconds", "6", "--seed", "10"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"},
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
    assert "window" in said or "a state" in said, "the model is another than was meant"
    assert "one data-parallel instance: D and P" in said
