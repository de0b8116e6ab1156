"""P and D whole but for the model: vLLM's schedulers, our connectors, real ranks, links and memory.

The made-up model's KV of a token is a hash of all tokens up to it, so every block that any forward of P or D
reads can be checked: what was pushed, what a prefix cache kept, what a preemption took back. A block that
vLLM gives out is poisoned first, and zeroed where vLLM's runners zero it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from p2pkv.connector import P2pKvConnector, describe
from p2pkv.connector.describe import Layers, local_groups
from p2pkv.connector.worker import Worker
from p2pkv.control.discovery import Ping, decode_ping
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address
from support.connector.instances import BLOCK, Instance, inner_id, pair_id
from support.connector.kinds import ATTENTION, Contents, Kind, Rows, heads_of, planning, seen_by
from support.hostile import router

POISON = (b"\xff\xff\xff\xff", bytes.fromhex("a57f833a"))
"""NaN in every type; and a stale number of float32, of which every other half is a NaN of bfloat16."""


class Engine(Instance):
    """An engine of `tp` real ranks for each pipeline stage, which listens from `port` on; as data-parallel
    rank `index` behind those before it.

    `stages`: how many layers each stage has; None: there is one. `dcp`: over how many ranks of a stage the
    tokens are divided, `interleave` of them in turn.
    """

    def __init__(
        self,
        role: str,
        tp: int,
        port: int,
        blocks: int,
        kind: Kind = ATTENTION,
        stages: Sequence[int] | None = None,
        dcp: int = 1,
        interleave: int = 1,
        **options: Any,
    ) -> None:
        self.kind = kind
        self._dcp, self._interleave = dcp, interleave
        names = list(kind.specs(tp))
        stages = stages or [len(names)]
        assert sum(stages) == len(names)
        starts = [0, *accumulate(stages)]
        self.stages = [names[start:stop] for start, stop in pairwise(starts)]
        """The layers of each."""
        self.tp = tp
        ranks = tp * len(stages)
        super().__init__(
            role,
            ranks=ranks,
            pp=len(stages),
            dcp=dcp,
            interleave=interleave,
            blocks=blocks,
            port=port,
            link="host",
            model=kind.model,
            **options,
        )
        self.role = role
        self.address = Address("127.0.0.1", port + (options.get("index") or 0) * ranks)
        self.connectors: list[P2pKvConnector] = []
        groups = self.kv_config.kv_cache_groups
        self._table = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        self.specs = {name: _spec_of(groups[self._table[name]], name) for name in kind.specs(tp)}
        self.memory: list[dict[str, torch.Tensor]] = []
        """Each rank's blocks of each layer, as vLLM registers them: [B, H, N, C]."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do before each layer of a forward."""
        self.weights = 0
        """What the made-up model's KV depends on, beside the tokens."""
        self._across: set[str] = set()
        """Requests that ran when the weights changed: they go on with the KV that they have, as with vLLM."""
        self.passed = 0
        """States that were written in the middle of a step."""
        self._given: list[int] = []
        self._poisoned: list[int] = []
        self._hashed: dict[str, list[Any]] = {}
        self._known: dict[bytes, list[int] | None] = {}
        self._requests: list[Request] = []
        self._checked: set[tuple[bytes, int]] = set()
        pool = self.scheduler.kv_cache_manager.block_pool
        give = pool.get_new_blocks

        def note(count: int) -> Any:
            blocks = give(count)
            self._given += [block.block_id for block in blocks]
            return blocks

        pool.get_new_blocks = note

    def make_kv_config(self, blocks: int) -> kv_cache_interface.KVCacheConfig:
        return self.kind.kv_config(self.config, blocks)

    def kv_config_of(self, rank: int) -> kv_cache_interface.KVCacheConfig:
        """As vLLM projects the groups of all layers onto the layers of a stage."""
        if len(self.stages) == 1:
            return self.kv_config
        specs = self.kind.specs(self.tp)
        mine = {name: specs[name] for name in self.stages[rank // self.tp]}
        groups = planning._project_kv_cache_groups_to_worker(self.kv_config.kv_cache_groups, mine)
        return planning.get_kv_cache_config_from_groups(self.config, groups, 1 << 30)

    def start(self) -> None:
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        configs = [self.kv_config_of(rank) for rank in range(len(self.ranks))]
        self.memory = [allocate_kv_cache(config, torch.device("cpu"), layout) for config in configs]
        described = [
            [group.described for group in local_groups(self.config, Layers(views, config))]
            for config, views in zip(configs, self.memory, strict=True)
        ]
        for rank, (config, views) in enumerate(zip(configs, self.memory, strict=True)):
            self._be_rank(rank)
            connector = P2pKvConnector(self.config, KVConnectorRole.WORKER, config)
            # What vLLM's processes would exchange.
            of_stages = described[rank % self.tp :: self.tp]
            with patch.object(describe.stage_layers, "exchange_with_stages", lambda _, them=of_stages: them):
                connector.register_kv_caches(views)
            self.connectors.append(connector)
        self.workers = [connector.worker for connector in self.connectors]

    def _be_rank(self, rank: int) -> None:
        self.config.parallel_config.rank = rank

    def stop(self) -> None:
        for connector in self.connectors:
            connector.shutdown()

    def count(self, name: str) -> int:
        return int(self.workers[0].rank.counters.values[name])

    def change_weights(self, weights: int) -> None:
        """As vLLM's engine core does it, between two steps."""
        scheduler: Any = self.scheduler
        told = scheduler.finished_recving_kv_req_ids
        self._across |= {each for each in scheduler.requests if self.computed[each] or each in told}

        def load() -> None:
            self.weights = weights

        generation = scheduler.connector.generation
        generation.call("reload_weights", (iter(()),), {}, load)
        generation.version(str(weights))
        assert scheduler.reset_connector_cache()

    def sleep(self, *, collect: bool = False) -> None:
        """As a worker of vLLM 0.33 before its memory is taken away, which is then somebody else's. `collect`:
        Python's collector runs, as it does there; beside all of vLLM that takes half a second."""
        with contextlib.nullcontext() if collect else patch("p2pkv.connector.worker._collect"):
            for connector in self.connectors:
                connector.unregister_kv_caches()
        for views in self.memory:
            for view in views.values():
                view.fill_(-2.0)

    def wake(self) -> None:
        for rank, connector in enumerate(self.connectors):
            self._be_rank(rank)
            connector.restore_kv_caches()

    def admits(self, may: bool) -> None:
        """Whether the scheduler admits requests: if not, each is asked for again in the next step."""
        connector = self.scheduler.connector
        if may:
            vars(connector).pop("get_num_new_matched_tokens", None)
        else:
            connector.get_num_new_matched_tokens = lambda request, computed: (None, False)

    def add(self, request: Request) -> Request:
        self._requests.append(request)
        self._note_hashes()  # P leaves tokens of the prompt out as soon as it has the request
        return super().add(request)

    # Blocks.

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._poisoned, self._given = self._given, []
        output = super()._run(scheduled)
        self.check_cached(again=False)
        return output

    def prepare_blocks(self, worker: Worker, scheduled: SchedulerOutput) -> None:
        """As both of vLLM's runners: zero the blocks of attention layers that vLLM names, then copy."""
        views = self.memory[self.workers.index(worker)]
        self._poison(views, self._poisoned)
        for name, spec in self.specs.items():
            if name in views and isinstance(spec, kv_cache_interface.AttentionSpec):
                views[name][scheduled.new_block_ids_to_zero or []] = 0
        # Of views at one address vLLM 0.32 copies the first, so the largest has to be that.
        largest = sorted(views.values(), key=lambda view: -view[0].nbytes)
        copies = scheduled.kv_cache_block_copies
        copy_kv_cache_blocks_inplace(largest, self.kv_config.num_blocks, copies or ())

    def _poison(self, views: dict[str, torch.Tensor], blocks: Sequence[int]) -> None:
        for view in views.values():
            for block in blocks:
                view[block].view(torch.uint8)[:] = self._pattern(view, block)

    def _pattern(self, view: torch.Tensor, block: int) -> torch.Tensor:
        poison = torch.tensor(list(POISON[block % 2]), dtype=torch.uint8)
        return poison.repeat(view.shape[-1] * view.element_size() // 4)

    @property
    def holds_poison(self) -> bool:
        return any(
            bool((view[block].view(torch.uint8) == self._pattern(view, block)).all(-1).any())
            for views in self.memory
            for name, view in views.items()
            for block in range(1, self.kv_config.num_blocks)
            if isinstance(self.specs[name], kv_cache_interface.AttentionSpec)
        )

    # The forward.

    def forward(self, worker: Worker, scheduled: SchedulerOutput) -> None:
        """Compute each scheduled token's KV, layer by layer, and check all that it reads."""
        rank, contents = self.workers.index(worker), {}
        for request_id in scheduled.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            contents[request_id] = self._contents(request.all_token_ids)
        for layer, (name, spec) in enumerate(self.specs.items()):
            if name not in self.memory[rank]:
                continue
            self.meanwhile()
            for write in (True, False):
                for request_id, count in scheduled.num_scheduled_tokens.items():
                    stop = self.scheduler.requests[request_id].num_computed_tokens
                    table = self.tables(request_id)[self._table[name]]
                    made, span = contents[request_id], range(stop - count, stop)
                    about = f"{self.role}: {request_id}, tokens {span.start} to {stop}, layer {layer}"
                    if not write and request_id in self._across:
                        continue
                    if isinstance(spec, kv_cache_interface.MambaSpec):
                        self._step_state(rank, layer, made, table, span, write, about)
                    elif isinstance(spec, kv_cache_interface.CircularBufferSpec):
                        if write:
                            self._step_ring(rank, layer, made, table[0], span, about)
                    elif write:
                        self._write(rank, layer, made, table, span)
                    else:
                        for seen in seen_by(spec, span, self.scheduler.requests[request_id]):
                            self._read(rank, layer, made, table, seen, about)
            if isinstance(spec, kv_cache_interface.AttentionSpec):
                worker.layer(name)

    def _place(self, rank: int) -> tuple[int, int]:
        return self.tp, rank % self.tp

    def _contents(self, tokens: Sequence[int]) -> Contents:
        return Contents(tokens, self.weights)

    def tables(self, request_id: str) -> list[list[int]]:
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def _layer(self, rank: int, layer: int) -> tuple[torch.Tensor, Any]:
        name, spec = list(self.specs.items())[layer]
        return self.memory[rank][name], spec

    def _write(self, rank: int, layer: int, made: Contents, table: list[int], span: range) -> None:
        rows = Rows(*self._layer(rank, layer))
        rows.put(table, *self._kept(rank, layer, made, rows.complete(span)))

    def _kept(self, rank: int, layer: int, made: Contents, ends: range) -> tuple[list[int], torch.Tensor]:
        """Of the rows that end with these tokens a rank's own: where they lie there, and what they hold."""
        view, spec = self._layer(rank, layer)
        rows = made.rows(ends, layer, heads_of(spec, *self._place(rank)), view)
        if self._dcp == 1:
            return [*ends], rows
        run, here = self._interleave, self._here(rank, ends)
        return [ends[each] // (run * self._dcp) * run + ends[each] % run for each in here], rows[here]

    def _here(self, rank: int, ends: range) -> Sequence[int]:
        if self._dcp == 1:
            return range(len(ends))
        turn = rank % self._dcp
        return [number for number, token in enumerate(ends) if token // self._interleave % self._dcp == turn]

    def _read(self, rank: int, layer: int, made: Contents, table: list[int], span: range, about: str) -> None:
        """All blocks of the tokens that are attended to, whole: what an attention masks it multiplies by 0,
        and 0 * NaN is NaN. But windows that are replayed are read row by row."""
        view, spec = self._layer(rank, layer)
        size, first = spec.block_size * self._dcp, span.start
        begin = first // size * size
        blocks = table[begin // size : -(-span.stop // size)]
        assert 0 not in blocks, f"{about}: a block that is needed is not there"
        lie = Rows(view, spec)
        rows = lie.get(blocks)
        # Where windows are replayed, cached tokens may lie behind these.
        until = min(made.tokens, begin + len(blocks) * size) if self.kind.replayed else span.stop
        expected = torch.zeros_like(rows)
        _, kept = self._kept(rank, layer, made, lie.complete(range(begin, until)))
        expected[: len(kept)] = kept
        right = (rows == expected).flatten(1).all(1)
        count = len(self._here(rank, lie.complete(range(begin, span.stop))))
        live = slice((first - begin) // lie.tokens, count)
        assert right[live].all(), f"{about}: reads KV that is not its own"
        if self.scheduler.needs_kv_cache_zeroing and not getattr(spec, "prefix_replay_tokens", 0):
            clean = right | (rows == 0).flatten(1).all(1)
            wrong = [begin // lie.tokens + place for place, fine in enumerate(clean.tolist()) if not fine]
            assert not wrong, f"{about}: slots {wrong} hold what was in their blocks before"

    def _step_state(
        self, rank: int, layer: int, made: Contents, table: list[int], span: range, write: bool, about: str
    ) -> None:
        """Read the state before the tokens, and write the one behind them."""
        view, spec = self._layer(rank, layer)
        size = spec.block_size
        if write and span.start:
            block = table[(span.start - 1) // size]
            assert block and self._is_state(rank, layer, made, block, span.start), (
                f"{about}: goes on from a state that is not its own"
            )
        block = table[(span.stop - 1) // size]
        assert block, f"{about}: its state has no block"
        if write:
            self._put_state(rank, made, span.stop, layer, view[block, 0, 0])
            if spec.num_prefill_checkpoint_blocks:
                self._write_passed(rank, layer, made, table, span)

    def _step_ring(self, rank: int, layer: int, made: Contents, block: int, span: range, about: str) -> None:
        """As vLLM's compressors: read the pool that is not complete, then keep the last tokens."""
        view, spec = self._layer(rank, layer)
        slots, heads = spec.block_size, heads_of(spec, *self._place(rank))
        opened = range(span.start // self.kind.pool * self.kind.pool, span.start)
        there = view[block][:, [token % slots for token in opened]].transpose(0, 1)
        assert torch.equal(there, made.rows(opened, layer, heads, view)), f"{about}: another pool's tokens"
        last = span[-slots:]
        rows = made.rows(last, layer, heads, view)
        view[block][:, [token % slots for token in last]] = rows.transpose(0, 1)

    def _write_passed(self, rank: int, layer: int, made: Contents, table: list[int], span: range) -> None:
        """The state at a block's end within the step, where vLLM's backends write it."""
        view, spec = self._layer(rank, layer)
        (offset,), (entry,) = compute_mamba_prefill_checkpoints(
            [span.stop],
            [len(span)],
            hash_block_size=BLOCK,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=BLOCK,
        )
        if offset and table[entry]:
            self._put_state(rank, made, span.start + offset, layer, view[table[entry], 0, 0])
            self.passed += 1

    def _is_state(self, rank: int, layer: int, made: Contents, block: int, tokens: int) -> bool:
        view, _ = self._layer(rank, layer)
        expected = view[block, 0, 0].clone()
        self._put_state(rank, made, tokens, layer, expected)
        return torch.equal(expected, view[block, 0, 0])

    def _put_state(self, rank: int, made: Contents, tokens: int, layer: int, page: torch.Tensor) -> None:
        spec = self._layer(rank, layer)[1]
        made.put_state(tokens, layer, page, spec, self._place(rank), self.kind.recurrent)

    # Prefix caches.

    def _note_hashes(self) -> None:
        """Which tokens each hash of a block stands for; None: those of a request that ran when the weights
        changed, whose blocks are of several weights. A reset gives running requests other hashes."""
        for request in self._requests:
            found, noted = request.block_hashes, self._hashed.get(request.request_id, [])
            if found == noted:
                continue
            across = request.request_id in self._across
            for number, each in enumerate(found, start=1):
                tokens = None if across else list(request.all_token_ids[: number * self.hash_block])
                self._known[bytes(each)] = tokens
            self._hashed[request.request_id] = list(found)

    def check_cached(self, again: bool = True) -> None:
        """Every block in the prefix cache holds what its hash stands for. `again`: also those that were
        there when this was last called."""
        self._note_hashes()
        held = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        cached = {
            (key, block.block_id)
            for key, blocks in held.items()
            for block in (blocks.values() if isinstance(blocks, dict) else (blocks,))
        }
        for key, block in cached if again else cached - self._checked:
            tokens = self._known[bytes(get_block_hash(key))]
            if tokens is None:
                continue
            for name in self.kv_config.kv_cache_groups[get_group_id(key)].layer_names:
                self._check_cached(name, self._contents(tokens), block, len(tokens))
        self._checked = cached

    def _check_cached(self, name: str, made: Contents, block: int, tokens: int) -> None:
        layer = list(self.specs).index(name)
        for rank in range(len(self.memory)):
            if name not in self.memory[rank]:
                continue
            view, spec = self._layer(rank, layer)
            about = f"{self.role}: block {block} is cached as that behind {tokens} tokens, but holds others"
            if isinstance(spec, kv_cache_interface.MambaSpec):
                assert self._is_state(rank, layer, made, block, tokens), about
                continue
            size = spec.block_size * self._dcp
            begin = (tokens - 1) // size * size
            rows = Rows(view, spec)
            _, kept = self._kept(rank, layer, made, rows.complete(range(begin, tokens)))
            assert torch.equal(rows.get([block])[: len(kept)], kept), about


def _spec_of(group: kv_cache_interface.KVCacheGroupSpec, name: str) -> Any:
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., list[Engine]]]:
    with contextlib.ExitStack() as stack:
        # Blocks are small: threads of torch's would only wait for each other where processors are few.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

        def start(
            tp_p: int,
            tp_d: int,
            blocks: int = 40,
            roles: tuple[str, str] = ("P", "D"),
            data_parallel: tuple[int, int] | None = None,
            stages: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
            context: tuple[dict[str, int], dict[str, int]] = ({}, {}),
            **options: Any,
        ) -> list[Engine]:
            """`data_parallel`: ranks of P and of D, of which each is an engine; those of P come first."""
            counts = data_parallel or (1, 1)
            ranks = [tp * len(each or [0]) for tp, each in zip((tp_p, tp_d), stages, strict=True)]
            port = free_ports(sum(map(prod, zip(ranks, counts, strict=True))))
            made = []
            for side, (role, tp) in enumerate(zip(roles, (tp_p, tp_d), strict=True)):
                first = port + side * ranks[0] * counts[0]
                more = {"stages": stages[side], **context[side], **options}
                for number in range(counts[side]):
                    index = number if data_parallel else None
                    engine = Engine(role, tp, first, blocks, index=index, **more)
                    stack.callback(engine.stop)
                    engine.start()
                    made.append(engine)
            return made

        yield start


def run(engines: Sequence[Engine], until: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, [engine.ended for engine in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.001)


@contextlib.contextmanager
def listening(secret: bytes = b"") -> Iterator[tuple[Any, dict[str, Any]]]:
    """A proxy's socket, and the options of engines that ping it."""
    with router(Members(secret) if secret else None) as (proxy, place):
        options = {"proxy_ip": place.host, "proxy_port": place.port}
        yield proxy, {**options, "http_port": 8100, "warm_up_seconds": 0}


def pings(proxy: Any, count: int) -> dict[bytes, Ping]:
    """One of each of so many engines, by its sender."""
    found: dict[bytes, Ping] = {}
    while len(found) < count:
        assert proxy.poll(30_000)
        sender, frame = proxy.recv_multipart()
        found[sender] = decode_ping(frame)
    return found


def finish(*engines: Engine) -> None:
    run(engines, lambda: not any(engine.scheduler.requests for engine in engines))
    for engine in engines:
        assert engine.free == engine.all_free
        engine.check_cached()


def preempt_all(engine: Engine) -> None:
    """By emptying its prefix cache. vLLM complains then if somebody still holds blocks."""
    with contextlib.suppress(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def ask(
    at: Engine, p: Engine, d: Engine, unique: int | str, prompt: list[int], tokens: int = 1, index: int = 0
) -> Request:
    """One of the two for its half of a request of the pair. `index`: of several prompts in one request."""
    outer = pair_id(unique, prefill=p.address, decode=d.address)
    return at.ask(inner_id(outer, prompt=index), prompt, max_tokens=tokens)


def ask_both(
    p: Engine, d: Engine, unique: int | str, prompt: list[int], tokens: int = 5, index: int = 0
) -> tuple[Request, Request]:
    return ask(p, p, d, unique, prompt, 1, index), ask(d, p, d, unique, prompt, tokens, index)
