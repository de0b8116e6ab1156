"""A client leaves, at every stage and on either side: both sides let go, and D has a last word about it.

One table for vLLM's schedulers, our connectors and real ranks; the proxy's own stages are its tests'.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from p2pkv.connector.scheduler import LoadState
from support.connector.instances import inner_id, pair_id, tokens
from support.connector.real_ranks import Engine, run
from support.engine.engines import busy

LEASE = 1.5
LENGTH = 100
BUDGET = 48


class Play:
    """One request on a P and a D, brought to a stage."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p, self.d = p, d
        self.id = inner_id(pair_id("cancelled", prefill=p.address, decode=d.address))
        self.prompt = tokens(LENGTH)
        self.on_p: Request | None = None
        self.on_d: Request | None = None

    def ask_p(self, max_tokens: int = 1) -> None:
        self.on_p = self.p.ask(self.id, self.prompt, max_tokens=max_tokens)

    def ask_d(self, max_tokens: int = 20) -> None:
        self.on_d = self.d.ask(self.id, self.prompt, max_tokens=max_tokens)

    def ask_both(self) -> None:
        self.ask_p()
        self.ask_d()

    # Of D

    def pending_loads(self) -> Any:
        return self.d.scheduler.connector.consumer.pending_loads[self.id]

    # The stages

    def in_ps_queue(self) -> None:
        self.p.admits(False)
        self.ask_both()
        for _ in range(5):
            self.d.step()
            self.p.step()
        assert self.on_p is not None and not self.on_p.num_computed_tokens

    def p_running(self) -> None:
        """D waits, and P has computed the first chunk of three."""
        self.d.admits(False)
        self.ask_both()
        self.p.step()
        assert self.on_p is not None and 0 < self.on_p.num_computed_tokens < LENGTH

    def p_done_and_d_not_yet_called(self) -> None:
        self.ask_p()
        while self.id not in self.p.ended:
            self.p.step()

    def transferring(self) -> None:
        """D has a part of it, and P has not computed the rest."""
        self.ask_both()
        self.p.step()
        run([self.d], lambda: self.d.count("bytes_scattered"))
        assert self.pending_loads().state is LoadState.LOADING

    def d_waiting_for_admission(self) -> None:
        """P has computed it, and D has no room for it."""
        self.d.admits(False)
        self.ask_both()
        run([self.p, self.d], lambda: self.pending_loads().begun and self.id in self.p.ended)
        assert self.pending_loads().state is LoadState.WAITING

    def just_admitted(self) -> None:
        """D's scheduler has given it pages, and its workers have not heard of it."""
        self.d_waiting_for_admission()
        self.d.admits(True)
        self.d.scheduled = self.d.scheduler.schedule()
        assert self.pending_loads().state is LoadState.LOADING
        self.d._running.append((self.d.scheduled, self.d._run(self.d.scheduled)))

    def decoding(self) -> None:
        self.ask_both()
        run([self.p, self.d], lambda: self.on_d is not None and self.on_d.num_output_tokens > 2)

    def finished(self) -> None:
        self.ask_both()
        run([self.p, self.d], lambda: self.id in self.d.ended)


STAGES = [
    Play.in_ps_queue,
    Play.p_running,
    Play.p_done_and_d_not_yet_called,
    Play.transferring,
    Play.d_waiting_for_admission,
    Play.just_admitted,
    Play.decoding,
    Play.finished,
]


def all_let_go(p: Engine, d: Engine) -> None:
    run([p, d], lambda: not p.scheduler.requests and not d.scheduler.requests, seconds=4 * LEASE + 10)
    run([p, d], lambda: not holdings(p) and not holdings(d), seconds=2 * LEASE + 5)
    assert p.free == p.all_free and d.free == d.all_free


def holdings(engine: Engine) -> dict[str, int]:
    return busy([worker.rank.context.counters.snapshot() for worker in engine.workers])


@pytest.mark.parametrize(
    ("who", "policy"), [("P", "fail"), ("P", "recompute"), ("D", "recompute"), ("both", "recompute")]
)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_client_that_leaves(engines: Any, stage: Callable[[Play], None], who: str, policy: str) -> None:
    p, d = engines(1, 1, budget=BUDGET, policy=policy, lease_seconds=LEASE)
    play = Play(p, d)
    stage(play)
    left = []
    for engine, request in ((p, play.on_p), (d, play.on_d)):
        if request is not None and not request.is_finished() and who in (engine.role, "both"):
            engine.abort(request)
            left.append(engine.role)
    for engine in (p, d):
        engine.admits(True)
    if play.on_d is None and who == "P":
        play.ask_d()  # the client is gone on P only: D comes late, and has an outcome too
    all_let_go(p, d)
    for engine, request in ((p, play.on_p), (d, play.on_d)):
        assert request is None or play.id in engine.ended, f"{engine.role} has no last word"
    if "D" not in left and play.on_d is not None:
        wanted = {"length"} if policy == "recompute" else {"length", "error"}
        assert d.ended[play.id] in wanted


REPEATED = [Play.in_ps_queue, Play.p_running, Play.transferring, Play.d_waiting_for_admission]


@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("stage", REPEATED, ids=lambda stage: stage.__name__)
def test_a_request_that_comes_twice_is_one(engines: Any, stage: Callable[[Play], None], who: str) -> None:
    """A router whose connection broke asks again under the same id, and only then vLLM aborts the first."""
    p, d = engines(1, 1, budget=BUDGET, policy="fail", lease_seconds=LEASE)
    play = Play(p, d)
    stage(play)
    engine, first = (p, play.on_p) if who == "P" else (d, play.on_d)
    again = engine.ask(play.id[:-8] + "00000000", play.prompt, max_tokens=1)
    engine.step()
    if not first.is_finished():
        engine.abort(first)
    for each in (p, d):
        each.admits(True)
    all_let_go(p, d)
    answered = play.id if who == "P" else again.request_id
    assert d.ended[answered] == "length"
    assert p.ended[again.request_id if who == "P" else play.id] == "length"
