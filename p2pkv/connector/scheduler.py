"""The connector in vLLM's scheduler: the orders of each step to the workers, and the answers to vLLM.

On P: which prompts are computed for whom, and when their blocks may go. On D: which requests wait for a P,
and how many of their tokens come from it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from p2pkv.connector.held_blocks import BlockQuota, HeldBlocks
from p2pkv.connector.identity import Paired, Pairs, prompt_digest
from p2pkv.connector.metadata import EndedRequest, PrefillStep, StepMetadata, WorkerMetadata
from p2pkv.connector.recurrent import state_entry
from p2pkv.connector.weights import other_weights
from p2pkv.engine.commands import Blocks, Expect, HoldPrompt, Invalidate, Load, OfferPrompt, PromptBlocks
from p2pkv.first_token import FirstToken, found
from p2pkv.log import RateLimit

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger("p2pkv")


@dataclass(frozen=True)
class BlockTables:
    """How vLLM's tables of a request's blocks are read, and which tokens of a prompt P and D compute."""

    sizes: tuple[int, ...]
    """Tokens in a block, of each table; 0: a ring's, of which no token has a block of its own."""
    states: Mapping[int, Any] = field(default_factory=dict)
    """vLLM's description of the layers of each table of recurrent layers or rings."""
    tail: int = 1
    """The last tokens of a prompt, which D computes in any case; see `prompt_tail`."""
    p_computes_last: bool = True
    """Whether P computes these, too; see `computes_last_token`."""
    replayed: Mapping[int, int] = field(default_factory=dict)
    """By table: `replayed_window`, where vLLM computes windows again behind a cached prefix."""

    @property
    def left_out(self) -> int:
        """The last tokens of a prompt that P does not compute."""
        return 0 if self.p_computes_last else self.tail

    def of(self, blocks: Iterable[Iterable[int]], tokens: int) -> Blocks:
        """The tables as the engine wants them: of a state the block that holds it after so many tokens."""
        tables = [list(table) for table in blocks]
        for number, spec in self.states.items():
            entry = state_entry(spec, tokens)
            tables[number] = tables[number][entry : entry + 1]
        return tuple(tables)

    def of_tokens(self, tables: Iterable[list[int]]) -> list[tuple[int, list[int]]]:
        """Each table that has blocks of tokens, and how many a block has."""
        return [(size, table) for size, table in zip(self.sizes, tables, strict=False) if size]


class ConnectorScheduler:
    """The scheduler side of the connector, as P or as D."""

    def __init__(self, pairs: Pairs, tables: BlockTables, quota: BlockQuota | None) -> None:
        """`quota`: for the blocks of this role's requests that wait for another instance; None: no bound."""
        self._pairs = pairs
        self._tables = tables
        self._quota = quota or BlockQuota()
        self._next = StepMetadata()
        self._generation = ""

    def _take_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers are to do from this step on."""
        meta, self._next = self._next, StepMetadata()
        meta.work = output.total_num_scheduled_tokens > 0
        return meta


# P.

TOO_LONG_SECONDS = 60.0
"""Between two log lines about prompts that are too long to be moved."""

CHANGED_ON_P = "P's weights have changed, or its caches were reset, since it began to compute this prompt"

ENDED_WITH_ITS_FIRST = "the answer has ended with its first token, which P has computed"
UNASKED = "the router says that no D will ask for it"

STOPPED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION)
"""How requests end whose answer is complete, and not cut off at the bound that a router has set."""

COMPLETED = (*STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""How requests end of which vLLM has taken the results."""


@dataclass
class _Prompt:
    request: Request
    paired: Paired
    digest: bytes
    handed_on: bool = False
    """P's token of it goes to the client."""
    filling: bool = False
    """It has blocks, and no step yet: another connector loads into them, and vLLM waits for that alone."""
    offered: bool = False
    announced: int = 0
    """Tokens of the prompt that the workers know to be in the blocks, or to be computed this step."""
    unannounced: tuple[list[int], ...] | None = None
    """The block table of what was computed on tokens that another connector may have failed to load."""
    stale: str = ""
    """Why what was computed of it, with former weights, is not sent any more."""


class ProducerScheduler(ConnectorScheduler):
    """P's scheduler side. A transfer key is in use from its request's arrival until the workers report it."""

    def __init__(
        self, pairs: Pairs, tables: BlockTables, held: HeldBlocks, batches: int, quota: BlockQuota | None
    ) -> None:
        """`batches`: the most steps that vLLM has under way at once."""
        super().__init__(pairs, tables, quota)
        self._held = held
        self._looked_up: dict[str, tuple[Request, int]] = {}
        """Requests that vLLM has looked up for the next step: how many tokens its prefix cache has."""
        self._filled: deque[set[int]] = deque(maxlen=batches)
        """Blocks that another connector fills, of each of the last steps, whose results may not be known."""
        self._prompts: dict[str, _Prompt] = {}
        self._taken: set[str] = set()
        self._duplicates: dict[str, _Prompt] = {}
        """Requests of the prompt of another one that pushes it; they do so only if that is aborted."""
        self._ended: dict[str, str] = {}
        self._unawaited: set[str] = set()
        """Those of the ended ones whose blocks vLLM frees without a report."""

    def invalidate(self, generation: str) -> None:
        """The weights have changed, or the caches were reset: send nothing of what was computed before."""
        self._generation = generation
        for prompt in self._prompts.values():
            if prompt.offered and not prompt.stale:
                prompt.stale = CHANGED_ON_P
                self._next.stale.append((prompt.paired.key, prompt.stale))
        for prompt in self._duplicates.values():
            if prompt.request.num_computed_tokens:
                prompt.stale = CHANGED_ON_P
        self._next.stale += [(key, CHANGED_ON_P) for key in self._ended.values()]

    def new(self, request: Request) -> None:
        paired = self._pairs.of(request)
        if paired is None or paired.side != "P":
            return
        said = found(request.kv_transfer_params)
        if said is FirstToken.WHOLE:
            return
        if said is FirstToken.RELEASED:
            if paired.key in self._ended.values():
                self._next.released.append((paired.key, UNASKED))
            return
        prompt = _Prompt(request, paired, prompt_digest(request), handed_on=said is FirstToken.HANDED_ON)
        if self._tables.left_out:
            leave_out_last(request, self._tables.left_out)
        # Some routers leave `n` on P: its first child pushes, the others would push the same again. And a
        # router that lost its connection asks again, while the first one may be running still.
        if paired.key in self._taken:
            self._duplicates[request.request_id] = prompt
            return
        self._taken.add(paired.key)
        self._prompts[request.request_id] = prompt
        named = paired.prefill if paired.prefill != self._pairs.mine else None
        self._next.holds.append(HoldPrompt(paired.key, paired.decode, named))
        if not self._quota.ever_admits(request.num_prompt_tokens):
            prompt.stale = (
                f"the prompt has {request.num_prompt_tokens} tokens, which take more than the "
                f"{self._quota.limit:g} KV blocks that P, an instance of both roles, has for others' prompts"
            )
            self._next.stale.append((paired.key, prompt.stale))

    def matched(self, request: Request, local: int) -> bool:
        """vLLM finds `local` tokens in its prefix cache, and would schedule the request; whether it may.

        What else vLLM counts as computed when it schedules the request in this very step, another connector
        of a MultiConnector loads during the step.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and not (prompt.offered or prompt.stale):  # its blocks will wait for its D
            name, tokens = request.request_id, request.num_prompt_tokens
            if self._held.full(prompt.paired.decode):
                self._quota.leave(name)  # others need not wait behind it
                return False
            if not self._quota.admits(name, tokens, other_blocks=self._held.all):
                return False
        self._looked_up[request.request_id] = request, local
        return True

    def allocated(self, request: Request) -> None:
        if prompt := self._prompts.get(request.request_id):
            prompt.filling = True
            self._quota.enter(request.request_id, request.num_prompt_tokens)

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """This step's orders to the workers. Called before vLLM advances the computed tokens."""
        meta = self._take_metadata(output)
        self._note_loads(output)
        for request_id in output.preempted_req_ids or ():
            if prompt := self._prompts.get(request_id):
                prompt.unannounced = None
                if prompt.announced:
                    prompt.announced = 0
                    meta.revoked.append(prompt.paired.key)
        fresh = cache(partial(self._fresh, output))  # once, and only if it is needed
        for request_id in output.num_scheduled_tokens:
            if (prompt := self._prompts.get(request_id)) is None:
                continue
            prompt.filling = False
            if not prompt.stale and prompt.announced < prompt.request.num_prompt_tokens:
                self._prefill(meta, prompt, output, fresh)
        return meta

    def _prefill(
        self, meta: StepMetadata, prompt: _Prompt, output: SchedulerOutput, fresh: Callable[[], set[int]]
    ) -> None:
        request, key, tokens = prompt.request, prompt.paired.key, prompt.request.num_prompt_tokens
        if not prompt.offered:
            prompt.offered = True
            offer = OfferPrompt(key, prompt.paired.decode, tokens, prompt.digest, self._generation)
            meta.offers.append(offer)
        state = output.kv_connector_block_state
        blocks = state.get_block_ids(request.request_id) if state is not None else None
        assert blocks is not None
        if any(not filled.isdisjoint(table) for filled in self._filled for table in blocks):
            # That load may fail, and what D has got cannot be taken back.
            prompt.unannounced = blocks
            return
        prompt.unannounced = None
        # After a preemption even tokens of the answer may be cached.
        start = min(request.num_computed_tokens, tokens)
        stop = min(request.num_computed_tokens + output.num_scheduled_tokens[request.request_id], tokens)
        cached = self._settled(fresh(), blocks, start) if start > prompt.announced else 0
        prompt.announced = stop
        table = PromptBlocks(key, self._tables.of(blocks, stop))
        meta.prefills.append(PrefillStep(table, cached, start, stop))
        meta.quiet = prompt.handed_on and (meta.quiet or len(meta.prefills) == 1)

    def _note_loads(self, output: SchedulerOutput) -> None:
        """Keep in mind which blocks another connector fills during this step."""
        state, filled = output.kv_connector_block_state, set[int]()
        for request_id, (request, local) in self._looked_up.items():
            stop, stats = request.num_computed_tokens, request.prefill_stats
            if stats is not None and not request.num_preemptions:
                local = stats.num_local_cached_tokens  # with what is cached of a further block
            if state is not None and request_id in output.num_scheduled_tokens and stop > local:
                tables = state.get_block_ids(request_id) or ()
                for size, table in self._tables.of_tokens(tables):
                    filled.update(table[local // size : -(-stop // size)])
        self._looked_up.clear()
        # The steps are reported to vLLM in their order, and it has no more than so many under way.
        self._filled.append(filled)

    def _settled(self, fresh: set[int], blocks: tuple[list[int], ...], cached: int) -> int:
        """How many of the cached tokens were computed before this step, which writes the `fresh` blocks.

        vLLM also counts as cached what another request of this very step is about to compute; those
        tokens come with each layer's hook.
        """
        for size, group in self._tables.of_tokens(blocks):
            number = next((index for index, block in enumerate(group) if block in fresh), len(group))
            cached = min(cached, number * size)
        return cached

    def _fresh(self, output: SchedulerOutput) -> set[int]:
        """The blocks that this step writes."""
        state, old = output.kv_connector_block_state, output.scheduled_cached_reqs
        assert state is not None
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        fresh: set[int] = set()
        for request_id, start in starts.items():
            for size, group in self._tables.of_tokens(state.get_block_ids(request_id) or ()):
                fresh.update(group[start // size :])
        return fresh

    @property
    def busy(self) -> bool:
        """Whether a prompt is queued, is computed, or has blocks that are still held."""
        return bool(self._prompts or self._ended)

    @property
    def awaits_workers(self) -> bool:
        """Whether blocks wait until the workers report that they are free."""
        return bool(self._ended)

    def finished(self, request: Request, blocks: Iterable[Iterable[int]]) -> bool:
        """The request has ended; whether its blocks must wait until the workers report them free."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            self._duplicates.pop(request.request_id, None)
            return False
        self._quota.leave(request.request_id)
        key = prompt.paired.key
        if prompt.unannounced is not None and not prompt.stale and request.status in COMPLETED:
            # vLLM has taken the results of the step in which another connector loaded a part of the prompt.
            tokens = prompt.announced = request.num_prompt_tokens
            table = PromptBlocks(key, self._tables.of(prompt.unannounced, tokens))
            self._next.prefills.append(PrefillStep(table, tokens, tokens, tokens))
        taken_over = not prompt.stale and prompt.announced < request.num_prompt_tokens
        if taken_over and (other := self._next_duplicate(prompt)):
            # As after a preemption: the same prompt, with other blocks.
            if prompt.announced:
                self._next.revoked.append(key)
            other.offered = prompt.offered
            self._prompts[other.request.request_id] = other
            if prompt.offered:
                self._quota.enter(other.request.request_id, other.request.num_prompt_tokens)
            return False
        if prompt.announced and not request.num_computed_tokens:
            # Preempted since the last step, so its blocks are gone already.
            prompt.announced = 0
            self._next.revoked.append(key)
        whole = prompt.announced >= request.num_prompt_tokens
        reason = prompt.stale or ("" if whole else "P's request was aborted before its prefill ended")
        self._ended[request.request_id] = key
        if prompt.filling:
            self._unawaited.add(request.request_id)
        self._held.hold(request.request_id, prompt.paired.decode, () if prompt.filling else blocks)
        self._next.sent.append(EndedRequest(request.request_id, key, reason))
        if prompt.handed_on and request.status in STOPPED:
            self._next.released.append((key, ENDED_WITH_ITS_FIRST))
        return not prompt.filling

    def _next_duplicate(self, prompt: _Prompt) -> _Prompt | None:
        """The duplicate that pushes in place of this prompt, whose request was aborted, or None."""
        for request_id, duplicate in self._duplicates.items():
            same = duplicate.paired.key == prompt.paired.key and duplicate.digest == prompt.digest
            if same and not duplicate.stale:
                return self._duplicates.pop(request_id)
        return None

    def reported(self, sent: set[str]) -> set[str]:
        """The workers have reported these requests: their keys may be used again. Returns those of them for
        which vLLM waits."""
        for request_id in sent:
            if key := self._ended.pop(request_id, None):
                self._taken.discard(key)
                self._held.free(request_id)
        awaited = sent - self._unawaited
        self._unawaited -= sent
        return awaited


def leave_out_last(request: Request, tokens: int) -> None:
    """Let vLLM compute the prompt without its last tokens, and then one token that is not used."""
    if request.num_prompt_tokens <= tokens:
        return
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-tokens]  # children of n may share the list
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-tokens]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1


# D.

CHANGED_ON_D = "D's weights changed, or its caches were reset, while this prompt's KV was on its way"


class LoadState(Enum):
    WAITING = auto()  # for P to begin
    LOADING = auto()  # vLLM has given it blocks and waits for the load's end
    SETTLED = auto()  # nothing more is to be loaded


@dataclass
class PendingLoad:
    """A request on D whose KV is to come from P, from its arrival until it has ended."""

    request: Request
    paired: Paired
    handed_on: bool = False
    """The prompt ends with P's token, so P has begun it, whatever the ranks have heard."""
    state: LoadState = LoadState.WAITING
    local: int = 0
    """Tokens in D's own prefix cache when vLLM last asked."""
    begun: list[str | None] = field(default_factory=list)
    """For each rank that P has offered it to, the offer's generation; see `commands.Begun`."""
    failure: str = ""
    """Why nothing comes from P; see `ConsumerScheduler.fail`."""
    stale: bool = False
    """The load began before D's weights changed, so that it has to end as failed."""
    number: int = 0
    """The load's number, as in `commands.Load`."""
    prompt: tuple[int, bytes] = 0, b""
    """Its tokens and their digest, as in `Expect`."""
    kept: bool = False
    """All ranks have its KV, so the step that computes the rest can load it."""


class ConsumerScheduler(ConnectorScheduler):
    """D's scheduler side. A transfer key is in use from its first request's arrival until that has ended."""

    def __init__(
        self,
        pairs: Pairs,
        world: int,
        recompute: bool,
        tables: BlockTables,
        quota: BlockQuota | None = None,
        keep_seconds: float = 0.0,
    ) -> None:
        """Each of `world` ranks must have P's offer. `recompute`: a failed load is computed here instead.
        `keep_seconds`: for so long the ranks do not let go of what waits for its request."""
        super().__init__(pairs, tables, quota)
        self._too_long = RateLimit(seconds=TOO_LONG_SECONDS)
        self._world = world
        self._recompute = recompute
        self.pending_loads: dict[str, PendingLoad] = {}
        """The first request of each key, by request id."""
        self._owners: dict[str, str] = {}
        self._siblings: dict[str, str] = {}
        """The key of each further child of n, which waits until the first is settled."""
        self._children: dict[str, set[str]] = {}
        """The same, by key: a retry with this key may come between the first child's end and theirs."""
        self.undecided: set[str] = set()
        """Ids of the requests for which the answer to `matched` was, and still is, "ask again"."""
        self.decided: Callable[[set[str]], None] = lambda request_ids: None
        """Called with ids that are undecided no more."""
        self._decided_now: set[str] = set()
        """What a pass of vLLM's scheduler decides: until the pass ends the head of its queue must stay."""
        self.resumes = False
        """Whether the last pass has put requests back into vLLM's queue, and the next one follows at once."""
        self._numbers = count(1)
        # vLLM's report of blocks that are no good knows one group only.
        plain = len(tables.sizes) == 1 and not (tables.states or tables.replayed or tables.left_out)
        self._keep_seconds = keep_seconds if plain else 0.0
        self._kept: dict[str, tuple[float, int, bytes]] = {}
        """What waits here for its request, by key: since when, tokens, digest."""
        self._known_early: set[str] = set()
        """Loads that vLLM knows to have ended, before a step's result has reported them."""

    def invalidate(self, generation: str) -> None:
        """The weights have changed, or the caches were reset: load nothing more of what is on its way."""
        self._generation = generation
        self._next.invalidate = Invalidate(generation, CHANGED_ON_D)
        self._kept.clear()
        for request_id, pending in self.pending_loads.items():
            pending.kept = False
            if pending.state is LoadState.LOADING and not pending.stale:
                pending.stale = True
                self._next.drops.append(EndedRequest(request_id, pending.paired.key, CHANGED_ON_D))
        self._decide(self.undecided.copy())

    def new(self, request: Request) -> None:
        paired = self._pairs.of(request)
        if paired is None or paired.side != "D":
            return
        if paired.key in self._owners:
            self._siblings[request.request_id] = paired.key
            self._children.setdefault(paired.key, set()).add(request.request_id)
            return
        self._owners[paired.key] = request.request_id
        handed_on = found(request.kv_transfer_params) is FirstToken.IN_PROMPT
        pending = self.pending_loads[request.request_id] = PendingLoad(request, paired, handed_on)
        more = int(handed_on)
        tokens = request.num_prompt_tokens - more
        tokens -= self._tables.left_out if tokens > self._tables.left_out else 0
        expect = Expect(paired.key, paired.prefill, tokens, prompt_digest(request, without=more))
        self._next.expects.append((request.request_id, expect))
        pending.prompt = expect.tokens, expect.digest

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens beyond the `local` ones that P computes for us; None: ask again."""
        pending = self.pending_loads.get(request.request_id)
        if pending is None and self.is_loaded(request.request_id):
            # A further child of n waits until the first has loaded, and then takes the prefix cache.
            self.undecided.add(request.request_id)
            return None, False
        if pending is None:
            return 0, False
        pending.local, external = local, request.num_prompt_tokens - self._tables.tail - local
        # A load begins behind what is cached here, so a shorter one would not bring the whole window.
        least = max(1, max(self._tables.replayed.values(), default=0) if local else 0)
        if pending.state is not LoadState.WAITING or external < least or self._is_too_long(request):
            return 0, False
        if self._failure(pending):
            # Under `fail`, vLLM fails a request only for a load that it has seen begin.
            return (0, False) if self._recompute else (external, True)
        since, *same = self._kept.pop(pending.paired.key, (-math.inf,))
        fresh = time.monotonic() - since < self._keep_seconds
        pending.kept = pending.kept or (fresh and same == [*pending.prompt])
        begun = pending.handed_on or pending.kept or len(pending.begun) >= self._world
        if begun and self._quota.admits(request.request_id, request.num_prompt_tokens):
            return external, not pending.kept
        self.undecided.add(request.request_id)
        return None, False

    def kept(self, key: str, tokens: int, digest: bytes, now: float) -> None:
        """All ranks have this prompt, whose request is still to come."""
        while self._kept and now - (oldest := next(iter(self._kept.items())))[1][0] > self._keep_seconds:
            del self._kept[oldest[0]]
        self._kept.pop(key, None)
        self._kept[key] = now, tokens, digest

    def _is_too_long(self, request: Request) -> bool:
        """Whether it is computed here, because a load would take more blocks than all loads may."""
        if self._quota.ever_admits(request.num_prompt_tokens):
            return False
        if self._too_long.admits():
            log.warning(
                f"a prompt of {request.num_prompt_tokens} tokens is computed here and not loaded: it takes "
                f"more than the {self._quota.limit:g} KV blocks that an instance of both roles has for "
                "loads; logged once a minute"
            )
        return True

    def _failure(self, pending: PendingLoad) -> str:
        """Why nothing can be loaded for this request; "" if nothing is known against it."""
        others = {*pending.begun} - {None, self._generation}
        return pending.failure or (other_weights(others.pop(), self._generation) if others else "")

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has admitted the request: order the load, once."""
        self.undecided.discard(request.request_id)  # with prompt_logprobs vLLM does not ask again
        pending = self.pending_loads.get(request.request_id)
        if pending is None or pending.state is not LoadState.WAITING:
            return
        key, rest = pending.paired.key, request.num_prompt_tokens - self._tables.tail
        failure = self._failure(pending) if pending.local < rest else ""
        if external <= 0:
            pending.state = LoadState.SETTLED
            self._quota.leave(request.request_id)
            self._decided_now.update(self._quota.next_waiting, self._children.get(key, ()))
            if failure:
                self._next.drops.append(EndedRequest(request.request_id, key, failure, report=False))
            else:
                self._next.loads.append((request.request_id, Load(key, 0, 0, ())))
            return
        pending.state = LoadState.LOADING
        self._quota.enter(request.request_id, request.num_prompt_tokens)
        self._decided_now.update(self._quota.next_waiting)
        if self._tables.left_out and pending.local + external != rest:
            failure = failure or "vLLM asks for a part of the prompt, and this model's KV only loads whole"
        if failure:
            # Some ranks have not failed, and P may not even have begun for them: nothing is asked for.
            self._next.drops.append(EndedRequest(request.request_id, key, failure))
            return
        stop = pending.local + external
        pending.number = next(self._numbers)
        tables = self._tables.of(blocks.get_block_ids(), stop)
        load = Load(key, pending.local, stop, tables, number=pending.number)
        self._next.loads.append((request.request_id, load))
        if pending.kept:
            pending.state = LoadState.SETTLED
            self._next.now[key] = tables[0][pending.local // self._tables.sizes[0] :]
            self._decided_now.update(self._children.get(key, ()))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        meta = self._take_metadata(output)
        # A loaded request keeps its blocks until it runs: from then on vLLM may take them from it.
        for request_id in output.num_scheduled_tokens.keys() & self._quota.admitted:
            self._quota.leave(request_id)
            self._decided_now.update(self._quota.next_waiting)
        self.resumes = not self.undecided.isdisjoint(self._decided_now)
        self._decide(self._decided_now)
        self._decided_now.clear()
        return meta

    @property
    def busy(self) -> bool:
        """Whether a request that a P prefills has not ended."""
        return bool(self.pending_loads)

    def is_loaded(self, request_id: str) -> bool:
        """Whether the KV of this request's prompt is to come from a P."""
        pending = self.pending_loads.get(self._owners.get(self._siblings.get(request_id, ""), request_id))
        return pending is not None and pending.state is not LoadState.SETTLED

    @property
    def loads(self) -> bool:
        """Whether KV may still be written into blocks of a request."""
        return any(pending.state is LoadState.LOADING for pending in self.pending_loads.values())

    @property
    def awaits_workers(self) -> bool:
        """Whether a request waits for P, or for its KV."""
        return any(pending.state is not LoadState.SETTLED for pending in self.pending_loads.values())

    def loading(self, number: int) -> str | None:
        """The request whose load has this number, if its KV is wanted and its end is not known yet."""
        for request_id, pending in self.pending_loads.items():
            if pending.number == number:
                return request_id if pending.state is LoadState.LOADING and not pending.stale else None
        return None

    def reported(
        self, metadata: WorkerMetadata | None, received: set[str], failed: Container[str], early: bool
    ) -> set[str]:
        """What the workers report; `received`: loads that have ended, of which some `failed`; `early`: they
        will report these once more.

        Returns those of `received` that are not reported to vLLM now: it knows them already, or their KV is
        not valid any more, so that the workers will report them again, as failed.
        """
        known = set() if early else self._known_early & received
        self._known_early ^= received if early else known
        withheld: set[str] = set()
        decided: list[str] = []
        for request_id in received - known:
            if pending := self.pending_loads.get(request_id):
                if pending.stale and request_id not in failed:
                    log.warning("the KV of %s is not used: %s", pending.paired.key, CHANGED_ON_D)
                    withheld.add(request_id)
                else:
                    pending.state = LoadState.SETTLED
                    decided += self._children.get(pending.paired.key, ())
        self._next.withheld += withheld
        if metadata is not None:
            for request_id, offered in metadata.begun.items():
                if pending := self.pending_loads.get(request_id):
                    pending.begun += offered
                    if len(pending.begun) >= self._world or self._failure(pending):
                        decided.append(request_id)
            for request_id, reason in metadata.failed.items():
                self.fail(request_id, reason)
        self._decide(decided)
        return withheld | known

    def fail(self, request_id: str, reason: str) -> None:
        """Nothing comes from P for this request, if it is known; vLLM learns that in its next pass."""
        if pending := self.pending_loads.get(request_id):
            pending.failure = reason
            self._decide([request_id])

    def _decide(self, request_ids: Iterable[str]) -> None:
        """The answer to `matched` has changed for these: have vLLM ask again for those that are undecided."""
        if decided := self.undecided.intersection(request_ids):
            self.undecided -= decided
            self.decided(decided)

    def finished(self, request: Request) -> None:
        """The request has ended, whatever its state. vLLM keeps the blocks of an aborted load itself."""
        if key := self._siblings.pop(request.request_id, None):
            self._children[key].remove(request.request_id)
            if not self._children[key]:
                del self._children[key]
        self.undecided.discard(request.request_id)
        pending = self.pending_loads.pop(request.request_id, None)
        if pending is None:
            return
        self._quota.leave(request.request_id)
        self._decide([*self._quota.next_waiting, *self._children.get(pending.paired.key, ())])
        self._owners.pop(pending.paired.key, None)
        self._kept.pop(pending.paired.key, None)  # the ranks have let go of it
        if pending.state is not LoadState.SETTLED:
            loading, reason = pending.state is LoadState.LOADING, "D's request has ended"
            ended = EndedRequest(request.request_id, pending.paired.key, reason, report=loading)
            self._next.drops.append(ended)
