"""p2pkv beside other ways to serve, in one run on one machine without a GPU.

The systems: one plain vLLM server; two behind round robin; p2pkv (P and D asked at once, or P first, or
through p2pkv-proxy), with and without idle naps; vLLM's ExampleConnector (files), NixlConnector,
NixlPushConnector and MooncakeConnector, each without and with naps. NIXL and Mooncake live in an
environment of their own (`.side/`), which this script makes. A model with tiny weights and 128 KiB of KV a
token, as Llama-8B has; in float32 where the CPU does not compute in bfloat16. Every server has one OpenMP
thread, bound to no core (OMP_NUM_THREADS=1, VLLM_CPU_OMP_THREADS_BIND=nobind), and no prefix cache. All
clients are in this process.

Few servers live at a time, so the systems come in groups. Each group has the same plain server and the same
p2pkv pair beside its own, and its rounds are interleaved: every figure is held against those of its group.

series: prompts of --series-tokens; what "Done when" asks for. One plain server is asked for nine tokens,
    which gives its decode step as well.
small: the same with prompts of 64 tokens, each system once a round.
lengths: one request at a time, one token, by prompt length: time to first token, P's answer, hand-over.
decode: 16 answers at once on D, with and without naps in turn: the mean time between two tokens while all
    16 are under way.
idle: CPU time of D's worker and engine core while a request waits for a P that never computes it, and of
    P's while its blocks wait for D.
arrivals: short prompts at a D where such a request waits, and where none does, in turn.
legs: P first at p2pkv and at ExampleConnector in turn, prompts of --series-tokens: D's legs.
load: a closed loop of mixed prompts (side_by_side_load.MIX), 16 and 64 clients: the same requests to each.
links: bytes alone, without vLLM.

What does not fit into --minutes is cut, and the page says what was. What cannot be installed or started,
fails or takes longer than --deadline is a row that says so. Writes side_by_side.md, .json and .svg to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import side_by_side_systems as systems
from decode_leg_report import description
from side_by_side_load import Asker, Asking, Failed, Taken, asking, closed_loop, mixed, within
from side_by_side_report import plot, report
from side_by_side_systems import MODEL, MODEL_SAID, NAME, System, Workshop

from p2pkv.demo.processes import ServerFailed, ending_on_signals, wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

SECTIONS = ("links", "series", "small", "lengths", "legs", "decode", "idle", "arrivals", "load")
GROUPS = {"p2pkv": 0.44, "files": 0.21, "nixl": 0.17, "mooncake": 0.14, "push": 0.04}
"""Groups, in this order, and their shares of the time."""

SHARES = {
    "p2pkv": {
        "series": 0.42,
        "small": 0.05,
        "lengths": 0.07,
        "decode": 0.25,
        "idle": 0.03,
        "arrivals": 0.03,
        "load": 0.15,
    },
    "files": {"legs": 0.33, "lengths": 0.27, "load": 0.4},
    "others": {"lengths": 0.4, "load": 0.6},
}
"""Shares of a group's time of its sections, in this order. What is not used goes to those after it."""

SERIES = {"plain": 3, "p2pkv": 3, "p2pkv proxy": 3, "p2pkv P first": 6}
"""How often each is asked in a series."""

SMALL = 64
"""Tokens of a small prompt."""

ARRIVALS = 10
"""Short prompts in a round of arrivals, with and without a request that waits."""

DECODE_TOKENS = 9
IDLE_SECONDS = 2.5, 4.0
"""How long KV is waited for before CPU time is counted, and how long it is counted."""

LENGTHS = 64, 256, 1000, 2000, 4000, 8000
LONG = 4000
"""Prompts from this length on are asked in one round of three, and not of these systems:"""

NOT_LONG = ("p2pkv proxy", "p2pkv no naps P first")
DECODE_ANSWER = 40

END_SECONDS = 45.0
"""Kept for stopping the servers and writing the page."""


class Run:
    """One run: its clock, its clients, what it has measured and what it could not."""

    def __init__(
        self, args: argparse.Namespace, runner: asyncio.Runner, asker: Asker, shop: Workshop
    ) -> None:
        self.args, self.shop = args, shop
        self.end = time.monotonic() + args.minutes * 60 - END_SECONDS
        self.records: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        self.cut: list[str] = []
        self.titles: dict[str, str] = {}
        self.start_seconds = 0.0  # The longest start of a server so far.
        self.group = ""
        self.runner, self.asker = runner, asker
        self._failures: dict[str, int] = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def record(self, section: str, system: str, **more: Any) -> None:
        self.records.append({"group": self.group, "section": section, "system": system, **more})

    def ask(self, section: str, system: System, tokens: int, number: int, answer: int = 1) -> Taken | None:
        """One request, timed and recorded; None if it failed: after two in a row it is asked no more."""
        if system.name in self.missing:
            return None
        if system.longest is not None and tokens > system.longest:
            self.note(
                f"{system.name}: no prompts of more than {system.longest:,} tokens, which it cannot move"
            )
            return None
        one = asking(tokens, MODEL.vocab, NAME, answer=answer)
        deadline = min(self.args.deadline, max(5.0, self.left() + END_SECONDS / 3))
        facts: dict[str, Any] = {"tokens": tokens, "round": number}
        try:
            taken: Taken = self.runner.run(within(deadline, system.ask(self.asker, one)))
        except Failed as error:
            self.record(section, system.name, **facts, failed=str(error))
            self._failures[system.name] = self._failures.get(system.name, 0) + 1
            if self._failures[system.name] > 1:
                self.missing[system.name] = f"given up after two failures in a row, the last: {error}"
            return None
        finally:
            time.sleep(self.args.settle)
            system.after()
        self._failures[system.name] = 0
        self.record(section, system.name, **facts, answer=answer, **asdict(taken))
        return taken

    def note(self, cut: str) -> None:
        """Something was left out; said once."""
        if cut not in self.cut:
            self.cut.append(cut)

    def load(self, system: System, requests: list[Asking], clients: int, number: int) -> None:
        """A closed loop, recorded."""
        if system.name in self.missing:
            return
        seconds = min(self.args.load_seconds, max(10.0, self.left()))
        loop = closed_loop(lambda one: system.ask(self.asker, one), requests, clients, seconds)
        loaded = self.runner.run(loop)
        self.record(
            "load",
            system.name,
            clients=clients,
            round=number,
            count=len(requests),
            seconds=loaded.seconds,
            failed=loaded.failed,
            first=[one.first for one in loaded.taken],
            gaps=[gap for one in loaded.taken for gap in one.gaps],
        )
        time.sleep(self.args.settle)
        system.after()
        if not loaded.taken:
            self.missing[system.name] = f"no request of a load ended: {loaded.failed[0]}"

    def together(self, system: System, requests: list[Asking]) -> list[Taken]:
        """All at once; raises Failed if one fails."""

        async def all_() -> list[Taken]:
            return await asyncio.gather(*(system.ask(self.asker, one) for one in requests))

        taken: list[Taken] = self.runner.run(within(self.args.deadline, all_()))
        return taken

    def rounds(self, section: str, wished: int, until: float) -> Iterator[int]:
        """Numbers of rounds, as many as are wished and fit; the longest so far says what fits."""
        longest, done = 0.0, 0
        while done < wished and time.monotonic() + longest < until:
            begin = time.monotonic()
            yield done
            longest, done = max(longest, time.monotonic() - begin), done + 1
        if done < wished:
            self.cut.append(f"{self.group}, {section}: {done} of {wished} rounds")


# Servers.


def start(run: Run, stack: contextlib.ExitStack, wanted: Sequence[System], until: float) -> list[System]:
    """Start their servers, two at a time; those that serve. The others are rows that say why not."""
    wanted = [system for system in wanted if system.name not in run.args.without]
    servers: list[VllmServer] = []
    for system in wanted:
        servers += [server for server in system.servers if server not in servers]
    waiting = [server for server in servers if not server.running()]
    failed: dict[str, str] = {}
    for number in range(0, len(waiting), 2):
        some = waiting[number : number + 2]
        for server in some:
            stack.enter_context(server)
        for server in some:
            seconds = min(run.args.start_seconds, max(1.0, until - time.monotonic()))
            try:
                took = server.wait_ready(seconds)
                run.start_seconds = max(run.start_seconds, took)
                say(f"  {server.name} serves after {took:.0f} s")
            except ServerFailed as error:
                failed[server.name] = why(str(error), server.log_path)
                say(f"  {server.name} does not serve: {failed[server.name]}")
    for system in wanted:
        broken = [server.name for server in system.servers if server.name in failed]
        if broken:
            run.missing[system.name] = f"{broken[0]} did not serve: {failed[broken[0]]}"
            for server in system.servers:
                if server in waiting:
                    server.stop()
    return [system for system in wanted if system.name not in run.missing]


def why(error: str, log: Path) -> str:
    """The error's first line, and the first exception in the log: later ones only follow from it."""
    text = log.read_text(errors="replace") if log.exists() else ""
    raised = re.search(r"\b\w*(?:Error|Exception): .+", text)
    return error.splitlines()[0] + (f" ({raised[0].strip()[:200]})" if raised else "")


def warm(run: Run, present: Sequence[System], until: float) -> None:
    """Links made, products asked for, memory touched: the KV cache of each server once around."""
    longest = max(run.args.lengths)
    turns = max(1, run.args.kv_gib * (1 << 30) // (longest * MODEL.kv_bytes_per_token))
    seen: set[str] = set()
    for system in present:
        key = system.servers[0].name
        if key in seen:
            continue
        seen.add(key)
        run.ask("warm-up", system, 64, 0)
        for turn in range(turns):
            if time.monotonic() < until:
                run.ask("warm-up", system, min(longest, system.longest or longest), turn + 1)
    if present:
        say(f"  warm; these servers take {systems.memory_gib(_alive(present)):.1f} GiB")


def _alive(present: Sequence[System]) -> list[VllmServer]:
    return list({server.name: server for system in present for server in system.servers}.values())


# Sections. Each has the systems of its group, the plain server first, and the time at which it should end.


def series(run: Run, present: Sequence[System], until: float) -> None:
    for number in run.rounds("series", run.args.series, until):
        for turn in range(max(SERIES.values())):
            for system in _turned(present, number + turn):
                if turn < SERIES.get(system.name, 0):
                    answer = DECODE_TOKENS if system.name == "plain" else 1
                    run.ask("series", system, run.args.series_tokens, number, answer)


def small(run: Run, present: Sequence[System], until: float) -> None:
    these = [system for system in present if system.name in SERIES]
    for number in run.rounds("small", run.args.small_rounds, until):
        for system in _turned(these, number):
            run.ask("small", system, SMALL, number, DECODE_TOKENS if system.name == "plain" else 1)


def lengths(run: Run, present: Sequence[System], until: float) -> None:
    cost = 0.0  # Seconds a token of a block, the highest so far.
    for number in run.rounds("lengths", run.args.rounds, until):
        for tokens in run.args.lengths:
            if tokens >= LONG and number % 3:
                continue
            if time.monotonic() + cost * tokens > until:
                run.cut.append(f"{run.group}, lengths: {tokens:,} tokens not in round {number + 1}")
                continue
            begin = time.monotonic()
            for system in _turned(present, number):
                if tokens < LONG or system.name not in NOT_LONG:
                    run.ask("lengths", system, tokens, number)
            settled = run.args.settle * len(present)
            if tokens >= 1000:
                cost = max(cost, (time.monotonic() - begin - settled) / tokens)


def legs(run: Run, present: Sequence[System], until: float) -> None:
    these = [system for system in present if system.name == "p2pkv P first" or system.name.startswith("Ex")]
    for number in run.rounds("legs", run.args.leg_rounds, until):
        for system in _turned(these, number):
            run.ask("legs", system, run.args.series_tokens, number)


def decode(run: Run, present: Sequence[System], until: float) -> None:
    pairs = [system for system in present if system.name in ("p2pkv", "p2pkv no naps")]
    if len(pairs) < 2:
        run.cut.append(f"{run.group}, decode: it needs p2pkv with and without naps")
        return
    for number in run.rounds("decode", run.args.decode_rounds, until):
        for system in _turned(pairs, number):
            requests = [asking(32, MODEL.vocab, NAME, answer=DECODE_ANSWER) for _ in range(16)]
            try:
                step = while_all(run.together(system, requests))
            except Failed as error:
                run.record("decode", system.name, round=number, failed=str(error))
                continue
            finally:
                time.sleep(run.args.settle)
            run.record("decode", system.name, round=number, step=step)


def while_all(taken: Sequence[Taken]) -> float:
    """Mean seconds between two tokens, from when the last answer has begun to when the first has ended."""
    begin, end = max(one.first for one in taken), min(one.total for one in taken)
    gaps = []
    for one in taken:
        at = one.first
        for gap in one.gaps:
            if begin <= at and at + gap <= end:
                gaps.append(gap)
            at += gap
    if not gaps:
        raise Failed(f"no two tokens while all {len(taken)} answers were under way; ask for longer ones")
    return sum(gaps) / len(gaps)


def idle(run: Run, present: Sequence[System], until: float) -> None:
    for system in present:
        if system.name in ("p2pkv", "p2pkv no naps") and time.monotonic() < until:
            p, d = system.servers
            for role, server in (("D", d), ("P", p)):
                used = _waiting(run, server, systems.pair_headers(p, d), d)
                run.record("idle", system.name, role=role, cores=used)


def arrivals(run: Run, present: Sequence[System], until: float) -> None:
    p, d = next(system for system in present if system.name == "p2pkv").servers

    async def measured(waits: bool) -> list[float]:
        """Seconds of each short prompt at D."""
        vain = asking(256, MODEL.vocab, NAME)
        vain.headers = systems.pair_headers(p, d)
        asked = asyncio.create_task(run.asker.single(d.base_url, vain)) if waits else None
        await asyncio.sleep(run.args.settle)
        taken = []
        for _ in range(ARRIVALS):
            taken.append((await run.asker.single(d.base_url, asking(8, MODEL.vocab, NAME))).first)
            await asyncio.sleep(random.uniform(0.05, 0.1))
        if asked is not None:
            asked.cancel()
            await asyncio.wait([asked])
        return taken

    for number in run.rounds("arrivals", run.args.arrival_rounds, until):
        for waits in (False, True):
            taken = run.runner.run(within(run.args.deadline, measured(waits)))
            run.record("arrivals", "p2pkv", round=number, waits=waits, first=taken)


def _waiting(run: Run, server: VllmServer, headers: dict[str, str], d: VllmServer) -> dict[str, float]:
    """Cores that a worker and an engine core use while KV waits on `server`."""
    one = asking(256, MODEL.vocab, NAME)
    one.headers = headers
    asker = run.asker

    async def measured() -> dict[str, float]:
        asked = asyncio.create_task(asker.single(server.base_url, one))
        if server is not d:
            await asked
        await asyncio.sleep(IDLE_SECONDS[0])
        begin, before = time.monotonic(), systems.cpu_seconds(server)
        await asyncio.sleep(IDLE_SECONDS[1])
        seconds, after = time.monotonic() - begin, systems.cpu_seconds(server)
        if server is d:
            asked.cancel()
            await asyncio.wait([asked])
        else:
            # D takes what waited for it.
            await asker.single(d.base_url, one)
        return {role: (after[role] - before[role]) / seconds for role in after}

    used: dict[str, float] = run.runner.run(within(run.args.deadline, measured()))
    time.sleep(run.args.settle)
    return used


def load(run: Run, present: Sequence[System], until: float) -> None:
    for clients, count in zip(run.args.clients, run.args.load_requests, strict=True):
        before = time.monotonic()
        for number in run.rounds(f"load of {clients}", run.args.load_rounds, until):
            requests = [mixed(count, MODEL.vocab, NAME, run.args.answer, seed=number) for _ in present]
            for system, these in zip(_turned(present, number), requests, strict=True):
                run.load(system, these, clients, number)
        say(f"  load of {clients}: {time.monotonic() - before:.0f} s")


def links(run: Run) -> None:
    """Each in a process of its own, with a deadline."""
    sizes = [str(mib) for mib in run.args.link_mib]
    here = Path(__file__).parent
    for name in ("memcpy", "nixl", "mooncake"):
        if name in run.shop.environment.missing:
            run.missing[f"link {name}"] = run.shop.environment.missing[name]
            continue
        python = sys.executable if name == "memcpy" else str(run.shop.environment.python)
        for row in _link_rows(
            run, name, [python, str(here / "side_by_side_links.py"), name, "--mib", *sizes]
        ):
            run.record("links", name, **row)
    ours = [sys.executable, str(here / "link_throughput.py"), "--json", "--depth", "2", "--mib", *sizes]
    for found in _link_rows(run, "p2pkv", ours):
        for row in found["rows"]:
            run.record("links", f"p2pkv {row['way']}", MiB=row["MiB"], **{"GB/s": [row["GB/s"]]})


def _link_rows(run: Run, name: str, command: list[str]) -> list[dict[str, Any]]:
    env = {**os.environ, **run.shop.environment.variables, "OMP_NUM_THREADS": "1"}
    # A group of its own, ended as a whole: these programs have children that may hang.
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, process_group=0
    )
    try:
        out, err = child.communicate(timeout=min(run.args.link_seconds, max(5.0, run.left())))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        out, err = child.communicate()
        err += f"not done within {run.args.link_seconds:g} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if child.returncode:
        last = (err.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        run.missing[f"link {name}"] = f"the raw link failed: {last}"
    return rows


def _turned(present: Sequence[System], number: int) -> list[System]:
    """Another one first in each round."""
    shift = number % len(present)
    return [*present[shift:], *present[:shift]]


STEPS: dict[str, Callable[[Run, Sequence[System], float], None]] = {
    "series": series,
    "small": small,
    "lengths": lengths,
    "legs": legs,
    "decode": decode,
    "idle": idle,
    "arrivals": arrivals,
    "load": load,
}


# The plan.


def members(run: Run, group: str) -> list[System]:
    """The systems of a group beside the plain server and p2pkv; those that cannot be had are rows."""
    shop, missing = run.shop, run.shop.environment.missing
    made: list[System] = []
    if group == "files":
        made = [
            systems.example(shop, "Example", "ExampleConnector (files)", False),
            systems.example(shop, "Example naps", "ExampleConnector with naps", True),
        ]
    elif group in ("nixl", "push"):
        connector = "NixlConnector" if group == "nixl" else "NixlPushConnector"
        short = "NIXL" if group == "nixl" else "NIXL push"
        # Those with naps start first: beside NIXL's spinning threads a start takes twice as long.
        for name, title, naps in (
            (f"{short} naps", f"{connector} with naps", True),
            (short, connector, False),
        ):
            if "nixl" in missing:
                run.missing[name] = missing["nixl"]
            else:
                made.append(systems.nixl(shop, name, title, naps, connector))
    elif group == "mooncake":
        for name, naps in (("Mooncake", False), ("Mooncake naps", True)):
            if "mooncake" in missing:
                run.missing[name] = missing["mooncake"]
            else:
                title = "MooncakeConnector (TCP)" + (" with naps" if naps else "")
                made.append(systems.mooncake(shop, name, title, naps))
    return made


def measure(run: Run) -> None:
    """Everything, into `run`."""
    args = run.args
    if "links" in args.sections:
        say("raw links")
        links(run)
    with contextlib.ExitStack() as stack:
        proxy = ProxyServer(log_path=args.logs / "proxy.log")
        stack.enter_context(proxy)
        plain = systems.plain(run.shop.server("plain"))
        pair = systems.p2pkv_pair(run.shop, "", True, proxy)
        at_once = systems.p2pkv("p2pkv", "p2pkv, P and D at once", pair, first=False)
        first = systems.p2pkv("p2pkv P first", "p2pkv, P first", pair, first=True)
        routed = systems.through_proxy("p2pkv proxy", "p2pkv through p2pkv-proxy", pair, proxy)
        say("the plain server and p2pkv")
        start(run, stack, [plain, at_once], run.end)
        if plain.name in run.missing or at_once.name in run.missing:
            raise ServerFailed("; ".join(run.missing.values()))
        wait_until(lambda: _serves(proxy), "the proxy finds P and D", 240.0)  # they warm up first
        warm(run, [plain, at_once], run.end)
        weights = {group: GROUPS[group] for group in GROUPS if group in args.groups}
        for group in list(weights):
            run.group = group
            until = time.monotonic() + run.left() * weights[group] / sum(weights.values())
            del weights[group]
            if group != "p2pkv" and time.monotonic() + 2 * run.start_seconds > until:
                run.cut.append(f"group {group}: all of it, there was no time to start its servers")
                continue
            say(f"group {group}: {until - time.monotonic():.0f} s")
            with contextlib.ExitStack() as own:
                if group == "p2pkv":
                    present = _ours(run, own, plain, at_once, first, routed, until)
                else:
                    others = start(run, own, members(run, group), until)
                    warm(run, others, until)
                    present = [plain, at_once, first, *others] if others else []
                run.titles |= {system.name: system.title for system in present}
                if present:
                    _sections(run, own, group, present, until)


def _ours(
    run: Run,
    own: contextlib.ExitStack,
    plain: System,
    at_once: System,
    first: System,
    routed: System,
    until: float,
) -> list[System]:
    pair = systems.p2pkv_pair(run.shop, "-no-naps", False, None)
    awake = systems.p2pkv("p2pkv no naps", "p2pkv without naps, at once", pair, first=False)
    awake_first = systems.p2pkv("p2pkv no naps P first", "p2pkv without naps, P first", pair, first=True)
    # Half of the time at most: the rest of the group can do without these two.
    half = (time.monotonic() + until) / 2
    present = [plain, at_once, first, routed, *start(run, own, [awake], half)]
    if awake in present:
        present.append(awake_first)
    warm(run, present[4:], until)
    return present


def _sections(run: Run, own: contextlib.ExitStack, group: str, present: list[System], until: float) -> None:
    shares = SHARES.get(group, SHARES["others"])
    wanted = [section for section in shares if section in run.args.sections]
    taken = {}
    for system in present:
        if system.is_pair and system.name not in run.missing:
            taken[system.name] = systems.external_tokens(system)
    for number, section in enumerate(wanted):
        rest = sum(shares[each] for each in wanted[number:])
        share = (until - time.monotonic()) * shares[section] / rest
        if share <= 0:
            run.cut.append(f"{group}, {section}: nothing, the group's time was over")
            continue
        say(f"  {section}: {share:.0f} s")
        these = list(present)
        if section == "lengths" and group not in ("p2pkv", "files"):
            these.remove(present[2])  # P first
        if section == "load":
            # P first is a router's choice for one request; under load p2pkv is asked at once.
            these = [system for system in present if not system.name.endswith("P first")]
            if group == "p2pkv":
                second = systems.round_robin([present[0].servers[0], run.shop.server("plain-2")])
                these += start(run, own, [second], until)
        STEPS[section](run, these, time.monotonic() + share)
    for name, before in taken.items():
        system = next(each for each in present if each.name == name)
        if name in run.missing:
            continue
        try:
            run.record("from P", name, tokens=systems.external_tokens(system) - before)
        except OSError as error:
            run.missing[name] = f"D answers no more: {error}"


def _serves(proxy: ProxyServer) -> bool:
    try:
        proxy.wait_ready(0.3)
    except ServerFailed:
        return False
    return True


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


# The command.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=55.0, help="the run ends by itself within this time")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="which systems")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="SYSTEM", help='names in the tables, as "NIXL naps"'
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of all lengths in a group")
    parser.add_argument("--series", type=int, default=5, help="series")
    parser.add_argument("--series-tokens", type=int, default=2000, help="prompt length of the series")
    parser.add_argument("--small-rounds", type=int, default=10, help="rounds of prompts of 64 tokens")
    parser.add_argument(
        "--arrival-rounds", type=int, default=5, help="rounds of short prompts at a waiting D"
    )
    parser.add_argument("--leg-rounds", type=int, default=8, help="rounds of legs beside ExampleConnector's")
    parser.add_argument("--decode-rounds", type=int, default=40, help="rounds of 16 answers at once")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64], help="clients of the loads")
    parser.add_argument(
        "--load-requests", type=int, nargs="+", default=[48, 64], help="requests of each load"
    )
    parser.add_argument("--load-rounds", type=int, default=1, help="rounds of each load")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer under load")
    parser.add_argument("--link-mib", type=int, nargs="+", default=[1, 16, 64, 256], help="message sizes")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for one request")
    parser.add_argument("--load-seconds", type=float, default=120.0, help="seconds for one load")
    parser.add_argument("--link-seconds", type=float, default=60.0, help="seconds for one raw link")
    parser.add_argument(
        "--start-seconds", type=float, default=240.0, help="how long a server may take to start"
    )
    parser.add_argument(
        "--settle", type=float, default=1.1, help="seconds between two requests: servers spin on"
    )
    parser.add_argument("--kv-gib", type=int, default=1, help="memory of each server's KV cache")
    parser.add_argument("--block-size", type=int, default=32, help="tokens in a block of every server")
    parser.add_argument(
        "--chunk-tokens", type=int, default=2048, help="tokens that a server computes in a step"
    )
    parser.add_argument(
        "--environment", type=Path, default=Path(".side"), help="where NIXL and Mooncake live"
    )
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where the servers' logs go")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="where results go"
    )
    args = parser.parse_args()
    args.tokens = args.lengths = sorted(args.lengths)
    if len(args.clients) != len(args.load_requests):
        parser.error("--clients and --load-requests must have as many numbers: a load has one of each")
    return args


def main() -> int:
    args = arguments()
    begin = time.monotonic()
    needed = [name for name, groups in (("nixl", {"nixl", "push"}), ("mooncake", {"mooncake"}))
              if groups & set(args.groups) or "links" in args.sections]  # fmt: skip
    say(f"the environment {args.environment}")
    made = systems.environment(args.environment, needed)
    with (
        ending_on_signals(),
        tempfile.TemporaryDirectory(prefix="side-by-side-") as scratch,
        asyncio.Runner() as runner,
    ):
        shop = Workshop(
            ensure_model(MODEL),
            max(*args.lengths, args.series_tokens) + DECODE_TOKENS + 3,
            *(args.kv_gib, args.block_size, args.chunk_tokens, made, Path(scratch), args.logs),
        )
        asker = runner.run(_entered(Asker()))
        run = Run(args, runner, asker, shop)
        run.end -= time.monotonic() - begin
        if without := [f"{tokens:,}" for tokens in LENGTHS if tokens not in args.lengths]:
            run.note(f"prompts of {' and '.join(without)} tokens: not asked for (--lengths)")
        try:
            measure(run)
        except (ServerFailed, Failed, TimeoutError, OSError) as error:
            run.cut.append(f"everything after this: {str(error).splitlines()[0]}")
        finally:
            runner.run(asker.__aexit__())
    found = {
        "about": {**description(args), "model": MODEL_SAID, "minutes": (time.monotonic() - begin) / 60},
        "titles": run.titles,
        "missing": run.missing,
        "cut": run.cut,
        "records": run.records,
    }
    write(args.out, found)
    say(f"done after {(time.monotonic() - begin) / 60:.1f} minutes: {args.out}/side_by_side.md")
    return 0


def write(out: Path, found: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "side_by_side.json").write_text(json.dumps(rounded(found), separators=(",", ":")) + "\n")
    drawn = plot(found, out / "side_by_side.svg")
    (out / "side_by_side.md").write_text(report(found, picture=drawn))


def rounded(value: Any) -> Any:
    """Floats to four places: tenths of a millisecond, and a file of a tenth of the size."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


async def _entered(asker: Asker) -> Asker:
    return await asker.__aenter__()


if __name__ == "__main__":
    raise SystemExit(main())
