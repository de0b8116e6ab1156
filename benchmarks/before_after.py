"""Another version of p2pkv against this one, in interleaved rounds: has a change made anything slower?

    servers: a pair of real vLLM servers of each version, a model with the KV of an 8B model, prompts of
        --tokens that no cache knows. Seconds from the question to the end of an answer of one token, with P
        and D asked at once and with P first; and D's leg: D's first token after P's answer, P first.
    engine: CPU time of the engine thread per transfer, with 16 and with 1,000 requests that wait, on P and on
        D: one round of each version's own bench_push.py.
    proxy: CPU time of the proxy per short request, with stub instances that answer at once, and per event of
        a streamed answer, less that of the request.

All servers of both versions are up all the time, and one pair or proxy is asked at a time; the versions take
turns in going first. Of each figure: both medians, and the geometric mean of after / before over the rounds
with its 95% interval. Writes before_after.md and before_after.json to --out.

    git archive 4556372 | tar x -C /some/folder
    python benchmarks/before_after.py --before /some/folder [--rounds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_proxy import HERE, Router, pings, short, streams, stubs, until_ready
from bench_servers import MODEL, MODEL_SAID, NAME, pair_headers
from clients import Asker, Taken, asking, description, paired_ratio

from p2pkv.demo.processes import ending_on_signals
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

_PACE, _EVENTS = 0.002, 1000
"""Seconds between two events of a stream, and how many it has."""
PARTS = ("servers", "engine", "proxy")
Found = dict[str, dict[str, list[float]]]
"""Seconds in each round, by figure and by version."""


@contextlib.contextmanager
def importable(trees: dict[str, Path]) -> Iterator[dict[str, dict[str, str]]]:
    """Per version, the environment of a process that imports it, wherever p2pkv is installed from."""
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name, tree in trees.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "p2pkv").symlink_to(tree / "p2pkv")
            (path / "p2pkv_proxy").symlink_to(tree / "proxy")
            made[name] = {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
        yield made


def push_script(tree: Path) -> Path:
    """Of a version; until 1.0.0rc1 it had another name."""
    names = (tree / "benchmarks" / name for name in ("bench_push.py", "engine_cost.py"))
    return next(path for path in names if path.exists())


class Run:
    def __init__(self, args: argparse.Namespace, trees: dict[str, Path]) -> None:
        self._args = args
        self._trees = trees
        self.found: Found = {}

    def _note(self, version: str, figure: str, seconds: float) -> None:
        self.found.setdefault(figure, {name: [] for name in self._trees})[version].append(seconds)

    def _turns(self) -> Iterator[tuple[int, str]]:
        """Which version is next, and in which round; round 0 warms up."""
        for turn in range(self._args.rounds + 1):
            for version in sorted(self._trees, reverse=turn % 2 == 0):
                yield turn, version

    def servers(self, environments: dict[str, dict[str, str]]) -> None:
        model = ensure_model(MODEL)
        settings = (
            *("--served-model-name", NAME, "--dtype", MODEL.dtype, "--block-size", "32"),
            *("--max-model-len", str(self._args.tokens + 64), "--max-num-batched-tokens", "512"),
            "--no-enable-prefix-caching",
        )
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pairs: dict[str, list[VllmServer]] = {}
            for version, env in environments.items():  # two at a time: two cores start no more in good time
                pairs[version] = [
                    stack.enter_context(
                        VllmServer(
                            model, role=role, env=env, extra_args=settings, kv_cache_gib=1,
                            log_path=logs / f"{version}-{role}.log", name=f"{version}-{role}",
                        )
                    )
                    for role in ("P", "D")
                ]  # fmt: skip
                for server in pairs[version]:
                    server.wait_ready(600.0)
            asyncio.run(self._ask(pairs))

    async def _ask(self, pairs: dict[str, list[VllmServer]]) -> None:
        async with Asker() as asker:
            for turn, version in self._turns():
                at_once, in_turn = await self._both(asker, *pairs[version])
                if turn:
                    self._note(version, "P and D at once", at_once.total)
                    self._note(version, "P first", in_turn.total)
                    assert in_turn.after is not None
                    self._note(version, "D's leg", in_turn.after)
                    print(
                        f"round {turn}, {version}: {at_once.total:.3f} s, {in_turn.total:.3f} s", flush=True
                    )

    async def _both(self, asker: Asker, p: VllmServer, d: VllmServer) -> tuple[Taken, Taken]:
        taken = []
        for way in (asker.at_once, asker.in_turn):
            one = asking(self._args.tokens, MODEL.vocab, NAME)
            one.headers = pair_headers(p, d)
            taken.append(await way(p.base_url, d.base_url, one))
        return taken[0], taken[1]

    def engine(self, environments: dict[str, dict[str, str]]) -> None:
        for turn, version in self._turns():
            if not turn:
                continue
            with tempfile.TemporaryDirectory() as out:
                command = [sys.executable, str(push_script(self._trees[version])), "--out", out]
                command += ["--peers", "1", "--waiting", "16", "1000", "--rounds", "1"]
                path = os.pathsep.join(
                    [environments[version]["PYTHONPATH"], str(self._trees[version] / "benchmarks")]
                )
                env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1"}
                subprocess.run(
                    command, env=env, cwd=self._trees[version], check=True, stdout=subprocess.DEVNULL
                )
                rows = json.loads(next(Path(out).glob("*.json")).read_text())["rows"]
            for row in rows:
                figure = f"engine thread of {row['side']}, a transfer, {row['waiting']:,} waiting"
                self._note(version, figure, statistics.median(row["transfer"]))

    def proxy(self, environments: dict[str, dict[str, str]]) -> None:
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ports = stack.enter_context(stubs(_PACE))
            routers = {}
            for version, env in environments.items():
                server = stack.enter_context(ProxyServer(log_path=logs / f"{version}.log", env=env))
                router = Router(version, server, server.http_port, server.discovery_port)
                for pinger in pings(router, ports):
                    pinger.start()
                    stack.callback(pinger.stop)
                server.wait_ready(60.0)
                routers[version] = router
            with asyncio.Runner() as runner:
                runner.run(until_ready([*routers.values()]))
                for turn, version in self._turns():
                    router = routers[version]
                    before = router.cpu()
                    done = runner.run(short(router.port, 16, self._args.seconds))
                    request = (router.cpu() - before) / done
                    before = router.cpu()
                    events = runner.run(streams(router.port, 16, _EVENTS))
                    event = (router.cpu() - before - 16 * request) / events
                    if turn:
                        self._note(version, "CPU of the proxy, a short request", request)
                        self._note(version, "CPU of the proxy, an event of a stream", event)


def page(found: Found, args: argparse.Namespace, about: str) -> Iterator[str]:
    yield f"# {args.before_name} and now ({about})"
    yield ""
    yield (
        f"`python benchmarks/before_after.py --rounds {args.rounds} --tokens {args.tokens}`; the model has "
        f"{MODEL_SAID}. Medians, and the ratio with its 95% interval. What is measured: before_after.py."
    )
    yield ""
    yield "| ms | before | after | after / before |"
    yield "|---|---:|---:|---:|"
    for figure, values in found.items():
        before, after = values["before"], values["after"]
        medians = (f"{1e3 * statistics.median(each):,.3g}" for each in (before, after))
        yield f"| {figure} | {' | '.join(medians)} | {paired_ratio(after, before)} |"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the root of another version of p2pkv")
    parser.add_argument("--before-name", default="before", help="what the page calls it")
    parser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a proxy's load in a round")
    parser.add_argument(
        "--only", choices=PARTS, help="measure this part alone, and keep what --out has of others"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="a folder")
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    written = args.out / "before_after.json"
    kept: dict[str, Any] = json.loads(written.read_text()) if args.only and written.exists() else {}
    trees = {"before": args.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    run = Run(args, trees)
    with ending_on_signals(), importable(trees) as environments:
        for part in (args.only,) if args.only else PARTS:
            getattr(run, part)(environments)
    found: Found = {**kept.get("found", {}), **run.found}
    facts = {name: value for name, value in description().items() if name != "command"}
    about = f"{facts['date']}; {facts['cpu']}, {facts['cores']} cores; {facts['versions']}"
    args.out.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps({"about": facts, "found": found}) + "\n")
    text = "\n".join(page(found, args, about)) + "\n"
    (args.out / "before_after.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
