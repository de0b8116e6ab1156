"""P2pKvConnector: vLLM's KV connector interface, handed on to the parts that do the work.

tests/connector/vllm_interface.md has the order of the calls.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllms
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from p2pkv.config import ConfigError
from p2pkv.connector import describe
from p2pkv.connector import vllm_patches as patches
from p2pkv.connector.core_beats import BeatListener, BeatSender, state_of
from p2pkv.connector.held_blocks import BlockQuota, HeldBlocks
from p2pkv.connector.identity import Pairs, adapter_fingerprint
from p2pkv.connector.idle_steps import FIRST_WAIT, IDLE_SLEEP, IdleBackoff, WakeupMessage, WakeupSender
from p2pkv.connector.metadata import EarlyLoad, P2pKvMetrics, P2pKvStats, StepMetadata, WorkerMetadata
from p2pkv.connector.scheduler import ConsumerScheduler, ProducerScheduler
from p2pkv.connector.weights import Generation, forget_prefixes
from p2pkv.connector.worker import Worker
from p2pkv.control.announcer import Announcement, Announcer, EngineHealth
from p2pkv.control.discovery import DISCOVERY_VERSION, Ping
from p2pkv.control.warm_up_prompts import ANSWER_TOKENS, WarmUp
from p2pkv.engine import commands as do
from p2pkv.engine.core_liveness import Beat
from p2pkv.engine.thread import Rank
from p2pkv.links import make_factory
from p2pkv.links.mps_check import warn_of_turns
from p2pkv.pairing import Address
from p2pkv.protocol.handshake import fit

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from p2pkv.protocol.messages import Hello

log = logging.getLogger("p2pkv")

SWITCH_SECONDS = 0.0002
"""How long a thread of a worker may keep the interpreter's lock when another wants it."""

WARM_UP_BLOCKS = 3
"""Full blocks of the prompt that an instance sends itself before it registers."""


class P2pKvConnector(vllms.KVConnectorBase_V1, vllms.SupportsHMA):
    """P pushes its KV layer by layer to D; with kv_both an instance is either, as each request's id says."""

    _cache_hit_source = CacheHitSource.P2P

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether this vLLM notifies the connector before its workers lose the memory of the KV cache."""
        return describe.notifies_of_sleep()

    def __init__(
        self, vllm_config: VllmConfig, role: vllms.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self.options = describe.options_of(vllm_config)
        describe.refuse_what_cannot_pair(vllm_config)
        if role is vllms.KVConnectorRole.WORKER:  # the scheduler comes later, and may have no model
            describe.refuse_what_cannot_move(vllm_config, kv_cache_config)
        self.producer: ProducerScheduler | None = None
        self.consumer: ConsumerScheduler | None = None
        self.worker: Worker | None = None
        self._announcer: Announcer | None = None
        self._beats: BeatListener | BeatSender | None = None
        self._steps = 0
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._hello: Hello | None = None
        """Of the rank, also while it sleeps."""
        self._asleep = False
        if self.options.idle_wait_ms or not self.options.spin:
            patches.SPIN_WAIT.install(self.options.skip_patches)
            patches.SPIN_WAIT.spins = self.options.spin
        if self.options.prefills and vllm_config.use_v2_model_runner:
            reason = patches.EARLY_REVOCATION.install(self.options.skip_patches)
            if reason and kv_cache_config.needs_kv_cache_zeroing:
                raise ConfigError(
                    "vLLM's V2 model runner may overwrite blocks of this model while a P sends them "
                    f"({reason}): set VLLM_USE_V2_MODEL_RUNNER=0"
                )
        if role is vllms.KVConnectorRole.SCHEDULER:
            self._schedule()

    def _schedule(self) -> None:
        config, options, cache = self._vllm_config, self.options, self._kv_cache_config
        for note in options.notes:
            log.warning("%s", note)
        self._pairs = pairs = Pairs(options.address, options.role, options.is_of_instance)
        self._backoff = IdleBackoff(config.max_concurrent_batches)
        # Ranks of other replicas may wait for a batch of this one that computes nothing.
        pausing = options.idle_wait_ms > 0 and config.parallel_config.data_parallel_size == 1
        self._longest_wait = pausing * options.idle_wait_ms / 1000 / config.max_concurrent_batches
        self._sleeps_when_idle = pausing and describe.on_one_host(config)
        patches.ENGINE_CORE.sleeps_when_idle |= self._sleeps_when_idle
        patches.ENGINE_CORE.install(options.skip_patches)
        self._outputs_changed = False
        self.generation = Generation(config)
        self.watches = options.watch_weights
        if self.watches:
            patches.WEIGHTS.install(options.skip_patches)
        self._adapters: dict[tuple[str, str], tuple[int, str]] = {}
        """By name and path: the number and the files of the adapter of the last request."""
        self._requests: WeakSet[Request] = WeakSet()
        """All that vLLM knows."""
        tables = describe.block_tables(config, cache)
        self._replayed = tuple(tables.replayed)
        for_prompts = for_loads = None
        if options.prefills:
            held_blocks = cache.num_blocks
            if options.decodes:
                held_blocks = (held_blocks - 1) // 3  # vLLM keeps one for itself
                for_prompts, for_loads = self._kv_both_quotas(held_blocks)
            held = HeldBlocks(held_blocks, options.held_share)
            self.producer = ProducerScheduler(pairs, tables, held, config.max_concurrent_batches, for_prompts)
        if options.decodes:
            recompute = config.kv_transfer_config.kv_load_failure_policy == "recompute"
            keep, ranks = options.lease_seconds / 2, options.engine_ranks
            self.consumer = ConsumerScheduler(pairs, ranks, recompute, tables, for_loads, keep)
            patches.DEFERRAL.install(options.skip_patches)
            patches.PAUSED_LOADS.install(options.skip_patches)
        if config.parallel_config.distributed_executor_backend in (None, "mp", "uni"):
            # To the ranks on this host, vLLM's first: beats arrive nowhere else. Ray may put them anywhere.
            local = range(options.engine_ranks // config.parallel_config.nnodes_within_dp)
            self._beats = BeatSender([str(options.address.shifted(rank)) for rank in local], self._beat)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take rank 0's address: Ray may have put that rank on another host than this scheduler."""
        first, here = metadata.get((0, 0)), self.options.host
        if isinstance(first, Address) and first.host != here:
            if self.options.proxies:
                log.warning(
                    f"the proxy sends requests to {first.host}, where rank 0 is: if the HTTP server is at "
                    f"{here} only, leave proxy_ip out, and list this instance on the proxy"
                )
            self.options = replace(self.options, host=first.host)
            self._pairs.mine, self._pairs.ours = first, self.options.is_of_instance

    def _kv_both_quotas(self, third: int) -> tuple[BlockQuota, BlockQuota]:
        """For the blocks of prompts for other instances, and for those of loads, with kv_both."""
        config = self._vllm_config
        blocks = describe.request_blocks(config, self._kv_cache_config)
        if (longest := blocks(config.model_config.max_model_len)) > third:
            log.warning(
                f"a request of --max-model-len tokens takes {longest} KV blocks, but with kv_both a prompt "
                f"for another instance, or a load, takes {third} (a third) at most: D computes longer ones "
                "itself; give the cache more memory, or lower --max-model-len"
            )
        return BlockQuota(third, blocks), BlockQuota(third, blocks)

    # Scheduler side.

    @property
    def _schedulers(self) -> list[ProducerScheduler | ConsumerScheduler]:
        return [scheduler for scheduler in (self.producer, self.consumer) if scheduler is not None]

    def _beat(self, orphaned: bool) -> Beat:
        """How the engine core gets on; for the thread that sends it to the ranks."""
        return state_of(
            patches.ENGINE_CORE.core,
            steps=self._steps,
            transfers=any(scheduler.busy for scheduler in self._schedulers),
            orphaned=orphaned,
            is_loaded=self.consumer.is_loaded if self.consumer is not None else lambda request_id: False,
        )

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def reset_cache(self) -> bool:
        """vLLM empties its caches, or has changed the weights: KV of before is not valid any more."""
        for scheduler in self._schedulers:
            scheduler.invalidate(self.generation.name)
        if self._schedulers:
            forget_prefixes(self._manager, self._requests)
            self._skip_next_wait()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on with its steps although it has nothing to compute: a pause that keeps the
        requests ends when their KV has come in. (P's held blocks keep vLLM at work without this.)"""
        return self.consumer is not None and self.consumer.loads

    def on_new_request(self, request: Request) -> None:
        self._requests.add(request)
        if (adapter := request.lora_request) is not None:
            # vLLM knows an adapter's blocks by its name and path: forget them if others lie there now.
            name, content = (adapter.lora_name, adapter.lora_path), adapter_fingerprint(adapter)
            known, self._adapters[name] = self._adapters.get(name), (adapter.lora_int_id, content)
            if known not in (None, self._adapters[name]):
                its = [each for each in self._requests if each.lora_request == adapter]
                forget_prefixes(self._manager, its)
        for scheduler in self._schedulers:
            scheduler.new(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.producer is not None and not self.producer.matched(request, num_computed_tokens):
            return None, False
        if self.consumer is not None:
            return self.consumer.matched(request, num_computed_tokens)
        return 0, False

    def waits_for_load(self, request: Request) -> bool:
        """Whether `get_num_new_matched_tokens` answers "ask again" for want of KV, and not of room on P."""
        return self.consumer is not None and request.request_id in self.consumer.undecided

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.producer is not None:
            self.producer.allocated(request)
        if self.consumer is not None:
            self.consumer.allocated(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The groups whose window vLLM would compute again behind what was loaded, although a load brings it.

        vLLM does not zero the blocks of a group that is named here, and a load leaves the slots behind the
        prompt's end, and those before a window, as they were; the kernels of the groups named read no such
        slots (the indices that vLLM's sparse_swa.py makes). Zeroing comes before the load: vLLM's runners
        zero before they bind a step's metadata, and a load waits for that (`Worker.begin`).
        """
        return self._replayed

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        self._steps += 1
        meta, *others = (scheduler.step(scheduler_output) for scheduler in self._schedulers)
        for other in others:
            meta = meta.with_loads(other)
        changed, self._outputs_changed = self._outputs_changed or meta.has_commands, False
        wakeup_address = patches.ENGINE_CORE.address if self._sleeps_when_idle else ""
        pause = self._backoff.step(
            *((IDLE_SLEEP, IDLE_SLEEP) if wakeup_address else (FIRST_WAIT, self._longest_wait)),
            tokens=meta.work or (self.consumer is not None and self.consumer.resumes),
            awaited=any(scheduler.awaits_workers for scheduler in self._schedulers),
            changed=changed,
            woken=patches.ENGINE_CORE.take_wakeup(),
        )
        patches.SPIN_WAIT.idle = meta.idle = pause > 0
        if wakeup_address:
            patches.ENGINE_CORE.seconds = pause
            meta.wakeup_address = wakeup_address
        else:
            meta.idle_wait = pause
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        sent = connector_output.finished_sending or set()
        received = connector_output.finished_recving or set()
        metadata = connector_output.kv_connector_worker_meta
        assert metadata is None or isinstance(metadata, WorkerMetadata)
        if sent or received or metadata:
            self._skip_next_wait()
        if self.producer is not None:
            connector_output.finished_sending = self.producer.reported(sent) or None
        if self.consumer is not None:
            early = isinstance(connector_output, EarlyLoad)
            withheld = self.consumer.reported(metadata, received, connector_output.failed_recving, early)
            connector_output.finished_recving = received - withheld or None

    def on_wakeup(self, message: WakeupMessage) -> str | None:
        """All ranks have sent it. Returns the request whose load has ended; None: none, or it was known."""
        if self.consumer is None:
            return None
        if message.number:
            return self.consumer.loading(message.number)
        self.consumer.kept(message.key, message.tokens, message.digest, time.monotonic())
        return None

    def _skip_next_wait(self) -> None:
        """Something has changed: the next step comes without a pause."""
        self._outputs_changed = patches.ENGINE_CORE.changed = True
        patches.ENGINE_CORE.seconds = 0.0

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.consumer is not None:
            self.consumer.finished(request)
        return self.producer is not None and self.producer.finished(request, block_ids), None

    # Worker side.

    def get_handshake_metadata(self) -> Any:
        config = self._vllm_config
        first = config.parallel_config.rank == 0 and not describe.on_one_host(config)
        return self.options.address if first else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start this rank: it listens from here on, and pings the proxy if it is the first."""
        self._kv_caches = kv_caches
        # vLLM's worker spins in Python while it waits for work and so wins the interpreter's lock back each
        # time; the engine thread would wait for the whole interval, several times a message.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        patches.SPIN_WAIT.worker = self._vllm_config.parallel_config.data_parallel_size == 1
        self._start()

    def unregister_kv_caches(self) -> None:
        """vLLM takes the memory of the KV cache away: give the rank up, and send the proxy a goodbye."""
        if self.worker is None or self._asleep:
            return
        self._asleep = True
        if self._announcer is not None:
            self._announcer.stop()
            self._announcer = None
        self.worker.sleep()
        log.info("this rank (role %s) sleeps: its links are closed", self.options.role)

    def restore_kv_caches(self) -> None:
        """The memory is back where it was: start again as another incarnation."""
        if self._asleep:
            self._asleep = False
            self._start()

    def _start(self) -> None:
        config, options = self._vllm_config, self.options
        layers = describe.Layers(self._kv_caches, self._kv_cache_config)
        number = config.parallel_config.rank  # in its engine; torch's world is all engines of a MoE instance
        cache, shape = describe.cache_of(config, layers)
        describe.make_ready(cache.device, config.compilation_config.static_forward_context.values())
        links = make_factory(
            options.link,
            host=options.host,
            staging_bytes=options.staging_bytes,
            device=cache.device,
            nccl_channels=options.nccl_num_channels,
            nccl_in_flight=options.nccl_in_flight,
            nccl_group_bytes=options.nccl_group_bytes,
            receives=options.decodes,
            allowed=options.allowed_peers,
        )
        if self._hello is None:
            hello = describe.hello_of(config, options, cache, shape, number, links.kind)
        else:  # the weights are those of the first start, whatever lies in their files by now
            hello = replace(self._hello, incarnation=uuid.uuid4().hex)
        # At the first start vLLM has yet to capture its graphs.
        rank = Rank(hello, options, cache, links, serving=self._hello is not None)
        self._hello = hello
        if not isinstance(self._beats, BeatListener):
            self._beats = BeatListener(hello.address)
        rank.steps.read_beats = self._beats.read
        if self.worker is None:
            # With micro-batches a layer's hook comes once for each of them.
            hooks = not config.parallel_config.use_ubatching
            wakeup_address = WakeupSender(number, options.engine_ranks)
            self.worker = Worker(rank, layers.indices, cache.device, hooks, wakeup_address)
        else:
            self.worker.wake(rank)
        if options.prefills:
            patches.EARLY_REVOCATION.preempt = self.worker.preempt
        log.info(
            f"rank {number} (role {options.role}) listens at {hello.address}; link {links.kind}; KV groups: "
            f"{'; '.join(map(str, cache.groups))}"
        )
        warn_of_turns(cache.device)
        if number == 0 and options.proxies and options.http_address is not None:
            self._announce(hello)

    def _announce(self, hello: Hello) -> None:
        """Announce this engine to the proxies once it is warm, from a process of its own."""
        config, options = self._vllm_config, self.options
        http, number = describe.http_address(config, options), describe.replica(config)
        names = config.model_config.served_model_name
        model = names if isinstance(names, str) else names[0]
        level = describe.first_token_level(config, self._kv_cache_config, options)
        ping = Ping(
            type=options.role,
            http_address=str(http),
            zmq_address=str(options.address),
            tp_size=config.parallel_config.tensor_parallel_size,
            version=DISCOVERY_VERSION,
            incarnation=hello.incarnation,
            model=model,
            dp_rank=options.engine_index,
            replica=number,
            protocol=hello.version,
            fit=fit(hello),
            partners=options.max_links if options.decodes and options.preconnect else 0,
            first_token=level,
            resumes=describe.resume_level(config, options),
            sampler=describe.sampler(config),
            parses=bool(config.structured_outputs_config.reasoning_parser),
            ahead_tokens=describe.ahead_tokens(self._kv_cache_config, options) if level else 0,
        )
        room = config.model_config.max_model_len - ANSWER_TOKENS
        plan = WarmUp(
            url=f"{'https' if options.warm_up_tls else 'http'}://{http}",
            model=model,
            tokens=max(1, min(WARM_UP_BLOCKS * config.cache_config.block_size + 1, room)),
            seconds=options.warm_up_seconds,
            api_key=options.warm_up_api_key,
            replica=number,
        )
        announcement = Announcement(
            proxies=tuple(map(str, options.proxies)),
            ping=ping,
            stall_seconds=options.stall_seconds,
            secret=options.secret if options.discovery == "curve" else None,
            warm_up=plan if options.warm_up_seconds else None,
            log_level=log.getEffectiveLevel(),
        )
        self._announcer = Announcer(announcement, self._set_partners, self._engine_health)

    def _set_partners(self, partners: tuple[str, ...]) -> None:
        """The proxy has named P's to this D; for the announcer's thread."""
        assert self.worker is not None
        others = tuple(each for each in partners if each != str(self.options.address))
        self.worker.rank.do(do.NamePartners(others))

    def _engine_health(self) -> EngineHealth:
        """Whether the proxies may send requests; for the announcer's thread."""
        assert self.worker is not None
        rank = self.worker.rank
        beat = rank.steps.beat or Beat(steps=0, work=False)
        return EngineHealth(rank.trouble(), rank.steps.paused or beat.stopping, beat.workload, beat.at)

    def handle_preemptions(self, kv_connector_metadata: vllms.KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        if self.worker is not None:
            self.worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: vllms.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self.worker is not None:
            self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Wait for the loads that this step computes with; bind_connector_metadata has handed all over."""
        if self.worker is not None:
            self.worker.load_now()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is not scheduled before all of its layers have come."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if self.worker is not None:
            self.worker.layer(layer_name)

    def wait_for_save(self) -> None:
        """Announce what no hook covered. Waits for nothing: blocks stay until they are reported free."""
        if self.worker is not None:
            self.worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> vllms.KVConnectorTransferResults:
        return self.worker.results() if self.worker is not None else vllms.KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.loads.spoilt() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self.worker.loads.worker_metadata() if self.worker is not None else None

    def get_kv_connector_stats(self) -> P2pKvStats | None:
        return self.worker.deltas.since() if self.worker is not None else None

    def shutdown(self) -> None:
        if self._announcer is not None:
            self._announcer.stop()
        if self.worker is not None:
            self.worker.stop()
        if self._beats is not None:
            self._beats.close()

    # For vLLM's front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> P2pKvStats:
        return P2pKvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> P2pKvMetrics:
        _log_as_vllm_does()
        # The one call that each API server makes with its configuration, which the engine has checked.
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        patches.PROMPT_END.install(extra.get("skip_patches") or ())
        return P2pKvMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class P2pNcclConnector(P2pKvConnector):
    """The name under which users of vLLM's removed connector know it."""


def _log_as_vllm_does() -> None:
    """Our messages go where vLLM's go, in its format."""
    mine, vllm = logging.getLogger("p2pkv"), logging.getLogger("vllm")
    if not mine.handlers and vllm.handlers:
        mine.handlers = list(vllm.handlers)
        mine.setLevel(vllm.getEffectiveLevel())
        mine.propagate = False
