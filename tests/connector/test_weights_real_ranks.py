"""Weights that change, caches that are reset and engines that sleep, with real ranks, links and pages.

The made-up model's KV depends on its weights, and every forward checks what it attends to. So a test fails as
soon as a request that began after a change attends to KV of before.
"""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from p2pkv.control.endpoint import inspect
from p2pkv.demo.processes import free_ports
from support.connector.instances import tokens
from support.connector.real_ranks import ask, ask_both, finish, preempt_all, run
from support.waiting import wait_for


@pytest.mark.parametrize("ahead", [0, 1], ids=["step-by-step", "one-step-ahead"])
@pytest.mark.parametrize("seed", range(4))
def test_weights_that_change_in_any_traffic(engines: Any, seed: int, ahead: int) -> None:
    """Also with early buffers, preemptions, resets and aborts. P and D get the same weights, one by one."""
    draw = random.Random(seed)
    sizes = draw.choice([1, 2]), draw.choice([1, 2])
    p, d = engines(
        *sizes, blocks=24, budget=40, policy="recompute", lease_seconds=2, ahead=ahead, chunk_bytes=4096,
        prefetch_bytes=draw.choice([0, 1 << 20]),
    )  # fmt: skip
    starts = [tokens(50, f"start {each}") for each in range(2)]
    live: list[Any] = []
    newest = 0
    for index in range(40):
        prompt = draw.choice(starts)[: draw.randrange(51)] + tokens(draw.randrange(1, 60), index)
        # The made-up model does not know tokens that are scheduled ahead.
        at_p, at_d = (1, 1) if ahead else (draw.choice([1, 1, 9]), draw.randrange(1, 30))
        both = [(p, at_p), (d, at_d)] if draw.random() < 0.7 else [(d, at_d), (p, at_p)]
        for engine, most in both:
            live.append((engine, ask(engine, p, d, f"{seed} {index}", prompt, most)))
            for _ in range(draw.randrange(4)):
                draw.choice([p, d]).step()
        event = draw.random()
        if event < 0.15:
            newest += 1
            draw.choice([p, d]).change_weights(newest)
        elif event < 0.4:
            for engine in draw.choice([[p], [d], [p, d]]):
                if engine.weights != newest:
                    engine.change_weights(newest)
        elif event < 0.5:
            assert draw.choice([p, d]).scheduler.reset_connector_cache()
        elif event < 0.6:
            engine, request = draw.choice(live)
            if not request.is_finished():
                engine.abort(request)
        elif event < 0.7:
            preempt_all(draw.choice([p, d]))
    finish(p, d)
    assert len(p.ended) == 40
    assert set(d.ended.values()) <= {"length", "abort"} and len(d.ended) == 40
    for engine in (p, d):
        if engine.weights != newest:
            engine.change_weights(newest)
    before = d.count("transfers_loaded")
    ask_both(p, d, f"{seed} at last", tokens(45, "at last"), tokens=1)
    finish(p, d)
    assert d.count("transfers_loaded") == before + 1


# Sleep, as vLLM 0.33 has it.


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("who", ["P", "D", "both"])
def test_a_pair_of_which_one_sleeps_works_again_when_it_wakes(engines: Any, who: str, tp: int) -> None:
    p, d = engines(tp, 1, policy="recompute", lease_seconds=2)
    for engine in (p, d):
        engine.change_weights(1)
    ask_both(p, d, 0, tokens(70))
    finish(p, d)
    sleepers = [engine for engine in (p, d) if who in (engine.role, "both")]
    hellos = [worker.rank.context.hello for engine in sleepers for worker in engine.workers]
    for engine in sleepers:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.sleep()
        engine.sleep()
        with pytest.raises(OSError):  # no port is left
            inspect(engine.address, 0.2)
    for engine in (p, d):
        engine.step(2)
    for engine in sleepers:
        engine.wake()
        engine.wake()
    again = [worker.rank.context.hello for engine in sleepers for worker in engine.workers]
    assert not {each.incarnation for each in hellos} & {each.incarnation for each in again}
    assert [each.weights for each in hellos] == [each.weights for each in again]
    before = d.count("transfers_loaded")
    ask_both(p, d, 1, tokens(70))
    finish(p, d)
    assert d.count("transfers_loaded") == before + 1
    assert set(d.ended.values()) == {"length"}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It does not run by itself, and what the test freezes is not frozen behind it."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py has
    gc.enable()


def test_a_rank_that_sleeps_gives_its_memory_back(no_collector: None, engines: Any) -> None:
    """Only Python's collector frees it, and from that vLLM hides all that it has after the start."""
    p, d = engines(1, 1, policy="recompute", lease_seconds=2, prefetch_bytes=1 << 20)
    ask_both(p, d, 0, tokens(70))
    finish(p, d)
    ranks = [weakref.ref(engine.workers[0].rank) for engine in (p, d)]
    gc.freeze()
    for engine in (p, d):
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.sleep(collect=True)
    assert [rank() for rank in ranks] == [None, None]
    assert gc.get_freeze_count()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("moment", ["asked", "begun", "queued"])
def test_a_request_of_d_across_its_sleep(engines: Any, moment: str, policy: str) -> None:
    """vLLM may keep requests that wait when it goes to sleep, and queues those that come meanwhile."""
    p, d = engines(1, 1, policy=policy, lease_seconds=2)
    d.admits(False)
    if moment == "begun":
        ask(p, p, d, 0, tokens(70))
    if moment != "queued":
        ask(d, p, d, 0, tokens(70), 3)
        (pending,) = d.scheduler.connector.consumer.pending_loads.values()
        run([p, d], lambda: len(pending.begun) == (moment == "begun") and bool(d.workers[0].loads._known))
    assert d.scheduler.reset_connector_cache()
    d.sleep()
    if moment == "queued":
        ask(d, p, d, 0, tokens(70), 3)
        d.step(2)
    d.wake()
    if moment == "asked":  # P knows by now that it is another D than the one that has cancelled
        claims = p.workers[0].rank.core.prefill.transfers._claims._claims
        hello = d.workers[0].rank.context.hello
        wait_for(
            lambda: (
                [each.incarnation for of in claims.values() for each in of.values()] == [hello.incarnation]
            )
        )
    d.admits(True)
    if moment != "begun":
        ask(p, p, d, 0, tokens(70))
    finish(p, d)
    whole = moment != "begun" or policy == "recompute"
    assert list(d.ended.values()) == ["length" if whole else "error"]
    assert d.count("transfers_loaded") == (moment != "begun")


@pytest.mark.parametrize("moment", ["waiting", "half", "whole", "queued"])
def test_a_prompt_of_p_across_its_sleep(engines: Any, moment: str) -> None:
    """Its blocks are free in the end; only one that had not begun is pushed after the waking."""
    p, d = engines(1, 1, budget=48, policy="recompute", lease_seconds=2)
    if moment != "queued":
        ask(p, p, d, 0, tokens(70))
        if moment == "waiting":
            p.admits(False)
        p.step({"waiting": 1, "half": 1, "whole": 3}[moment])
    preempt_all(p)
    assert p.scheduler.reset_connector_cache()
    p.sleep()
    if moment == "queued":
        p.admits(False)
        ask(p, p, d, 0, tokens(70))
    p.step(moment in ("waiting", "queued"))
    p.wake()
    p.admits(True)
    ask(d, p, d, 0, tokens(70), 3)
    finish(p, d)
    assert list(d.ended.values()) == ["length"]
    assert d.count("transfers_loaded") == (moment in ("waiting", "queued"))


def test_the_proxy_hears_of_a_sleep_and_of_the_waking(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from p2pkv.connector import connector

    announcers = [Mock() for _ in range(3)]  # D has the second
    made = Mock(side_effect=announcers)
    monkeypatch.setattr(connector, "Announcer", made)
    p, _ = engines(1, 1, proxy_ip="127.0.0.1", proxy_port=free_ports(), http_port=8100)
    p.sleep()
    assert made.call_count == 2 and [len(each.stop.mock_calls) for each in announcers] == [1, 0, 0]
    p.wake()
    (told, *_), _ = made.call_args
    assert made.call_count == 3 and told.ping.incarnation == p.workers[0].rank.context.hello.incarnation
