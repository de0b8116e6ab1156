"""Engines whose copies are only queued when the calls return: nothing is said before it is true."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from p2pkv.engine import commands as do
from support.cuda import ipc as ipc_simulated
from support.engine.engines import Engine, Forward, Geometry, engines, on_engine_thread, step
from support.engine.fake_device import Device, DeviceCache, QueuedGpu
from support.engine.transfers import BLOCKS, TOKENS, arrives, ask, begin, ends, load, rest, scribble, value
from support.links.faulty import Faults, FaultyLinks
from support.links.pairs import ipc_links
from support.waiting import wait_for

ONE = Geometry()
D_BLOCKS = list(range(20, 26))


class Pair:
    """P and D, each on a device of its own that stands still until the test lets it work."""

    links: dict[str, FaultyLinks]

    def __init__(self, p: Engine, d: Engine, on_p: Device, on_d: Device) -> None:
        self.p, self.d, self.on_p, self.on_d = p, d, on_p, on_d

    def ask(self, key: str = "k", blocks: list[int] = BLOCKS, d_blocks: list[int] = D_BLOCKS) -> None:
        begin(self.p, self.d, key, blocks=blocks)
        load(self.d, key, blocks=d_blocks)

    def queued(self, engine: Engine, count: int = 1) -> None:
        """Wait until copies are queued on the device, and the engine has taken a further turn."""
        rank = engine.ranks[0].rank
        wait_for(lambda: rank.counters.snapshot()["copies"] >= count, what=f"{count} copies")
        on_engine_thread(rank, lambda: None)
        on_engine_thread(rank, lambda: None)

    def done(self, key: str = "k", blocks: list[int] = D_BLOCKS) -> None:
        arrives(self.d, key, blocks=blocks)
        ends(self.p, self.d, key)

    def free(self) -> None:
        self.on_p.free()
        self.on_d.free()

    def goes_on(self) -> None:
        """Nothing is left of the request that has ended, and the next one is served."""
        for engine in (self.p, self.d):
            engine.do(do.Forget("k"))
        rest(self.p, self.d)
        self.ask("next")
        self.done("next")


@pytest.fixture
def start() -> Iterator[Callable[..., Pair]]:
    """Starts a Pair: `start(chunk_bytes=...)`; stopped at the end, with devices that work again."""
    on = {"P": Device(), "D": Device()}
    links = {side: FaultyLinks(ipc_links(gpu=QueuedGpu(on[side])), Faults()) for side in on}
    devices = {side: DeviceCache.on(device) for side, device in on.items()}
    with contextlib.ExitStack() as stack:

        def make(**options: object) -> Pair:
            both = engines(ONE, ONE, lambda side, rank: links[side], devices=devices, **options)
            pair = Pair(*stack.enter_context(both), on["P"], on["D"])
            pair.links = links
            stack.callback(pair.free)
            return pair

        yield make
    ipc_simulated.let_go()


def heard(engine: Engine, kind: type) -> list[do.Event]:
    return engine.ranks[0].events(kind)


def test_pages_are_free_and_loads_reported_only_when_the_device_is_done(start):
    pair = start(chunk_bytes=1 << 20)
    pair.ask()
    pair.queued(pair.p)
    assert heard(pair.p, do.BlocksFree) == []
    counted = pair.p.ranks[0].rank.counters.snapshot()
    assert counted["prompts"] == 0, "for the conversation, the blocks have been read"
    assert counted["prompts_held"] == 1
    pair.on_p.free()
    pair.p.wait(do.BlocksFree("k"))
    pair.queued(pair.d)
    assert heard(pair.d, do.Loaded) == [] and heard(pair.d, do.LoadFailed) == []
    assert value(pair.d, "bytes_scattered") == 0
    assert pair.d.ranks[0].pages[0].max() == -1.0, "nothing has been written yet"
    pair.on_d.free()
    pair.done()


def behind_a_step(pair: Pair) -> Forward:
    """D loads into blocks to which its step before still writes."""
    forward = Forward()
    begin(pair.p, pair.d)
    pair.d.wait(do.Begun("k"))
    pair.d.do(do.Load("k", 0, TOKENS - 1, (D_BLOCKS,), forward))
    return forward


def test_a_load_waits_on_the_host_for_the_step_that_still_writes_to_its_blocks(start):
    """Its chunks arrive meanwhile, and nothing is queued on the device: a receive would wait behind it."""
    pair = start(chunk_bytes=1 << 20)
    pair.on_p.free()
    forward = behind_a_step(pair)
    wait_for(lambda: forward.looks > 2, what="looks at the fence, which come when a chunk has arrived")
    assert value(pair.d, "copies") == 0
    scribble(pair.d, D_BLOCKS)  # the step before
    pair.on_d.free()
    forward.done.set()
    pair.done()


def test_a_drop_while_the_step_before_still_writes_ends_the_load_at_once(start):
    pair = start(chunk_bytes=1 << 20)
    pair.free()
    forward = behind_a_step(pair)
    wait_for(lambda: forward.looks > 0, what="a look at the fence")
    pair.d.do(do.Drop("k", "the client has left"))
    wait_for(lambda: heard(pair.d, do.LoadFailed))
    assert pair.d.ranks[0].pages[0].max() == -1.0, "nothing has been written"
    pair.goes_on()


@contextlib.contextmanager
def waiting(pair: Pair, call: Callable[[], object]) -> Iterator[threading.Thread]:
    """The call waits for P's device meanwhile, and returns after it."""
    calling = threading.Thread(target=call)
    calling.start()
    wait_for(lambda: pair.on_p.waiting == 1, what="the wait for the device")
    yield calling
    calling.join(20.0)
    assert not calling.is_alive()


def test_revoke_waits_for_what_the_device_still_reads_and_for_nothing_else(start):
    """D's device stands still, so no byte is ever taken: a wait for the network would never end."""
    pair = start(chunk_bytes=1 << 20)
    pair.ask()
    pair.queued(pair.p)
    rank = pair.p.ranks[0].rank
    rank.revoke(["another"])
    with waiting(pair, lambda: rank.revoke(["k"])) as revoking:
        for _ in range(10):  # in most runs the first piece of work is the only gather
            assert pair.on_p.run(1) == 1
            revoking.join(2.0)
            if not revoking.is_alive():
                break
    scribble(pair.p, BLOCKS)
    pair.free()
    pair.done()


def test_a_prompt_revoked_between_two_gathers_is_computed_again(start):
    other = list(range(30, 36))
    pair = start(chunk_bytes=4096)
    ask(pair.p, pair.d, blocks=D_BLOCKS)
    step(pair.p, "k", BLOCKS, 0, 48)
    pair.queued(pair.p)
    with waiting(pair, lambda: pair.p.ranks[0].rank.revoke(["k"])):
        pair.on_p.free()
    scribble(pair.p, BLOCKS)
    pair.on_d.free()
    step(pair.p, "k", other, 0, TOKENS)
    pair.done()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("how", ["aborted", "its link lost"])
def test_what_ends_on_p_frees_its_pages_when_the_device_has_read_them(start, how, verify):
    """With checksums, the words that wait for them are never said if the link is lost."""
    pair = start(chunk_bytes=1 << 20, verify=verify)
    pair.ask()
    pair.queued(pair.p, count=1 + verify)
    if how == "aborted":
        pair.p.do(do.Abort("k", "the client has left"))
        pair.queued(pair.p)
    else:
        on_engine_thread(pair.p.ranks[0].rank, lambda: pair.links["P"].change(break_at=-1))
        wait_for(lambda: heard(pair.d, do.LoadFailed))
        wait_for(lambda: value(pair.p, "sends_under_way") == 0)
    assert heard(pair.p, do.BlocksFree) == []
    pair.on_p.free()
    pair.p.wait(do.BlocksFree("k"))
    assert len(heard(pair.p, do.BlocksFree)) == 1
    if how == "its link lost":
        pair.on_d.free()
        pair.goes_on()


def test_a_drop_on_d_is_confirmed_when_nothing_writes_to_the_pages_any_more(start):
    pair = start(chunk_bytes=4096)
    pair.on_p.free()
    pair.ask()
    pair.queued(pair.d)
    pair.d.do(do.Drop("k", "the client has left"))
    pair.queued(pair.d)
    assert heard(pair.d, do.LoadFailed) == []
    pair.on_d.free()
    wait_for(lambda: heard(pair.d, do.LoadFailed))
    scribble(pair.d, D_BLOCKS)
    ends(pair.p, pair.d)
    rest(pair.p, pair.d)
    assert all((page[D_BLOCKS] == 7.0).all() for page in pair.d.ranks[0].pages)
    assert heard(pair.d, do.Loaded) == [] and len(heard(pair.d, do.LoadFailed)) == 1


@pytest.mark.parametrize("verify", [False, True])
def test_requests_keep_their_order_on_devices_that_work_piece_by_piece(start, verify):
    pair = start(chunk_bytes=4096, verify=verify)
    keys = {f"k{number}": list(range(number * 6, number * 6 + 6)) for number in range(4)}
    for key, blocks in keys.items():
        pair.ask(key, blocks, blocks)
    loads: list[str] = []

    def all_loaded() -> bool:
        pair.on_p.run(1)
        pair.on_d.run(1)
        loads[:] = [event.key for event in heard(pair.d, do.Loaded)]
        return len(loads) == len(keys)

    wait_for(all_loaded, 40.0)
    assert loads == list(keys)
    pair.free()
    for key, blocks in keys.items():
        pair.done(key, blocks)
    rest(pair.p, pair.d)


def test_a_stopped_rank_leaves_no_copy_behind(start):
    pair = start(chunk_bytes=1 << 20)
    pair.ask()
    pair.queued(pair.p)
    with waiting(pair, pair.p.stop):
        assert pair.p.ranks[0].rank.alive
        pair.on_p.free()
    assert not pair.p.ranks[0].rank.alive


# Checksums that the device has yet to compute.


def said(pair: Pair) -> list[tuple[str, bool, int]]:
    """What P has told D about the posted receives, in their order: key, whether filler, bytes of checksum."""
    (peer,) = pair.d.ranks[0].rank.core.roles[0].peers
    words = [posted.sent for posted in tuple(peer.link.posted)]
    return [(word.key, word.filler, len(word.digest)) for word in words if word is not None]


def test_p_says_that_a_chunk_was_sent_when_its_checksum_is_known(start):
    pair = start(chunk_bytes=1 << 20, verify=True)
    pair.ask()
    pair.queued(pair.p, count=2)  # the gather and the checksum
    on_engine_thread(pair.d.ranks[0].rank, lambda: None)
    assert said(pair) == []
    assert pair.on_p.run(1) >= 1, "the gather alone"
    pair.queued(pair.p, count=1)
    assert said(pair) == []
    assert heard(pair.p, do.BlocksFree) == []
    assert value(pair.d, "copies") == 0
    pair.on_p.run(1)
    pair.queued(pair.d)  # D has read it
    pair.on_p.free()
    pair.p.wait(do.BlocksFree("k"))
    pair.on_d.free()
    pair.done()


def test_a_void_chunk_is_not_said_before_the_one_in_front_of_it(start):
    """Nothing has to be computed for it, but D expects P's words in the order of the link."""
    pair, other = start(chunk_bytes=1 << 20, verify=True), list(range(30, 36))
    pair.ask("k")
    pair.queued(pair.p, count=2)
    begin(pair.p, pair.d, "filler", blocks=other)
    pair.d.wait(do.Begun("filler"))
    rank = pair.p.ranks[0].rank
    rank.context.revoked.add(["filler"])  # as Rank.revoke does, before the engine has heard of it
    pair.d.do(do.Load("filler", 0, TOKENS - 1, (other,)))
    wait_for(lambda: rank.counters.values["chunks_filler"] >= 1)
    (peer,) = rank.core.roles[0].peers
    on_engine_thread(rank, lambda: None)
    assert [sent.summed for sent in tuple(peer.link.pending)][:2] == [False, True]
    on_engine_thread(pair.d.ranks[0].rank, lambda: None)
    assert said(pair) == []
    pair.on_p.run(2)
    pair.queued(pair.d)
    rank.do(do.Revoked("filler"))
    pair.free()
    step(pair.p, "filler", other, 0, TOKENS)
    pair.done("k")
    pair.done("filler", other)
    rest(pair.p, pair.d)
    assert value(pair.d, "links_aborted") == 0


def test_a_flipped_byte_is_found_behind_the_scatter_and_fails_the_load(start):
    """The device checks as it writes: the pages hold the byte, and nobody is told that they were loaded."""
    pair = start(chunk_bytes=4096, verify=True)
    pair.on_p.free()
    pair.ask("first")
    pair.on_d.free()
    pair.done("first")
    on_engine_thread(pair.d.ranks[0].rank, lambda: pair.links["D"].change(flip_at=1))
    pair.ask("k")
    wait_for(lambda: heard(pair.d, do.LoadFailed))
    assert "its bytes changed on the way" in heard(pair.d, do.LoadFailed)[0].reason
    assert do.Loaded("k") not in heard(pair.d, do.Loaded)
    assert value(pair.d, "chunks_corrupt") == 1
    pair.p.wait(do.BlocksFree("k"))
    pair.goes_on()


def test_a_load_is_not_reported_before_its_checksums_are_compared(start):
    """D's device has written the pages, and stands still before the next piece of work."""
    pair = start(chunk_bytes=1 << 20, verify=True)
    pair.on_p.free()
    pair.ask()
    pair.queued(pair.d, count=1)
    assert heard(pair.d, do.Loaded) == []
    assert pair.on_d.run(1) >= 1, "the checksum, ahead of the scatter"
    assert pair.d.ranks[0].pages[0].max() == -1.0
    assert heard(pair.d, do.Loaded) == []
    pair.on_d.free()
    pair.done()
