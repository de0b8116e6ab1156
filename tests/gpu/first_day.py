"""`make gpu-first-day`: all that can be tried on one or two GPUs, what says most first, into one page.

For a machine with torch, CuPy and pytest, without network and with nothing prepared. Each step is a process
with a deadline; steps that need no quiet run side by side, then those that measure, one by one. What a
machine lacks, or what there is no time for, is a line that says so. Writes first_day.html, first_day.md and
first_day.json, to be attached to an issue. Exit code 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # this is a script

from gpu import mps  # noqa: E402
from gpu.figures import VARIABLE, figures  # noqa: E402
from gpu.needs import VLLM, lacking  # noqa: E402
from gpu.page import Block, Boxes, Heading, Output, Table, Text, markdown, page  # noqa: E402
from gpu.tables import mps_phrase, push_blocks, token_blocks  # noqa: E402

TITLE = "p2pkv on a GPU: the first day"

LAST_LINES = 60
"""Lines of a step's output that the report keeps."""

ENVIRONMENT = """
import importlib.metadata, platform, sys
print("Python", sys.version.split()[0], "on", platform.platform())
for name in ("torch", "vllm", "numpy", "pyzmq", "msgspec", "cupy-cuda12x", "cupy-cuda13x", "nccl4py",
             "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
import torch
print("CUDA", torch.version.cuda, "devices", torch.cuda.device_count() if torch.cuda.is_available() else 0)
for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    device = torch.cuda.get_device_properties(number)
    print(number, device.name, f"{device.total_memory >> 20} MiB,", device.multi_processor_count, "SMs")
"""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        gpus: CUDA devices that it needs.
        seconds: its deadline.
        modules: those of WHEELS that it needs.
        one: what exit status 1 means, if that is not a failure.
        boxes: what is shown on a card if it passes.
        quiet: whether nothing else may run meanwhile: it measures, or it is alone on two cards.
    """

    name: str
    what: str
    command: tuple[str, ...]
    gpus: int = 0
    seconds: float = 120.0
    modules: tuple[str, ...] = ()
    one: str = ""
    boxes: tuple[str, ...] = ()
    quiet: bool = True


@dataclass
class Result:
    """`outcome`: "passed", "failed" or "not run"; `why`: a sentence, empty if it passed."""

    step: str
    what: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)


def steps(out: Path) -> list[Step]:
    """What says most comes first, should the time be over."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-c", "tests/gpu/bare.ini", "-q", "-rfEs")
    bench = (python, "-m", "p2pkv.cli", "bench", "--repeat", "3", "--fan-out", "1", "2", "--link")
    wheels = ("msgspec", "zmq")

    def servers(name: str, what: str, setting: str, gpus: int, *boxes: str) -> Step:
        command = (*tests, "tests/gpu/test_servers.py", "-k", setting)
        return Step(name, what, command, gpus, 240.0 * gpus, boxes=boxes, quiet=gpus > 1)

    def model(name: str, what: str) -> Step:
        command = (*tests, "tests/gpu/test_models.py", "-k", f"one-gpu-{name}")
        box = f"{what}: a P and a D of vLLM on one card answer as a single server, and all checksums agree"
        return Step(f"model, {name}", f"vLLM, {what}", command, 1, 240.0, boxes=(box,), quiet=False)

    def pushes(name: str, what: str, chosen: str, gpus: int, *boxes: str, also: Sequence[str] = ()) -> Step:
        command = (*tests, "tests/gpu/test_push.py", *also, "-k", chosen)
        return Step(name, what, command, gpus, 240.0, wheels, boxes=boxes, quiet=gpus > 1)

    def table(link: str, *boxes: str) -> Step:
        command = (python, "tests/gpu/push_table.py", "--link", link, "--json", str(out / PUSHES[link]))
        what = f"a prompt of 512 MiB over link: {link}, by size of message"
        return Step(f"push table, {link}", what, command, 1, 90.0, wheels, boxes=boxes)

    def tokens(name: str, p_card: str, d_card: str, gpus: int) -> Step:
        command = (python, "tests/gpu/first_tokens.py", "--json", str(out / TOKENS[gpus]))
        return Step(
            name,
            "vLLM: time to first token by length, and pauses while prompts arrive, beside one server",
            (*command, "--cards", p_card, d_card),
            gpus,
            200.0,
            (*wheels, VLLM),
            boxes=("first tokens and pauses of a model of 3B geometry, and its answers (tables below)",),
        )

    return [
        Step("environment", "Python, packages and devices", (python, "-c", ENVIRONMENT), 0, 60, quiet=False),
        Step("driver", "what the driver says", ("nvidia-smi",), 0, 30, quiet=False),
        Step("topology", "what lies between the cards", ("nvidia-smi", "topo", "-m"), 0, 30, quiet=False),
        Step(
            "doctor",
            "what p2pkv can use here",
            (python, "-m", "p2pkv.cli", "doctor"),
            seconds=60,
            one="no vLLM server with p2pkv can run here; its lines say why",
            quiet=False,
        ),
        Step(
            "kernels",
            "gather, scatter and checksums",
            (*tests, "tests/gpu/test_kernels.py"),
            1,
            boxes=(
                "the kernels move the bytes that torch's index kernels move, and compute torch's checksums",
                "a gather on the engine's stream does not wait for the forward's stream",
            ),
            quiet=False,
        ),
        pushes(
            "one card",
            "two ranks on one card: pushes compared, a peer killed, links aborted",
            "(one_gpu or one-gpu) and not ipc",
            1,
            "NCCL joins two ranks on one card, and bytes on D equal bytes on P",
            "D is killed in mid-transfer: its link is aborted within three leases, and the next D gets one",
        ),
        servers(
            "servers, one card",
            "vLLM: P, D and the proxy on one card answer as one server does",
            "one-gpu and not graphs and not ipc",
            1,
            "a P and a D of vLLM on one card answer as a single server, and all checksums agree",
            "D decodes on while prompts arrive, and when P is killed (figures below, not in quiet)",
        ),
        pushes(
            "CUDA IPC, one card",
            "link: ipc between two processes on one card: pushes compared, a peer killed",
            "ipc-on-one-gpu",
            1,
            "memory that one process exports (cuMem) is mapped by another: bytes on D equal bytes on P",
            "D is killed in mid-transfer: P's writes fault nothing, and the next D gets a link",
        ),
        servers(
            "servers, one card, CUDA IPC",
            "vLLM: P and D on one card over link: ipc",
            "one-gpu-ipc",
            1,
            "a P and a D of vLLM on one card answer as a single server over link: ipc",
        ),
        servers(
            "graphs, one card",
            "vLLM with CUDA graphs on one card",
            "one-gpu-graphs",
            1,
            "with CUDA graphs on one card the answers are right",
        ),
        table("nccl", "a push over NCCL beside NCCL alone, on one card (table below)"),
        tokens("first tokens", "0", "0", 1),
        table("ipc", "a push over link: ipc beside a plain copy, on one card (table below)"),
        pushes(
            "two cards",
            "the same as on one card between two cards",
            "two-gpus and not ipc",
            2,
            "bytes on D equal bytes on P between two cards, by NVLink or PCIe",
            also=["tests/gpu/test_bench_gpu.py"],
        ),
        servers(
            "servers, two cards",
            "vLLM on a card each",
            "two-gpus and not piecewise and not full and not tp2 and not ipc",
            2,
            "a P and a D of vLLM on a card each answer as a single server",
        ),
        pushes(
            "CUDA IPC, two cards",
            "link: ipc between two cards that reach each other's memory",
            "ipc-on-two-gpus",
            2,
            "a gather over NVLink or PCIe into another process's memory: bytes on D equal bytes on P",
        ),
        servers(
            "servers, two cards, CUDA IPC",
            "vLLM on a card each, which the other server does not see, over link: ipc",
            "two-gpus-ipc",
            2,
            "memory of a card that CUDA_VISIBLE_DEVICES hides is mapped, and the answers are right",
        ),
        Step(
            "bench, CUDA IPC",
            "link and push over link: ipc",
            (*bench, "ipc", "--json", str(out / BENCH_IPC)),
            1,
            180.0,
            wheels,
            boxes=("link: ipc beside a plain copy on one card, or the limit of NVLink (figures below)",),
        ),
        Step(
            "bench",
            "gather, link and push",
            (*bench, "nccl", "--json", str(out / BENCH)),
            1,
            180.0,
            wheels,
            boxes=("gather, link and push beside the limits of the card and of the link (figures below)",),
        ),
        servers(
            "graphs, two cards",
            "vLLM with CUDA graphs, piecewise and full",
            "two-gpus-piecewise or two-gpus-full",
            2,
            "with CUDA graphs, piecewise and full, the answers are right and no capture is ended",
        ),
        servers(
            "TP 2",
            "P and D with tensor parallel size 2 on both cards, under load",
            "two-gpus-tp2",
            2,
            "beside the all-reduce of TP 2 nothing hangs, and the pauses between tokens are those of decode",
        ),
        tokens("first tokens, two cards", "0", "1", 2),
        Step(
            "fan-out",
            "several ranks of D on one card, and what a communicator costs",
            (*tests, "tests/gpu/test_bench_gpu.py", "-k", "one-gpu"),
            1,
            240.0,
            boxes=("several ranks of D share P's heads, and the memory of a communicator is known",),
        ),
        *(model(name, what) for name, what in MODELS.items()),
    ]


MODELS = {
    "mla": "MLA with vLLM's own choice of kernels",
    "triton-mla": "MLA with Triton's kernels",
    "window": "sliding windows beside full attention",
    "recurrent": "states of gated delta nets beside attention",
    "mamba": "states of Mamba-2 beside attention",
    "sinks": "attention sinks, experts and windows",
    "fp8": "KV in fp8",
    "runner1": "the V1 model runner",
    "blocks": "D's blocks twice as large as P's",
}
"""What the settings of test_models.py show; on one card that takes `--minutes 13`."""

STOP_SECONDS = 90.0
BENCH = "bench.json"
BENCH_IPC = "bench_ipc.json"
PUSHES = {"nccl": "pushes_nccl.json", "ipc": "pushes_ipc.json"}
TOKENS = {1: "first_tokens.json", 2: "first_tokens_two_cards.json"}
"""By the number of cards."""

MINUTES = {1: 8.0, 2: 30.0}
"""What it takes by default, with so many cards or fewer."""

AT_ONCE = max(2, (os.cpu_count() or 2) // 2)
"""Steps that run side by side at most: each may start three servers, which are busy with Python at first."""

FIGURES = "figures.jsonl"


def run(step: Step, seconds: float) -> Result:
    """Run it, with a deadline of so many seconds; then it has STOP_SECONDS to stop the servers that it has
    started, which have process groups of their own, before its process group is killed."""
    result = Result(step.name, step.what, "passed")
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            # A shell starts what runs in the background with SIGINT ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
    except OSError as error:
        result.outcome, result.why = "not run", f"{step.command[0]} cannot be started: {error}"
        return result
    RUNNING.add(child.pid)
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        result.outcome, result.why = "failed", f"it did not end in {seconds:g} s"
    finally:
        RUNNING.discard(child.pid)
    result.seconds = time.monotonic() - begin
    result.output = said.splitlines()[-LAST_LINES:]
    if not result.why and child.returncode == 1 and step.one:
        result.outcome, result.why = "not run", step.one
    elif not result.why:
        result.outcome, result.why = verdict(child.returncode, said)
    return result


RUNNING: set[int] = set()
"""Process groups of the steps that run."""


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Ctrl-C ends this process alone, as steps have process groups of their own: pass it on to them."""
    try:
        yield
    except KeyboardInterrupt:
        for group in list(RUNNING):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGINT)
        raise


def verdict(status: int, said: str) -> tuple[str, str]:
    """Outcome and reason of a process that has ended. pytest's status 0 may mean that all was skipped."""
    if status:
        return "failed", f"exit status {status}"
    if re.search(r"^\d+ skipped|^[^\n]*\bno tests ran", said, re.MULTILINE):
        reason = re.search(r"^SKIPPED \[\d+\] \S+ (.+)$", said, re.MULTILINE)
        return "not run", reason[1] if reason else "all of its tests were skipped"
    return "passed", ""


def devices() -> int:
    """CUDA devices of this machine, asked in a process of its own."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def run_all(wanted: Sequence[Step], count: int, seconds: float) -> list[Result]:
    """All of them within so many seconds, on a machine with `count` CUDA devices; those next to each other
    that need no quiet at the same time, AT_ONCE at most."""
    end = time.monotonic() + seconds

    def one(step: Step) -> Result:
        left = end - time.monotonic()
        if count < step.gpus:
            why = f"needs {step.gpus} CUDA device{'s' * (step.gpus > 1)}, and torch finds {count}"
            result = Result(step.name, step.what, "not run", why)
        elif why := lacking(step.modules):
            result = Result(step.name, step.what, "not run", why)
        elif left < 1.0:
            result = Result(step.name, step.what, "not run", "the time was over (--minutes)")
        else:
            result = run(step, min(step.seconds, left))
        print(f"{result.outcome:<8} {step.name} ({result.seconds:.0f} s) {result.why}".rstrip(), flush=True)
        return result

    results: list[Result] = []
    for quiet, together in groupby(wanted, lambda step: step.quiet):
        with ThreadPoolExecutor(1 if quiet else AT_ONCE) as pool, ending_all():
            results += pool.map(one, together)
    return results


# The physical limits that the figures are compared with.


def limits() -> dict[str, float]:
    """GB/s of what bytes pass through, as far as this machine tells: by name, one direction."""
    found: dict[str, float] = {}
    if (links := _asked("nvidia-smi", "nvlink", "--status", "-i", "0")) and (
        rates := re.findall(r"Link \d+: ([\d.]+) GB/s", links)
    ):
        found["NVLink"] = sum(map(float, rates))
    asked = "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"
    pcie = _asked("nvidia-smi", *asked, "-i", "0")
    if match := re.match(r"(\d+), (\d+)", pcie):
        found["PCIe"] = PCIE_LANE.get(int(match[1]), 0.0) * int(match[2])
    for rate in sorted(INFINIBAND.glob("*/ports/*/rate")):
        if gbits := re.match(r"(\d+)", rate.read_text()):
            found["network"] = max(found.get("network", 0.0), int(gbits[1]) / 8)
    return {name: rate for name, rate in found.items() if rate}


INFINIBAND = Path("/sys/class/infiniband")

PCIE_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane, by generation, after its encoding."""


def _asked(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# The report.


def figures_table(
    bench: dict[str, Any] | None,
    kept: Sequence[dict[str, Any]],
    limit: dict[str, float],
    ipc: dict[str, Any] | None = None,
) -> Table:
    """Each figure beside what it is measured against, as a ratio. `ipc`: of `bench --link ipc`, where on one
    card a message is one copy on the device."""
    rows: list[list[str]] = []
    way, fastest = next(((name, limit[name]) for name in ("NVLink", "PCIe") if name in limit), ("", 0.0))
    for measured, note in ((bench, ""), (ipc, ", link: ipc")):
        for row in (measured or {}).get("rows", []):
            size, copy = f"{row['bytes'] >> 10} KiB", row["copy"] / 1e9
            for kind in () if note else ("gather", "scatter"):
                rate, plain = row[kind] / 1e9, f"a plain copy, {copy:.1f} GB/s"
                rows.append([f"{kind}, {size}", f"{rate:.1f} GB/s", plain, f"{rate / copy:.2f}"])
            name, most = ("a plain copy", copy) if note else ("", 0.0)
            if len(set((measured or {})["devices"])) > 1:
                name, most = way, fastest
            for kind in ("link", "push") if note else ("raw", "link", "push"):
                if row.get(kind):
                    rate = statistics.median(row[kind]) / 1e9
                    compared = [f"{name}, {most:.0f} GB/s", f"{rate / most:.2f}"] if most else ["-", "-"]
                    rows.append([f"{NAMES[kind]}{note}, {size}", f"{rate:.1f} GB/s", *compared])
    rows += [
        [f"{each['name']} ({each['where']})", f"{each['value']:.3g} {each['unit']}", "-", "-"]
        for each in kept
    ]
    return Table(["figure", "value", "limit", "ratio"], rows)


NAMES = {"raw": "NCCL's own send and receive", "link": "p2pkv's link", "push": "a whole push"}


def blocks(
    wanted: Sequence[Step],
    results: Sequence[Result],
    when: str,
    table: Table | None = None,
    limit: dict[str, float] | None = None,
    under: str = "",
    more: Sequence[Block] = (),
) -> list[Block]:
    """The page's parts. `under`: whether MPS ran; `more`: tables that have a shape of their own."""
    outcomes = {each.step: each.outcome for each in results}
    counts = ", ".join(
        f"{sum(each.outcome == outcome for each in results)} {outcome}"
        for outcome in ("passed", "failed", "not run")
    )
    found: list[Block] = [
        Text(f"{when}, `make gpu-first-day`{under and ', '}{under}: {counts}. Attach this page to an issue."),
        Heading("What a card has to show"),
        Boxes(
            [
                (outcomes.get(step.name) == "passed", f"{box} ({step.name})")
                for step in wanted
                for box in step.boxes
            ]
        ),
        Heading("Steps"),
        Table(
            ["step", "what", "outcome", "seconds", "why"],
            [[each.step, each.what, each.outcome, f"{each.seconds:.0f}", each.why] for each in results],
        ),
        Heading("Figures and their limits"),
        Text(
            ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in (limit or {}).items())
            or "This machine tells of no NVLink, PCIe or InfiniBand."
        ),
        table if table is not None and table.rows else Text("Nothing was measured."),
        *more,
    ]
    for each in results:
        if each.output:
            found += [Heading(each.step), Output(each.output)]
    return found


def _written(path: Path) -> Any:
    """The JSON that a step left there, None without."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, help="it ends by itself within this time; by default 8, with two cards 30"
    )
    parser.add_argument(
        "--mps", action="store_true", help="start CUDA MPS for this time, which two processes on a card need"
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only these steps, by name")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-first-day", help="where the report goes")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = steps(args.out.absolute())
    if args.only:
        if unknown := set(args.only) - {step.name for step in wanted}:
            parser.error(
                f"no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in wanted)}"
            )
        wanted = [step for step in wanted if step.name in args.only]
    for name in (FIGURES, BENCH, BENCH_IPC, *PUSHES.values(), *TOKENS.values()):
        (args.out / name).unlink(missing_ok=True)
    os.environ[VARIABLE] = str((args.out / FIGURES).absolute())
    count = devices()
    minutes = args.minutes or MINUTES[min(max(count, 1), 2)]
    with mps.started(args.mps) as said:
        under = mps_phrase(mps.runs(), said) if count else ""
        print(f"{count} CUDA devices, {minutes:g} minutes at most{under and ', '}{under}", flush=True)
        results = run_all(wanted, count, minutes * 60)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    limit, kept = limits(), figures(args.out / FIGURES)
    table = figures_table(_written(args.out / BENCH), kept, limit, _written(args.out / BENCH_IPC))
    more = push_blocks([found for name in PUSHES.values() if (found := _written(args.out / name))])
    for name in TOKENS.values():
        more += token_blocks(_written(args.out / name))
    parts = blocks(wanted, results, when, table, limit, under, more)
    (args.out / "first_day.md").write_text(markdown(TITLE, parts), encoding="utf-8")
    (args.out / "first_day.html").write_text(page(TITLE, parts), encoding="utf-8")
    steps_done = [asdict(each) for each in results]
    data = {"when": when, "mps": under, "steps": steps_done, "figures": kept, "limits": limit}
    (args.out / "first_day.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"the report: first_day.html, first_day.md and first_day.json in {args.out}")
    return 1 if any(each.outcome == "failed" for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
