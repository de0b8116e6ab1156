"""`make gpu-first-day`: all that can be tried on one or two GPUs, in under ten minutes, into one report.

For a machine with torch, CuPy and pytest, without network and with nothing prepared. Each step is a process
with a deadline; what a machine lacks, or what there is no time for, is a line that says so. Writes
first_day.md and first_day.json, to be attached to an issue. Exit code 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # this is a script

from gpu.needs import lacking  # noqa: E402

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
    """

    name: str
    what: str
    command: tuple[str, ...]
    gpus: int = 0
    seconds: float = 120.0
    modules: tuple[str, ...] = ()
    one: str = ""


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
    python = sys.executable
    tests = (python, "-m", "pytest", "-c", "tests/gpu/bare.ini", "-q", "-rfEs")
    bench = (python, "-m", "p2pkv.cli", "bench", "--link", "nccl", "--repeat", "3", "--fan-out", "1", "2")
    return [
        Step("environment", "Python, packages and devices", (python, "-c", ENVIRONMENT), seconds=60),
        Step("driver", "what the driver says", ("nvidia-smi",), seconds=30),
        Step(
            "doctor",
            "what p2pkv can use here",
            (python, "-m", "p2pkv.cli", "doctor"),
            seconds=60,
            one="no vLLM server with p2pkv can run here; its lines say why",
        ),
        Step("kernels", "gather, scatter and checksums", (*tests, "tests/gpu/test_kernels.py"), 1),
        Step(
            "one card",
            "two ranks on one card: pushes compared, a peer killed, links aborted",
            (*tests, "tests/gpu/test_push.py", "-k", "one_gpu or one-gpu"),
            1,
        ),
        Step(
            "fan-out",
            "several ranks of D on one card, and what a communicator costs",
            (*tests, "tests/gpu/test_bench_gpu.py", "-k", "one-gpu"),
            1,
        ),
        Step(
            "bench",
            "gather, link and push",
            (*bench, "--json", str(out / "bench.json")),
            1,
            180.0,
            ("msgspec", "zmq"),
        ),
        Step(
            "two cards",
            "the same between two cards",
            (*tests, "tests/gpu/test_push.py", "tests/gpu/test_bench_gpu.py", "-k", "two-gpus"),
            2,
        ),
        Step(
            "servers",
            "vLLM: a P, a D and the proxy answer as one server does",
            (*tests, "tests/gpu/test_servers.py"),
            2,
            400.0,
        ),
    ]


def run(step: Step, seconds: float) -> Result:
    """Run it, with a deadline of so many seconds; its whole process group ends with it."""
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
        )
    except OSError as error:
        result.outcome, result.why = "not run", f"{step.command[0]} cannot be started: {error}"
        return result
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        result.outcome, result.why = "failed", f"it did not end in {seconds:g} s"
    result.seconds = time.monotonic() - begin
    result.output = said.splitlines()[-LAST_LINES:]
    if not result.why and child.returncode == 1 and step.one:
        result.outcome, result.why = "not run", step.one
    elif not result.why:
        result.outcome, result.why = verdict(child.returncode, said)
    return result


def verdict(status: int, said: str) -> tuple[str, str]:
    """Outcome and reason of a process that has ended. pytest's status 0 may mean that all was skipped."""
    if status:
        return "failed", f"exit status {status}"
    if re.search(r"^\d+ skipped", said, re.MULTILINE) or re.search(
        r"^[^\n]*\bno tests ran", said, re.MULTILINE
    ):
        reason = re.search(r"^SKIPPED \[\d+\] \S+ (.+)$", said, re.MULTILINE)
        return "not run", reason[1] if reason else "all of its tests were skipped"
    return "passed", ""


def devices() -> int:
    """CUDA devices of this machine, asked in a process of its own."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def run_all(wanted: Sequence[Step], count: int, seconds: float) -> list[Result]:
    """All of them within so many seconds, on a machine with `count` CUDA devices."""
    end = time.monotonic() + seconds
    results = []
    for step in wanted:
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
        results.append(result)
    return results


def report(results: Sequence[Result], when: str) -> str:
    """The page."""
    lines = [
        "# p2pkv on a GPU: the first day",
        "",
        f"{when}, `make gpu-first-day`.",
        "",
        "| step | what | outcome | seconds | why |",
        "|---|---|---|---:|---|",
    ]
    for each in results:
        why = each.why.replace("|", "\\|")
        lines.append(f"| {each.step} | {each.what} | {each.outcome} | {each.seconds:.0f} | {why} |")
    for each in results:
        if each.output:
            lines += ["", f"## {each.step}", "", "```", *each.output, "```"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="it ends by itself within this time")
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
    results = run_all(wanted, devices(), args.minutes * 60)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    page, data = args.out / "first_day.md", args.out / "first_day.json"
    page.write_text(report(results, when))
    data.write_text(json.dumps({"when": when, "steps": [asdict(each) for each in results]}, indent=1) + "\n")
    print(f"the report: {page} and {data}")
    return 1 if any(each.outcome == "failed" for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
