"""`make mutants`: changes that tests must notice. Each is made in a copy of the tree; its tests run there.

The first table changes the product; the second takes a fault away that a test says it injects, so that the
test must say that nothing was broken. A mutant that survives, or whose text is not exactly once in its place,
makes the exit status 1. So does a test of the tables that fails on the tree as it is.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("p2pkv", "proxy", "tests", "examples", "docs", "pyproject.toml", "README.md")
SECONDS = 300.0
"""For the tests of one mutant. One that hangs until then is killed, too."""


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`; then one of `tests`, as pytest names them, must fail.

    `where`: a file, or a file and a class or function in it ("p2pkv/links/staging.py:StagingShare.grants");
    there `old` must stand exactly once.
    """

    what: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]

    def applied(self, text: str) -> str:
        """The text of the file with the change in it. Raises Stale if its place is not there."""
        start, stop = _span(text, self.where.partition(":")[2])
        found = text.count(self.old, start, stop)
        if found != 1:
            raise Stale(f"{self.where} has {found} times {self.old!r}")
        at = text.index(self.old, start, stop)
        return text[:at] + self.new + text[at + len(self.old) :]


class Stale(Exception):
    """The place of a mutant is not in the tree any more."""


def _span(text: str, name: str) -> tuple[int, int]:
    """Where the class or function of this qualified name begins and ends; all of the text without a name."""
    if not name:
        return 0, len(text)
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        inner = [each for each in ast.walk(node) if isinstance(each, DEFINITIONS) and each.name == part]
        if not inner:
            raise Stale(f"there is no {name}")
        node = inner[0]
    lines = text.splitlines(keepends=True)
    assert isinstance(node, DEFINITIONS)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


PRODUCT = (
    Mutant(
        "over CUDA IPC D learns of a message before the gather is done",
        "p2pkv/links/ipc_ends.py:IpcOutbound._announce",
        "if send.written is None or not send.written.ready():",
        "if send.written is None:",
        ("tests/links/test_ipc.py",),
    ),
    Mutant(
        "over CUDA IPC a slot is granted again while the scatter reads it",
        "p2pkv/links/ipc_ends.py:IpcContext.reap",
        "while self._read and self._read[0][0].ready():",
        "while self._read:",
        ("tests/links/test_ipc.py",),
    ),
    Mutant(
        "over CUDA IPC slots come back while a P that D has aborted may write there",
        "p2pkv/links/ipc_ends.py:IpcInbound._free",
        "awaited = self._line if self._posted and not self._left else None",
        "awaited = None",
        ("tests/links/test_ipc.py", "tests/links/test_processes.py"),
    ),
    Mutant(
        "P unmaps D's memory while its copies run",
        "p2pkv/links/ipc_ends.py:IpcOutbound._leave",
        "wait_out(written)",
        "pass",
        ("tests/links/test_ipc.py",),
    ),
    Mutant(
        "the ranks of a decode-context-parallel group are numbered as those of a stage",
        "p2pkv/sharding.py:Shape.part",
        "(tp_rank * self.pcp + pcp_rank) % self.dcp",
        "rank % self.dcp",
        ("tests/connector/test_context_parallel.py::test_ranks_are_numbered_as_in_vllms_groups",),
    ),
    Mutant(
        "a rank of P is taken to hold all tokens of its heads",
        "p2pkv/plan.py:_edges",
        "if prefill.dcp > 1:",
        "if False:",
        ("tests/unit/test_plan.py::test_every_cell_arrives_once_where_it_belongs",),
    ),
    Mutant(
        "a rank's own tokens are numbered as if single ones took turns",
        "p2pkv/interleave.py:Part.positions",
        "tokens // self.cycle * self.run + tokens % self.run",
        "tokens // self.ranks",
        ("tests/connector/test_context_parallel.py",),
    ),
    Mutant(
        "common tokens count as computed when as many tokens of the prompt are",
        "p2pkv/protocol/pieces.py:Extent.sendable",
        "computed = self.tokens.count(computed)",
        "pass",
        ("tests/engine/test_many_ranks.py::test_context_parallel_ranks",),
    ),
    Mutant(
        "D writes to where P has read",
        "p2pkv/engine/decode.py:Decode._scatter",
        "edge.tokens.on_target(*span)",
        "edge.tokens.on_source(*span)",
        ("tests/engine/test_many_ranks.py::test_context_parallel_ranks",),
    ),
    Mutant(
        "a run of tokens may lie in two blocks",
        "p2pkv/kv/layouts.py:Runs.of",
        "run = gcd(pages.units, self._longest)",
        "run = self._longest",
        ("tests/kv/test_rectangles.py", "tests/kv/test_kernels.py"),
    ),
    Mutant(
        "a block of the scheduler has as many tokens as one of a rank",
        "p2pkv/connector/describe.py:block_tables",
        "spec.block_size * token_parts(config, spec)",
        "spec.block_size",
        ("tests/connector/test_describe.py::test_context_parallel_ranks",),
    ),
    Mutant(
        "tokens of a window are divided over ranks",
        "p2pkv/protocol/handshake.py:_check_divided_tokens",
        "group.once or group.window or",
        "group.once or",
        ("tests/protocol/test_handshake.py::test_only_plain_rows_of_tokens_are_divided_over_ranks",),
    ),
    Mutant(
        "a draft model's layers come before the model's",
        "p2pkv/connector/stage_layers.py:layer_order",
        "name.startswith(DRAFTERS), [",
        "False, [",
        ("tests/connector/test_drafters.py::test_stages_of_a_model_with_a_drafter",),
    ),
    Mutant(
        "stages whose layers are out of order are taken as they are",
        "p2pkv/connector/stage_layers.py:_whole",
        "if names != ordered:",
        "if False:",
        ("tests/connector/test_drafters.py::test_stages_of_a_model_with_a_drafter",),
    ),
    Mutant(
        "the scheduler looks at the layers of stage 0 alone",
        "p2pkv/connector/describe.py:computes_last_token",
        'group.layer_names or ("",)',
        "group.layer_names",
        ("tests/connector/test_describe.py::test_a_group_of_which_this_stage_has_no_layer_is_passed_over",),
    ),
    Mutant(
        "slots count as heads",
        "p2pkv/connector/describe.py:_model_heads",
        'held == getattr(spec, "num_kv_heads", 0) and (held > 1 or tp == 1)',
        "held > 1 or tp == 1",
        ("tests/connector/test_describe.py::test_a_model_that_spreads_heads_otherwise_is_refused",),
    ),
    Mutant(
        "the engines of a data-parallel instance listen on the same ports",
        "p2pkv/config.py:Options.address",
        "Address(self.host, self.kv_port + self.engine_index * self.engine_ranks)",
        "Address(self.host, self.kv_port)",
        ("tests/connector/test_describe.py::test_the_ports_of_a_data_parallel_engine",),
    ),
    Mutant(
        "a hybrid server gets the number of an engine in the whole instance",
        "p2pkv/connector/describe.py:replica",
        "parallel.data_parallel_rank_local if own_only else parallel.data_parallel_index",
        "parallel.data_parallel_index",
        ("tests/connector/test_describe.py::test_a_ping_has_the_engines_http_server_and_its_number_there",),
    ),
    Mutant(
        "the engine in the id is not sent which engine has the request",
        "p2pkv/engine/prefill.py:Prefill.hold",
        "command.named is not None",
        "False",
        ("tests/connector/test_data_parallel.py::test_a_router_that_knows_no_ranks",),
    ),
    Mutant(
        "a prompt is for the engine of D in the id alone",
        "p2pkv/engine/prefill.py:Prefill._is_for",
        "if entry.peers or not is_engine_of(entry.decode, peer.hello):",
        "if True:",
        ("tests/connector/test_data_parallel.py::test_a_router_that_knows_no_ranks",),
    ),
    Mutant(
        "D has ended its part, and the engine of P that has the request is not sent that",
        "p2pkv/engine/decode.py:Decode.referred",
        "self._release_elsewhere(message.key, engine, now)",
        "pass",
        ("tests/connector/test_data_parallel.py::test_p_is_released_whichever_of_its_engines_d_has_asked",),
    ),
    Mutant(
        "the proxy sends no X-data-parallel-rank",
        "proxy/relay.py:to_instance",
        "if instance.replica is not None:",
        "if False:",
        ("tests/proxy/test_data_parallel.py",),
    ),
    Mutant(
        "vLLM does not zero the blocks of D's loads",
        "p2pkv/connector/connector.py:P2pKvConnector.get_loaded_kv_cache_group_ids",
        "        return ()\n",
        "        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))\n",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "a request that D never admits waits without end (K3)",
        "p2pkv/protocol/receiver.py:Receiver._bound",
        "return None if self.ahead or self._idle else self.waits_since + self.bounds.wait",
        "return None",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "D counts chunks that P has sent against what P may announce",
        "p2pkv/protocol/receiver.py:Source.announced",
        "self._unsent >= MAX_CHUNKS",
        "len(self.chunks) >= MAX_CHUNKS",
        ("tests/protocol/test_receiver_faults.py",),
    ),
    Mutant(
        "P keeps blocks for as long as any D claims them (K3)",
        "p2pkv/protocol/sender.py:Sender.kept_until",
        "end = self._moved + self.terms.wait",
        "end = self._moved + 1e9",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "a paused P keeps blocks for a D that takes nothing (K3)",
        "p2pkv/protocol/sender.py:Sender.kept_until",
        "min(end, max(self._moved, paused_since) + self.terms.lease)",
        "end",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "one D may hold all blocks of P (K3)",
        "p2pkv/connector/block_room.py:HeldBlocks.full",
        "if not mine or mine < self._share * (self._total - others):",
        "if True:",
        ("tests/connector/test_held_blocks.py",),
    ),
    Mutant(
        "two instances of both roles may hold all their blocks for each other",
        "p2pkv/connector/connector.py:P2pKvConnector._schedule",
        "held_blocks = (held_blocks - 1) // 3",
        "held_blocks = held_blocks - 1",
        ("tests/virtual/test_full_of_each_other.py",),
    ),
    Mutant(
        "with kv_both loads may take all blocks",
        "p2pkv/connector/connector.py:P2pKvConnector._thirds",
        "return Room(third, blocks), Room(third, blocks)",
        "return Room(third, blocks), Room()",
        ("tests/virtual/test_full_of_each_other.py",),
    ),
    Mutant(
        "with kv_both prompts for others may take all blocks",
        "p2pkv/connector/connector.py:P2pKvConnector._thirds",
        "return Room(third, blocks), Room(third, blocks)",
        "return Room(), Room(third, blocks)",
        ("tests/virtual/test_full_of_each_other.py",),
    ),
    Mutant(
        "with kv_both blocks of finished prompts do not count beside those of running ones",
        "p2pkv/connector/scheduler.py:ProducerScheduler._may_begin",
        "besides=self._held.all",
        "besides=0",
        ("tests/virtual/test_full_of_each_other.py",),
    ),
    Mutant(
        "of requests that wait for blocks a short one overtakes a long one",
        "p2pkv/connector/block_room.py:Room.admits",
        "if first == request_id and",
        "if",
        ("tests/connector/test_held_blocks.py",),
    ),
    Mutant(
        "a load takes blocks although all loads have as many as they may",
        "p2pkv/connector/block_room.py:Room.admits",
        "if first == request_id and self.taken + besides + self.blocks(tokens) <= self.limit:",
        "if True:",
        ("tests/connector/test_held_blocks.py",),
    ),
    Mutant(
        "receives may fill the staging of a rank that sends, too",
        "p2pkv/links/staging.py:StagingBudget.carry_both_ways",
        "self.limit - aligned(self.limit // 4)",
        "self.limit",
        ("tests/links/test_staging.py",),
    ),
    Mutant(
        "two ranks of both roles answer each other's Stranger without end",
        "p2pkv/engine/core.py:Core._take_unowned",
        "elif not isinstance(message, Stranger):",
        "else:",
        ("tests/virtual/test_both_roles.py",),
    ),
    Mutant(
        "a key that goes in both directions is forgotten in both at once",
        "p2pkv/engine/prefill.py:Prefill.forget",
        'if command.role == "D":',
        "if False:",
        ("tests/virtual/test_both_roles.py",),
    ),
    Mutant(
        "a pool of instances of both roles never pushes under load",
        "proxy/routing.py:Router.choose",
        "return self._beside(decode, prefillers, request)",
        "return Choice(None, decode, whole=True)",
        ("tests/proxy/test_both_roles.py",),
    ),
    Mutant(
        "a prompt's cost forgets the answers that it stops",
        "proxy/placement.py:PlacementCosts._prompt_part",
        "+ self.pause_weight * engine.answers * prompt",
        "",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "what is queued at an instance costs nothing",
        "proxy/placement.py:PlacementCosts._prompt_part",
        "engine.queued_seconds(now) + prompt",
        "prompt",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a prompt that is long overdue costs nothing",
        "proxy/placement.py:EngineCosts._seconds_left",
        "abs(first - since)",
        "max(0.0, first - since)",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "what instances report of their queues is not used",
        "proxy/placement.py:EngineCosts._seconds_left",
        "if self._reports(now):",
        "if False:",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a prompt counts beside the report that has it",
        "proxy/placement.py:EngineCosts.follow",
        "self._since_report.popleft()",
        "break",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a prompt that comes from a P counts as queued at D",
        "p2pkv/connector/core_beats.py:workload_of",
        " and not is_loaded(request.request_id)",
        "",
        ("tests/connector/test_core_beats.py",),
    ),
    Mutant(
        "what an instance has of a prompt in its cache costs as much as the rest",
        "proxy/placement.py:PlacementCosts.cheapest",
        "tokens - cached.get(each, 0), now) for each in drawn",
        "tokens, now) for each in drawn",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a hand-over costs nothing",
        "proxy/placement.py:PlacementCosts.cheapest",
        "+ _FIRST_TOKEN * late + cost",
        "+ cost",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "answers beside it do not make an answer slower",
        "proxy/placement.py:PlacementCosts._answer_part",
        "(2 * engine.answers + 1)",
        "1",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "prompts at the same instance do not make an answer slower",
        "proxy/placement.py:PlacementCosts._answer_part",
        "stopped *= engine.prefill_share(now) * (1.0 + self.pause_weight)",
        "stopped = 0.0",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "placement by cost pairs instances that do not match",
        "proxy/placement.py:PlacementCosts.cheapest",
        "if each is not prefill and each.matches(prefill)",
        "if each is not prefill",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "in a large pool placement by cost passes links over",
        "proxy/placement.py:PlacementCosts.cheapest",
        "answers_at(self._some(near(prefill))) if near else answers",
        "answers",
        ("tests/proxy/test_partners.py",),
    ),
    Mutant(
        "with placement by cost a D computes prompts beyond its share",
        "proxy/routing.py:Router._cheapest",
        'each.role == "both" or each.alone < alone',
        "True",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "with placement by cost a D computes what a P has failed",
        "proxy/routing.py:Router.choose",
        "alone=self._alone if mode is PrefillMode.WANTED else 0,",
        "alone=self._alone,",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "with placement by cost a request comes back to what has failed it",
        "proxy/routing.py:Router.choose",
        "fleet = self._fleet(request.model, now, avoid)",
        "fleet = self._fleet(request.model, now, frozenset())",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "the time that prompts took counts as that of steps",
        "proxy/placement.py:EngineCosts.answer_ended",
        "share = min(1.0, prompts / lasted)",
        "share = 0.0",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "what was observed is never forgotten",
        "proxy/placement.py:LeastSquares.learn",
        "_FORGET * products[column] +",
        "products[column] +",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "one stall decides what is predicted",
        "proxy/placement.py:LeastSquares.learn",
        "seen = min(seen, 4.0 * self.predict(*features) + 0.1)",
        "pass",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "more work may be predicted to take less time",
        "proxy/placement.py:LeastSquares._solved",
        "if found[least] < 0.0:",
        "if False:",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a guess at when a prompt was computed teaches",
        "proxy/placement.py:PlacedRequest.seems_computed",
        "learn=False",
        "learn=True",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "what an answer lasted teaches nothing",
        "proxy/placement.py:EngineCosts.answer_ended",
        "if steps >= _LEAST_STEPS and lasted > 0.0:",
        "if False:",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a request that has left still counts as queued",
        "proxy/placement.py:PlacedRequest.leave",
        "self._prefill.prompt_left(self._queued, now)",
        "pass",
        ("tests/proxy/test_placement.py",),
    ),
    Mutant(
        "a stopped engine core is vouched for (K4)",
        "p2pkv/engine/liveness.py:Liveness.trouble",
        "if now - self._beaten > silence:",
        "if False:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "an engine core that hangs is vouched for (K4)",
        "p2pkv/engine/liveness.py:Liveness.trouble",
        "if self._beat.work and now - self._moved > stall:",
        "if False:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "a paused engine core is vouched for without end (K4)",
        "p2pkv/engine/liveness.py:Liveness.trouble",
        "if self.paused_since is not None and now - self.paused_since > stall:",
        "if False:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "D asks for its prompts although its engine core is stopped (K4)",
        "p2pkv/engine/decode.py:Decode._send_heartbeats",
        "if self._ctx.steps.trouble(now):",
        "if False:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "P confirms requests although its engine core is stopped (K4)",
        "p2pkv/engine/prefill.py:Prefill.heartbeat",
        "if not self._ctx.steps.trouble(now):",
        "if True:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "requests that the engine core takes from nobody's queue are no work (K4)",
        "p2pkv/connector/core_beats.py:state_of",
        " or not core.input_queue.empty()",
        "",
        ("tests/connector/test_core_beats.py",),
    ),
    Mutant(
        "a rank takes beats from any process (K4)",
        "p2pkv/connector/core_beats.py:BeatListener.read",
        "if _sender(ancillary) not in self._senders:",
        "if False:",
        ("tests/connector/test_core_beats.py",),
    ),
    Mutant(
        "an instance in trouble is announced (K4)",
        "p2pkv/control/announcer_child.py:_Worker.vouched_for",
        "return not silent and not self._last.trouble",
        "return not silent",
        ("tests/control/test_announcer.py",),
    ),
    Mutant(
        "requests stay at a D whose engine hangs behind a server that answers (K4)",
        "proxy/membership/prober.py:Prober._hung",
        'instance.lost("hung")',
        "pass",
        ("tests/proxy/test_paused_engines.py",),
    ),
    Mutant(
        "a paused instance gets requests (K3)",
        "proxy/membership/registry.py:Registry.candidates",
        "not (each.drained or each.paused)",
        "not each.drained",
        ("tests/proxy/test_paused_engines.py",),
    ),
    Mutant(
        "a rank whose thread has ended takes part in steps (K9)",
        "p2pkv/connector/worker.py:Worker.begin",
        "if self.rank.failure:",
        "if False:",
        ("tests/engine/test_thread_end.py",),
    ),
    Mutant(
        "a rank whose thread has ended is announced (K9)",
        "p2pkv/engine/thread.py:Rank.trouble",
        "if self.failure or not self.alive:",
        "if False:",
        ("tests/engine/test_thread_end.py",),
    ),
    Mutant(
        "a thread that cannot begin does not fail the start (K9)",
        "p2pkv/engine/thread.py:Rank.__init__",
        "if self.failure:\n            raise RuntimeError",
        "if False:\n            raise RuntimeError",
        ("tests/engine/test_thread_end.py",),
    ),
    Mutant(
        "an engine without its server holds what it has (X13)",
        "p2pkv/engine/core.py:Core._look_at_engine",
        "self._leave(now)\n",
        "pass\n",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "an engine core does not notice that its server is gone (X13)",
        "p2pkv/connector/core_beats.py:BeatSender._run",
        "self._parent not in (None, os.getppid())",
        "False",
        ("tests/connector/test_core_beats.py",),
    ),
    Mutant(
        "P pushes what another connector is still loading",
        "p2pkv/connector/scheduler.py:ProducerScheduler._prefill",
        "if any(not filled.isdisjoint(table) for _, filled in self._filled for table in blocks):",
        "if False:",
        ("tests/connector/test_multi.py::test_what_a_store_fills_on_p_is_pushed_only_once_vllm_has_taken_the_step",),
    ),
    Mutant(
        "P forgets in the next step already what another connector was loading",
        "p2pkv/connector/scheduler.py:ProducerScheduler._note_loads",
        "self._steps - self._batches:",
        "self._steps - 1:",
        ("tests/connector/test_multi.py::test_a_failed_load_on_p_never_reaches_d",),
    ),
    Mutant(
        "D waits for P although its store has the whole prompt",
        "p2pkv/connector/multi.py:MultiConnector.get_num_new_matched_tokens",
        "if undecided and not (whole and all(undecided)):",
        "if undecided:",
        ("tests/connector/test_multi.py::test_d_does_not_wait_for_p_where_the_store_has_the_whole_prompt",),
    ),
    Mutant(
        "links are built ahead of requests although there are max_links",
        "p2pkv/engine/preconnect.py:Preconnect._begin",
        "if room < partner.sources or fresh >= AT_ONCE:",
        "if fresh >= AT_ONCE:",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "on P a link that is built ahead takes another's place",
        "p2pkv/engine/to_decode.py:DecodePeers.hello",
        "parked=self._full",
        "parked=False",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "a link that no request uses is closed after a minute although the proxy names its P",
        "p2pkv/engine/roles.py:DecodeRole.look",
        " or self.preconnect.keeps(peer)",
        "",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "the configuration that vLLM has built does not count",
        "p2pkv/connector/identity.py:_fingerprint",
        "digest.update(_settings(settings, apart | MACHINES_SETTINGS).encode())",
        "pass",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "weights without files need no name",
        "p2pkv/connector/identity.py:_weight_files",
        "    if kind in FILE_FORMATS:\n",
        "    if True:\n        return []\n    if kind in FILE_FORMATS:\n",
        ("tests/connector/test_describe.py::test_weights_without_files_need_a_name",),
    ),
    Mutant(
        "an adapter that is loaded in place is read again only if its files have changed their size",
        "p2pkv/connector/identity.py:stamps",
        "(str(file), state.st_mtime_ns, state.st_size)",
        "(str(file), 0, state.st_size)",
        ("tests/connector/test_identity.py",),
    ),
    Mutant(
        "quantization while the weights are loaded does not count",
        "p2pkv/connector/identity.py:_fingerprint",
        "{model.quantization} ",
        "",
        ("tests/connector/test_describe.py::test_what_vllm_makes_of_the_files_counts",),
    ),
    Mutant(
        "longrope counts only where all layers have it",
        "p2pkv/connector/identity.py:_by_length",
        "ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]",
        "ropes = [rope]",
        ("tests/connector/test_describe.py::test_the_longest_context_counts_where_it_decides_what_k_is",),
    ),
    Mutant(
        "a tensor is not looked at at its end",
        "p2pkv/connector/identity.py:_offsets",
        "((start + stop) // 2, max(start, stop - SAMPLE_BYTES))",
        "((start + stop) // 2,)",
        ("tests/connector/test_describe.py::test_a_tensor_is_looked_at_in_its_middle_and_at_its_end",),
    ),
    Mutant(
        "the names of weight files do not count",
        "p2pkv/connector/identity.py:_sample",
        'f"{file.name}:{size}"',
        'f"{size}"',
        ("tests/connector/test_describe.py::test_shards_that_have_changed_their_names_are_other_weights",),
    ),
    Mutant(
        "a picture counts by vLLM's identifier",
        "p2pkv/connector/identity.py:_contents",
        'if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):',
        "if True:",
        ("tests/connector/test_identity.py",),
    ),
    Mutant(
        "vLLM's V2 runner overwrites blocks before the revocation",
        "p2pkv/connector/vllm_patches.py:EarlyRevocation.instead_of_update_requests",
        "self.preempt(each)",
        "pass",
        ("tests/connector/test_worker.py",),
    ),
    Mutant(
        "gathers ignore the forward's fence",
        "p2pkv/engine/core.py:Core._blocked",
        "return isinstance(head, Computed) and not head.fence.ready()",
        "return False",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "block tables are uploaded from ordinary memory",
        "p2pkv/kv/uploads.py:Ring.__init__",
        "pin_memory=True",
        "pin_memory=False",
        ("tests/kv/test_uploads.py",),
    ),
    Mutant(
        "a ring is written again before its copies have been made",
        "p2pkv/kv/uploads.py:Ring._enter",
        "if not fence.ready():",
        "if False:",
        ("tests/kv/test_uploads.py",),
    ),
    Mutant(
        "a link launches a second operation behind an unfinished one",
        "p2pkv/links/nccl_ends.py",
        "ON_DEVICE = 1",
        "ON_DEVICE = 2",
        ("tests/links/test_nccl_queues.py",),
    ),
    Mutant(
        "D launches a receive that P has not announced",
        "p2pkv/links/nccl_ends.py:NcclEnd._may_launch",
        "self._told > 0 and",
        "",
        ("tests/links/test_nccl_queues.py",),
    ),
    Mutant(
        "a block table is uploaded again for each span of layers",
        "p2pkv/kv/uploads.py:Recent.find",
        "if known is array and other == kind:",
        "if False:",
        ("tests/kv/test_uploads.py",),
    ),
    Mutant(
        "what a thread of a kernel loads goes through local memory",
        "p2pkv/kv/kernels.cu",
        "= some[i];",
        "= some[(i + rows) % P2PKV_TOGETHER];",
        ("tests/kv/test_nvrtc.py",),
    ),
    Mutant(
        "a device that is full is not named",
        "p2pkv/device.py:take_memory",
        "except (torch.OutOfMemoryError, MemoryError):",
        "except NotImplementedError:",
        ("tests/unit/test_device.py",),
    ),
    Mutant(
        "the doctors believe whatever comes over the link",
        "p2pkv/cli/pair.py:_grant",
        "if compare and not torch.equal",
        "if False and not torch.equal",
        ("tests/cli/test_pair.py::test_other_bytes_than_were_sent_are_seen",),
    ),
    Mutant(
        "pages that are taken back are not marked",
        "p2pkv/engine/core.py:Core.revoke",
        "self.context.revoked.add(keys)",
        "pass",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "pages are taken back in the middle of a gather",
        "p2pkv/engine/prefill.py:Prefill.fill",
        "with revoked.reading:\n            filler",
        "if True:\n            filler",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "a block's scales are read and written one row further",
        "p2pkv/kv/layouts.py:plane_of",
        "int(tensor.storage_offset()) + rows * before",
        "int(tensor.storage_offset()) + (rows * before + width if before else 0)",
        ("tests/kv/test_planes.py",),
    ),
    Mutant(
        "rings are left out",
        "p2pkv/connector/describe.py:local_groups",
        "once += ring_groups(",
        "[] and ring_groups(",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "only the first head of a ring travels",
        "p2pkv/connector/rings.py:_group",
        "torch.split(tensors[number], 1, 1)",
        "torch.split(tensors[number], 1, 1)[:1]",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "rings of different sizes are not refused",
        "p2pkv/protocol/handshake.py:_seen",
        "if group.once and group.window:",
        "if False:",
        ("tests/protocol/test_handshake.py",),
    ),
    Mutant(
        "an indexer's keys are left out",
        "p2pkv/connector/describe.py:Layers.alike",
        "if keeps_state(spec):",
        "if keeps_state(spec) or spec.head_size == 132:",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "an indexer's keys and scales are taken to lie together",
        "p2pkv/connector/planes.py:_planes",
        "return INDEXER[spec.head_size]",
        "return ()",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "a row is sent of which D has tokens to compute",
        "p2pkv/protocol/handshake.py:RowFormat.needed",
        "stop = stop // self.unit * self.unit",
        "stop = -(-stop // self.unit) * self.unit",
        ("tests/protocol/test_row_format.py",),
    ),
    Mutant(
        "a chunk that attention sees is taken for a sliding window",
        "p2pkv/protocol/handshake.py:RowFormat.needed",
        "if self.chunked else",
        "if False else",
        ("tests/protocol/test_row_format.py",),
    ),
    Mutant(
        "layers that lie unevenly are copied as if they were evenly spaced",
        "p2pkv/kv/layouts.py:spans_of",
        "even = apart.pop() if len(apart) == 1 else None",
        "even = apart.pop()",
        ("tests/kv/test_copy.py",),
    ),
    Mutant(
        "pieces of narrow rows come first in a chunk",
        "p2pkv/protocol/pieces.py:Cutter._cut",
        "key=self._alignment, reverse=True",
        "key=self._alignment",
        ("tests/protocol/test_pieces.py",),
    ),
    Mutant(
        "vLLM sets scales that have been loaded to 1",
        "p2pkv/connector/describe.py:make_ready",
        "impl._ensure_scale_caches(layer.kv_cache)",
        "pass",
        ("tests/connector/test_planes.py",),
    ),
    Mutant(
        "D's staging is granted without a budget",
        "p2pkv/links/staging.py:StagingShare.grants",
        "return left >= 0 and (not self.held or self.held + need <= left)",
        "return True",
        ("tests/engine/test_backpressure.py::"
         "test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget",),
    ),
    Mutant(
        "one P may hold all of D's staging",
        "p2pkv/links/staging.py:StagingShare.grants",
        "return left >= 0 and (not self.held or self.held + need <= left)",
        "return left >= 0",
        ("tests/engine/test_backpressure.py::"
         "test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget",),
    ),
    Mutant(
        "nothing is reserved for admitted requests",
        "p2pkv/engine/decode.py:Decode._decided",
        "reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if entry.ahead else 0",
        "reserve = 0",
        ("tests/engine/test_ahead.py::test_admitted_requests_go_before_it",),
    ),
    Mutant(
        "admitted requests wait behind what comes ahead",
        "p2pkv/engine/from_prefill.py:InboundLink.post",
        "            self._admitted_first()\n",
        "            pass\n",
        ("tests/engine/test_ahead.py::test_admitted_requests_go_before_it",),
    ),
    Mutant(
        "the tag of a pair is constant",
        "p2pkv/pairing.py:_pair_name",
        'return f"pair:{found.pair.unique}:{tag}"',
        'return f"pair:{found.pair.unique}:0"',
        ("tests/unit/test_pairing.py",),
    ),
    Mutant(
        "a step waits while an earlier one with tokens is out",
        "p2pkv/connector/idle_steps.py:IdlePace.step",
        "if self._empty < self._batches or not awaited:",
        "if not self._empty or not awaited:",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "an event does not end the wait of an idle step",
        "p2pkv/engine/thread.py:Rank._report",
        "self._happened.set()",
        "pass",
        ("tests/engine/test_progress.py::test_an_event_ends_the_forward_threads_wait",),
    ),
    Mutant(
        "a worker with news does not ring",
        "p2pkv/engine/thread.py:Rank._report",
        "self._call()\n",
        "pass\n",
        ("tests/engine/test_progress.py::test_an_event_is_called_out_once_until_it_has_been_heard",),
    ),
    Mutant(
        "the engine core rests although it has just heard news",
        "p2pkv/connector/connector.py:P2pKvConnector._hurry",
        "        patches.ENGINE_CORE.seconds = 0.0\n",
        "",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "a bell ends a rest, and the step that may bring its news is forgotten",
        "p2pkv/connector/idle_steps.py:IdlePace.step",
        "0 if tokens else 1 if rung else",
        "0 if tokens else",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "naps wait for a wake-up that can be lost",
        "p2pkv/connector/idle_steps.py",
        "LONGEST_NAP_MS = 4\n",
        "LONGEST_NAP_MS = 60_000\n",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "control sockets have no keepalive",
        "p2pkv/control/endpoint.py:Endpoint._socket",
        "socket.setsockopt(zmq.TCP_KEEPALIVE, 1)",
        "socket.setsockopt(zmq.TCP_KEEPALIVE, 0)",
        ("tests/control/test_endpoint.py",),
    ),
    Mutant(
        "the kernel probes control sockets only after its own two hours",
        "p2pkv/control/endpoint.py:Endpoint._socket",
        "        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)\n",
        "",
        ("tests/control/test_endpoint.py",),
    ),
    Mutant(
        "the timer for a P that ends late is not cancelled",
        "proxy/attempt.py:Attempt._see_off.ended",
        "deadline.cancel()",
        "pass",
        ("tests/proxy/test_soak.py::test_a_p_that_ends_after_d_leaves_nothing_of_its_request",),
    ),
    Mutant(
        "an answer was given up if the bytes that say so are anywhere in it",
        "proxy/upstream.py:gave_up",
        "return sign is not None and sign in body and _given_up(body)",
        "return b'\"finish_reason\":\"abort\"' in body",
        ("tests/proxy/test_given_up.py::test_an_answer_that_repeats_its_request_pauses_no_instance",),
    ),
    Mutant(
        "an event gives up if the bytes that say so are anywhere in it",
        "proxy/upstream.py:first_given_up",
        "if any(_given_up(line.removeprefix(_DATA)) for line in lines if line.startswith(_DATA)):",
        "if lines:",
        ("tests/proxy/test_given_up.py::test_what_does_not_give_up_passes_as_it_is",),
    ),
    Mutant(
        "a message that was given up passes for a whole one",
        "proxy/upstream.py:_Answer.given_up",
        'case "message", _:',
        'case "no message", _:',
        ("tests/proxy/test_vllm_answers.py::test_messages",),
    ),
    Mutant(
        "the values of a body become objects",
        "proxy/bodies.py:parse",
        "return Body(raw, _views.decode(raw), path, released)",
        "read = msgspec.json.decode(raw)\n"
        "        return Body(raw, {k: Raw(msgspec.json.encode(v)) for k, v in read.items()}, path)",
        ("tests/proxy/test_large_bodies.py::test_no_item_of_a_list_becomes_an_object",),
    ),
    Mutant(
        "P's body is a copy of the client's",
        "proxy/bodies.py:Body._changed",
        "return self._kept(made if self._size > _SMALL_BODY else Content((bytes(made),)))",
        "return self._kept(Content((bytes(made),)))",
        ("tests/proxy/test_large_bodies.py::test_what_instances_get_is_made_of_the_clients_own_bytes",),
    ),
    Mutant(
        "the values of a body are not counted",
        "proxy/bodies.py:BodyReader.read",
        "await check_values(body, limits.max_values, token_ids=request.path in WITH_TOKEN_IDS)",
        "pass",
        ("tests/proxy/test_large_bodies.py::test_two_million_empty_messages_end_at_the_proxy",),
    ),
    Mutant(
        "the router goes on with instances that have changed since",
        "proxy/routing.py:_Kept.holds",
        "self._version == self._registry.version",
        "True",
        ("tests/proxy/test_kept.py",),
    ),
    Mutant(
        "one that has fallen silent since counts as well",
        "proxy/routing.py:_Kept.holds",
        "<= now <= self._until",
        "<= now",
        ("tests/proxy/test_kept.py",),
    ),
    Mutant(
        "how those in doubt are is looked up once",
        "proxy/routing.py:_Kept.holds",
        "self._doubtful.items()",
        "()",
        ("tests/proxy/test_kept.py",),
    ),
    Mutant(
        "a D that is full is given more",
        "proxy/membership/instance.py:Instance.take_place",
        "self.full.add(self)",
        "pass",
        ("tests/proxy/test_kept.py", "tests/proxy/test_places.py", "tests/proxy/test_fit.py"),
    ),
    Mutant(
        "messages have no bound of their own",
        "proxy/service.py:Proxy.generate",
        "if body.messages(self.limits.max_messages) > self.limits.max_messages:",
        "if False:",
        ("tests/proxy/test_large_bodies.py::test_messages_have_a_bound_of_their_own",),
    ),
    Mutant(
        "a body that no instance may be sent any more is held by what failed",
        "proxy/bodies.py:Body.let_go",
        "            content.pieces = ()\n",
        "            pass\n",
        ("tests/proxy/test_large_bodies.py::test_no_body_stays_in_memory_when_its_request_fails",),
    ),
    Mutant(
        "others wait while the values of a body are counted",
        "proxy/values.py:check_values",
        "            counted = True\n        await asyncio.sleep(0)\n",
        "            counted = True\n",
        ("tests/proxy/test_large_bodies.py::"
         "test_texts_pictures_and_token_ids_are_no_values_however_long_they_are",),
    ),
    Mutant(
        "a large body is written in one go",
        "proxy/upstream.py",
        "_SENT_AT_ONCE = 1 << 17",
        "_SENT_AT_ONCE = 1 << 30",
        ("tests/proxy/test_large_bodies.py::test_a_large_body_is_sent_in_pieces_and_can_be_sent_again",),
    ),
    Mutant(
        "a body is held while its answer is streamed",
        "proxy/attempt.py:Attempt._pass_on",
        "self.body.let_go()  # from here on nothing is tried again\n",
        "pass\n",
        ("tests/proxy/test_large_bodies.py::test_streams_that_have_begun_take_no_room_for_bodies",),
    ),
    Mutant(
        "a body that is let go still stands in memory",
        "proxy/bodies.py:Prompt.let_go",
        "empty afterwards.\"\"\"\n        self._parts = []\n",
        "empty afterwards.\"\"\"\n",
        ("tests/proxy/test_large_bodies.py::test_a_body_is_let_go_when_the_answer_has_begun",),
    ),
    Mutant(
        "a picture counts by the length of its base64",
        "proxy/bodies.py:_is_data",
        "return mixed and len(look) == _LOOK_BYTES and not look.translate(None, _BASE64)",
        "return False",
        ("tests/proxy/test_prefixes.py::test_a_picture_counts_by_a_figure_of_its_own",),
    ),
    Mutant(
        "a load is done although its state is missing",
        "p2pkv/protocol/pieces.py:Coverage.__init__",
        "        self.left = extents.nbytes\n        self._taken",
        "        self.left = sum(each.nbytes for each in extents.by_group.values() if each.ready is None)\n"
        "        self._taken",
        ("tests/engine/test_kv_groups.py::"
         "test_a_load_of_which_only_the_state_is_missing_fails_with_its_link[memory]",),
    ),
    Mutant(
        "the checksum of a chunk that holds a state alone is not compared",
        "p2pkv/engine/decode.py:Decode.check",
        "        if receiving.sent is None:\n",
        "        if receiving.sent is None or all(\n"
        "            peer.formats[piece.group].once for piece in receiving.chunk.pieces\n"
        "        ):\n",
        ("tests/engine/test_kv_groups.py::test_a_flipped_bit_of_the_state_alone_fails_the_load",),
    ),
    Mutant(
        "a state travels before the last token of the prompt is computed",
        "p2pkv/protocol/pieces.py:Extent.sendable",
        "        if self.ready is not None:\n            return self.start\n",
        "        if self.ready is not None:\n            return self.ceiling if computed else self.start\n",
        ("tests/engine/test_kv_groups.py", "tests/virtual/test_walks.py"),
    ),
    Mutant(
        "P's blocks are free while a chunk of a KV group beside the first is to be read",
        "p2pkv/protocol/sender.py:SendState.drained",
        "        return self.cutter is not None and not self.cutter.left and not self.announced\n",
        "        under_way = {piece.group for _, pieces in self.announced.values() for piece in pieces}\n"
        "        return self.cutter is not None and not self.cutter.left and 0 not in under_way\n",
        ("tests/virtual/test_walks.py",),
    ),
    Mutant(
        "D wants what has left a window, and P has given back",
        "p2pkv/protocol/handshake.py:RowFormat.needed",
        "first = first // whole * whole if self.window else 0",
        "first = 0",
        ("tests/virtual/test_walks.py",),
    ),
    Mutant(
        "a 4xx of P's is the client's mistake, whatever D says",
        "proxy/blame.py:_of_p",
        "    if end in REFUSALS and decode in REFUSALS:\n",
        "    if end in REFUSALS:\n",
        ("tests/proxy/test_blame.py::test_a_p_with_another_key_fails_no_request_and_gets_a_pause",),
    ),
    Mutant(
        "a P that D has proved wrong is not charged",
        "proxy/attempt.py:Attempt._charge_doubted",
        "            if charge is proof:\n",
        "            if False:\n",
        ("tests/proxy/test_blame.py::test_a_p_with_another_key_fails_no_request_and_gets_a_pause",),
    ),
    Mutant(
        "a client's request that no P can take has all P's paused",
        "proxy/blame.py:_of_p",
        "        charge = Charge.IF_P_ACCEPTS\n",
        "        charge = Charge.IF_D_ACCEPTS\n",
        ("tests/proxy/test_blame.py::test_what_every_p_refuses_d_answers_alone_and_no_p_is_worse_for_it",),
    ),
    Mutant(
        "a success that is not the trial's ends a pause",
        "proxy/membership/instance.py:Breaker.succeeded",
        "        if not self._is_trial(owner):\n",
        "        if self._trial is None:\n",
        ("tests/proxy/test_breaker.py::test_while_there_is_a_trial_what_becomes_of_others_decides_nothing",),
    ),
    Mutant(
        "a failure that is not the trial's lengthens a pause",
        "proxy/membership/instance.py:Breaker.failed",
        "            bad = self._is_trial(owner)\n",
        "            bad = self._trial is not None\n",
        ("tests/proxy/test_breaker.py::test_while_there_is_a_trial_what_becomes_of_others_decides_nothing",),
    ),
    Mutant(
        "requests wait for ever at a D whose engine hangs behind a living server",
        "proxy/membership/prober.py:Prober._doubt",
        "            if instance.left is None and self._registry.overdue(instance, self._clock()):\n",
        "            if False:\n",
        ("tests/proxy/test_hung.py::test_of_a_d_that_hangs_another_one_answers",),
    ),
    Mutant(
        "what a hung D has begun is broken off",
        "proxy/upstream.py:Call._stuck",
        "            return False\n",
        "            return True\n",
        ("tests/proxy/test_hung.py::test_what_has_begun_goes_on_and_so_does_what_has_nowhere_to_go",),
    ),
    Mutant(
        "a request at a hung D fails although there is no other",
        "proxy/upstream.py:Call._stuck",
        "self.instance.vouches or self.may_leave()",
        "True",
        ("tests/proxy/test_hung.py::test_what_has_begun_goes_on_and_so_does_what_has_nowhere_to_go",),
    ),
    Mutant(
        "the budget of retries keeps requests at a hung D",
        "proxy/service.py:Proxy._serve",
        " or outcome.end is CallEnd.HUNG\n",
        "\n",
        ("tests/proxy/test_hung.py::test_however_many_hang_there_the_budget_of_retries_keeps_none",),
    ),
    Mutant(
        "the deadline for the first token is not kept",
        "proxy/attempt.py:Attempt._decode",
        "            if seconds and response.content_type == EVENT_STREAM:\n",
        "            if False:\n",
        ("tests/proxy/test_hung.py::test_no_token_in_time_is_a_504_or_another_d_s_answer",),
    ),
    Mutant(
        "a client that reads slowly counts as a silent D",
        "proxy/relay.py:Relay._watch_instance",
        "        since = self._waiting_since if self._writing is None else now\n",
        "        since = self._waiting_since\n",
        ("tests/proxy/test_hung.py::test_a_client_that_reads_slowly_is_not_ds_silence",),
    ),
    Mutant(
        "a request is sent again however late its connection has ended",
        "proxy/upstream.py:Client.post",
        "            at_once = time.monotonic() - began <= _REPEAT_SECONDS\n",
        "            at_once = True\n",
        ("tests/proxy/test_upstream.py::test_only_a_connection_that_ends_at_once_was_closed_for_being_idle",),
    ),
    Mutant(
        "requests are sent again beyond the budget of retries",
        "proxy/upstream.py:Client.post",
        " and _closed_unanswered(error) and may_repeat()):\n",
        " and _closed_unanswered(error)):\n",
        ("tests/proxy/test_upstream.py::test_what_is_sent_once_more_is_within_the_budget_of_retries",),
    ),
    Mutant(
        "the proxy's own lack of sockets is an instance's failure",
        "proxy/upstream.py:Call.open",
        "            if is_ours(error):\n",
        "            if False:\n",
        ("tests/proxy/test_blame.py::test_what_the_proxy_lacks_is_no_instance_s_failure",),
    ),
    Mutant(
        "the proxy's own lack of sockets makes a listed instance unready",
        "proxy/membership/listed.py:ListedWatch._look",
        "            if is_ours(error):\n",
        "            if False:\n",
        ("tests/proxy/test_listed.py::test_what_the_proxy_lacks_makes_no_listed_instance_unready",),
    ),
    Mutant(
        "one frozen D holds up the list of models",
        "proxy/models.py:_replies",
        "            left = _OTHERS_SECONDS\n",
        "            pass\n",
        ("tests/proxy/test_models.py",),
    ),
    Mutant(
        "the models of a D that does not answer are forgotten",
        "proxy/models.py:ModelLists.merged",
        "            self._latest.update(found)\n",
        "            pass\n",
        ("tests/proxy/test_models.py",),
    ),
    Mutant(
        "what keeps the port takes connections, too",
        "proxy/supervisor.py:reserved",
        "                port = made[-1].getsockname()[1]\n",
        "                port = made[-1].getsockname()[1]\n                made[-1].listen()\n",
        ("tests/proxy/test_workers.py::test_what_keeps_the_port_gets_no_connections",),
    ),
    Mutant(
        "a request that was sent twice is sent anew without bound",
        "proxy/service.py:Proxy._serve",
        "                may_resend = False\n",
        "                may_resend = True\n",
        ("tests/proxy/test_blame.py::test_what_is_sent_twice_and_fails_is_sent_anew_only_once",),
    ),
    Mutant(
        "a P that stops breaks a stream of several prompts",
        "proxy/attempt.py:_interrupt",
        "    if verdict.again is not Again.GOES_ON:\n        relay",
        "    if isinstance(ended, CallFailed):\n        relay",
        ("tests/proxy/test_blame.py::test_a_p_that_stops_breaks_no_stream_of_several_prompts",),
    ),
    Mutant(
        "the P of several prompts counts as not needed after the first token",
        "proxy/attempt.py:Attempt.needs",
        " and (self.relay is None or not self.body.one_prompt)\n",
        " and self.relay is None\n",
        ("tests/proxy/test_blame.py::test_a_p_is_needed_until_the_end_of_a_stream_of_several_prompts",),
    ),
    Mutant(
        "D's error does not wait for the news of P's failure",
        "proxy/attempt.py:Attempt._concurrent",
        "                    await asyncio.wait((prefilling,), timeout=_VERDICT_SECONDS)\n",
        "                    pass\n",
        ("tests/proxy/test_blame.py::test_ds_error_waits_for_the_news_of_ps_failure_and_is_ps",),
    ),
    Mutant(
        "instances that have said goodbye are judged",
        "proxy/attempt.py:Attempt._count",
        "        if instance.left is not None:\n            return  # it",
        "        if False:\n            return  # it",
        ("tests/proxy/test_blame.py::test_who_has_said_goodbye_is_not_judged",),
    ),
    Mutant(
        "an answer has no second of grace after the goodbye",
        "proxy/membership/prober.py:Prober._doubt",
        "                if refused and now - instance.left >= _GOODBYE_SECONDS:\n",
        "                if refused:\n",
        ("tests/proxy/test_membership.py::test_an_answer_that_comes_within_a_second_of_the_goodbye_is_taken",),
    ),
    Mutant(
        "a leaver that freezes with its port open keeps its requests",
        "proxy/membership/prober.py:Prober._doubt",
        "                elif not refused and self._registry.overdue(instance, now):\n",
        "                elif False:\n",
        ("tests/proxy/test_membership.py::test_a_frozen_leaver_loses_its_requests_after_a_lease",),
    ),
    Mutant(
        "who needs a P is left to a D alone",
        "proxy/routing.py:Router._able",
        "            if mode is PrefillMode.NEEDED:\n                raise NoInstance(",
        "            if False:\n                raise NoInstance(",
        ("tests/proxy/test_routing.py::test_who_needs_a_p_is_not_left_to_a_d_alone_where_all_ps_are_in_doubt",),
    ),
    Mutant(
        "what is left of a prompt takes as long on any number of ranks",
        "proxy/prefixes.py:PrefixAware.__call__.cost",
        "_WEIGHT_OF_NEW * new / instance.ping.tp_size",
        "_WEIGHT_OF_NEW * new",
        ("tests/proxy/test_routing.py::test_four_ranks_compute_all_of_it_sooner_than_one_computes_half",),
    ),
    Mutant(
        "that a request was left to a D alone is forgotten at the next try",
        "proxy/admission.py:RequestPlace.mode_after",
        "        if self.choice.missed:\n",
        "        if False:\n",
        ("tests/proxy/test_alone.py::test_what_a_second_try_needs_of_p",),
    ),
    Mutant(
        "a place that is left for a D alone is not given to the next request",
        "proxy/admission.py:Admission.stay_alone",
        "        self._count(place.choice)\n        self.advance()\n",
        "        self._count(place.choice)\n",
        ("tests/proxy/test_alone.py::test_the_place_that_is_left_for_a_d_alone_is_the_next_one_s",),
    ),
    Mutant(
        "an address that a ping spells in full is not taken out of errors",
        "proxy/membership/instance.py:Instance.written_addresses",
        ", str(self.zmq_address)}",
        "}",
        ("tests/proxy/test_rewriter.py::test_an_error_names_no_instance_however_it_spells_the_address",),
    ),
    Mutant(
        "in a fleet larger than max_links a request goes to a pair without a link",
        "proxy/routing.py:Router.choose",
        "elif fleet.nearby is not None",
        "elif False",
        ("tests/proxy/test_partners.py::test_in_a_large_fleet_requests_go_to_pairs_that_have_links",),
    ),
    Mutant(
        "a stream goes on with a token too many",
        "proxy/transcript.py:Transcript.rewind",
        "del self._ids[self._safe :]",
        "del self._ids[self._safe + 3 :]",
        ("tests/proxy/test_continuation.py::test_a_cut_answer_is_the_whole_one",),
    ),
    Mutant(
        "half a character counts as sent",
        "proxy/transcript.py:Transcript.feed_alike",
        "start < at < end",
        "start <= at < end",
        ("tests/proxy/test_continuation.py::test_half_a_character_is_generated_anew",),
    ),
    Mutant(
        "text that a stop string may begin in counts as sent",
        "proxy/transcript.py:Transcript._add",
        "self._chars + self.wanted.kept_back",
        "self._chars",
        ("tests/proxy/test_continuation.py::test_a_cut_answer_is_the_whole_one",),
    ),
    Mutant(
        "a stream that goes on may generate as many tokens as a new one",
        "proxy/continuation.py:Continuation._body",
        "self._transcript.prompt_tokens) - self.before",
        "self._transcript.prompt_tokens)",
        ("tests/proxy/test_continuation.py::test_a_cut_answer_is_the_whole_one",),
    ),
    Mutant(
        "a retry may go to the neighbour of the engine that failed",
        "proxy/retries.py:Retries._move",
        "failed.union(culprit.neighbours())",
        "failed",
        (
            "tests/proxy/test_data_parallel.py"
            "::test_what_a_hung_engine_has_not_begun_goes_to_another_server",
        ),
    ),
    Mutant(
        "an instance whose port refuses counts as a try",
        "proxy/service.py:Proxy._serve",
        "tries - closed",
        "tries",
        ("tests/proxy/test_retries.py::test_instances_whose_port_refuses_are_no_tries",),
    ),
    Mutant(
        "the budget of retries refuses the first resume",
        "proxy/retries.py:Retries.resume",
        "whatever=tries == 0",
        "whatever=False",
        ("tests/proxy/test_resume.py::test_all_streams_of_a_lost_d_go_on",),
    ),
    Mutant(
        "bytes that were held back are lost when D dies",
        "proxy/relay.py:Relay._break_off",
        "            await self._send(self._noted(self._rewriter.flush()) + self._flushed())\n",
        "            pass\n",
        ("tests/proxy/test_failures.py::test_what_was_held_back_when_d_dies_reaches_the_client",),
    ),
    Mutant(
        "the supervisor does not find out which connections are closed",
        "proxy/supervisor.py:Pings.all",
        "        for source in [source for source in self._numbers if not source.stands()]:\n",
        "        for source in list[PingSource]():\n",
        ("tests/proxy/test_supervisor.py::test_a_closed_connection_takes_its_instance_along",),
    ),
    Mutant(
        "workers do not learn that a connection is closed",
        "proxy/worker.py:WorkerState.update",
        "            self._connections.pop(number).open = False\n",
        "            self._connections.pop(number)\n",
        ("tests/proxy/test_supervisor.py::test_a_closed_connection_takes_its_instance_along",),
    ),
    Mutant(
        "the pause before a worker's restart does not grow",
        "proxy/supervisor.py:Supervisor._keep",
        "            pause = min(2 * pause, _LONGEST_PAUSE)\n",
        "            pass\n",
        ("tests/proxy/test_supervisor.py::test_the_pause_before_a_restart_doubles_up_to_a_bound",),
    ),
    Mutant(
        "a worker that lived long is restarted as late as one that did not",
        "proxy/supervisor.py:Supervisor._keep",
        "            pause = _FIRST_PAUSE if time.monotonic() - began > _LIVED_SECONDS else pause\n",
        "            pass\n",
        ("tests/proxy/test_supervisor.py::test_the_pause_before_a_restart_doubles_up_to_a_bound",),
    ),
    Mutant(
        "a frozen worker stays",
        "proxy/supervisor.py:Supervisor._update",
        "                process.kill()\n            return\n",
        "                pass\n            return\n",
        ("tests/proxy/test_supervisor.py::test_a_frozen_worker_is_restarted_and_a_starting_one_is_not",),
    ),
    Mutant(
        "a worker takes connections before it knows the instances",
        "proxy/cli.py:_serve_as_worker",
        "        await worker.updated.wait()\n",
        "",
        ("tests/proxy/test_workers.py::test_a_worker_that_begins_turns_no_request_away_for_want_of_instances",),
    ),
    Mutant(
        "a worker that begins forgets what is drained",
        "proxy/worker.py:WorkerState.update",
        "            registry.adopt_drains(update.drains)\n",
        "            pass\n",
        ("tests/proxy/test_supervisor.py::test_only_a_worker_that_begins_takes_over_drains",),
    ),
    Mutant(
        "a listed instance whose rank was known once is not asked again",
        "proxy/membership/listed.py:ListedWatch._down",
        "        self._source.answers = self._source.pinged = self._learnt = False\n",
        "        self._source.answers = self._source.pinged = False\n",
        ("tests/proxy/test_listed.py::test_a_rank_that_cannot_be_asked_after_a_restart_is_asked_again",),
    ),
    Mutant(
        "each list of partners puts off the end of those that are not in it",
        "p2pkv/engine/preconnect.py:Preconnect._take",
        "min(partner.until, now + LEFT_SECONDS)",
        "now + LEFT_SECONDS",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "P's that the proxy names no more are dialed",
        "p2pkv/engine/preconnect.py:Preconnect._begin",
        " or partner.until < inf",
        "",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "a P that a request needs is given up as one that was dialed ahead",
        "p2pkv/engine/preconnect.py:Preconnect._look_at",
        "elif any(peer.needed for peer in peers):",
        "elif False:",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "links are built ahead to a P with more ranks than max_links",
        "p2pkv/engine/preconnect.py:Preconnect._meet",
        "if len(edges) > self._ctx.options.max_links:",
        "if False:",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "one link of several makes a P count as linked",
        "p2pkv/engine/preconnect.py:Preconnect._all_up",
        "return all(peer.link.up",
        "return any(peer.link.up",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause after a failed try stays long once a link was up",
        "p2pkv/engine/preconnect.py:Preconnect._came_up",
        "0.0, FIRST_PAUSE, False",
        "0.0, partner.pause, False",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause between two tries does not grow",
        "p2pkv/engine/preconnect.py:Preconnect._give_up",
        "min(2 * partner.pause, LAST_PAUSE)",
        "partner.pause",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause between two tries grows without bound",
        "p2pkv/engine/preconnect.py:Preconnect._give_up",
        "min(2 * partner.pause, LAST_PAUSE)",
        "2 * partner.pause",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "D hangs up on ranks of P that requests need",
        "p2pkv/engine/preconnect.py:Preconnect._let_go",
        "if not peer.needed:",
        "if True:",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "a link may take all that is left of the staging, whatever it holds",
        "p2pkv/links/staging.py:StagingShare.grants",
        "self.held + need <= left",
        "need <= left",
        ("tests/links/test_staging.py",),
    ),
    Mutant(
        "the memory of a pool counts as idle since its first use",
        "p2pkv/links/staging.py:MappedPool.take",
        "            self._idle_since = None\n",
        "",
        ("tests/links/test_staging.py",),
    ),
    Mutant(
        "the largest layer says how many layers fill a message",
        "p2pkv/kv/cache.py:RankCache.layer_bytes",
        "min(tokens",
        "max(tokens",
        ("tests/kv/test_rank_cache.py",),
    ),
    Mutant(
        "P and D may have different attention windows",
        "p2pkv/protocol/handshake.py:_same_of_groups",
        "_seen(mine), _seen(theirs), SAME_RINGS",
        "0, 0, SAME_RINGS",
        ("tests/protocol/test_handshake.py",),
    ),
    Mutant(
        "of a mixed prompt P keeps the marks of the tokens that it leaves to D",
        "p2pkv/connector/scheduler.py:leave_out_last",
        "        request.prompt_is_token_ids = request.prompt_is_token_ids[:-tokens]\n",
        "        pass\n",
        ("tests/connector/test_prefill_side.py",),
    ),
    Mutant(
        "P reads the block tables of a step again for each prompt",
        "p2pkv/connector/scheduler.py:ProducerScheduler.step",
        "cache(partial(self._fresh, output))",
        "partial(self._fresh, output)",
        ("tests/connector/test_prefill_side.py",),
    ),
    Mutant(
        "embeddings are copied before they are hashed",
        "p2pkv/connector/identity.py:_tensor_digest",
        "tensor.detach()",
        "tensor.detach().clone()",
        ("tests/connector/test_identity.py",),
    ),
    Mutant(
        "every scheduling pass comes to the requests that wait for P",
        "p2pkv/connector/deferral.py:DeferringQueue.prepend_requests",
        "if request.request_id in self._undecided:",
        "if False:",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "requests that P begins late come first, whatever their age",
        "p2pkv/connector/deferral.py:DeferringQueue.resume",
        "<= _age(request)",
        "< 0",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "a preempted request is overtaken by an older one",
        "p2pkv/connector/deferral.py:DeferringQueue.resume",
        "queue[0].status is RequestStatus.PREEMPTED or ",
        "",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "requests that wait for P do not count as waiting",
        "p2pkv/connector/deferral.py:DeferringQueue.__len__",
        " + len(self._deferred)",
        "",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "an aborted request that waits for P stays in the queue",
        "p2pkv/connector/deferral.py:DeferringQueue.remove_requests",
        "self._deferred.pop(each.request_id, None) is None",
        "each.request_id not in self._deferred",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "a request of which one rank of P has begun is looked up again",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.reported",
        "settled = len(asking.begun) >= self._world or self._failure(asking)",
        "settled = True",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "a request whose P has failed is not looked at again",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.fail",
        "self._decide([request_id])",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "further children of n wait on when the first has loaded",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.reported",
        "decided += self._children.get(asking.paired.key, ())",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "further children of n wait on when the first was aborted",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.finished",
        "self._decide(self._children.get(asking.paired.key, ()))",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "further children of n wait on when the first needs nothing from P",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.allocated",
        "self._decide(self._children.get(key, ()))",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "a pause that keeps requests does not take back the blocks that KV has come into",
        "p2pkv/connector/vllm_patches.py:PausedLoads.instead_of_reset_prefix_cache",
        "self._give_back(scheduler)",
        "pass",
        ("tests/connector/test_decode_side.py",),
    ),
    Mutant(
        "a pause that keeps requests does not wait for KV that comes in",
        "p2pkv/connector/connector.py:P2pKvConnector.has_pending_push_work",
        "self.consuming is not None and self.consuming.loads",
        "False",
        ("tests/connector/test_decode_side.py",),
    ),
    Mutant(
        "beside another connector D asks that one only once",
        "p2pkv/connector/vllm_patches.py:Deferral._defer",
        "getattr(scheduler.connector,",
        'getattr(getattr(scheduler.connector, "sub_connectors", [scheduler.connector])[-1],',
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "of each tensor only its middle is looked at",
        "p2pkv/connector/identity.py:_offsets",
        "for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES))",
        "for at in ((start + stop) // 2,)",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "of each tensor only its end is looked at",
        "p2pkv/connector/identity.py:_offsets",
        "for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES))",
        "for at in (max(start, stop - SAMPLE_BYTES),)",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "an engine core that shuts down rests",
        "p2pkv/connector/vllm_patches.py:EngineCore._rest",
        " or not core.is_running()",
        "",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "a nap sleeps through wake-ups",
        "p2pkv/connector/vllm_patches.py:SpinWait.instead_of_wait",
        "original(condition, nap if timeout_ms is None else min(nap, timeout_ms))",
        "time.sleep(nap / 1000)",
        ("tests/connector/test_idle_steps.py::TestSpinning::test_a_wake_up_ends_the_nap",),
    ),
    Mutant(
        "D loads what P has computed with other weights",
        "p2pkv/connector/scheduler.py:ConsumerScheduler._failure",
        "others = {*asking.begun} - {None, self._generation}",
        "others: set[str | None] = set()",
        ("tests/connector/test_weights_change.py", "tests/connector/test_weights_real_ranks.py"),
    ),
    Mutant(
        "P sends what it has computed with former weights",
        "p2pkv/connector/scheduler.py:ProducerScheduler.invalidate",
        "if prompt.offered and not prompt.stale:",
        "if False:",
        ("tests/connector/test_weights_change.py", "tests/connector/test_weights_real_ranks.py"),
    ),
    Mutant(
        "vLLM hears that a load of former weights has come",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.reported",
        "if asking.stale and request_id not in failed:",
        "if False:",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "vLLM's prefix cache keeps what was computed with former weights",
        "p2pkv/connector/generation.py:forget_prefixes",
        "pool.evict_blocks(set(range(len(pool.blocks))))",
        "pass",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "what runs across a change of weights is found in vLLM's prefix cache",
        "p2pkv/connector/generation.py:forget_prefixes",
        "request.cache_salt = uuid.uuid4().hex",
        "continue",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "early buffers survive a change of weights",
        "p2pkv/engine/decode.py:Decode.invalidate",
        "self._decided(entry, entry.receiver.cancel(command.reason), now)",
        "pass",
        ("tests/engine/test_ahead.py",),
    ),
    Mutant(
        "weights that are loaded anew go unnoticed",
        "p2pkv/connector/vllm_patches.py:_watching",
        "if generation.changes > before and",
        "if False and",
        ("tests/connector/test_generation.py",),
    ),
    Mutant(
        "blocks of prompts that P had before its sleep are never free",
        "p2pkv/connector/worker.py:Worker.wake",
        "self._free |= self._held",
        "pass",
        ("tests/connector/test_weights_real_ranks.py",),
    ),
    Mutant(
        "fields that are not marked as optional are dropped too",
        "p2pkv/protocol/messages.py:_kept",
        "name.startswith(OPTIONAL)",
        "True",
        ("tests/protocol/test_messages.py",),
    ),
    Mutant(
        "an optional field may stand twice in a message, or in another form",
        "p2pkv/protocol/messages.py:without_optional",
        "if msgspec.msgpack.encode(fields) != data:",
        "if False:",
        ("tests/protocol/test_messages.py",),
    ),
)  # fmt: skip

FAULTS = (
    Mutant(
        "blocks are not poisoned",
        "tests/real_ranks_support.py:Engine.prepare_blocks",
        "        self._poison(views, self._poisoned)\n",
        "",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "a relay that should hold everything holds nothing",
        "tests/chaos/rough.py:Relay._give",
        "if way.name in manner.held or way.shut:",
        "if way.shut:",
        ("tests/chaos/test_rough.py::test_short_stalls_cost_nothing_but_time",),
    ),
    Mutant(
        "connections that should be held are not, and the test of partitions asks for nothing",
        "tests/chaos/rough.py:Relay._give",
        "if way.name in manner.held or way.shut:",
        "if way.shut:",
        ("tests/chaos/test_rough.py::test_while_both_ways_are_held_nothing_comes_through",),
    ),
    Mutant(
        "the window of a convolution is divided as one piece",
        "p2pkv/connector/recurrent.py:_delta_net",
        'segments = ("q", keys), ("k", keys), ("v", values)',
        'segments = (("q", _equal_parts(2 * keys.heads * keys.size + values.heads * values.size)),)',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "room for speculative tokens travels with the window",
        "p2pkv/connector/recurrent.py:_parts",
        "part = _StatePart(kind, name, form, axis, form.steps, dtype, DENSE, step, stride)",
        "part = _StatePart(kind, name, form, axis, form.room, dtype, DENSE, step, stride)",
        ("tests/connector/test_states.py::test_every_rank_of_d_holds_its_slice_of_the_global_state",),
    ),
    Mutant(
        "Mamba-2's copies of a group count as groups",
        "p2pkv/connector/recurrent.py:_mamba2",
        'sizes["norm.n_groups"]',
        'sizes["n_groups"]',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "a CPU's delta net passes for a GPU's",
        "p2pkv/connector/recurrent.py:_parts",
        'codec = KEY_FIRST if on_cpu and kind == "GDN_ATTN" else DENSE',
        "codec = DENSE",
        ("tests/connector/test_states.py::test_a_cpu_s_delta_net_meets_only_another_one",),
    ),
    Mutant(
        "columns of a window that begins at another layer are copied as if they followed",
        "p2pkv/kv/copiers.py:ColumnCopier._matrices",
        "np.flatnonzero(np.diff(steps) != self._element)",
        "np.flatnonzero(np.diff(steps) > 1 << 40)",
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
)


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """The parts that tests need, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        # p2pkv_proxy is installed from proxy/, under another name.
        (copy / "p2pkv_proxy").symlink_to("proxy")
        yield copy


def run_tests(copy: Path, tests: Iterable[str], seconds: float = SECONDS) -> tuple[str, str]:
    """Run tests of the copy: "passed", "failed", "hung" or "did not run", and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            said = child.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            return "hung", child.communicate()[0]
    last = said.strip().splitlines()[-1:] or [""]
    passed = child.returncode == 0 and " passed" in last[0]
    return ("passed" if passed else "failed" if child.returncode == 1 else "did not run"), said


def foreign_imports(copy: Path) -> str:
    """Where p2pkv or p2pkv_proxy would come from if not from the copy; "" if all is well."""
    say = "import p2pkv, p2pkv_proxy; print(p2pkv.__file__, p2pkv_proxy.__file__)"
    env = os.environ | {"PYTHONPATH": str(copy)}
    where = subprocess.run(
        [sys.executable, "-c", say], cwd=copy, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    return "" if all(Path(each).is_relative_to(copy) for each in where) else " and ".join(where)


def verdict(copy: Path, mutant: Mutant) -> str:
    """ "killed", or what is wrong."""
    path = copy / mutant.file
    before = path.read_text() if path.exists() else ""
    try:
        path.write_text(mutant.applied(before))
    except Stale as stale:
        return f"STALE: {stale}; mend tests/mutants.py"
    try:
        result, said = run_tests(copy, mutant.tests)
    finally:
        path.write_text(before)
    if result == "passed":
        return f"SURVIVED {' '.join(mutant.tests)}"
    if result == "did not run":
        return f"ITS TESTS DID NOT RUN:\n{said}"
    return "killed" if result == "failed" else "killed (its tests hung)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this text in their name or place")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    chosen = parser.parse_args()
    mutants = [each for each in (*PRODUCT, *FAULTS) if chosen.only in f"{each.what} {each.where}"]
    if chosen.list or not mutants:
        print(
            "\n".join(f"{each.where}: {each.what}" for each in mutants) or f"none has {chosen.only!r} in it"
        )
        return 0 if mutants else 1
    bad = 0
    with copy_of_the_tree() as copy:
        if where := foreign_imports(copy):
            print(f"the tests would not run against the copy, but against {where}")
            return 1
        tests = sorted({test for each in mutants for test in each.tests})
        result, said = run_tests(copy, tests, 6 * SECONDS)
        if result != "passed":
            print(f"{said}\nthe tests do not pass on the tree as it is ({result}), so they show nothing")
            return 1
        for each in mutants:
            began = time.monotonic()
            found = verdict(copy, each)
            bad += not found.startswith("killed")
            print(f"{each.where}: {each.what}: {found} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants were killed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
