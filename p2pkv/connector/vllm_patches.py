"""Everything of vLLM that p2pkv replaces: why, in which vLLM, and how to switch it off.

A `Patch` puts p2pkv's functions in the place of vLLM's, once in a process, and only where vLLM's functions
look as p2pkv knows them. It is also the holder of whatever those functions need in this process. The option
`skip_patches` names patches that are not to be installed. docs/compatibility.md has a table of all of them,
and tests/connector/test_vllm_patches.py compares it with `PATCHES`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import queue
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import RequestStatus

from p2pkv.config import PatchName
from p2pkv.connector import idle_steps
from p2pkv.connector.core_beats import pass_credentials
from p2pkv.connector.deferring_queue import DeferringQueue
from p2pkv.connector.metadata import EarlyLoad, StepMetadata
from p2pkv.connector.scheduler import ConsumerScheduler
from p2pkv.plugin import doubt, vllm_version

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from p2pkv.connector.weights import Generation

log = logging.getLogger("p2pkv")

Original = Callable[..., Any]
"""A function of vLLM."""

_ENGINE_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_TEXT = "vllm.v1.engine.detokenizer"

MAX_PARTIAL = 1024
"""Messages kept that some ranks have sent and others have not yet."""


@dataclass(frozen=True)
class Function:
    """A function of vLLM, and how it must look for p2pkv to know it."""

    module: str
    """Where it is, as "vllm.v1.engine.core"."""
    name: str
    """In that module, as "EngineCore.sleep"."""
    parameters: tuple[str, ...] = ()
    """Their names; empty: any."""
    mentions: Set[str] = frozenset()
    """Names that its code must use."""
    only_if: str = ""
    """A flag of the module without which there is no such function; "": there is always one."""

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    def holder(self) -> Any:
        """The class or module that has it. Raises ImportError or AttributeError where this vLLM has none."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split(".")[:-1]:
            found = getattr(found, part)
        return found

    def absent(self) -> bool:
        return bool(self.only_if) and not getattr(importlib.import_module(self.module), self.only_if, False)

    def misfit(self) -> str:
        """How this vLLM's function differs from the one that p2pkv knows; "" if it does not."""
        if self.absent():
            return ""
        try:
            function = vars(self.holder()).get(self.last_name)
        except (ImportError, AttributeError):
            function = None
        if self.only_if:  # it may be compiled, and then it cannot be looked at
            return "" if callable(function) else f"this vLLM has no {self.name}"
        expected = ", ".join(name for name in self.parameters if name != "self")
        if not inspect.isfunction(function) or (
            self.parameters and tuple(inspect.signature(function).parameters) != self.parameters
        ):
            return f"this vLLM has no {self.name}({expected})"
        if not self.mentions <= set(inspect.unwrap(function).__code__.co_names):
            return f"this vLLM's {self.name} works in a way that p2pkv does not know"
        return ""


class Patch:
    """Functions of vLLM that p2pkv replaces together, and what the replacements need in this process.

    For each function `f` of `replaced` there is a method `instead_of_f` (without leading underscores), which
    is called in its place, with vLLM's function before the arguments.
    """

    name: ClassVar[PatchName]
    """As in the option `skip_patches`."""
    replaced: ClassVar[tuple[Function, ...]]
    required: ClassVar[tuple[Function, ...]] = ()
    """Functions that are not replaced, but must look so for the replacements to be right."""
    without: ClassVar[str]
    """What happens without this patch, for the log; "": nothing that must be logged."""
    level: ClassVar[int] = logging.INFO
    """The level of that line in the log."""
    any_version: ClassVar[bool] = False
    """Whether it fits any vLLM whose functions look as expected, and not only those tested with p2pkv."""

    installed = False

    def install(self, skipped: Container[str] = ()) -> str:
        """Install it, once in a process, unless `skipped` has its name. Returns (and logs) why not, or ""."""
        if self.installed:
            return ""
        if reason := self._reason_against(skipped):
            if self.without:
                log.log(self.level, "%s: %s", self.without, reason)
            return reason
        self.installed = True
        for function in self.replaced:
            if not function.absent():
                self._replace(function)
        return ""

    def _reason_against(self, skipped: Container[str]) -> str:
        if self.name in skipped:
            return f"the option skip_patches names {self.name}"
        installed = vllm_version() or "of unknown version"
        if not self.any_version and doubt(installed):
            return f"p2pkv changes only a vLLM that it is tested with, and this one is {installed}"
        return next(filter(None, (each.misfit() for each in (*self.replaced, *self.required))), "")

    def _replace(self, function: Function) -> None:
        holder = function.holder()
        original = getattr(holder, function.last_name)
        method = getattr(self, f"instead_of_{function.last_name.lstrip('_')}")

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(holder, function.last_name, wraps(original)(replacement))


class WeightWatch(Patch):
    """Reports to the connector all that may change the weights, since vLLM has no hook for that.

    All ways to change them (`/update_weights`, `reload_weights`, `/collective_rpc`, `LLM.apply_model`) end in
    `EngineCore.collective_rpc`. The workers carry it out after the steps that were scheduled before it, and
    before those that are scheduled after it. The option `watch_weights` switches it off, too.
    """

    name = "weights"
    replaced = tuple(
        Function(_ENGINE_CORE, f"EngineCore.{name}", parameters)
        for name, parameters in (
            ("collective_rpc", ("self", "method", "timeout", "args", "kwargs")),
            ("set_weight_version", ("self", "weight_version")),
            ("sleep", ("self", "level", "mode")),
            ("wake_up", ("self", "tags")),
        )
    )
    without = (
        "p2pkv does not notice if the weights change while this instance runs, so restart P and D after each "
        "change"
    )
    level = logging.WARNING
    # A change that goes unnoticed makes answers wrong, and all arguments of these methods are known.
    any_version = True

    def instead_of_collective_rpc(
        self,
        original: Original,
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        make = partial(original, core, method, timeout, args, kwargs)
        with _watching(core) as generation:
            return make() if generation is None else generation.call(method, args, kwargs or {}, make)

    def instead_of_set_weight_version(self, original: Original, core: Any, weight_version: Any) -> Any:
        with _watching(core, lambda generation: generation.version(str(weight_version))):
            return original(core, weight_version)

    def instead_of_sleep(self, original: Original, core: Any, level: int = 1, mode: str = "abort") -> Any:
        with _watching(core, lambda generation: generation.sleeps(level)):
            return original(core, level, mode)

    def instead_of_wake_up(self, original: Original, core: Any, tags: list[str] | None = None) -> Any:
        with _watching(core, lambda generation: generation.wakes(tags)):
            return original(core, tags)


@contextmanager
def _watching(
    core: Any, note: Callable[[Generation], None] = lambda generation: None
) -> Iterator[Generation | None]:
    """The generation of this engine core's weights, which `note` may change; None without p2pkv.

    If it changes meanwhile, all connectors empty their caches, also those beside p2pkv in a MultiConnector.
    """
    scheduler = getattr(core, "scheduler", None)
    connector: Any = scheduler.get_kv_connector() if scheduler is not None else None
    parts = getattr(connector, "_connectors", (connector,))
    generation = next((each.generation for each in parts if getattr(each, "watches", False)), None)
    if scheduler is None or generation is None:
        yield None
        return
    before = generation.changes
    try:
        note(generation)
        yield generation
    finally:
        if generation.changes > before and not scheduler.reset_connector_cache():
            log.warning(
                "the weights have changed, and a connector beside p2pkv has not emptied its cache: KV of "
                "former weights may come from it; call /reset_prefix_cache?reset_external=true until it "
                "succeeds"
            )


class EngineCore(Patch):
    """Knows the engine core of this process, and lets it sleep between two idle steps (`idle_steps`).

    vLLM calls `_process_input_queue` before each step. Where `sleeps_when_idle`, that call waits first for up
    to `seconds`, as vLLM itself does when no request is there at all: for the next item of the input queue.
    That is a request, an abort, vLLM's own wake-up at its shutdown, or the same wake-up because a worker's
    `WakeupSender` has sent one. Without it vLLM sleeps for a millisecond and steps again. The option
    `idle_wait_ms` 0 ends these sleeps, too.

    A wake-up may also say that a rank has all of a load. When all ranks have, vLLM's scheduler learns of it
    here, before its next pass, and not by the result of a step that computes nothing.

    The beats by which the ranks see how their engine core gets on (`core_beats`) need `core`.
    """

    name = "engine_core"
    replaced = (
        Function(
            _ENGINE_CORE,
            "EngineCoreProc._process_input_queue",
            ("self",),
            {"has_work", "is_running", "input_queue", "_handle_client_request"},
        ),
        Function(
            _ENGINE_CORE,
            "EngineCoreProc._process_engine_step",
            ("self",),
            {"step_fn", "output_queue", "put_nowait", "post_step", "scheduler", "has_requests", "sleep"},
        ),
    )
    required = (
        Function(_ENGINE_CORE, "EngineCoreProc._handle_client_request", mentions={"WAKEUP"}),
        Function(
            _SCHEDULER,
            "Scheduler._update_from_kv_xfer_finished",
            ("self", "kv_connector_output"),
            {"update_connector_output", "finished_recving", "finished_recving_kv_req_ids"},
        ),
    )
    without = (
        "vLLM's engine core steps while it has nothing to compute, and its ranks do not learn that it is "
        "paused"
    )

    sleeps_when_idle = False
    seconds = 0.0
    """How long to sleep before the next step; used up by that sleep."""
    address = ""
    """Where wake-ups are sent: an abstract Unix socket. "" until an engine core of this process can sleep."""
    core: Any = None
    """vLLM's EngineCoreProc of this process, once its loop runs; None elsewhere."""
    changed = False
    """The last step has changed something, so the next one shall follow at once."""
    _woken = False

    def __init__(self) -> None:
        self._messages: deque[idle_steps.WakeupMessage] = deque()
        """What all ranks have sent, and the scheduler does not know yet."""

    def take_wakeup(self) -> bool:
        """Whether a worker has sent a wake-up since this was last asked."""
        woken, self._woken = self._woken, False
        return woken

    def instead_of_process_input_queue(self, original: Original, core: Any) -> None:
        self.core = core
        if self.sleeps_when_idle and not self.address:
            self._listen_for_wakeups(core.input_queue)
        self._sleep_until_input(core)
        original(core)
        while self._messages:
            message = self._messages.popleft()
            # A MultiConnector has none: it learns of all by the steps' results.
            on_wakeup = getattr(core.scheduler.get_kv_connector(), "on_wakeup", None)
            if on_wakeup is not None and (request_id := on_wakeup(message)) is not None:
                core.scheduler._update_from_kv_xfer_finished(EarlyLoad(finished_recving={request_id}))

    def instead_of_process_engine_step(self, original: Original, core: Any) -> bool:
        """vLLM sleeps for a millisecond after a step that has computed nothing. Here a wake-up ends that
        sleep, and there is none after a step that has changed something."""
        if not self.sleeps_when_idle or not core.is_running():
            return bool(original(core))
        self.changed = False
        if watch_dog := getattr(original, "__globals__", {}).get("get_watch_dog"):  # since vLLM 0.33
            watch_dog().feed()
        outputs, computed = core.step_fn()
        for output in outputs.items() if outputs else ():
            core.output_queue.put_nowait(output)
        core.post_step(computed)
        if not computed and not self.changed and core.scheduler.has_requests():
            self.seconds = max(self.seconds, idle_steps.VLLM_IDLE_SLEEP)
        return bool(computed)

    def _listen_for_wakeups(self, requests: queue.Queue[Any]) -> None:
        wakeups = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            pass_credentials(wakeups)
            wakeups.bind(f"\0p2pkv-{uuid.uuid4().hex}")
        except OSError as error:
            self.sleeps_when_idle = False
            log.info("vLLM's engine core steps while it has nothing to compute: %s", error)
            return

        def pass_on() -> None:
            partial: dict[tuple[int, str], set[int]] = {}
            while True:  # it ends with the process
                if (message := idle_steps.receive_wakeup(wakeups)) is not None:
                    ranks = partial.setdefault((message.number, message.key), set())
                    ranks.add(message.rank)
                    if len(ranks) < message.ranks:
                        if len(partial) > MAX_PARTIAL:
                            del partial[next(iter(partial))]
                        continue
                    del partial[message.number, message.key]
                    self._messages.append(message)
                    if not message.number:
                        continue  # its request is still to come
                self._woken = True
                requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

        threading.Thread(target=pass_on, name="p2pkv-wakeups", daemon=True).start()
        self.address = wakeups.getsockname().decode()

    def _sleep_until_input(self, core: Any) -> None:
        seconds, self.seconds = self.seconds, 0.0
        if not seconds or not core.is_running():
            return
        try:
            kind, request = core.input_queue.get(timeout=seconds)
        except queue.Empty:
            return
        core._handle_client_request(kind, request)


class SpinWait(Patch):
    """vLLM's wait for a message between its processes: a sleep while `idle`, where vLLM spins for a second.

    vLLM calls `SpinCondition.wait` until the message is there. While `idle`, each call sleeps on the socket
    of vLLM's own wake-ups, MAX_SLEEP_MS at most, instead of yielding the processor, and vLLM's extension in
    C does not spin before it. The option `idle_wait_ms` 0 switches it off, too.
    """

    name = "spin_wait"
    replaced = (
        Function(
            _QUEUES, "SpinCondition.wait", ("self", "timeout_ms"), {"last_read", "busy_loop_s", "poller"}
        ),
        Function(_QUEUES, "spinloop", only_if="SPINLOOP_EXT_ENABLED"),
    )
    without = "vLLM's processes spin while they have nothing to compute"

    idle = False
    """Whether the last step of this process had nothing to compute and might wait."""
    worker = False
    """Whether this process waits for steps only, and so has nothing to compute while none comes."""
    spins = True
    """Whether it spins as vLLM made it while there is something to compute (the option `spin`)."""

    def instead_of_wait(self, original: Original, condition: Any, timeout_ms: int | None = None) -> None:
        waited, busy = time.monotonic() - condition.last_read, condition.busy_loop_s
        sleep_ms = 0  # do as vLLM does, which spins for `busy` seconds
        if waited <= busy and (self.idle or self.worker):
            most, stepless = idle_steps.MAX_SLEEP_MS, int(waited * 1000) // idle_steps.STEPLESS_MS
            sleep_ms = most if self.idle else min(stepless, most)
        if not sleep_ms and not self.spins and waited <= busy:
            time.sleep(idle_steps.NAP_SECONDS)
            return
        if not sleep_ms:
            original(condition, timeout_ms)
            return
        condition.busy_loop_s = -1.0
        try:
            original(condition, sleep_ms if timeout_ms is None else min(sleep_ms, timeout_ms))
        finally:
            condition.busy_loop_s = busy

    def instead_of_spinloop(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self.spins and not self.idle else None


class EarlyRevocation(Patch):
    """P's revocations before vLLM's V2 runner overwrites the blocks.

    V2 zeroes blocks that a request is given, and copies those that it shares, in `update_requests`. It calls
    `handle_preemptions` only after that, V1 before. Among these blocks may be some that the scheduler took
    from a prompt in this very step, while they are still read for D. Such a P does not start without this.
    """

    name = "early_revocation"
    replaced = (Function(_RUNNER, "GPUModelRunner.update_requests", ("self", "scheduler_output")),)
    required = (Function(_RUNNER, "GPUModelRunner.execute_model", mentions={"update_requests"}),)
    without = ""

    preempt: Callable[[StepMetadata], None] | None = None
    """Of this process's P; None: there is none."""

    def instead_of_update_requests(
        self, original: Original, runner: GPUModelRunner, scheduler_output: SchedulerOutput
    ) -> None:
        mine: Any = scheduler_output.kv_connector_metadata  # or a MultiConnector's, with p2pkv's in it
        for each in (mine, *getattr(mine, "metadata", ())):
            if isinstance(each, StepMetadata) and each.revoked and self.preempt is not None:
                self.preempt(each)
        original(runner, scheduler_output)


class Deferral(Patch):
    """Puts a DeferringQueue into each scheduler of this process whose connector is p2pkv's, as D.

    vLLM gives a connector no way to its scheduler, so `Scheduler.add_request` is replaced by one that looks
    first. A scheduler with a MultiConnector keeps its queue: each pass must ask the other connectors, too.
    """

    name = "deferral"
    replaced = (Function(_SCHEDULER, "Scheduler.add_request", ("self", "request")),)
    required = (
        Function(
            _SCHEDULER,
            "Scheduler.schedule",
            mentions={"waiting", "peek_request", "prepend_requests", "get_num_new_matched_tokens"},
        ),
    )
    without = "vLLM looks up each request that waits for P in every scheduling pass"

    def instead_of_add_request(self, original: Original, scheduler: Scheduler, request: Request) -> None:
        consumer = getattr(scheduler.connector, "consumer", None)
        if isinstance(consumer, ConsumerScheduler) and not isinstance(scheduler.waiting, DeferringQueue):
            scheduler.waiting = queue = DeferringQueue(scheduler.waiting, consumer.undecided)
            consumer.decided = queue.resume
        original(scheduler, request)


class PausedLoads(Patch):
    """Blocks of requests whose KV has come in, given back when vLLM empties a D's caches under load.

    `/pause?mode=keep`, and a sleep in that mode, preempt what runs and then empty the prefix cache, which
    fails while a request holds blocks. vLLM leaves out those that wait for KV, or, once it has come, for one
    more block or an adapter. D keeps its engine core at work until that KV has come or failed
    (`has_pending_push_work`), and then these requests, too, give their blocks back: D computes their prompts
    itself after `/resume`.
    """

    name = "paused_loads"
    replaced = (
        Function(
            _SCHEDULER, "Scheduler.reset_prefix_cache", ("self", "reset_running_requests", "reset_connector")
        ),
    )
    required = (
        Function(
            _SCHEDULER,
            "Scheduler._update_waiting_for_remote_kv",
            ("self", "request"),
            mentions={"finished_recving_kv_req_ids"},
        ),
        Function(_SCHEDULER, "Scheduler._free_request_blocks", ("self", "request")),
        Function(_SCHEDULER, "Scheduler.has_requests", mentions={"has_pending_push_work"}),
        Function(_SCHEDULER, "Scheduler.get_request_counts", mentions={"kv_holding_waiting"}),
    )
    without = "vLLM's /pause?mode=keep fails on a D while KV comes in"

    def instead_of_reset_prefix_cache(
        self,
        original: Original,
        scheduler: Scheduler,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> Any:
        if reset_running_requests:
            for request in tuple(scheduler.kv_holding_waiting):
                if request.request_id in scheduler.finished_recving_kv_req_ids:
                    scheduler._update_waiting_for_remote_kv(request)
                elif request.resumable or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                    continue
                scheduler._free_request_blocks(request)
                request.num_computed_tokens = 0
                request.status = RequestStatus["PREEMPTED" if request.num_preemptions else "WAITING"]
        return original(scheduler, reset_running_requests, reset_connector)


class PromptEnd(Patch):
    """The end of a prompt, where vLLM would decode all of it, twice, before the first token has its text.

    With the decoders known here the end decides what text follows if it ends with a whole character and has a
    token with text that is no single byte: then no byte before the end belongs with one of the answer.
    """

    name = "prompt_end"
    replaced = (
        Function(
            _TEXT, "FastIncrementalDetokenizer.__init__", ("self", "tokenizer", "request"), {"DecodeStream"}
        ),
    )
    without = "vLLM decodes the whole prompt before a request's first token has its text"

    LENGTH = 32
    KNOWN = re.compile(  # of most models; Llama's; Gemma's, which is Llama's without Strip
        r'{"type":"(ByteLevel|Metaspace)"|'
        r'{"type":"Sequence","decoders":\[{"type":"Replace","pattern":{"String":"\u2581"},"content":" "},'
        r'{"type":"ByteFallback"},{"type":"Fuse"}(,{"type":"Strip","content":" ","start":1,"stop":0})?]}'
    )

    def instead_of_init__(self, original: Original, made: Any, tokenizer: Any, request: Any) -> None:
        original(made, tokenizer, request)
        with suppress(Exception):  # a prompt without ids, or another kind of tokenizer
            end, skip = request.prompt_token_ids[-self.LENGTH :], made.skip_special_tokens
            coder = made.tokenizer
            known = self.KNOWN.match(coder.decoder.__getstate__().decode()) is not None
            whole = not coder.decode(end, skip).endswith("\ufffd")
            tokens = (coder.id_to_token(each) for each in end if coder.decode([each], skip))
            if known and whole and any(not token.startswith("<0x") for token in tokens):
                made.stream = type(made.stream)(ids=end, skip_special_tokens=skip)


WEIGHTS, ENGINE_CORE, SPIN_WAIT, PROMPT_END = WeightWatch(), EngineCore(), SpinWait(), PromptEnd()
EARLY_REVOCATION, DEFERRAL, PAUSED_LOADS = EarlyRevocation(), Deferral(), PausedLoads()
PATCHES = (WEIGHTS, ENGINE_CORE, SPIN_WAIT, EARLY_REVOCATION, DEFERRAL, PAUSED_LOADS, PROMPT_END)
"""All patches, one of each in a process, whose engine cores, queues and runners share their class."""
