"""What host links hold, and what returns when they end."""

import gc
import os

import pytest

from p2pkv.links.base import LinkError
from p2pkv.links.host import HostLinks
from p2pkv.links.shared_memory import ENTRIES
from support.links.pairs import HOST_WINDOW as WINDOW
from support.links.pairs import connect, leftovers


def mapped() -> int:
    return len(leftovers()[1])


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    gc.collect()


@pytest.mark.parametrize("shared", [True, False])
def test_descriptors_and_mappings_return(shared: bool) -> None:
    links = HostLinks("127.0.0.1", WINDOW, shared)
    before = leftovers()
    for round_ in range(12):
        pair = connect((links, links), WINDOW, ready=round_ % 3 > 0)
        if shared and round_ % 3:
            descriptors, maps, _ = leftovers()
            assert (descriptors, len(maps)) == (before[0] + 2, len(before[1]) + 2), "one of each at each end"
        if round_ % 3 == 2:
            pair.begin(100)
        pair.abort()
        del pair
        assert leftovers() == before
    links.close()


def test_links_dropped_without_an_abort_are_collected() -> None:
    before = mapped()
    links = HostLinks("127.0.0.1", WINDOW, True)
    connect((links, links), WINDOW, ready=False).begin(10)
    gc.collect()
    assert mapped() == before
    links.close()


def test_a_tensor_outlives_its_link(shm: HostLinks) -> None:
    before = mapped()
    pair = connect((shm, shm), WINDOW)
    receive, send = pair.begin(100)
    send.buffer.fill_(5)
    buffer = receive.buffer
    pair.abort()
    del receive, send, pair
    assert mapped() == before + 1
    assert int(buffer.sum()) == 500
    del buffer
    assert mapped() == before


def test_idle_pages_return_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.links.staging.IDLE_SECONDS", 0.05)
    before = set(os.listdir("/proc/self/fd"))
    window = 20 << 20
    links = HostLinks("127.0.0.1", window, True)
    pair = connect((links, links), window)
    arena = next(fd for fd in os.listdir("/proc/self/fd") if fd not in before)
    pair.carry(window)
    assert os.stat(f"/proc/self/fd/{arena}").st_blocks * 512 >= window
    pair.until(lambda: os.stat(f"/proc/self/fd/{arena}").st_blocks * 512 < 1 << 20)
    pair.carry(window)
    links.close()


def test_more_messages_than_entries(shm: HostLinks) -> None:
    pair = connect((shm, shm), WINDOW)
    receives = []
    while (receive := pair.inbound.post(1)) is not None:
        receives.append(receive)
    assert len(receives) == ENTRIES
    with pytest.raises(ValueError, match="never fit"):
        pair.inbound.post(WINDOW + 1)
    sends = [pair.outbound.reserve(1, receive.remote_slot) for receive in receives]
    for _ in range(2 * ENTRIES):
        send, receive = sends.pop(0), receives.pop(0)
        send.buffer[0] = len(receives) % 256
        send.commit()
        assert receive.done() and int(receive.buffer) == len(receives) % 256
        receive.release()
        assert send.done()
        receives.append(pair.inbound.post(1))
        sends.append(pair.outbound.reserve(1, receives[-1].remote_slot))


def test_a_remote_slot_outside_the_window_breaks_the_link(shm: HostLinks) -> None:
    pair = connect((shm, shm), WINDOW)
    for remote_slot in (WINDOW << 20, -1):
        with pytest.raises(LinkError, match="remote slot"):
            pair.outbound.reserve(1, remote_slot)
