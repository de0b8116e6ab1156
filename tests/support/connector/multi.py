"""vLLM's MultiConnector with p2pkv and a storing connector in it, around vLLM's own scheduler."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from p2pkv.connector.connector import P2pKvConnector
from p2pkv.connector.metadata import StepMetadata
from p2pkv.connector.worker import Worker
from support.connector.instances import BLOCK, LAYERS, Instance, kv_cache_config, transfer_config

OURS = "p2pkv.connector.multi"
"""Where our MultiConnector is; vLLM's own has no path."""


@dataclass
class StoreMetadata(base.KVConnectorMetadata):
    loads: list[tuple[str, list[int]]] = field(default_factory=list)
    """Requests whose load begins with this step, and the blocks that it fills."""


class StoreConnector(base.KVConnectorBase_V1):
    """Stands for a connector that keeps prompts beside the engine. Tests set what it holds and how it acts.

    Attributes, of the scheduler's half:
        held: how many of a prompt's first tokens it has, by the first three.
        undecided: whether it is still looking.
        later: whether it loads between steps, and not within one.
        saves: whether it saves a request's blocks after the request has ended.
        loaded: requests that it was told to load, with the number of tokens.
    Of each worker's half:
        spoil: whether the next load fails, from its second block on.
        saved: requests of which it has saved all.
        came: requests of which it has loaded all, between steps.
        began: requests whose loads have begun.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.held: dict[tuple[int, ...], int] = {}
        self.undecided = self.saves = self.later = False
        self.loaded: list[tuple[str, int]] = []
        self.spoil = False
        self._failed: set[int] = set()
        self.saved: set[str] = set()
        self.came: set[str] = set()
        self.began: list[str] = []
        self._next = StoreMetadata()

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.undecided:
            return None, False
        found = max(0, self._of(request) - num_computed_tokens)
        return found, self.later and found > 0

    def _of(self, request: Any) -> int:
        """Tokens of this prompt that it has, all but the last at most."""
        held = self.held.get(tuple(request.prompt_token_ids[:3]), 0)
        return min(held, (request.num_prompt_tokens - 1) // BLOCK * BLOCK)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loaded.append((request.request_id, num_external_tokens))
            held = self._of(request)
            (table,) = blocks.get_block_ids()
            filled = table[(held - num_external_tokens) // BLOCK : held // BLOCK]
            self._next.loads.append((request.request_id, filled))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StoreMetadata:
        meta, self._next = self._next, StoreMetadata()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.saves, None

    # A worker's half.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, blocks in self._get_connector_metadata().loads:
            self.began.append(request_id)
            if self.spoil:
                self._failed.update(blocks[1:] or blocks)
                self.spoil = False

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        saved, came, self.saved, self.came = self.saved, self.came, set(), set()
        return base.KVConnectorTransferResults(finished_sending=saved, finished_recving=came)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class MultiInstance(Instance):
    """An instance with both; `store_first` gives their order, `path` whose MultiConnector it is."""

    def __init__(
        self,
        role: str,
        *,
        store_first: bool = True,
        path: str | None = OURS,
        policy: str = "fail",
        ranks: int = 1,
        **options: Any,
    ) -> None:
        store = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "support.connector.multi",
            "kv_role": "kv_both",
        }
        both = [store, transfer_config(role)] if store_first else [transfer_config(role), store]
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_module_path=path,
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": both},
        )
        super().__init__(role, ranks=ranks, transfer=transfer, **options)
        self.store, self.ours = _children(self.scheduler.connector)
        self.multis = []
        for worker in self.workers:
            multi = KVConnectorFactory.create_connector(
                self.config, base.KVConnectorRole.WORKER, kv_cache_config()
            )
            _children(multi)[1].worker = worker
            self.multis.append(multi)
        self.outputs: list[KVConnectorOutput] = []

    @property
    def stores(self) -> list[StoreConnector]:
        """The workers' halves."""
        return [_children(multi)[0] for multi in self.multis]

    def _ours(self, meta: Any) -> StepMetadata:
        (ours,) = [each for each in meta.metadata if isinstance(each, StepMetadata)]
        return ours

    def _connector_output(self, worker: Worker, meta: Any, scheduled: SchedulerOutput) -> KVConnectorOutput:
        multi = self.multis[self.workers.index(worker)]
        multi.handle_preemptions(meta)
        multi.bind_connector_metadata(meta)
        if scheduled.has_sync_kv_loads:
            multi.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            for name in LAYERS:
                multi.wait_for_layer_load(name)
                multi.save_kv_layer(name, torch.empty(0), None)
        if not scheduled.has_sync_kv_loads:
            multi.start_load_kv(None)
        multi.wait_for_save()
        results = multi.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=multi.get_block_ids_with_load_errors(),
            kv_connector_stats=multi.get_kv_connector_stats(),
            kv_connector_worker_meta=multi.build_connector_worker_meta(),
        )
        multi.clear_connector_metadata()
        self.outputs.append(output)
        return output


def _children(multi: Any) -> tuple[StoreConnector, P2pKvConnector]:
    (store,) = [each for each in multi.sub_connectors if isinstance(each, StoreConnector)]
    (ours,) = [each for each in multi.sub_connectors if isinstance(each, P2pKvConnector)]
    return store, ours
