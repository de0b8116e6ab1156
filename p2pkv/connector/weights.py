"""Which weights this instance computes KV with, since vLLM may change them while it runs.

P's `Offer` carries the name that `Generation` gives them, and D loads a prompt only if its own have the same.
docs/design.md, "Weights that change", has the rules.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from p2pkv.connector.identity import source_of_weights, stamps, weight_files, weights_in_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

log = logging.getLogger("p2pkv")

_T = TypeVar("_T")

LONGEST_NAME = 128
"""Characters of vLLM's weight version that go into the name; of a longer one its hash."""

SESSION = frozenset(
    {"start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"}
)
"""Methods of vLLM's workers that make up one update; between the first and the last the weights are mixed."""

KEEPS_WEIGHTS = frozenset(
    {
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),  # a prompt's digest covers its adapter
        *("annotate_profile", "check_health", "checkpoint_prepare", "checkpoint_restore", "profile"),
        *("compute_weight_checksums", "determine_available_memory", "execute_dummy_batch", "execute_model"),
        *("get_cache_block_size_bytes", "get_compilation_match_table", "get_draft_model"),
        *("get_encoder_timing_stats", "get_kv_cache_spec", "get_kv_connector_handshake_metadata"),
        *("get_model", "get_model_inspection", "get_simple_cpu_offload_num_cpu_blocks"),
        *("get_supported_kv_cache_layouts", "get_supported_tasks", "init_weight_transfer_engine"),
        *("release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache", "sample_tokens"),
        *("save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine"),
        *("supports_draft_weight_updates", "synchronize_device", "take_draft_token_ids", "update_config"),
        "update_max_model_len",
    }
)
"""Methods of vLLM's workers that leave the weights as they are. Any other may change them, also those of a
`--worker-extension-cls`, and functions that are sent to the workers."""


class Generation:
    """The name of the weights that this instance computes with.

    "" stands for those of its start, which the handshake compares. Later ones are named by vLLM's weight
    version, or by the files they were read from; each change without a name counts one up. While an update is
    under way, and after one has failed, the name is one that no other instance has.
    """

    def __init__(self, config: "VllmConfig") -> None:
        self._model = source_of_weights(config.model_config), config.model_config.revision
        self._load = str(config.load_config.load_format), config.load_config.download_dir
        self._named = ""
        self._count = 0
        self._mixed = ""
        self._discards = False
        self.changes = 0
        """How often the weights, or their name, have changed."""

    @property
    def name(self) -> str:
        if self._mixed:
            return self._mixed
        return f"{self._named or 'start'}+{self._count}" if self._count else self._named

    def call(
        self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any], make: Callable[[], _T]
    ) -> _T:
        """Let `make` call this method of vLLM's workers, and take note of what that does to the weights."""
        if method == "reload_weights":
            given = zip(("weights_iterator", "weights_path"), args, strict=False)
            return self._reload({**dict(given), **kwargs}, make)
        if method in SESSION:
            # vLLM refuses it out of turn; within an update that fails, the weights stay mixed.
            result = make()
            self._changed() if method == "finish_weight_update" else self._mix()
            return result
        if method in KEEPS_WEIGHTS:
            result = make()
            if method == "update_config":
                self._configure(*args, **kwargs)
            return result
        try:
            return make()
        finally:
            log.warning(
                "%s was called in vLLM's workers, and p2pkv does not know it, so it counts as a change of "
                "weights: P and D exchange KV after equally many changes, or once /update_weight_version has "
                "given both the same name",
                method if isinstance(method, str) else getattr(method, "__name__", "a function"),
            )
            self._changed()

    def version(self, name: str) -> None:
        """vLLM's weight version is `name` from now on. A name that is repeated changes nothing."""
        if len(name) > LONGEST_NAME:
            name = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        if self._named != f"version {name}":
            self.changes += 1
            self._named, self._count = f"version {name}", 0

    def sleeps(self, level: int) -> None:
        """vLLM goes to sleep; from level 2 on it discards the weights."""
        self._discards |= level >= 2

    def wakes(self, tags: Iterable[str] | None) -> None:
        """vLLM wakes up; weights that it had discarded have to be loaded again."""
        if self._discards and (tags is None or "weights" in tags):
            self._discards = False
            self._mix()

    def _mix(self) -> None:
        self.changes += 1
        self._mixed = self._mixed or f"unfinished {uuid.uuid4().hex[:12]}"

    def _changed(self, name: str = "") -> None:
        self.changes += 1
        self._mixed = ""
        self._named, self._count = (name, 0) if name else (self._named, self._count + 1)

    def _configure(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """vLLM's workers will load from elsewhere."""
        model, load = overrides.get("model_config", {}), overrides.get("load_config", {})
        self._model = str(model.get("model", self._model[0])), model.get("revision", self._model[1])
        self._load = str(load.get("load_format", self._load[0])), load.get("download_dir", self._load[1])

    def _reload(self, given: Mapping[str, Any], make: Callable[[], _T]) -> _T:
        """The weights come from files again, or from wherever the caller has them."""
        if path := given.get("weights_path"):
            self._model = str(path), None
        local = given.get("weights_iterator") is None
        before = stamps(weight_files(*self._model, *self._load)) if local else ()
        try:
            result = make()
        except BaseException:
            self._mix()
            raise
        # Files that were written meanwhile may not be those that vLLM has read.
        files = weight_files(*self._model, *self._load)
        known = before and stamps(files) == before
        self._changed(f"files {weights_in_files(files)}" if known else "")
        return result


def other_weights(theirs: str | None, mine: str) -> str:
    """Why D does not load what P has computed with other weights."""
    return (
        f"P computed this prompt with weights '{theirs or 'start'}', and D has '{mine or 'start'}': update "
        "both in the same way, or give both the same name with /update_weight_version"
    )


def forget_prefixes(manager: "KVCacheManager", requests: "Iterable[Request]") -> None:
    """Empty vLLM's prefix cache, also of blocks that are in use. What `requests` compute from now on rests on
    what they have computed before, so it is never found there; the requests themselves go on."""
    for request in requests:
        if request.num_computed_tokens:
            # Hashes of later blocks are made from these, or from the salt where there is none yet.
            request.cache_salt = uuid.uuid4().hex
            request.block_hashes[:] = [type(each)(os.urandom(len(each))) for each in request.block_hashes]
    for pool in dict.fromkeys(each.block_pool for each in manager.coordinator.single_type_managers):
        pool.evict_blocks(set(range(len(pool.blocks))))
