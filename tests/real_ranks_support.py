"""P and D whole but for the model: vLLM's schedulers, our connectors, real ranks, links and pages.

The made-up model's KV of a token is a hash of all tokens up to it, so every page that any forward of P
or D attends to can be checked: what was pushed, what a prefix cache kept, what a preemption took back.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_support import BLOCK, LAYERS, Instance, inner_id, kv_cache_config, pair_id
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from p2pkv.connector import P2pKvConnector
from p2pkv.connector.worker import Worker
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address

HEADS, CONTENT = 2, 32


class MadeUpModel:
    """The KV of token ids: each row depends on weights, layer and head, and on all tokens up to its own."""

    def __init__(self) -> None:
        self.weights = 0
        self._hashes: dict[tuple[str, int], list[int]] = {}

    def kv(self, request: Request, stop: int, layer: int, head: int) -> torch.Tensor:
        """[token, content] of tokens [0, stop)."""
        seed = (self.weights * len(LAYERS) + layer) * HEADS + head
        hashes = self._hashes.setdefault((request.request_id, seed), [])
        for token in request.all_token_ids[len(hashes) : stop]:
            hashes.append(zlib.crc32(token.to_bytes(4, "little"), hashes[-1] if hashes else seed))
        rows = torch.tensor([each & 0xFFFF for each in hashes[:stop]], dtype=torch.float32)
        return rows[:, None] + torch.arange(CONTENT) / CONTENT


class Engine(Instance):
    """An instance of `tp` real ranks, which listens from `port` on."""

    def __init__(self, role: str, tp: int, port: int, blocks: int, **options: Any) -> None:
        super().__init__(role, ranks=tp, blocks=blocks, port=port, link="host", **options)
        self.role = role
        self.address = Address("127.0.0.1", port)
        self.connectors: list[P2pKvConnector] = []
        self.pages: list[list[torch.Tensor]] = []
        self.heads = HEADS // tp
        self.model = MadeUpModel()
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do before each layer of a forward."""
        self._across: set[str] = set()
        """Requests that ran when the weights changed: they go on with the KV that they have, as with vLLM."""
        self._be_rank: Callable[[int], None] = lambda rank: None

    def change_weights(self, weights: int) -> None:
        """As vLLM's engine core does it, between two steps."""
        scheduler: Any = self.scheduler
        told = scheduler.finished_recving_kv_req_ids
        self._across |= {each for each in scheduler.requests if self.computed[each] or each in told}

        def load() -> None:
            self.model.weights = weights

        generation = scheduler.connector.generation
        generation.call("reload_weights", (iter(()),), {}, load)
        generation.version(str(weights))
        assert scheduler.reset_connector_cache()

    def sleep(self) -> None:
        """As a worker of vLLM 0.33 before its memory is taken away, which is then somebody else's."""
        for connector in self.connectors:
            connector.unregister_kv_caches()
        for layers in self.pages:
            for pages in layers:
                pages.fill_(-2.0)

    def wake(self) -> None:
        for rank, connector in enumerate(self.connectors):
            self._be_rank(rank)
            connector.restore_kv_caches()

    def start(self, be_rank: Callable[[int], None]) -> None:
        self._be_rank = be_rank
        blocks = self.config.cache_config.num_gpu_blocks
        for rank in range(len(self.ranks)):
            be_rank(rank)
            caches = {name: torch.full((blocks, self.heads, BLOCK, CONTENT), -1.0) for name in LAYERS}
            connector = P2pKvConnector(self.config, KVConnectorRole.WORKER, kv_cache_config(blocks))
            connector.register_kv_caches(caches)
            self.connectors.append(connector)
            self.pages.append(list(caches.values()))
        self.workers = [connector.worker for connector in self.connectors]

    def stop(self) -> None:
        for connector in self.connectors:
            connector.shutdown()

    def admits(self, may: bool) -> None:
        """Whether the scheduler admits requests: if not, each is asked for again in the next step."""
        connector = self.scheduler.connector
        if may:
            vars(connector).pop("get_num_new_matched_tokens", None)
        else:
            connector.get_num_new_matched_tokens = lambda request, computed: (None, False)

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
            if attend and request_id in self._across:
                continue
            if attend:
                assert torch.equal(page[table[slots // BLOCK], slots % BLOCK], values), (
                    f"{request_id} attends to KV that is not its own, in layer {layer}"
                )
            else:
                page[table[slots // BLOCK], slots % BLOCK] = values[stop - count :]


@contextlib.contextmanager
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    """Starts pairs of a P and a D, which are stopped at the end."""
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
    assert p.free == p.all_free
    assert d.free == d.all_free


def ask_both(p: Engine, d: Engine, unique: int | str, prompt: list[int]) -> None:
    outer = pair_id(unique, prefill=p.address, decode=d.address)
    p.ask(inner_id(outer), prompt, max_tokens=1)
    d.ask(inner_id(outer), prompt, max_tokens=5)
