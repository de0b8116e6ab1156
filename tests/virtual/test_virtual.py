"""Runs in one thread on a virtual clock, and what makes them worth anything: a seed gives exactly one run."""

import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from chaos.jobs import Job
from chaos.model import ONE_GROUP
from chaos.schedule import LEASE
from virtual.faults import WEIGHTS
from virtual.world import Broken, World

from p2pkv.engine import commands as do
from p2pkv.engine.decode import Decode, TransferMessage
from p2pkv.engine.from_prefill import PrefillPeer
from p2pkv.engine.prefetch import ArrivedChunk
from p2pkv.protocol import messages as m
from p2pkv.protocol.receiver import Receiver

ROOT = Path(__file__).parents[2]
SHORT = 12.0
"""Virtual seconds."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of faults are thousands of warnings; and threads of torch wait for each other for long."""
    logger = logging.getLogger("p2pkv")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)


def trace(seed: int, hashes: str) -> str:
    """What a process of its own says of this run."""
    run = subprocess.run(
        [sys.executable, "-m", "virtual", "--seconds", str(SHORT), "--seed", str(seed)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONHASHSEED": hashes},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    (connection,) = (connection for connection in run.stdout.splitlines() if connection.startswith("trace "))
    return connection


@pytest.mark.parametrize("groups", ["P", "D", "PD"])
def test_data_parallel_engines_behind_a_router_that_names_any_of_them(groups: str) -> None:
    """No invariant is broken, and D finds the engine of P to which the request has come."""
    with patch.object(Decode, "redirected", autospec=True, side_effect=Decode.redirected) as redirected:
        world = World(11, model=ONE_GROUP, tps=(1, 2), groups=groups)
        world.run(SHORT)
    assert world.jobs.outcomes["loaded"] > 10
    assert redirected.called == ("P" in groups)


def test_a_referral_for_a_request_that_has_ended_waits_until_d_has_forgotten_it() -> None:
    """Its failure is reported once, and the engine of P that has it is released at once, not by a lease."""
    world = World(3, decodes=1, model=ONE_GROUP, tps=(1,), groups="P")
    p, named, d = world.machines.values()
    (worker,) = d.life.workers
    d.life.step_in = lambda seconds: None  # type: ignore[method-assign]  # the forward thread is this test

    def do_on_d(command: do.Command) -> None:
        worker.core.do(command)
        worker.ring()

    do_on_d(do.Expect("k", named.outside, 100, b"1"))
    world.wait(0.1)
    do_on_d(do.Drop("k", "the client has left"))
    world.jobs.open["k"] = Job("k", p, d, world.clock.now, in_prefill=True)  # type: ignore[arg-type]
    on_p = {"decode": str(d.outside), "named": str(named.outside), "chunk": 100, "tokens": 100}
    p.order("prefill", key="k", prompt=1, abort_at=-1, preempt_at=-1, **on_p)
    world.wait(0.1)
    do_on_d(do.Load("k", 0, 0, ()))
    world.wait(0.1)
    assert worker.core.events() == [do.LoadFailed("k", "the client has left")]
    do_on_d(do.Forget("k"))
    world.turn_until(lambda: not world.jobs.open, 0.2 * LEASE)


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    """Whatever its hashes are, and where its objects lie."""
    world = World("3/0")
    world.run(SHORT)
    whole = hashlib.blake2b(world.trace.encode(), digest_size=16).hexdigest()
    assert trace(3, hashes="1") == f"trace {whole} of {world.lines} lines"


def test_every_kind_of_fault_happens() -> None:
    """In a few runs together: which of them one run draws changes with everything else that it draws."""
    missing = {fault.__name__ for fault in WEIGHTS}
    for seed in range(100, 120):
        world = World(seed, model=ONE_GROUP, tps=(1,), gap=0.1)
        world.run(SHORT)
        missing -= set(world.faults)
        if not missing:
            return
    raise AssertionError(f"faults that never happened: {missing}")


def test_a_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run itself, where checksums do not find it first."""
    monkeypatch.setattr(ArrivedChunk, "differs", lambda _: False)
    world = World(4)
    for machine in world.machines.values():
        # Not on P as well: that would flip the same bit back.
        for worker in machine.life.workers if machine.name.startswith("D") else ():
            worker.links.faults = dataclasses.replace(worker.links.faults, flip_at=5)
    with pytest.raises(Broken, match="wrong values"):
        world.run(SHORT)


def test_an_outcome_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Decode.message

    def forgetful(self: Decode, peer: PrefillPeer, message: TransferMessage, now: float) -> None:
        if not isinstance(message, m.Chunk):
            take(self, peer, message, now)

    monkeypatch.setattr(Decode, "message", forgetful)
    monkeypatch.setattr(Receiver, "tick", lambda *_: [])
    with pytest.raises(Broken, match="has no end on"):
        World(5, prefills=1, decodes=1, model=ONE_GROUP, tps=(1,)).run(SHORT)


def test_a_link_that_d_gives_up_without_being_able_to_say_so_is_built_anew() -> None:
    """D's queue to P is full just then, and P, which was told nothing, thinks that the link is up."""
    world = World(2, prefills=1, decodes=1, model=ONE_GROUP, tps=(1,))
    p, d = world.machines.values()

    def load() -> None:
        world.jobs.ask(p, d, plain=True)
        world.turn_until(lambda: not world.jobs.open, 2 * LEASE)

    load()
    assert d.life is not None and world.jobs.outcomes["loaded"] == 1
    (worker,) = d.life.workers
    (inlet,) = worker.core.roles[0].peers
    inlet.connection.refuses = 1  # type: ignore[attr-defined]
    worker.links.change(break_at=-1)
    world.wait(1.0)
    assert not inlet.link.linked and inlet.connection.refuses == 0  # type: ignore[attr-defined]
    load()
    world.wait(1.0)
    load()
    assert world.jobs.outcomes["loaded"] >= 2
