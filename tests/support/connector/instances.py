"""vLLM's own scheduler around our connector, with workers whose engine is made up. No server, no model."""

from __future__ import annotations

import copy
import random
import tempfile
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from p2pkv.connector.describe import Layers, cache_of, hello_of, options_of
from p2pkv.connector.idle_steps import WakeupSender
from p2pkv.connector.metadata import PrefillStep, StepMetadata
from p2pkv.connector.worker import Worker
from p2pkv.demo.tiny_model import TinyFiles, TinyLlama, ensure_model
from p2pkv.engine import commands as do
from p2pkv.engine.context import Counters
from p2pkv.engine.core_liveness import Liveness
from p2pkv.pairing import Address, mint
from p2pkv.protocol.messages import Hello

BLOCK = 16
LONGEST = 512
"""Tokens of a request: vLLM's max_model_len."""
P_ADDRESS, D_ADDRESS = Address("127.0.0.1", 21001), Address("127.0.0.1", 21101)
LAYERS = {"model.layers.0.self_attn.attn": 0, "model.layers.1.self_attn.attn": 1}
ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
_ROLES = {"P": ("kv_producer", P_ADDRESS), "D": ("kv_consumer", D_ADDRESS), "both": ("kv_both", P_ADDRESS)}


SMALL = TinyLlama(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64, vocab=512)
"""A model of a few kilobytes: configurations need one, and nobody loads its weights."""

each_pace = pytest.mark.parametrize("ahead", [0, 1], ids=["step-by-step", "one-step-ahead"])
each_policy = pytest.mark.parametrize("policy", ["recompute", "fail"])


@cache
def write(model: TinyFiles) -> Path:
    return ensure_model(model, Path(tempfile.gettempdir()) / "p2pkv-connector-tests")


def vllm_config(
    role: str,
    *,
    policy: str = "fail",
    budget: int = 64,
    seqs: int = 8,
    port: int | None = None,
    reserve: bool = True,
    transfer: KVTransferConfig | None = None,
    drafter: Mapping[str, Any] | None = None,
    model: TinyFiles = SMALL,
    **extra: Any,
) -> VllmConfig:
    """A configuration for one instance; `budget` is of tokens in a step, `extra` goes to p2pkv. `reserve`: a
    prompt is begun only if all of it fits, vLLM's default. `transfer` takes the place of what
    `transfer_config` says. `drafter`: as --speculative-config."""
    load_general_plugins()
    config = VllmConfig(
        model_config=ModelConfig(model=str(write(model)), max_model_len=LONGEST, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=reserve,
        ),
        kv_transfer_config=transfer
        or KVTransferConfig(kv_load_failure_policy=policy, **transfer_config(role, port, **extra)),
    )
    config.scheduler_config.max_num_batched_tokens = budget  # which vLLM raises on a CPU for MLA
    if drafter is not None:
        target, parallel = config.model_config, config.parallel_config
        config.speculative_config = SpeculativeConfig(
            target_model_config=target, target_parallel_config=parallel, **drafter
        )
    return config


def be_data_parallel(config: VllmConfig, index: int, start: int = 0, size: int = 1) -> None:
    """What vLLM leaves in the configuration of an engine. `start`: its node's first; `size`: 1 if dense."""
    parallel = config.parallel_config
    parallel.data_parallel_index, parallel.data_parallel_rank_local = index, index - start
    parallel.data_parallel_size, parallel.data_parallel_rank = size, index if size > 1 else 0
    config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{index}"


def transfer_config(role: str, port: int | None = None, **extra: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` says of p2pkv."""
    kv_role, address = _ROLES[role]
    return {
        "kv_connector": "P2pKvConnector",
        "kv_role": kv_role,
        "kv_port": port or address.port,
        "kv_connector_extra_config": {"host": address.host, **extra},
    }


def kv_cache_config(blocks: int = 64, spec: Any = None, layers: Iterable[str] = LAYERS) -> KVCacheConfig:
    return kv_groups((layers, spec or FULL), blocks=blocks)


def kv_groups(*groups: tuple[Iterable[str], Any], blocks: int = 4) -> KVCacheConfig:
    """Each has layers of these names and one description."""
    made = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=made)


def caches_of(
    names: Iterable[str], heads: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Four blocks of each layer, as vLLM registers them."""
    return {name: torch.zeros(4, heads, BLOCK, 32, dtype=dtype) for name in names}


def hello_with(config: VllmConfig, caches: dict[str, torch.Tensor], rank: int = 0) -> Hello:
    kv = kv_cache_config(layers=caches)
    cache, said = cache_of(config, Layers(caches, kv))
    return hello_of(config, options_of(config), cache, said, rank, "host")


def pair_id(unique: int | str = 0, *, prefill: Address = P_ADDRESS, decode: Address = D_ADDRESS) -> str:
    """A router's request id for P and D, the same for the same `unique`."""
    return mint(prefill, decode, uuid.uuid5(uuid.NAMESPACE_OID, str(unique)).hex)


def inner_id(outer: str, prompt: int = 0, child: int | None = None) -> str:
    """What vLLM's completions API makes of a request id; its last part differs each time."""
    return f"{'' if child is None else f'{child}_'}cmpl-{outer}-{prompt}-{uuid.uuid4().hex[:8]}"


def tokens(count: int, seed: int | str = 0) -> list[int]:
    """A prompt like no other seed's."""
    draw = random.Random(f"{seed}")
    return [draw.randrange(10, 500) for _ in range(count)]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    params: Any = None,
    hash_block: int = BLOCK,
    **more: Any,
) -> Request:
    kv_cache_utils.init_none_hash(sha256)
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(hash_block, sha256),
        **more,
    )


@dataclass
class Fact:
    """What the made-up engine knows of one key."""

    offered: bool = False
    asked: bool = False
    over: bool = False


@dataclass
class FakeRank:
    """Writes down its commands, keeps the engine's promises, and refuses what the engine cannot do. Its
    promises: each D key has one last word (Loaded or LoadFailed), each P key one BlocksFree."""

    log: list[do.Command] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)
    revoked: list[str] = field(default_factory=list)
    handed_on: set[str] = field(default_factory=set)
    """Keys of requests of which D's scheduler knows without an engine that P has begun them."""

    def __post_init__(self) -> None:
        self.counters, self.steps = Counters(), Liveness(1e9)
        self.failure = ""
        self._events: list[do.Event] = []
        self.waits: list[float] = []
        """Seconds that each idle step was allowed to wait."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens in such a wait."""
        self.on_event: Callable[[do.Event], None] = lambda event: None

    def do(self, command: do.Command) -> None:
        self.log.append(command)
        match command:
            case do.HoldPrompt(key) | do.Expect(key):
                assert key not in self.facts, f"{key} is announced while the engine still knows it"
                self.facts[key] = Fact()
            case do.OfferPrompt(key):
                assert not self.facts[key].offered, f"{key} is offered twice"
                self.facts[key].offered = True
            case do.PromptBlocks(key):
                assert self.facts[key].offered
            case do.Computed(prompts):
                assert all(self.facts[key].offered for key, _ in prompts)
            case do.Load(key, start, stop):
                self._load(key, stop > start)
            case do.Drop(key, reason):
                self._last_word(do.LoadFailed(key, reason))
            case do.Abort(key) | do.Release(key) if key in self.facts:  # else it has forgotten it already
                self._last_word(do.BlocksFree(key))
            case do.Forget(key, _):
                assert self.facts.pop(key).over, f"{key} is forgotten before the engine's last word"

    def layers_per_message(self, tokens: int) -> int:
        return 1

    def _load(self, key: str, anything: bool) -> None:
        fact = self.facts[key]
        assert not fact.asked, f"{key} is asked for twice"
        fact.asked = True
        if not anything:
            self._last_word(do.Loaded(key))
        else:
            begun = fact.offered or fact.over or key in self.handed_on
            assert begun, f"{key} is asked for before P has begun"

    def _last_word(self, event: do.Loaded | do.LoadFailed | do.BlocksFree) -> None:
        fact = self.facts[event.key]
        if not fact.over:
            fact.over = True
            self._emit(event)

    def _emit(self, event: do.Event) -> None:
        self._events.append(event)
        self.on_event(event)

    def revoke(self, keys: Iterable[str]) -> None:
        self.revoked += keys

    def events(self) -> list[do.Event]:
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        pass

    # What happens between the ranks.

    def begin(self, key: str, generation: str | None = "") -> None:
        assert not self.facts[key].offered
        self.facts[key].offered = True
        self._emit(do.Begun(key, generation))

    def load(self, key: str) -> None:
        assert self.facts[key].asked
        self._last_word(do.Loaded(key))

    def fail(self, key: str) -> None:
        self._last_word(do.LoadFailed(key, "P is gone"))

    def free(self, key: str) -> None:
        self._last_word(do.BlocksFree(key))

    def wait_for_event(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.meanwhile()

    def said(self, kind: type) -> list[Any]:
        return [command for command in self.log if isinstance(command, kind)]


class Instance:
    """One vLLM engine core: the real scheduler, our connector, and a Worker of ours for each rank. `ahead`:
    steps that are scheduled before the first one's result is known, as with asynchronous scheduling. `index`:
    its data-parallel rank; None: its instance has one engine."""

    def __init__(
        self,
        role: str,
        *,
        ranks: int = 1,
        pp: int = 1,
        dcp: int = 1,
        interleave: int = 1,
        blocks: int = 64,
        ahead: int = 0,
        index: int | None = None,
        **options: Any,
    ) -> None:
        self.config = config = vllm_config(role, **options)
        if index is not None:
            be_data_parallel(config, index)
        config.cache_config.num_gpu_blocks = blocks
        config.parallel_config.tensor_parallel_size = ranks // pp
        config.parallel_config.pipeline_parallel_size = pp
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        config.scheduler_config.async_scheduling = bool(ahead)
        kind = AsyncScheduler if ahead else Scheduler
        self.kv_config = self.make_kv_config(blocks)
        block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(self.kv_config, config)
        self.hash_block = hash_block_size
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_utils.generate_scheduler_kv_cache_config([self.kv_config_of(0)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.ranks = [FakeRank() for _ in range(ranks)]
        device = torch.device("cpu")
        self.workers = [Worker(rank, LAYERS, device, True, WakeupSender()) for rank in self.ranks]
        self.aggregator = KVOutputAggregator(ranks)
        self.ended: dict[str, str] = {}
        """Why each request has ended, as its client hears."""
        self.reported: list[str] = []
        self.computed: Counter[str] = Counter()
        """Tokens that each request's forwards have computed."""
        self.metas: list[StepMetadata] = []
        self._ahead = ahead
        self._running: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.all_free = self.free

    def make_kv_config(self, blocks: int) -> KVCacheConfig:
        return kv_cache_config(blocks)

    def kv_config_of(self, rank: int) -> KVCacheConfig:
        """A rank's. vLLM's scheduler has that of rank 0."""
        return self.kv_config

    @property
    def rank(self) -> FakeRank:
        return self.ranks[0]

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def ask(self, request_id: str, prompt: Sequence[int], **more: Any) -> Request:
        return self.add(make_request(request_id, prompt, hash_block=self.hash_block, **more))

    @property
    def computing(self) -> bool:
        """Whether the result of a step with tokens is not known yet."""
        return any(scheduled.total_num_scheduled_tokens for scheduled, _ in self._running)

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.ended[request.request_id] = "abort"

    def key(self, request: Request) -> str:
        known = self.ranks[0].facts
        loads = self.workers[0].loads._known
        (key,) = [key for key, load in loads.items() if load.request_id == request.request_id]
        assert key in known
        return key

    def begin(self, request: Request, *generations: str | None) -> str:
        """P has begun it for every rank of this D; its key. `generations`: of all ranks, or of each."""
        self.step()
        key = self.key(request)
        for number, rank in enumerate(self.ranks):
            rank.begin(key, generations[number % len(generations)] if generations else "")
        return key

    def start_load(self, request: Request, generation: str = "") -> str:
        """P has begun it, and this D loads it; its key."""
        key = self.begin(request, generation)
        self.run_until(lambda: all(rank.facts[key].asked for rank in self.ranks))
        return key

    def load(self, request: Request, generation: str = "") -> str:
        """P has begun it, and every rank of this D has all of it; its key."""
        key = self.start_load(request, generation)
        for rank in self.ranks:
            rank.load(key)
        return key

    def finish(self, *requests: Request, most: int = 60) -> None:
        self.run_until(lambda: all(each.request_id in self.ended for each in requests), most)

    @property
    def held_key(self) -> str:
        (hold,) = self.rank.said(do.HoldPrompt)
        return str(hold.key)

    def prefills(self, key: str = "") -> list[PrefillStep]:
        """What this P's workers were told to compute for a D, or of this prompt."""
        return [each for meta in self.metas for each in meta.prefills if key in ("", each.blocks.key)]

    def blocks(self, request: Request) -> list[int]:
        (group,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(group)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.scheduled = self.scheduler.schedule()
            self.computed.update(self.scheduled.num_scheduled_tokens)
            self._running.append((self.scheduled, self._run(self.scheduled)))
            if len(self._running) > self._ahead:
                self._take_note()

    def drain(self) -> None:
        while self._running:
            self._take_note()

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        meta = scheduled.kv_connector_metadata
        self.metas.append(self._ours(meta))
        outputs = [self._rank_output(worker, copy.deepcopy(meta), scheduled) for worker in self.workers]
        return self.aggregator.aggregate(outputs)

    def _ours(self, meta: Any) -> StepMetadata:
        """What the step's metadata say to our connector."""
        assert isinstance(meta, StepMetadata)
        return meta

    def _rank_output(self, worker: Worker, meta: Any, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(scheduled.num_scheduled_tokens)
        prefilling = [self.scheduler.requests[request_id].is_prefill_chunk for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[] if chunk else [7] for chunk in prefilling],
            kv_connector_output=self._connector_output(worker, meta, scheduled),
        )

    def _connector_output(self, worker: Worker, meta: Any, scheduled: SchedulerOutput) -> KVConnectorOutput:
        """One step of one worker, as vLLM's runners have it."""
        worker.preempt(meta)
        self.prepare_blocks(worker, scheduled)
        worker.begin(meta)
        if scheduled.has_sync_kv_loads:
            worker.load_now()
        if scheduled.total_num_scheduled_tokens:
            self.forward(worker, scheduled)
        worker.end()
        results = worker.results()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.loads.spoilt(),
            kv_connector_worker_meta=worker.loads.worker_metadata(),
        )

    def prepare_blocks(self, worker: Worker, scheduled: SchedulerOutput) -> None:
        """What vLLM's runner does to this step's new blocks before the connector learns of the step."""

    def forward(self, worker: Worker, scheduled: SchedulerOutput) -> None:
        for name in LAYERS:
            worker.layer(name)

    def _take_note(self) -> None:
        scheduled, output = self._running.popleft()
        told = output.kv_connector_output
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)
        # The connector may have taken something out.
        self.reported += [*(told.finished_sending or ()), *(told.finished_recving or ())]

    def run_until(self, done: Any, most: int = 60) -> None:
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError(f"not after {most} steps")

    def assert_at_rest(self, *freed: str) -> None:
        """When D has taken these from P, nobody holds anything, and vLLM was told of each request at most
        once."""
        for key in freed:
            self.rank.free(key)
        self.step(3)
        self.drain()
        assert not self.scheduler.requests
        assert self.free == self.all_free
        assert len(set(self.reported)) == len(self.reported)
        for rank in self.ranks:
            assert not rank.facts


def asked(
    role: str, prompt: Sequence[int], *, max_tokens: int = 4, **options: Any
) -> tuple[Instance, Request]:
    instance = Instance(role, **options)
    return instance, instance.ask(inner_id(pair_id()), prompt, max_tokens=max_tokens)
