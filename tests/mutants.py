"""`make mutants`: changes that tests must notice. Each is made in a copy of the tree; its tests run there.

The first table changes the product; the second takes a fault away that a test says it injects, so that the
test must say that nothing was broken. A mutant that survives, or whose text is not in the tree exactly once,
makes the exit status 1. So does a test of the tables that fails on the tree as it is.
"""

from __future__ import annotations

import argparse
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
    """In `file`, `old` becomes `new`; then one of `tests`, as pytest names them, must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PRODUCT = (
    Mutant(
        "P pushes what another connector is still loading",
        "p2pkv/connector/scheduler.py",
        "if any(not filled.isdisjoint(table) for _, filled in self._filled for table in blocks):",
        "if False:",
        ("tests/connector/test_multi.py::test_what_a_store_fills_on_p_is_pushed_only_once_vllm_has_taken_the_step",),
    ),
    Mutant(
        "P forgets in the next step already what another connector was loading",
        "p2pkv/connector/scheduler.py",
        "self._steps - self._batches:",
        "self._steps - 1:",
        ("tests/connector/test_multi.py::test_a_failed_load_on_p_never_reaches_d",),
    ),
    Mutant(
        "D waits for P although its store has the whole prompt",
        "p2pkv/connector/multi.py",
        "if undecided and not (whole and all(undecided)):",
        "if undecided:",
        ("tests/connector/test_multi.py::test_d_does_not_wait_for_p_where_the_store_has_the_whole_prompt",),
    ),
    Mutant(
        "links are built ahead of requests although there are max_links",
        "p2pkv/engine/partners.py",
        "if room < partner.sources or fresh >= AT_ONCE:",
        "if fresh >= AT_ONCE:",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "on P a link that is built ahead takes another's place",
        "p2pkv/engine/producer.py",
        "peer.parked = self._full",
        "peer.parked = False",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "a link that no request uses is closed after a minute although the proxy names its P",
        "p2pkv/engine/consumer.py",
        " or self.partners.keeps(peer)",
        "",
        ("tests/engine/test_links_ahead.py",),
    ),
    Mutant(
        "of a model with weight files the configuration does not count",
        "p2pkv/connector/identity.py",
        "digest.update(_written_settings(folder, model).encode())",
        "pass",
        ("tests/connector/test_describe.py",),
    ),
    Mutant(
        "vLLM's V2 runner overwrites blocks before the revocation",
        "p2pkv/connector/worker.py",
        "self._before(scheduler_output.kv_connector_metadata)",
        "pass",
        ("tests/connector/test_worker.py",),
    ),
    Mutant(
        "gathers ignore the forward's fence",
        "p2pkv/engine/rank.py",
        "return isinstance(head, Computed) and not head.fence.ready()",
        "return False",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "block tables are uploaded from ordinary memory",
        "p2pkv/kv/copiers.py",
        'pin_memory=self._device.type == "cuda"',
        "pin_memory=False",
        ("tests/kv/test_uploads.py",),
    ),
    Mutant(
        "a block table is uploaded again for each span of layers",
        "p2pkv/kv/copiers.py",
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
        "p2pkv/device.py",
        "except torch.OutOfMemoryError:",
        "except NotImplementedError:",
        ("tests/unit/test_device.py",),
    ),
    Mutant(
        "the doctors believe whatever comes over the link",
        "p2pkv/cli/pair.py",
        "if compare and not torch.equal",
        "if False and not torch.equal",
        ("tests/cli/test_pair.py::test_other_bytes_than_were_sent_are_seen",),
    ),
    Mutant(
        "pages that are taken back are not marked",
        "p2pkv/engine/rank.py",
        "self.context.revoked.update(keys)",
        "pass",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "pages are taken back in the middle of a gather",
        "p2pkv/engine/producer.py",
        "with self._ctx.reading:\n            filler",
        "if True:\n            filler",
        ("tests/engine/test_page_ownership.py",),
    ),
    Mutant(
        "D's staging is granted without a budget",
        "p2pkv/links/staging.py",
        "return left >= 0 and (not self.held or self.held + need <= left)",
        "return True",
        ("tests/engine/test_backpressure.py::"
         "test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget",),
    ),
    Mutant(
        "one P may hold all of D's staging",
        "p2pkv/links/staging.py",
        "return left >= 0 and (not self.held or self.held + need <= left)",
        "return left >= 0",
        ("tests/engine/test_backpressure.py::"
         "test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget",),
    ),
    Mutant(
        "nothing is reserved for admitted requests",
        "p2pkv/engine/consumer.py",
        "reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if _is_ahead(entry) else 0",
        "reserve = 0",
        ("tests/engine/test_ahead.py::test_admitted_requests_go_before_it",),
    ),
    Mutant(
        "admitted requests wait behind what comes ahead",
        "p2pkv/engine/consumer.py",
        "            self._admitted_first(peer)\n",
        "",
        ("tests/engine/test_ahead.py::test_admitted_requests_go_before_it",),
    ),
    Mutant(
        "the tag of a pair is constant",
        "p2pkv/pairing.py",
        'return f"pair:{found.pair.unique}:{tag}"',
        'return f"pair:{found.pair.unique}:0"',
        ("tests/unit/test_pairing.py",),
    ),
    Mutant(
        "a step waits while an earlier one with tokens is out",
        "p2pkv/connector/idle_steps.py",
        "if self._empty < self._batches or not awaited:",
        "if not self._empty or not awaited:",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "an event does not end the wait of an idle step",
        "p2pkv/engine/rank.py",
        "self._happened.set()",
        "pass",
        ("tests/engine/test_progress.py::test_an_event_ends_the_forward_threads_wait",),
    ),
    Mutant(
        "a worker with news does not ring",
        "p2pkv/engine/rank.py",
        "self._call()\n",
        "pass\n",
        ("tests/engine/test_progress.py::test_an_event_is_called_out_once_until_it_has_been_heard",),
    ),
    Mutant(
        "the engine core rests although it has just heard news",
        "p2pkv/connector/connector.py",
        "            CORE.seconds = 0.0\n",
        "",
        ("tests/connector/test_idle_steps.py",),
    ),
    Mutant(
        "a bell ends a rest, and the step that may bring its news is forgotten",
        "p2pkv/connector/idle_steps.py",
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
        "p2pkv/control/endpoint.py",
        "socket.setsockopt(zmq.TCP_KEEPALIVE, 1)",
        "socket.setsockopt(zmq.TCP_KEEPALIVE, 0)",
        ("tests/control/test_endpoint.py",),
    ),
    Mutant(
        "the kernel probes control sockets only after its own two hours",
        "p2pkv/control/endpoint.py",
        "        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)\n",
        "",
        ("tests/control/test_endpoint.py",),
    ),
    Mutant(
        "the timer for a P that ends late is not cancelled",
        "proxy/dispatch.py",
        "deadline.cancel()",
        "pass",
        ("tests/proxy/test_soak.py::test_a_p_that_ends_after_d_leaves_nothing_of_its_request",),
    ),
    Mutant(
        "a load is done although its state is missing",
        "p2pkv/protocol/pieces.py",
        "        self.left = extents.nbytes\n        self._taken",
        "        self.left = sum(each.nbytes for each in extents.by_group.values() if each.ready is None)\n"
        "        self._taken",
        ("tests/engine/test_kv_groups.py::"
         "test_a_load_of_which_only_the_state_is_missing_fails_with_its_link[memory]",),
    ),
    Mutant(
        "the checksum of a chunk that holds a state alone is not compared",
        "p2pkv/engine/consumer.py",
        "        if not peer.verify or posted.sent is None:\n",
        "        if not peer.verify or posted.sent is None or all(\n"
        "            peer.wires[piece.group].once for piece in posted.chunk.pieces\n"
        "        ):\n",
        ("tests/engine/test_kv_groups.py::test_a_flipped_bit_of_the_state_alone_fails_the_load",),
    ),
    Mutant(
        "a state travels before the last token of the prompt is computed",
        "p2pkv/protocol/pieces.py",
        "        if self.ready is not None:\n            return self.start\n",
        "        if self.ready is not None:\n            return self.ceiling if computed else self.start\n",
        ("tests/engine/test_kv_groups.py", "tests/protocol/test_conversation.py"),
    ),
    Mutant(
        "P's blocks are free while a chunk of a KV group beside the first is to be read",
        "p2pkv/protocol/sender.py",
        "        return self.cutter is not None and not self.cutter.left and not self.announced\n",
        "        under_way = {piece.group for _, pieces in self.announced.values() for piece in pieces}\n"
        "        return self.cutter is not None and not self.cutter.left and 0 not in under_way\n",
        ("tests/protocol/test_conversation.py",),
    ),
    Mutant(
        "D wants what has left a window, and P has given back",
        "p2pkv/protocol/handshake.py",
        "first = max(0, stop - self.window + 1) // whole * whole if self.window else 0",
        "first = 0",
        ("tests/protocol/test_conversation.py",),
    ),
    Mutant(
        "D loads what P has computed with other weights",
        "p2pkv/connector/scheduler.py",
        "others = {*asking.begun} - {None, self._generation}",
        "others: set[str | None] = set()",
        ("tests/connector/test_weights_change.py", "tests/connector/test_weights_real_ranks.py"),
    ),
    Mutant(
        "P sends what it has computed with former weights",
        "p2pkv/connector/scheduler.py",
        "if prompt.offered and not prompt.stale:",
        "if False:",
        ("tests/connector/test_weights_change.py", "tests/connector/test_weights_real_ranks.py"),
    ),
    Mutant(
        "vLLM hears that a load of former weights has come",
        "p2pkv/connector/scheduler.py",
        "if asking.stale and request_id not in failed:",
        "if False:",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "vLLM's prefix cache keeps what was computed with former weights",
        "p2pkv/connector/generation.py",
        "pool.evict_blocks(set(range(len(pool.blocks))))",
        "pass",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "what runs across a change of weights is found in vLLM's prefix cache",
        "p2pkv/connector/generation.py",
        "request.cache_salt = uuid.uuid4().hex",
        "continue",
        ("tests/connector/test_weights_change.py",),
    ),
    Mutant(
        "early buffers survive a change of weights",
        "p2pkv/engine/requests.py",
        "self.run(entry, entry.receiver.cancel(reason), now)\n\n    def drop",
        "pass\n\n    def drop",
        ("tests/engine/test_ahead.py",),
    ),
    Mutant(
        "weights that are loaded anew go unnoticed",
        "p2pkv/connector/vllm_patches.py",
        "if generation.changes > before and",
        "if False and",
        ("tests/connector/test_generation.py",),
    ),
    Mutant(
        "blocks of prompts that P had before its sleep are never free",
        "p2pkv/connector/worker.py",
        "self._free |= self._held",
        "pass",
        ("tests/connector/test_weights_real_ranks.py",),
    ),
)  # fmt: skip

FAULTS = (
    Mutant(
        "a relay that should hold everything holds nothing",
        "tests/chaos/rough.py",
        "if way.name in manner.held or way.shut:",
        "if way.shut:",
        ("tests/chaos/test_rough.py::test_short_stalls_cost_nothing_but_time",),
    ),
    Mutant(
        "connections that should be held are not, and the test of partitions asks for nothing",
        "tests/chaos/rough.py",
        "if way.name in manner.held or way.shut:",
        "if way.shut:",
        ("tests/chaos/test_rough.py::test_while_both_ways_are_held_nothing_comes_through",),
    ),
    Mutant(
        "the window of a convolution is divided as one piece",
        "p2pkv/connector/states.py",
        'segments = ("q", keys), ("k", keys), ("v", values)',
        'segments = (("q", _equal_parts(2 * keys.heads * keys.size + values.heads * values.size)),)',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "room for speculative tokens travels with the window",
        "p2pkv/connector/states.py",
        "part = _StatePart(kind, name, form, axis, form.steps, dtype, DENSE, step, stride)",
        "part = _StatePart(kind, name, form, axis, form.room, dtype, DENSE, step, stride)",
        ("tests/connector/test_states.py::test_every_rank_of_d_holds_its_slice_of_the_global_state",),
    ),
    Mutant(
        "Mamba-2's copies of a group count as groups",
        "p2pkv/connector/states.py",
        'sizes["norm.n_groups"]',
        'sizes["n_groups"]',
        ("tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side",),
    ),
    Mutant(
        "a CPU's delta net passes for a GPU's",
        "p2pkv/connector/states.py",
        'codec = KEY_FIRST if on_cpu and kind == "GDN_ATTN" else DENSE',
        "codec = DENSE",
        ("tests/connector/test_states.py::test_a_cpu_s_delta_net_meets_only_another_one",),
    ),
    Mutant(
        "columns of a window that begins at another layer are copied as if they followed",
        "p2pkv/kv/copiers.py",
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


def run_tests(copy: Path, tests: Iterable[str]) -> tuple[str, str]:
    """Run tests of the copy: "passed", "failed", "hung" or "did not run", and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            said = child.communicate(timeout=SECONDS)[0]
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
    if before.count(mutant.old) != 1:
        return (
            f"STALE: {mutant.file} has {before.count(mutant.old)} times {mutant.old!r}; mend tests/mutants.py"
        )
    path.write_text(before.replace(mutant.old, mutant.new))
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
    parser.add_argument("--only", default="", help="mutants with this text in their name or file")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    chosen = parser.parse_args()
    mutants = [each for each in (*PRODUCT, *FAULTS) if chosen.only in f"{each.what} {each.file}"]
    if chosen.list or not mutants:
        print("\n".join(f"{each.file}: {each.what}" for each in mutants) or f"none has {chosen.only!r} in it")
        return 0 if mutants else 1
    bad = 0
    with copy_of_the_tree() as copy:
        if where := foreign_imports(copy):
            print(f"the tests would not run against the copy, but against {where}")
            return 1
        tests = sorted({test for each in mutants for test in each.tests})
        result, said = run_tests(copy, tests)
        if result != "passed":
            print(f"{said}\nthe tests do not pass on the tree as it is ({result}), so they show nothing")
            return 1
        for each in mutants:
            began = time.monotonic()
            found = verdict(copy, each)
            bad += not found.startswith("killed")
            print(f"{each.file}: {each.what}: {found} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants were killed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
