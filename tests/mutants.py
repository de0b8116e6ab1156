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
        "vLLM does not zero the blocks of D's loads",
        "p2pkv/connector/connector.py:P2pKvConnector.get_loaded_kv_cache_group_ids",
        "        return ()\n",
        "        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))\n",
        ("tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block",),
    ),
    Mutant(
        "a request that D never admits waits without end (K3)",
        "p2pkv/protocol/receiver.py:Receiver._bound",
        "return None if self.ahead or self._idle else self.waits_since + self.wait",
        "return None",
        ("tests/virtual/test_engine_cores.py",),
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
        "p2pkv/connector/scheduler.py:HeldBlocks.full",
        "if mine < self._share * (self._total - others):",
        "if True:",
        ("tests/connector/test_held_blocks.py",),
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
        "p2pkv/engine/consumer.py:Consumer.tick",
        "if now >= self._next_beat and not self._ctx.steps.trouble(now):",
        "if now >= self._next_beat:",
        ("tests/virtual/test_engine_cores.py",),
    ),
    Mutant(
        "P confirms requests although its engine core is stopped (K4)",
        "p2pkv/engine/prompts.py:Prompts.waiting",
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
        "p2pkv/control/announcer.py:_Parent.vouched_for",
        "return not silent and self._last != _FAILS",
        "return not silent",
        ("tests/control/test_announcer.py",),
    ),
    Mutant(
        "requests stay at a D whose engine hangs behind a server that answers (K4)",
        "proxy/prober.py:Prober._doubt",
        'instance.lost("hung")',
        "pass",
        ("tests/proxy/test_paused_engines.py",),
    ),
    Mutant(
        "a paused instance gets requests (K3)",
        "proxy/registry.py:Registry.routable",
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
        "p2pkv/engine/rank.py:Rank.trouble",
        "if self.failure or not self.alive:",
        "if False:",
        ("tests/engine/test_thread_end.py",),
    ),
    Mutant(
        "a thread that cannot begin does not fail the start (K9)",
        "p2pkv/engine/rank.py:Rank.__init__",
        "if self.failure:\n            raise RuntimeError",
        "if False:\n            raise RuntimeError",
        ("tests/engine/test_thread_end.py",),
    ),
    Mutant(
        "an engine without its server holds what it has (X13)",
        "p2pkv/engine/rank.py:Core._look_at_engine",
        "self.half.leave(now)\n",
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
        "p2pkv/engine/partners.py:LinksAhead._begin",
        "if room < partner.sources or fresh >= AT_ONCE:",
        "if fresh >= AT_ONCE:",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "on P a link that is built ahead takes another's place",
        "p2pkv/engine/producer.py:Producer._hello",
        "peer.parked = self._full",
        "peer.parked = False",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "a link that no request uses is closed after a minute although the proxy names its P",
        "p2pkv/engine/consumer.py:Consumer._look",
        " or self.partners.keeps(peer)",
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
        "    if not files:\n",
        "    if False:\n",
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
        "p2pkv/connector/identity.py:_places",
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
        "p2pkv/connector/worker.py:EarlyRevocation.install.revoke_first",
        "self._before(scheduler_output.kv_connector_metadata)",
        "pass",
        ("tests/connector/test_worker.py",),
    ),
    Mutant(
        "gathers ignore the forward's fence",
        "p2pkv/engine/rank.py:Core._blocked",
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
        "p2pkv/links/nccl_ends.py:End._may_launch",
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
        "except torch.OutOfMemoryError:",
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
        "p2pkv/engine/rank.py:Core.revoke",
        "self.context.revoked.update(keys)",
        "pass",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "pages are taken back in the middle of a gather",
        "p2pkv/engine/producer.py:Outgoing._transmit",
        "with self._ctx.reading:\n            filler",
        "if True:\n            filler",
        ("tests/engine/test_page_ownership.py",),
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
        "p2pkv/engine/consumer.py:Incoming.post",
        "reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if _is_ahead(entry) else 0",
        "reserve = 0",
        ("tests/engine/test_ahead.py::test_admitted_requests_go_before_it",),
    ),
    Mutant(
        "admitted requests wait behind what comes ahead",
        "p2pkv/engine/consumer.py:Incoming.post",
        "            self._admitted_first(peer)\n",
        "",
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
        "p2pkv/engine/rank.py:Rank._emit",
        "self._happened.set()",
        "pass",
        ("tests/engine/test_progress.py::test_an_event_ends_the_forward_threads_wait",),
    ),
    Mutant(
        "a worker with news does not ring",
        "p2pkv/engine/rank.py:Rank._emit",
        "self._call()\n",
        "pass\n",
        ("tests/engine/test_progress.py::test_an_event_is_called_out_once_until_it_has_been_heard",),
    ),
    Mutant(
        "the engine core rests although it has just heard news",
        "p2pkv/connector/connector.py:P2pKvConnector.update_connector_output",
        "            CORE.seconds = 0.0\n",
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
        "proxy/dispatch.py:Exchange.see_off.ended",
        "deadline.cancel()",
        "pass",
        ("tests/proxy/test_soak.py::test_a_p_that_ends_after_d_leaves_nothing_of_its_request",),
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
        "p2pkv/engine/consumer.py:Incoming.check",
        "        if not peer.verify or posted.sent is None:\n",
        "        if not peer.verify or posted.sent is None or all(\n"
        "            peer.wires[piece.group].once for piece in posted.chunk.pieces\n"
        "        ):\n",
        ("tests/engine/test_kv_groups.py::test_a_flipped_bit_of_the_state_alone_fails_the_load",),
    ),
    Mutant(
        "a state travels before the last token of the prompt is computed",
        "p2pkv/protocol/pieces.py:Extent.sendable",
        "        if self.ready is not None:\n            return self.start\n",
        "        if self.ready is not None:\n            return self.ceiling if computed else self.start\n",
        ("tests/engine/test_kv_groups.py", "tests/protocol/test_conversation.py"),
    ),
    Mutant(
        "P's blocks are free while a chunk of a KV group beside the first is to be read",
        "p2pkv/protocol/sender.py:SendState.drained",
        "        return self.cutter is not None and not self.cutter.left and not self.announced\n",
        "        under_way = {piece.group for _, pieces in self.announced.values() for piece in pieces}\n"
        "        return self.cutter is not None and not self.cutter.left and 0 not in under_way\n",
        ("tests/protocol/test_conversation.py",),
    ),
    Mutant(
        "D wants what has left a window, and P has given back",
        "p2pkv/protocol/handshake.py:Wire.needed",
        "first = max(0, stop - self.window + 1) // whole * whole if self.window else 0",
        "first = 0",
        ("tests/protocol/test_conversation.py",),
    ),
    Mutant(
        "each list of partners puts off the end of those that are not in it",
        "p2pkv/engine/partners.py:LinksAhead._take",
        "min(partner.until, now + LEFT_SECONDS)",
        "now + LEFT_SECONDS",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "P's that the proxy names no more are dialed",
        "p2pkv/engine/partners.py:LinksAhead._begin",
        " or partner.until < inf",
        "",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "a P that a request needs is given up as one that was dialed ahead",
        "p2pkv/engine/partners.py:LinksAhead._look_at",
        "elif any(peer.needed for peer in peers):",
        "elif False:",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "links are built ahead to a P with more ranks than max_links",
        "p2pkv/engine/partners.py:LinksAhead._meet",
        "if len(edges) > self._ctx.options.max_links:",
        "if False:",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "one link of several makes a P count as linked",
        "p2pkv/engine/partners.py:LinksAhead._all_up",
        "return all(peer.up",
        "return any(peer.up",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause after a failed try stays long once a link was up",
        "p2pkv/engine/partners.py:LinksAhead._came_up",
        "0.0, FIRST_PAUSE, False",
        "0.0, partner.pause, False",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause between two tries does not grow",
        "p2pkv/engine/partners.py:LinksAhead._give_up",
        "min(2 * partner.pause, LAST_PAUSE)",
        "partner.pause",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "the pause between two tries grows without bound",
        "p2pkv/engine/partners.py:LinksAhead._give_up",
        "min(2 * partner.pause, LAST_PAUSE)",
        "2 * partner.pause",
        ("tests/engine/test_partners.py",),
    ),
    Mutant(
        "D hangs up on ranks of P that requests need",
        "p2pkv/engine/partners.py:LinksAhead._let_go",
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
        '        ("attention windows", mine.window, theirs.window, SAME_ALLOCATOR),\n',
        "",
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
        " if asking.begun >= self._world else []",
        "",
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
        "decided += asking.siblings",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "further children of n wait on when the first was aborted",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.finished",
        "self._decide(asking.siblings)",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "further children of n wait on when the first needs nothing from P",
        "p2pkv/connector/scheduler.py:ConsumerScheduler.allocated",
        "self._decide(asking.siblings)",
        "pass",
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "beside another connector D asks that one only once",
        "p2pkv/connector/deferral.py:Deferral._defer",
        "getattr(scheduler.connector,",
        'getattr(getattr(scheduler.connector, "sub_connectors", [scheduler.connector])[-1],',
        ("tests/connector/test_deferral.py",),
    ),
    Mutant(
        "of each tensor only its middle is looked at",
        "p2pkv/connector/identity.py:_places",
        "for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES))",
        "for at in ((start + stop) // 2,)",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "of each tensor only its end is looked at",
        "p2pkv/connector/identity.py:_places",
        "for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES))",
        "for at in (max(start, stop - SAMPLE_BYTES),)",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "an engine core that shuts down rests",
        "p2pkv/connector/idle_steps.py:CoreRest._rest",
        " or not core.is_running()",
        "",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "a nap sleeps through wake-ups",
        "p2pkv/connector/idle_steps.py:SpinWait._replace.wait",
        "spinning(condition, nap if timeout_ms is None else min(nap, timeout_ms))",
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
        "p2pkv/engine/requests.py:Requests.invalidate",
        "self.run(entry, entry.receiver.cancel(reason), now)\n\n    def drop",
        "pass\n\n    def drop",
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
        "p2pkv/connector/states.py:_delta_net",
        'segments = ("q", keys), ("k", keys), ("v", values)',
        'segments = (("q", _equal_parts(2 * keys.heads * keys.size + values.heads * values.size)),)',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "room for speculative tokens travels with the window",
        "p2pkv/connector/states.py:_parts",
        "part = _StatePart(kind, name, form, axis, form.steps, dtype, DENSE, step, stride)",
        "part = _StatePart(kind, name, form, axis, form.room, dtype, DENSE, step, stride)",
        ("tests/connector/test_states.py::test_every_rank_of_d_holds_its_slice_of_the_global_state",),
    ),
    Mutant(
        "Mamba-2's copies of a group count as groups",
        "p2pkv/connector/states.py:_mamba2",
        'sizes["norm.n_groups"]',
        'sizes["n_groups"]',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "a CPU's delta net passes for a GPU's",
        "p2pkv/connector/states.py:_parts",
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
