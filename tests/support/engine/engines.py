"""Ranks with made-up pages, for tests that need engines but no vLLM."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from p2pkv.config import Options
from p2pkv.demo.processes import free_ports
from p2pkv.device import make_recorder
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.links.host import HostLinks
from p2pkv.page_packings import DENSE
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup
from p2pkv.sharding import Shape
from support.kv.cpu_pages import pack, unpack
from support.links.memory import MemoryNetwork
from support.waiting import wait_for

READY = make_recorder(torch.device("cpu"))()


def plain_links(kind: str, staging: int = 1 << 20) -> Callable[[str, int], LinkFactory]:
    """Links by side and rank: through one "memory" network, "shared-memory" or "tcp"."""
    network = MemoryNetwork()
    if kind == "memory":
        return lambda side, rank: network.rank(staging)
    return lambda side, rank: HostLinks("127.0.0.1", staging, kind == "shared-memory")


@dataclass(frozen=True)
class _Deed:
    """A command that only tests give."""

    act: Callable[[], object]


def soon_on_engine_thread(rank: Rank, act: Callable[[], object]) -> None:
    """Have the engine's thread do this, since sockets and links are its own; returns at once."""
    rank.core.table.commands[_Deed] = [lambda deed, now: deed.act()]
    rank.do(_Deed(act))  # type: ignore[arg-type]


def on_engine_thread(rank: Rank, act: Callable[[], object]) -> None:
    """The same; returns when it is done."""
    done = threading.Event()
    soon_on_engine_thread(rank, lambda: (act(), done.set()))
    assert done.wait(20.0), "the engine's thread did not come to it in 20 s"


@dataclass
class Forward:
    """The fence of a forward that has been queued, and is done when a test says so."""

    done: threading.Event = field(default_factory=threading.Event)
    looks: int = 0

    def ready(self) -> bool:
        self.looks += 1
        return self.done.is_set()

    def wait(self) -> None:
        raise AssertionError("the engine's thread must not wait for the forward")


def hold_back(engine: Engine) -> Callable[[], None]:
    """A P that announces and obeys no grant, or a D that only hears; the result lets it go on."""
    (role,) = engine.ranks[0].rank.core.roles
    peers, poll = role.peers, role.peers.poll
    on_engine_thread(engine.ranks[0].rank, lambda: setattr(peers, "poll", lambda now: False))
    return lambda: on_engine_thread(engine.ranks[0].rank, lambda: setattr(peers, "poll", poll))


@dataclass(frozen=True)
class Geometry:
    """One engine's cache: KV heads and layers of the whole model, and how it spreads them."""

    layers: tuple[int, ...] = (4,)
    kv_heads: int = 2
    tp: int = 1
    block: int = 16
    content: int = 8
    blocks: int = 64
    codec: str = DENSE
    dtype: torch.dtype = torch.float32
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pcp * len(self.layers)

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.kv_heads, self.tp, self.pcp, self.dcp, self.interleave)

    def slots(self, rank: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By the rule of vLLM's slot mapping: which of the tokens are on a rank, and each one's entry of the
        block table and slot of the block there. vLLM's groups of ranks are transposed: PCP ranks first."""
        pcp_rank, tp_rank = divmod(rank % (self.pcp * self.tp), self.tp)
        dcp_rank = (tp_rank * self.pcp + pcp_rank) % self.dcp
        entry, offset = tokens // (self.block * self.dcp), tokens % (self.block * self.dcp)
        here = offset // self.interleave % self.dcp == dcp_rank
        slot = offset // (self.dcp * self.interleave) * self.interleave + offset % self.interleave
        return here, entry[here], slot[here]

    def heads(self, rank: int) -> range:
        """The global KV heads on a rank, as vLLM spreads or replicates them."""
        place = rank % self.tp
        if self.tp >= self.kv_heads:
            head = place * self.kv_heads // self.tp
            return range(head, head + 1)
        each = self.kv_heads // self.tp
        return range(place * each, (place + 1) * each)

    def layer_span(self, rank: int) -> range:
        stage = rank // (self.tp * self.pcp)
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])


@dataclass
class TestRank:
    """One rank and its pages, [layer][block, head, token, content]."""

    __test__ = False

    geometry: Geometry
    rank: Rank
    pages: list[torch.Tensor]
    hello: Hello
    links: LinkFactory
    """What it was made with."""
    seen: list[do.Event] = field(default_factory=list)

    def heard(self, event: do.Event) -> bool:
        self.seen += self.rank.events()
        return event in self.seen

    def events(self, kind: type) -> list[do.Event]:
        self.seen += self.rank.events()
        return [event for event in self.seen if isinstance(event, kind)]


def make_rank(
    role: str,
    geometry: Geometry,
    rank: int,
    port: int,
    links: LinkFactory,
    fill: float = 0.0,
    device: Callable[[PagedCache], PagedCache] = lambda cache: cache,
    host: str = "127.0.0.1",
    addresses: Sequence[Address] = (),
    **options: object,
) -> TestRank:
    """`device`: what stands between the engine and its pages. `addresses`: where each rank of its engine
    listens; by default at `host`, one port behind the other."""
    opts = Options(role=role, host=host, kv_port=port, **DEFAULTS | options)  # type: ignore[arg-type]
    pages, cache = make_pages(geometry, rank, fill)
    cache = device(cache)
    described = cache_of(geometry, cache)
    hello = hello_of(opts, rank, geometry.world, described, cache.digest_name, links.kind)
    if addresses:
        hello = replace(hello, address=str(addresses[rank]), addresses=tuple(map(str, addresses)))
    return TestRank(geometry, Rank(hello, opts, RankCache([cache]), links), pages, hello, links)


DEFAULTS = {"lease_seconds": 5.0, "staging_bytes": 1 << 20, "chunk_bytes": 4096}


def make_pages(geometry: Geometry, rank: int, fill: float = 0.0) -> tuple[list[torch.Tensor], PagedCache]:
    """A rank's layers, [block, head, token, content] each, and the cache over them."""
    shape = (geometry.blocks, len(geometry.heads(rank)), geometry.block, geometry.content)
    pages = [torch.full(shape, fill, dtype=geometry.dtype) for _ in geometry.layer_span(rank)]
    return pages, PagedCache.from_tensors(pages, block_size=geometry.block, codec=geometry.codec)


def cache_of(geometry: Geometry, cache: PagedCache) -> Cache:
    """As a Hello describes it."""
    group = KvGroup(
        geometry.layers, geometry.kv_heads, cache.row_bytes, cache.unit_tokens,
        str(geometry.dtype).removeprefix("torch."), cache.codec, "x",
        dcp=geometry.dcp, interleave=geometry.interleave,
    )  # fmt: skip
    return Cache(geometry.tp, (group,), geometry.pcp)


def hello_of(
    options: Options, rank: int, world: int, cache: Cache, digest: str, link: str, incarnation: str = ""
) -> Hello:
    place = options.address
    return Hello(
        version=PROTOCOL_VERSION,
        incarnation=incarnation or uuid.uuid4().hex,
        role="D" if options.decodes else "P",
        rank=rank,
        to="none",
        address=str(place.shifted(rank)),
        addresses=tuple(str(place.shifted(each)) for each in range(world)),
        model="made-up",
        weights="made-up",
        cache=cache,
        link=link,
        digest=digest,
        verify=options.verify,
        several=True,
        together=True,
        prefetch=options.decodes and options.prefetch_bytes > 0 and not options.data_parallel,
        instance=str(options.instance or ""),
    )


def other_group(cache: Cache, tp: int | None = None, **changes: Any) -> Cache:
    """The same cache, but for what its one group says."""
    (group,) = cache.groups
    return Cache(tp or cache.tp, (replace(group, **changes),))


@dataclass
class Engine:
    address: Address
    geometry: Geometry
    ranks: list[TestRank]

    def do(self, command: do.Command) -> None:
        for each in self.ranks:
            each.rank.do(command)

    def all_heard(self, event: do.Event) -> bool:
        return all(each.heard(event) for each in self.ranks)

    def wait(self, event: do.Event, seconds: float = 20.0) -> None:
        wait_for(lambda: self.all_heard(event), seconds, f"{event} on all ranks of {self.address}")

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(lambda each: each.rank.stop(), self.ranks))


def make_engine(role: str, geometry: Geometry, links: Callable[[int], LinkFactory], **options: Any) -> Engine:
    port = int(str(options.pop("kv_port", 0))) or free_ports(geometry.world)
    fill = 0.0 if role == "P" else -1.0
    ranks = [make_rank(role, geometry, r, port, links(r), fill, **options) for r in range(geometry.world)]
    return Engine(Address("127.0.0.1", port), geometry, ranks)


Make = Callable[..., Engine]
"""A role, a geometry if it is not the usual one, and the options of a rank."""


@contextlib.contextmanager
def engine_maker(
    links: Callable[[str, int], LinkFactory], geometry: Geometry | None = None, **defaults: Any
) -> Iterator[Make]:
    """What makes engines, and stops them at the end. `links`: those of a rank, by role and rank."""
    usual = geometry or Geometry()
    with contextlib.ExitStack() as stack:

        def make(role: str, geometry: Geometry = usual, **options: Any) -> Engine:
            engine = make_engine(role, geometry, lambda rank: links(role, rank), **defaults | options)
            stack.callback(engine.stop)
            return engine

        yield make


def truth(geometry: Geometry, layer: int, tokens: torch.Tensor, heads: range, salt: int) -> torch.Tensor:
    """The KV that a made-up model computes, [token, head, content]: noise, the same for the same place."""
    place = (salt * 64 + layer) * 8192 + tokens[:, None, None]
    place = (place * 64 + torch.tensor(heads)[:, None]) * 64 + torch.arange(geometry.content)
    noise = place * -0x61C8864680B583EB >> 20  # Fibonacci hashing, modulo 2**64
    return noise.to({2: torch.int16, 4: torch.int32}[geometry.dtype.itemsize]).view(geometry.dtype)


def _places(
    rank: TestRank, blocks: list[int], start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens [start, stop) those that this rank keeps, and each one's block and slot."""
    tokens = torch.arange(start, stop)
    here, entries, slots = rank.geometry.slots(rank.hello.rank, tokens)
    return tokens[here], torch.tensor(blocks)[entries], slots


def compute(rank: TestRank, blocks: list[int], layer: int, start: int, stop: int, salt: int = 0) -> None:
    """What a forward does: write tokens [start, stop) of one local layer into the pages."""
    geometry, number, page = rank.geometry, rank.hello.rank, rank.pages[layer]
    tokens, where, slots = _places(rank, blocks, start, stop)
    values = truth(geometry, geometry.layer_span(number)[layer], tokens, geometry.heads(number), salt)
    if geometry.codec == DENSE:
        page[where, :, slots] = values
        return
    for block in where.unique().tolist():
        plain = unpack(page[block], geometry.codec, geometry.content // 2)
        plain[:, slots[where == block]] = values[where == block].transpose(0, 1)
        page[block] = pack(plain, geometry.codec, geometry.content // 2)


def wrong_cells(
    rank: TestRank, blocks: list[int], start: int, stop: int, salt: int = 0
) -> list[tuple[int, ...]]:
    """(layer, token, head) of this rank whose pages do not hold the truth."""
    geometry, heads = rank.geometry, rank.geometry.heads(rank.hello.rank)
    tokens, where, slots = _places(rank, blocks, start, stop)
    used, places = where.unique(return_inverse=True)
    wrong = []
    for page, layer in zip(rank.pages, geometry.layer_span(rank.hello.rank), strict=True):
        if not len(tokens):
            continue
        plain = torch.stack([unpack(page[block], geometry.codec, geometry.content // 2) for block in used])
        right = truth(geometry, layer, tokens, heads, salt)
        differs = plain[places, :, slots].view(torch.uint8) != right.view(torch.uint8)
        for token, head in differs.any(-1).nonzero().tolist():
            wrong.append((layer, int(tokens[token]), heads[head]))
    return wrong


def prefill(
    engine: Engine, key: str, decode: Address, tokens: int, blocks: list[int], chunk: int, salt: int = 0
) -> None:
    engine.do(do.OfferPrompt(key, decode, tokens, b"digest"))
    for start in range(0, tokens, chunk):
        step(engine, key, blocks, start, min(tokens, start + chunk), salt)


def step(engine: Engine, key: str, blocks: list[int], start: int, stop: int, salt: int = 0) -> None:
    engine.do(do.PromptBlocks(key, (blocks,)))
    for rank in engine.ranks:
        for layer in range(len(rank.pages)):
            compute(rank, blocks, layer, start, stop, salt)
            rank.rank.do(do.Computed(((key, stop),), layer, layer + 1, READY))
        rank.rank.do(do.Flush((key,)))


@contextlib.contextmanager
def engines(
    prefill_side: Geometry,
    decode_side: Geometry,
    links: Callable[[str, int], LinkFactory],
    devices: Mapping[str, Callable[[PagedCache], PagedCache]] | None = None,
    **options: Any,
) -> Iterator[tuple[Engine, Engine]]:
    """A P and a D, stopped at the end; `devices` by role, see make_rank."""
    on = {role: {"device": device} for role, device in (devices or {}).items()}
    with engine_maker(links, **options) as make:
        yield make("P", prefill_side, **on.get("P", {})), make("D", decode_side, **on.get("D", {}))


BUSY = (
    "prompts", "prompts_held", "early_claims", "requests", "loads", "staging_bytes",
    "sends_under_way", "receives_posted", "receives_asked", "copies",
)  # fmt: skip

PATIENT = "early_claims"
"""The one gauge that may stay for ten leases: D's last word about a prompt that P has never heard of."""


def busy(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """What ranks that count so hold and should not when nothing is under way."""
    return {
        f"{name} of rank {rank}": its[name]
        for rank, its in enumerate(counts)
        for name in BUSY
        if its.get(name) and name != PATIENT
    }


def at_baseline(engine: Engine) -> bool:
    """No pages held, staging empty, nothing under way."""
    snapshots = [each.rank.counters.snapshot() for each in engine.ranks]
    return not any(snapshot.get(name, 0) for snapshot in snapshots for name in BUSY)


def vanish(engine: Engine) -> None:
    """Die as by kill -9: no farewell."""
    for each in engine.ranks:
        (role,) = each.rank.core.roles
        each.rank.finish = role.peers.close = lambda: None  # type: ignore[method-assign]
    engine.stop()
