"""What only NCCL links do: open on helper threads, give up, quarantine, share one device's memory."""

import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import pytest
import torch

from p2pkv.bench.nccl import PARTS, parts_of, parts_table
from p2pkv.links import nccl_ends
from p2pkv.links.base import LinkError, LinkSettings, decode_blob, encode_blob
from p2pkv.links.gpu import HelperThreads
from p2pkv.links.nccl import NcclAcceptance, NcclInbound, NcclLinks, make_links
from p2pkv.links.watchdog import Watchdog
from support.links.pairs import Pair, connect, from_another_thread, links_of, nccl_links, simulated
from support.nccl.gpu import SimulatedGpu
from support.nccl.simulated import SimulatedDevice, SimulatedEvent, SimulatedNccl
from support.waiting import wait_for

WINDOW = 1 << 16


def both(**how: object) -> tuple[NcclLinks, NcclLinks]:
    return nccl_links(**how), nccl_links(**how)  # type: ignore[arg-type]


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(LinkError) as caught:
        wait_for(lambda: call() and False)
    return str(caught.value)


# Coming up.


def test_versions_must_be_equal_and_both_are_named() -> None:
    p, d = nccl_links(version=22809), nccl_links(version=22703)
    assert (p.kind, d.kind) == ("nccl 2.28.9", "nccl 2.27.3")  # what the handshake compares
    with pytest.raises(LinkError, match=r"this rank has NCCL 2\.27\.3 and its peer NCCL 2\.28\.9.*same"):
        d.accept(p.invite(), WINDOW)
    same = nccl_links(version=22809)
    invitation = p.invite()
    _, acceptance = same.accept(invitation, WINDOW)
    older = msgspec.structs.replace(decode_blob(acceptance, NcclAcceptance), nccl=22703)
    with pytest.raises(LinkError, match=r"this rank has NCCL 2\.28\.9 and its peer NCCL 2\.27\.3"):
        p.complete(invitation, encode_blob(older))


def test_ready_means_that_a_message_has_gone_through() -> None:
    p, d = both()
    invitation = p.invite()
    inbound, acceptance = d.accept(invitation, WINDOW)
    for _ in range(20):
        assert not inbound.ready()
    outbound = p.complete(invitation, acceptance)
    wait_for(lambda: inbound.ready() and outbound.ready())
    for links in (p, d):
        assert len(simulated(links).last) == 1 and all(op.done for op in simulated(links).last.values())


def test_an_absent_peer_is_given_up_and_the_pair_starts_afresh() -> None:
    p, d = both(init_seconds=0.05)
    inbound, _ = d.accept(p.invite(), WINDOW)
    reason = error_of(inbound.ready)
    assert "NCCL did not come up in 0.05 s: the peer is absent" in reason
    with pytest.raises(LinkError, match="did not come up"):
        inbound.post(10)
    inbound.abort()
    wait_for(lambda: d.stuck == 0 and simulated(d).live == 0)
    d.shared.init_seconds = p.shared.init_seconds = 10.0
    connect((p, d), WINDOW).carry(100)


def test_what_comes_up_after_it_was_given_up_is_aborted() -> None:
    p, d = both()
    invitation = p.invite()
    inbound, acceptance = d.accept(invitation, WINDOW)
    inbound.abort()
    outbound = p.complete(invitation, acceptance)
    wait_for(lambda: simulated(d).live == 0 and d.shared.openings.busy == 0)
    outbound.poll()
    outbound.abort()
    assert d.staging.used == p.staging.used == 0


def test_a_thread_that_could_not_begin_does_not_count_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    helpers = HelperThreads()
    with pytest.raises(RuntimeError, match="new thread"):
        helpers.run("one", 0.0, lambda: None)
    assert helpers.busy == helpers.stuck == 0


def test_too_many_stuck_threads_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.links.base.MAX_STUCK", 2)
    monkeypatch.setattr(nccl_ends, "ABORT_SECONDS", 0.05)
    p, d = both()
    simulated(d).abort_hangs = True
    for _ in range(2):
        connect((p, d), WINDOW).abort()
    wait_for(lambda: d.stuck == 2)
    with pytest.raises(LinkError, match=r"2 calls to NCCL never returned.*restart it"):
        d.accept(p.invite(), WINDOW)


@pytest.mark.parametrize(
    ("result", "words"), [(2, "NCCL's init failed"), (5, "if P and D share a GPU: set NCCL_HOSTID")]
)
def test_an_error_of_init_is_the_links_and_says_what_to_set(result: int, words: str) -> None:
    p, d = both()
    simulated(d).fails_with = result
    pair = connect((p, d), WINDOW, ready=False)
    reason = error_of(pair.inbound.ready)
    assert f"result {result}" in reason and words in reason
    pair.abort()
    wait_for(lambda: simulated(d).live == 0)


# Going down.


def test_an_error_that_nccl_reports_breaks_the_link() -> None:
    pair = connect(factories := both(), WINDOW)
    receive, _ = pair.begin(100)
    simulated(factories[1]).fails_with = 6
    assert "NCCL reports error 6" in error_of(pair.inbound.poll)
    with pytest.raises(LinkError, match="error 6"):
        receive.done()
    pair.abort()
    wait_for(lambda: simulated(factories[1]).live == 0)


def test_a_failed_device_breaks_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = connect(both(), WINDOW)
    pair.begin(100)
    failed = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(SimulatedEvent, "ready", Mock(side_effect=failed))
    assert "device has failed: an illegal memory access" in error_of(pair.inbound.poll)
    monkeypatch.undo()
    pair.abort()


def test_slots_return_when_the_abort_does_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ends, "ABORT_SECONDS", 0.05)
    p, d = factories = both()
    pair = connect(factories, WINDOW)
    receive, send = pair.begin(WINDOW)
    pair.inbound.poll()  # launches the receive, so the device may write to its slot
    simulated(d).abort_hangs = True
    pair.inbound.abort()
    assert not simulated(d).over.is_set() and d.staging.used == WINDOW, "the owner has waited for the abort"
    pair.outbound.abort()
    assert (pair.inbound.used, pair.outbound.used) == (0, 0)
    wait_for(lambda: d.stuck == 1 and p.staging.used == 0)
    assert d.staging.used == WINDOW, "the device may still write there"
    connect(factories, WINDOW).carry(WINDOW)
    simulated(d).over.set()
    wait_for(lambda: d.staging.used == 0 and d.stuck == 0)
    assert receive.buffer.numel() == send.buffer.numel() == WINDOW


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("0", 0), (None, 0)])
def test_ranks_of_both_roles_are_warned_of_launches_that_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None, count: int
) -> None:
    """Each of two would wait in its launch of a send for the other's launch of the receive."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    nccl_links().carry_both_ways()
    assert sum(message.startswith("CUDA_LAUNCH_BLOCKING is set") for message in caplog.messages) == count


# Memory and order.


def test_links_share_the_ranks_slots() -> None:
    p, d = both(staging=4 * 1024)
    first, second = connect((p, d), 1 << 20), connect((p, d), 1 << 20)
    for pair in (first, second):
        with pytest.raises(ValueError, match="4097 bytes can never fit"):
            pair.inbound.post(4097)
        with pytest.raises(ValueError, match="4097 bytes can never fit"):
            pair.outbound.reserve(4097, 0)
    pairs = [first.begin(1024), first.begin(1024)]
    receive = first.inbound.post(1024)
    assert first.outbound.reserve(1024, receive.remote_slot) is None, "as much must be left to the others"
    other = second.inbound.post(1024)
    assert other is not None and second.inbound.post(1) is None, "D's slots are all taken"
    assert second.outbound.reserve(1024, other.remote_slot) is not None
    assert p.staging.used == 3 * 1024 and d.staging.used == 4 * 1024
    for taken, send in pairs:
        send.commit()
        first.until(taken.done)
    for pair in (first, second):
        pair.abort()
    wait_for(lambda: p.staging.used == d.staging.used == 0)


@pytest.mark.parametrize(("processors", "channels", "busy"), [(132, 8, 4), (132, 32, 1), (10, 8, 1)])
def test_links_leave_most_of_the_device_to_the_model(processors: int, channels: int, busy: int) -> None:
    """At most a quarter of its SMs, one for each channel of a busy link; one link at least."""
    p, d = (nccl_links(processors=processors, channels=channels) for _ in range(2))
    pairs = [connect((p, d), WINDOW) for _ in range(busy + 1)]
    begun = [pair.begin(100) for pair in pairs[:busy]]
    assert pairs[busy].inbound.post(100) is None
    receive, send = begun[0]
    send.commit()
    pairs[0].until(lambda: receive.done() and send.done())
    receive.release()
    pairs[busy].carry(100)
    for pair in pairs:
        pair.abort()


def test_nccl_begins_when_what_was_queued_before_a_commit_or_a_post_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link asks the device, and queues no wait on its stream: that would hold up a hardware queue."""
    pair = connect(both(), WINDOW)
    before = SimulatedEvent(None, lambda: True)
    true, launched = SimulatedNccl.queue, list[str]()
    monkeypatch.setattr(SimulatedDevice, "record_event", lambda self: before)
    monkeypatch.setattr(
        SimulatedNccl,
        "queue",
        lambda *given: launched.append("S" if given[2][0].send else "R") or true(*given),
    )
    done = True
    monkeypatch.setattr(before, "ready", lambda: done)
    receive = pair.inbound.post(10)
    assert launched == [], "its grant goes out first"
    done = False
    pair.inbound.poll()
    assert launched == []
    done = True
    pair.inbound.poll()
    assert launched == ["R"]
    send = pair.outbound.reserve(10, receive.remote_slot)
    pair.outbound.poll()
    assert launched == ["R"], "nothing is sent before it is committed"
    done = False
    send.commit()
    pair.outbound.poll()
    assert launched == ["R"]
    done = True
    pair.until(receive.done)
    assert launched == ["R", "S"]


def test_a_full_device_fails_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(multi_processor_count=132))
    monkeypatch.setattr("p2pkv.links.nccl_bindings.load_nccl", lambda channels: SimulatedNccl())
    full = torch.cuda.OutOfMemoryError("tried to allocate")
    monkeypatch.setattr(torch, "empty", Mock(side_effect=full))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 80 << 30))
    with pytest.raises(
        ValueError, match=r"staging_bytes is 0 MiB, and of the 81,920 MiB of cuda:3 only 1 MiB"
    ):
        make_links(LinkSettings(host="", staging_bytes=4096, device=torch.device("cuda", 3)))


# One owner.


def test_a_second_thread_is_refused_even_on_another_link() -> None:
    factories = both()
    first = connect(factories, WINDOW)
    first.poll()
    second = connect(factories, WINDOW, ready=False)
    caught = from_another_thread(second.inbound.poll, second.outbound.abort, second.inbound.ready)
    assert all("NCCL on simulated:0 belongs to thread" in text and "intruder" in text for text in caught)
    second.abort()


def test_a_benchmark_sees_where_the_time_of_a_message_goes() -> None:
    factories = both()
    pair = connect(factories, WINDOW)
    pair.carry(100)
    sends = factories[0].shared.times = []
    receives = factories[1].shared.times = []
    for _ in range(3):
        pair.carry(100)
    pair.until(lambda: len(sends) == len(receives) == 3)
    for times in (*sends, *receives):
        assert len(times) == 5 and list(times) == sorted(times)
    parts = parts_of(sends)
    assert set(parts) == set(PARTS) and parts["wire"] > 0
    (head, line) = parts_table([{"bytes": 1 << 20, "parts": parts}])
    assert "µs" in head and line.startswith("  1024 KiB")
    assert list(parts_table([{"bytes": 1 << 20}])) == []


def test_the_owner_asks_the_device_for_nothing_once_its_links_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory, streams and contexts: CUDA may wait for the device, and so for a peer. Helper threads may, but
    take no memory either: the first message of a link is beside the slots."""
    factories, owner = both(), threading.get_ident()
    asked: list[str] = []
    for name in ("memory", "stream", "enter", "free_bytes"):
        call = getattr(SimulatedDevice, name)

        def noted(
            self: object, *given: object, name: str = name, call: Callable[..., object] = call
        ) -> object:
            if threading.get_ident() == owner or name == "memory":
                asked.append(name)
            return call(self, *given)

        monkeypatch.setattr(SimulatedDevice, name, noted)
    pairs = [connect(factories, WINDOW) for _ in range(2)]
    for pair in pairs:
        pair.carry(100)
        pair.abort()
    wait_for(lambda: all(simulated(links).live == 0 for links in factories))
    assert asked == []


SECONDS = 0.2


def hanging() -> tuple[SimulatedGpu, NcclLinks, Pair]:
    """D with a receive on its device, whose P sends nothing."""
    gpu = SimulatedGpu()
    p, d = nccl_links(), nccl_links(gpu=gpu)
    pair = connect((p, d), WINDOW)
    wait_for(lambda: not gpu.launched)
    assert pair.inbound.post(100) is not None
    wait_for(lambda: pair.inbound.poll() or bool(gpu.launched))
    wait_for(lambda: pair.inbound.poll() or not simulated(d).launching)
    return gpu, d, pair


def test_a_turn_that_hangs_on_the_device_ends_when_its_links_are_broken() -> None:
    gpu, links, pair = hanging()
    watchdog = Watchdog(links, SECONDS)
    with watchdog.turn():
        # As a call that takes memory may do: wait for all that runs on the device (test_small_copies.py).
        wait_for(lambda: not gpu.launched, what="somebody who frees the device")
    with pytest.raises(LinkError, match="hangs in a call to the device"):
        pair.inbound.poll()
    pair.inbound.abort()
    wait_for(lambda: links.staging.used == 0 and simulated(links).live == 0)
    assert simulated(links).aborted == 1
    watchdog.close()


def test_links_that_launch_nothing_outlive_a_long_turn(caplog: pytest.LogCaptureFixture) -> None:
    """As on a busy machine: nobody may read that they were given up."""
    watchdog = Watchdog(links_of("shared-memory"), SECONDS)
    with watchdog.turn():
        time.sleep(3 * SECONDS)
    watchdog.close()
    assert not caplog.records


def test_turns_that_are_short_break_nothing() -> None:
    _, links, pair = hanging()
    seconds = 5 * SECONDS  # a busy machine may take some of them for one turn
    watchdog = Watchdog(links, seconds)
    end = time.monotonic() + 1.5 * seconds
    while time.monotonic() < end:
        with watchdog.turn():
            pair.inbound.poll()
    watchdog.close()
    pair.abort()


@pytest.mark.parametrize("wherever", [False, True])
def test_the_communicator_that_the_owner_is_calling_comes_last(wherever: bool) -> None:
    """With launches that block, the owner is inside the call until the peer sends, or the link is aborted."""
    gpu = SimulatedGpu()
    p, d = nccl_links(), nccl_links(gpu=gpu)
    called, other = connect((p, d), WINDOW), connect((p, d), WINDOW)
    wait_for(lambda: not gpu.launched)
    assert other.inbound.post(100)
    wait_for(lambda: other.inbound.poll() or gpu.launched)
    simulated(d).launches_wait = True
    inside = called.inbound
    assert isinstance(inside, NcclInbound)

    def rescue() -> None:
        wait_for(lambda: gpu.launched == 2)
        d.rescue("a test", wherever)
        wait_for(lambda: simulated(d).live == (0 if wherever else 1))
        if not wherever:
            assert inside._calling.locked(), "it has been left alone"
            d.rescue("a test", True)

    thread = threading.Thread(target=rescue)
    thread.start()
    called.inbound.post(100)
    with pytest.raises(LinkError, match="a test"):
        called.inbound.poll()
    thread.join(20)
    for pair in (called, other):
        with pytest.raises(LinkError, match="a test"):
            pair.inbound.poll()
        pair.abort()
    wait_for(lambda: d.staging.used == 0)
    simulated(d).violations.clear()  # an abort during a call, as the last resort


def test_a_link_that_is_coming_up_is_given_up() -> None:
    links = nccl_links()
    inbound, _ = links.accept(nccl_links().invite(), WINDOW)
    links.rescue("a test", False)
    with pytest.raises(LinkError, match="a test"):
        inbound.poll()
    inbound.abort()
