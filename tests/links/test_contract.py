"""What base.py promises, for every kind of link."""

import threading

import msgspec
import pytest
import torch

from p2pkv.links import host, ipc, nccl
from p2pkv.links.base import LinkError, LinkFactory, SetupBlob
from support.links.pairs import KINDS, connect, from_another_thread, make_factories
from support.waiting import wait_for

Factories = tuple[LinkFactory, LinkFactory]
WINDOW = 1 << 16


def test_a_send_is_not_done_before_it_is_committed_and_received(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    receive, send = pair.begin(100)
    assert pair.inbound.used >= 100 and pair.outbound.used >= 100
    for _ in range(50):
        pair.poll()
        assert not receive.done() and not send.done()
    send.commit()
    assert not send.done()
    alone = factories[0].kind.startswith("nccl")  # D's device takes the bytes without D's thread
    for _ in range(0 if alone else 50):  # D is silent, so nothing has taken the bytes
        pair.outbound.poll()
        assert not send.done() and pair.outbound.used >= 100
    pair.until(receive.done)
    receive.release()
    pair.until(send.done)
    assert receive.buffer.numel() == send.buffer.numel() == 100


def test_a_full_window_says_none_and_recovers(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    first, send = pair.begin(WINDOW // 2)
    second, other = pair.begin(WINDOW // 2)
    assert pair.inbound.post(1) is None
    for each in (send, other):
        each.buffer.fill_(7)
        each.commit()
    pair.until(lambda: first.done() and second.done())
    assert pair.inbound.post(1) is None
    second.release()
    third, again = pair.begin(WINDOW // 2)
    again.buffer.fill_(9)
    again.commit()
    pair.until(third.done)
    assert bool((third.buffer == 9).all()) and bool((first.buffer == 7).all())


def test_release_is_idempotent_and_waits_for_late_bytes(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    receive, send = pair.begin(WINDOW)
    receive.release()
    receive.release()
    pair.poll()
    assert pair.inbound.used == WINDOW, "P may still write there"
    assert pair.inbound.post(WINDOW) is None
    send.commit()
    pair.until(lambda: pair.inbound.used == 0)
    receive.release()
    assert pair.inbound.used == 0
    pair.carry(WINDOW)


@pytest.mark.parametrize("nbytes", [-1, 0, WINDOW + 1, 1 << 40])
def test_what_can_never_fit_is_a_value_error(factories: Factories, nbytes: int) -> None:
    pair = connect(factories, WINDOW)
    with pytest.raises(ValueError, match=str(nbytes)):
        pair.inbound.post(nbytes)


def test_a_window_needs_room(factories: Factories) -> None:
    invitation = factories[0].invite()
    with pytest.raises(ValueError, match="0 bytes"):
        factories[1].accept(invitation, 0)


@pytest.mark.parametrize("moment", ["before commit", "after commit", "received", "half of a large one"])
def test_abort_frees_both_ends_at_any_moment(factories: Factories, moment: str) -> None:
    window = 1 << 22
    pair = connect(factories, window)
    receive, send = pair.begin(window)
    if moment != "before commit":
        send.commit()
    if moment == "received":
        pair.until(receive.done)
    if moment == "half of a large one":
        pair.outbound.poll()
        pair.inbound.poll()
    for end in (pair.outbound, pair.inbound):
        end.abort()
        end.abort()
        assert end.used == 0
        for call in (end.ready, end.poll):
            with pytest.raises(LinkError, match="aborted"):
                call()
    for refused in (
        receive.done,
        send.done,
        lambda: pair.inbound.post(1),
        lambda: pair.outbound.reserve(1, 0),
    ):
        with pytest.raises(LinkError, match="aborted"):
            refused()
    receive.release()
    for each in factories:  # of CUDA IPC, P could write until it has answered, which a thread waits for
        wait_for(lambda each=each: each.staging.used == 0)  # type: ignore[misc]
    connect(factories, 64).carry(64)


def test_a_late_write_lands_nowhere(factories: Factories) -> None:
    old = connect(factories, WINDOW)
    receive, send = old.begin(WINDOW)
    old.inbound.abort()
    new = connect(factories, WINDOW)
    fresh, _ = new.begin(WINDOW)
    before = fresh.buffer.clone()
    send.buffer.fill_(0xEE)  # the frozen P wakes up
    try:
        send.commit()
        for _ in range(20):
            old.outbound.poll()
    except LinkError as error:  # over TCP it may learn that D has gone
        assert "closed" in str(error) or "broke" in str(error)
    for _ in range(20):
        new.inbound.poll()
    assert torch.equal(fresh.buffer, before) and not fresh.done()
    receive.release()
    old.outbound.abort()


def test_each_end_belongs_to_one_thread(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    pair.poll()
    caught = from_another_thread(pair.inbound.poll, pair.outbound.poll, pair.inbound.abort)
    assert all("intruder" in text and threading.current_thread().name in text for text in caught)


def test_grants_used_out_of_order_break_the_link(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    pair.begin(10)
    later = pair.inbound.post(10)
    with pytest.raises(LinkError, match=f"remote slot {later.remote_slot + 5}"):
        pair.outbound.reserve(10, later.remote_slot + 5)
    with pytest.raises(LinkError, match="remote slot"):
        pair.outbound.reserve(10, later.remote_slot)


def test_another_size_than_posted_breaks_the_link(factories: Factories) -> None:
    pair = connect(factories, WINDOW)
    receive = pair.inbound.post(100)
    if factories[0].kind.startswith("nccl"):  # NCCL would not notice, so P must, before it sends
        with pytest.raises(LinkError, match="message 0 with 99 bytes"):
            pair.outbound.reserve(99, receive.remote_slot)
        return
    send = pair.outbound.reserve(99, receive.remote_slot)
    send.commit()
    with pytest.raises(LinkError, match="99 bytes where 100"):
        pair.until(receive.done)
    with pytest.raises(LinkError, match="99 bytes where 100"):
        pair.inbound.post(1)


@pytest.mark.parametrize("blob", [b"", b"\x00", b"garbage", b"\x91" * 1000, b"x" * 5000, b"\x80"])
def test_blobs_are_checked(factories: Factories, blob: bytes) -> None:
    p, d = factories
    with pytest.raises(LinkError):
        d.accept(blob, WINDOW)
    invitation = p.invite()
    with pytest.raises(LinkError):
        p.complete(invitation, blob)
    _, acceptance = d.accept(p.invite(), WINDOW)
    with pytest.raises(LinkError, match=r"another invitation|does not answer"):
        p.complete(invitation, acceptance)


@pytest.mark.parametrize("kind", KINDS)
def test_close_aborts_every_link(kind: str) -> None:
    factories = make_factories(kind)
    pair = connect(factories, WINDOW)
    pair.begin(10)
    for factory in factories:
        factory.close()
        factory.close()
        with pytest.raises(LinkError, match="closed"):
            factory.invite()
    for end in (pair.inbound, pair.outbound):
        assert end.used == 0
        with pytest.raises(LinkError, match="closed"):
            end.poll()


# What versions promise: a link between a rank of this version and one of 0.1.0 comes up.


@pytest.mark.parametrize(
    ("blob", "names"),
    [
        (host.HostInvitation, "version nonce place"),
        (host.HostAcceptance, "version answers nonce window place shared host port"),
        (ipc.IpcInvitation, "version nonce boot network"),
        (ipc.IpcAcceptance, "version answers door memory nbytes device"),
        (nccl.NcclInvitation, "version tag nccl unique_id"),
        (nccl.NcclAcceptance, "version answers nccl"),
    ],
)
def test_fields_have_the_names_of_the_first_version(blob: type[SetupBlob], names: str) -> None:
    assert [field.encode_name for field in msgspec.structs.fields(blob)] == names.split()


# The faults that tests inject do what they say.


@pytest.mark.parametrize("who", ["P", "D"])
def test_frozen_then_awake(who: str) -> None:
    p, d = make_factories("faulty")
    pair, frozen = connect((p, d), 1 << 16), p if who == "P" else d
    receive, send = pair.begin(100)
    frozen.frozen = True
    send.buffer.fill_(4)
    send.commit()
    for _ in range(20):
        pair.poll()
        assert not receive.done() and not send.done()
    frozen.frozen = False
    pair.until(lambda: receive.done() and send.done())
    assert torch.equal(receive.buffer, send.buffer)
