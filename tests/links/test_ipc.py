"""CUDA IPC links beyond the contract: who owns D's memory, what runs on the device, and who is refused."""

import ctypes
import gc
import os
import re
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from p2pkv.links import base, cuda_memory, ipc, ipc_ends, ipc_socket
from p2pkv.links.base import LinkError
from p2pkv.links.cuda_memory import open_block
from p2pkv.links.gpu import MAX_PAUSE
from p2pkv.links.ipc import IpcAcceptance, IpcInvitation, IpcLinks
from support.cuda.ipc import GRANULARITY, SimulatedGpu, SimulatedMemory
from support.links.pairs import Pair, connect, ipc_links
from support.waiting import wait_for

WINDOW = 1 << 20
OTHER_CARD = b"another GPU....."


@pytest.fixture
def p() -> Iterator[IpcLinks]:
    links = ipc_links(receives=False)
    yield links
    links.close()


@pytest.fixture
def d() -> Iterator[IpcLinks]:
    links = ipc_links()
    yield links
    links.close()


def gpu(links: IpcLinks) -> SimulatedGpu:
    return links.shared.device


def driver(links: IpcLinks) -> SimulatedMemory:
    return links.shared.driver


# The device's order.


def test_d_learns_of_a_message_when_the_gather_is_done(p: IpcLinks, d: IpcLinks) -> None:
    pair = connect((p, d), WINDOW)
    receive, send = pair.begin(100)
    gpu(p).held = True
    send.commit()
    for _ in range(20):
        pair.poll()
        assert not receive.done()
    send.buffer.fill_(7)  # the gather runs, straight into D's slot
    gpu(p).held = False
    pair.until(receive.done)
    assert bool((receive.buffer == 7).all())


def test_a_slot_is_granted_again_when_the_scatter_is_done(p: IpcLinks) -> None:
    d = ipc_links(WINDOW)
    pair, other = connect((p, d), WINDOW), connect((p, d), WINDOW)
    receive, send = pair.begin(WINDOW)
    send.commit()
    pair.until(receive.done)
    gpu(d).held = True
    receive.release()
    assert other.inbound.take(WINDOW) is None and pair.inbound.post(1) is None
    assert d.staging.used == 0, "an idle link is not polled, and must not count as one that holds staging"
    gpu(d).held = False
    assert other.inbound.take(WINDOW) is not None, "another link may have it, though this one is not polled"
    d.close()


def test_a_device_that_has_failed_breaks_the_link(p: IpcLinks, d: IpcLinks) -> None:
    pair = connect((p, d), WINDOW)
    _, send = pair.begin(10)
    gpu(p).fails = True
    with pytest.raises(LinkError, match="the device has failed"):
        send.commit()
    gpu(p).fails = False


# Aborts: D's slots are P's until P has left.


def test_slots_stay_taken_while_p_may_write_there(p: IpcLinks, d: IpcLinks) -> None:
    """D aborts while P's gather runs; P finds out, aborts too, and the gather still runs."""
    pair = connect((p, d), WINDOW)
    receive, send = pair.begin(WINDOW)
    gpu(p).held = True
    send.commit()
    pair.inbound.abort()
    assert pair.inbound.used == 0 and d.staging.used == WINDOW
    with pytest.raises(LinkError, match="closed by the peer"):
        wait_for(pair.outbound.poll)  # type: ignore[arg-type]
    fresh = connect((p, d), WINDOW)
    late = send.buffer
    pair.outbound.abort()
    assert p.pause() == MAX_PAUSE, "nothing is looked for there any more"
    second = fresh.inbound.post(WINDOW)
    assert second is not None and second.remote_slot >> 24 != receive.remote_slot >> 24
    before = second.buffer.clone()
    late.fill_(0xEE)
    assert torch.equal(second.buffer, before)
    assert d.staging.used == 2 * WINDOW and p.shared.aborts.busy
    del late, send
    gpu(p).held = False
    wait_for(lambda: d.staging.used == WINDOW)


def test_a_frozen_p_keeps_its_slots_and_is_counted(
    p: IpcLinks, d: IpcLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_ends, "ABORT_SECONDS", 0.0)
    monkeypatch.setattr(base, "MAX_STUCK", 2)
    pairs = [connect((p, d), 64) for _ in range(2)]
    for pair in pairs:
        pair.inbound.post(64)
        pair.inbound.abort()
    wait_for(lambda: d.stuck == 2)
    assert d.staging.used == 128
    with pytest.raises(LinkError, match="2 links to peers that neither answer nor end"):
        d.accept(p.invite(), 64)
    for pair in pairs:
        pair.outbound.abort()
    wait_for(lambda: d.stuck == 0 and d.staging.used == 0)


def test_an_abort_before_p_has_come(p: IpcLinks, d: IpcLinks) -> None:
    invitation = p.invite()
    inbound, acceptance = d.accept(invitation, WINDOW)
    assert inbound.post(WINDOW) is not None
    inbound.abort()
    wait_for(lambda: d.staging.used == 0)
    with pytest.raises(LinkError, match="D's unix socket cannot be reached"):
        p.complete(invitation, acceptance)


# D's memory in P's address space.


def test_memory_is_mapped_once_for_a_peer_and_not_after_its_last_link(p: IpcLinks, d: IpcLinks) -> None:
    first, second = connect((p, d), WINDOW), connect((p, d), WINDOW)
    assert driver(p).opened == 1 and driver(p).mapped == driver(d).mapped
    first.carry(100)
    first.outbound.abort()
    second.carry(100)
    second.outbound.abort()
    wait_for(lambda: bool(gc.collect()) or driver(p).baseline)
    connect((p, d), WINDOW).carry(100)
    assert driver(p).opened == 2


def test_memory_that_was_mapped_for_a_link_that_has_ended_is_unmapped(
    p: IpcLinks, d: IpcLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P gives a link up while a helper thread maps D's memory for it."""
    goes_on, mapped = threading.Event(), []

    def slow(memory: SimulatedMemory, fd: int, nbytes: int) -> torch.Tensor:
        assert goes_on.wait(20.0)
        mapped.append(nbytes)
        return open_block(memory, fd, nbytes)

    monkeypatch.setattr(ipc_ends, "open_block", slow)
    pair = connect((p, d), WINDOW, ready=False)
    wait_for(lambda: pair.poll() or p.shared.openings.busy)
    pair.outbound.abort()
    goes_on.set()
    wait_for(lambda: not p.shared.openings.busy)
    assert mapped and driver(p).baseline


def test_a_rank_that_only_sends_takes_no_memory(p: IpcLinks) -> None:
    assert driver(p).baseline
    with pytest.raises(LinkError, match="only sends"):
        p.accept(ipc_links().invite(), WINDOW)


@pytest.mark.parametrize("call", ["create", "export_fd", "reserve", "map", "allow"])
def test_memory_that_cannot_be_made_leaves_nothing(call: str) -> None:
    card = SimulatedGpu()
    memory = SimulatedMemory(card)
    memory.refuses = call
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=f"{call} failed with CUDA_ERROR_INVALID_VALUE"):
        IpcLinks(card, memory, WINDOW, True)
    assert memory.baseline and len(os.listdir("/proc/self/fd")) <= before


def test_a_full_device_is_a_memory_error() -> None:
    card = SimulatedGpu()
    with pytest.raises(MemoryError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        IpcLinks(card, SimulatedMemory(card, room=GRANULARITY), GRANULARITY + 1, True)


@pytest.mark.parametrize("call", ["import_fd", "reserve", "map", "allow"])
def test_memory_that_cannot_be_mapped_is_a_sentence(p: IpcLinks, d: IpcLinks, call: str) -> None:
    driver(p).refuses = call
    pair = connect((p, d), WINDOW, ready=False)
    with pytest.raises(LinkError, match=r"cannot be mapped here .*CUDA_ERROR_INVALID_VALUE.*link=nccl"):
        wait_for(lambda: pair.outbound.ready() | pair.inbound.ready())
    pair.outbound.abort()
    with pytest.raises(LinkError, match="closed by the peer"):
        wait_for(pair.inbound.ready)
    wait_for(lambda: driver(p).baseline)


# Who is refused.


def test_a_gpu_that_is_out_of_reach(d: IpcLinks) -> None:
    p = ipc_links(card=OTHER_CARD)
    driver(p).unreachable.add(driver(d).card)
    invitation = p.invite()
    _, acceptance = d.accept(invitation, WINDOW)
    with pytest.raises(LinkError, match=r"cuDeviceCanAccessPeer is 0.*link=nccl"):
        p.complete(invitation, acceptance)


def test_a_gpu_that_this_process_does_not_see_is_tried(d: IpcLinks) -> None:
    p = ipc_links(card=OTHER_CARD)
    driver(p).unseen.add(driver(d).card)
    connect((p, d), WINDOW).carry(100)


@pytest.mark.parametrize(
    ("elsewhere", "sentence"),
    [(("another boot", None), "another host"), ((None, 1), "both containers the host's network")],
)
def test_another_host_or_container(
    p: IpcLinks, d: IpcLinks, elsewhere: tuple[str | None, int | None], sentence: str
) -> None:
    boot, network = ipc.this_host()
    p._host = elsewhere[0] or boot, elsewhere[1] or network
    with pytest.raises(LinkError, match=sentence):
        d.accept(p.invite(), WINDOW)


def test_memory_that_cannot_be_exported_is_a_sentence() -> None:
    card = SimulatedGpu()
    memory = SimulatedMemory(card)
    memory.can_export = False
    with pytest.raises(ValueError, match=r"simulated:0 has none .*use link=nccl"):
        IpcLinks(card, memory, WINDOW, True)


def test_another_link_kind_is_refused(d: IpcLinks) -> None:
    other = base.encode_blob(IpcInvitation(version=1, nonce=b"x" * 16, boot="b", network=1)).replace(
        b"\xa3ipc", b"\xa3tcp"
    )
    with pytest.raises(LinkError, match="same `link` setting"):
        d.accept(other, WINDOW)


# The socket.


def call(name: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(b"\0p2pkv-ipc-" + name.hex().encode())
    return connection


def test_strangers_at_the_door_get_nothing(p: IpcLinks, d: IpcLinks) -> None:
    invitation = p.invite()
    inbound, acceptance = d.accept(invitation, WINDOW)
    name = base.decode_blob(acceptance, IpcAcceptance).door
    wrong, silent = call(name), call(name)
    wrong.send(b"not the nonce...")
    wait_for(lambda: inbound.poll() or wrong.recv(64, socket.MSG_DONTWAIT) == b"")  # closed
    pair = Pair(p.complete(invitation, acceptance), inbound)
    wait_for(lambda: pair.outbound.ready() & pair.inbound.ready())
    assert silent.recv(64) == b""
    pair.carry(100)
    with pytest.raises(ConnectionRefusedError):
        call(name)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ((ipc_socket.COMMITTED, 1, 10), "message 1 where message 0 was next"),
        ((ipc_socket.COMMITTED, 0, 11), "11 bytes where 10"),
        ((ipc_socket.TAKEN, 0, 0), "which P does not send"),
        ((99, 0, 0), "which P does not send"),
        ((ipc_socket.GOODBYE, 0, 0), "closed by the peer"),
    ],
)
def test_a_p_that_breaks_the_protocol(
    p: IpcLinks, d: IpcLinks, record: tuple[int, int, int], sentence: str
) -> None:
    pair = connect((p, d), WINDOW)
    pair.begin(10)
    pair.outbound._line.send(*record)  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match=sentence):
        wait_for(pair.inbound.poll)  # type: ignore[arg-type]


def test_a_d_that_breaks_the_protocol(p: IpcLinks, d: IpcLinks) -> None:
    pair = connect((p, d), WINDOW)
    pair.inbound._line.send(ipc_socket.TAKEN, 0)  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="not what D has to send next"):
        wait_for(pair.outbound.poll)  # type: ignore[arg-type]


def test_records_that_the_socket_has_no_room_for_are_sent_later(p: IpcLinks, d: IpcLinks) -> None:
    links = p, ipc_links(64 * 2000)
    pair = connect(links, 64 * 2000)
    operations = [pair.begin(64) for _ in range(2000)]
    for number, (_, send) in enumerate(operations):
        send.buffer.fill_(number % 251)
        send.commit()  # D reads nothing
    pair.until(lambda: all(receive.done() for receive, _ in operations))
    assert [int(receive.buffer[0]) for receive, _ in operations] == [n % 251 for n in range(2000)]
    for receive, _ in operations:
        receive.release()
    pair.until(lambda: all(send.done() for _, send in operations))


# CUDA's own header.

HEADERS = [
    Path(folder) / header
    for spec in (find_spec("nvidia.cuda_runtime"), find_spec("triton"))
    if spec is not None
    for folder in spec.submodule_search_locations or ()
    for header in ("include/cuda.h", "backends/nvidia/include/cuda.h")
]

SCALARS = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUmemGenericAllocationHandle": ctypes.c_ulonglong,
    "unsigned long long": ctypes.c_ulonglong,
    "unsigned char": ctypes.c_ubyte,
    "unsigned short": ctypes.c_ushort,
    "CUuuid": ctypes.c_ubyte * 16,
    "char *": ctypes.c_char_p,
    "CUmemLocation": cuda_memory.Location,
    "CUmemAllocationProp": cuda_memory.AllocationProp,
    "CUmemAccessDesc": cuda_memory.AccessDesc,
}


@pytest.fixture(scope="module")
def header() -> str:
    found = [path for path in HEADERS if path.exists()]
    if not found:
        pytest.skip("no cuda.h is installed: it comes with nvidia-cuda-runtime-cu12 and with triton")
    return re.sub(r"/\*.*?\*/", "", found[0].read_text(encoding="utf-8"), flags=re.S)


def c_type(text: str) -> object:
    """The ctypes type of a declaration of cuda.h; all of its enums are ints."""
    text = text.replace("const ", "").strip()
    if text == "void *":
        return ctypes.c_void_p
    if text.endswith("*") and text not in SCALARS:
        return ctypes.POINTER(c_type(text[:-1]))  # type: ignore[arg-type]
    return SCALARS.get(text, ctypes.c_int)


@pytest.mark.parametrize("name", cuda_memory.CALLS)
def test_calls_are_declared_as_in_cuda_h(header: str, name: str) -> None:
    declared = re.search(rf"CUresult CUDAAPI {name}\(([^)]*)\);", header)
    types = [re.match(r"(.*?)\w+$", each.strip()).group(1) for each in declared[1].split(",")]  # type: ignore[union-attr]
    unknown = [each for each in types if c_type(each) is ctypes.c_int and not re.match(r"int|CU\w+ $", each)]
    assert not unknown
    assert tuple(map(c_type, types)) == cuda_memory.CALLS[name]


@pytest.mark.parametrize(
    ("struct", "name"),
    [
        (cuda_memory.Location, "CUmemLocation"),
        (cuda_memory.AllocationProp, "CUmemAllocationProp"),
        (cuda_memory.AccessDesc, "CUmemAccessDesc"),
    ],
)
def test_structs_are_laid_out_as_in_cuda_h(header: str, struct: type[ctypes.Structure], name: str) -> None:
    body = re.search(rf"typedef struct {name}_st \{{(.*?)\}} {name}_v1;", header, flags=re.S)
    inner = re.search(r"struct \{(.*?)\} (\w+);", body[1], flags=re.S)
    outer = body[1] if inner is None else body[1].replace(inner[0], "")
    fields = [(found[2], c_type(found[1])) for found in re.finditer(r"([\w ]+[ *])(\w+);", outer)]
    assert fields == [field[:2] for field in struct._fields_ if field[0] != "allocFlags"]
    if inner is not None:
        flags = re.findall(r"(unsigned \w+) (\w+)(?:\[(\d)\])?;", inner[1])
        assert [
            (each, SCALARS[kind] * int(count) if count else SCALARS[kind]) for kind, each, count in flags
        ] == list(cuda_memory.AllocationFlags._fields_)
        assert struct._fields_[-1][0] == inner[2] == "allocFlags"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", cuda_memory._OUT_OF_MEMORY),
        ("CUDA_ERROR_DEINITIALIZED", cuda_memory._ENDED),
        ("CU_MEM_ALLOCATION_TYPE_PINNED", cuda_memory._PINNED),
        ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", cuda_memory._FILE_DESCRIPTOR),
        ("CU_MEM_LOCATION_TYPE_DEVICE", cuda_memory._ON_DEVICE),
        ("CU_MEM_ACCESS_FLAGS_PROT_READWRITE", cuda_memory._READ_WRITE),
        ("CU_MEM_ALLOC_GRANULARITY_MINIMUM", cuda_memory._MINIMUM),
        ("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", cuda_memory._EXPORTABLE),
    ],
)
def test_numbers_are_those_of_cuda_h(header: str, name: str, value: int) -> None:
    found = re.search(rf"\b{name}\s*=\s*(\w+)", header)
    assert found is not None and int(found[1], 0) == value
