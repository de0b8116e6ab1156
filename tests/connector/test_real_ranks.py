"""P and D whole but for the model: vLLM's schedulers, our connectors, real ranks, links and pages.

The made-up model's KV of a token is a hash of all tokens up to it, so every page that any forward of P
or D attends to can be checked: what was pushed, what a prefix cache kept, what a preemption took back.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from connector_support import BLOCK, LAYERS, Instance, inner_id, kv_cache_config, pair_id, tokens
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from p2pkv.cli.processes import free_ports
from p2pkv.connector import P2pKvConnector
from p2pkv.connector.worker import Worker
from p2pkv.control.discovery import decode_ping
from p2pkv.control.members import Members
from p2pkv.pairing import Address

pytestmark = pytest.mark.vllm

HEADS, CONTENT = 2, 32


class MadeUpModel:
    """The KV of token ids: each row depends on its layer, its head, and all tokens up to its own."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, int], list[int]] = {}

    def kv(self, request: Request, stop: int, layer: int, head: int) -> torch.Tensor:
        """[token, content] of tokens [0, stop)."""
        seed = layer * HEADS + head
        hashes = self._hashes.setdefault((request.request_id, seed), [])
        for token in request.all_token_ids[len(hashes) : stop]:
            hashes.append(zlib.crc32(token.to_bytes(4, "little"), hashes[-1] if hashes else seed))
        rows = torch.tensor([each & 0xFFFF for each in hashes[:stop]], dtype=torch.float32)
        return rows[:, None] + torch.arange(CONTENT) / CONTENT


class Engine(Instance):
    """An instance of `tp` real ranks, which listens from `port` on."""

    def __init__(self, role: str, tp: int, port: int, blocks: int, **options: Any) -> None:
        super().__init__(role, ranks=tp, blocks=blocks, port=port, link="host", **options)
        self.address = Address("127.0.0.1", port)
        self.connectors: list[P2pKvConnector] = []
        self.pages: list[list[torch.Tensor]] = []
        self.heads = HEADS // tp
        self.model = MadeUpModel()
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do before each layer of a forward."""

    def start(self, be_rank: Callable[[int], None]) -> None:
        blocks = self.config.cache_config.num_gpu_blocks
        for rank in range(len(self.ranks)):
            be_rank(rank)
            caches = {name: torch.full((blocks, self.heads, BLOCK, CONTENT), -1.0) for name in LAYERS}
            connector = P2pKvConnector(self.config, KVConnectorRole.WORKER, kv_cache_config(blocks))
            connector.register_kv_caches(caches)
            self.connectors.append(connector)
            self.pages.append(list(caches.values()))
        self.workers = [connector._worker for connector in self.connectors]

    def stop(self) -> None:
        for connector in self.connectors:
            connector.shutdown()

    def forward(self, worker: Worker, scheduled: SchedulerOutput) -> None:
        """Compute each scheduled token's KV, layer by layer, and check all that it attends to."""
        rank = self.workers.index(worker)
        for layer, name in enumerate(LAYERS):
            self.meanwhile()
            for attend in (False, True):
                for request_id, count in scheduled.num_scheduled_tokens.items():
                    self._attention(rank, layer, request_id, count, attend)
            worker.layer(name)

    def _attention(self, rank: int, layer: int, request_id: str, count: int, attend: bool) -> None:
        request = self.scheduler.requests[request_id]
        # The scheduler has advanced num_computed_tokens already.
        stop = request.num_computed_tokens
        slots = torch.arange(0 if attend else stop - count, stop)
        table = torch.tensor(self.blocks(request))
        for head in range(self.heads):
            page = self.pages[rank][layer][:, head]
            values = self.model.kv(request, stop, layer, rank * self.heads + head)
            if attend:
                assert torch.equal(page[table[slots // BLOCK], slots % BLOCK], values), (
                    f"{request_id} attends to KV that is not its own, in layer {layer}"
                )
            else:
                page[table[slots // BLOCK], slots % BLOCK] = values[stop - count :]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    from vllm.distributed import parallel_state

    def be_rank(rank: int) -> None:
        world = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)

    with contextlib.ExitStack() as stack:

        def start(tp_p: int, tp_d: int, blocks: int = 40, **options: Any) -> tuple[Engine, Engine]:
            port = free_ports(tp_p + tp_d)
            p = Engine("P", tp_p, port, blocks, **options)
            d = Engine("D", tp_d, port + tp_p, blocks, **options)
            for engine in (p, d):
                stack.callback(engine.stop)
                engine.start(be_rank)
            return p, d

        yield start


def run(p: Engine, d: Engine, until: Callable[[], bool], seconds: float = 30.0) -> None:
    """Steps of both, as vLLM's loops make them, until the condition holds."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, (p.ended, d.ended)
        for engine in (p, d):
            engine.step()
        time.sleep(0.001)


def finish(p: Engine, d: Engine) -> None:
    run(p, d, lambda: not p.scheduler.requests and not d.scheduler.requests)
    assert p.free == p._free
    assert d.free == d._free


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_d_decodes_from_what_p_has_pushed(engines: Any, tp_p: int, tp_d: int) -> None:
    p, d = engines(tp_p, tp_d, budget=48)
    outer = pair_id(prefill=p.address, decode=d.address)
    prompts = [tokens(length, length) for length in (1, 2, 16, 17, 100)]
    for index, prompt in enumerate(prompts):
        p.ask(inner_id(outer, prompt=index), prompt, max_tokens=1)
        d.ask(inner_id(outer, prompt=index), prompt, max_tokens=20)
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert sum(d.computed.values()) == 20 * len(prompts), "D computed one token of each prompt"


def test_members_of_one_secret_transfer_and_ping_as_members(engines: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of the tests")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        Members(b"a secret of the tests").serve(proxy, "proxy")
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        place = {"proxy_ip": "127.0.0.1", "proxy_port": port, "http_port": 8100}
        p, d = engines(1, 2, secret_file=str(tmp_path / "secret"), **place)
        ask_both(p, d, "k", tokens(40))
        finish(p, d)
        assert set(d.ended.values()) == {"length"} and sum(d.computed.values()) == 5
        roles = set()
        while roles != {"P", "D"}:
            assert proxy.poll(10_000)
            roles.add(decode_ping(proxy.recv_multipart()[1]).type)


def test_prompts_with_a_common_beginning_in_one_step(engines: Any) -> None:
    """P's later prompts take as cached what the first one computes in the same step, while D asks."""
    p, d = engines(1, 1, budget=400, chunk_bytes=4096)
    ask_both(p, d, "the link is built", tokens(20, "first"))
    finish(p, d)

    def let_d_ask_and_p_push() -> None:
        for _ in range(40):
            d.step()
            time.sleep(0.001)

    p.meanwhile = let_d_ask_and_p_push
    for index in range(4):
        ask_both(p, d, index, [*tokens(64), index, 1, 2, 3])
    finish(p, d)
    assert set(d.ended.values()) == {"length"}
    assert p.workers[0].rank.counters.values["bytes_early"] > 0, "nothing was pushed during the step"


def ask_both(p: Engine, d: Engine, unique: int | str, prompt: list[int]) -> None:
    outer = pair_id(unique, prefill=p.address, decode=d.address)
    p.ask(inner_id(outer), prompt, max_tokens=1)
    d.ask(inner_id(outer), prompt, max_tokens=5)


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic(engines: Any, seed: int) -> None:
    """Little memory, common prefixes, chunks, aborts and preemptions on both sides, in any order."""
    draw = random.Random(seed)
    sizes = draw.choice([1, 2]), draw.choice([1, 2])
    # What D gives up before it has found P is P's to find out, and takes a lease.
    p, d = engines(*sizes, blocks=24, budget=40, policy="recompute", lease_seconds=2)
    starts = [tokens(50, f"start {each}") for each in range(2)]
    live = []
    for index in range(25):
        outer = pair_id(f"{seed} {index}", prefill=p.address, decode=d.address)
        prompt = draw.choice(starts)[: draw.randrange(51)] + tokens(draw.randrange(1, 60), index)
        live += [
            (p, p.ask(inner_id(outer), prompt, max_tokens=draw.choice([1, 1, 9]))),
            (d, d.ask(inner_id(outer), prompt, max_tokens=draw.randrange(1, 30))),
        ]
        for _ in range(draw.randrange(6)):
            draw.choice([p, d]).step()
        if draw.random() < 0.3:
            engine, request = draw.choice(live)
            if not request.is_finished():
                engine.abort(request)
        if draw.random() < 0.2:
            # vLLM complains if somebody still holds blocks, after it has preempted all that runs.
            with contextlib.suppress(RuntimeError):
                draw.choice([p, d]).scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(p, d)
    assert len(p.ended) == len(d.ended) == 25
    assert set(d.ended.values()) <= {"length", "abort"}
