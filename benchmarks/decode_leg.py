"""The decode leg of a request: p2pkv beside vLLM's ExampleConnector (files), with real servers on a CPU.

A model with tiny weights and Llama-8B's KV geometry (32 layers x 8 KV heads x 128, bfloat16: 128 KiB a
token), so that 2,048 tokens are 256 MiB. Six servers: a P that pushes layer by layer, a P that pushes when
all of the prompt is computed, one D for both, a D with `prefetch_bytes` (which P pushes to layer by layer),
and a P and a D with ExampleConnector. Prompts are fresh each time, and one request is under way at any time;
the kinds of request take turns, so that a busy machine is so to all.

sequential: P is asked and has answered; then D is asked for one token, and that is timed.
concurrent: P and D are asked at once. D's lag is the time from P's answer to D's answer (one token).
The three times that the lag is held against are measured in the same run, between the others:

decode step: the median time between two tokens of a streamed answer of D, after a prompt of the longest
    length that came from P.
layer of P: the time that P alone takes to answer the longest prompt, less what it takes to answer all of
    it but its last chunk (chunk: what P computes in one step, --chunk-tokens; a prompt of one token if
    the prompt is a single chunk), divided by 32.
copy: the time in which one thread copies the bytes of the longest prompt's KV, in memory that it has used
    before. A decode step and a copy are the least that a D can need that starts with nothing.
scheduler pass: while a request waits on D for a P that was never asked, the passes of D's scheduler that
    compute nothing are counted for a second by D's connector; a second divided by their number. vLLM
    sleeps 1 ms in each of them.

Writes a Markdown table and every measurement (JSON) to --out; exits with 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decode_leg_report import KINDS, MODEL, Results, Taken, description, marks, milliseconds, report

from p2pkv.demo import client
from p2pkv.demo.processes import ending_on_signals, free_ports, wait_until
from p2pkv.demo.servers import LOOPBACK, VllmServer
from p2pkv.demo.tiny_model import ensure_model

NAME = "llama-8b-kv"
SETTLE_SECONDS = 1.1
"""Between two requests: vLLM's processes spin for a second after their last step, and beside the servers of
the request before two cores would show little else."""

STEP_TOKENS = 17
AHEAD_BYTES = 1 << 29


@dataclass
class Fleet:
    """The six servers; `files` is where ExampleConnector keeps its KV, `passes` D's count of them.

    `owed` counts the bytes that D must have got from P by now, if it has computed no prompt by itself.
    """

    layers: VllmServer
    whole: VllmServer
    decode: VllmServer
    ahead: VllmServer
    files_p: VllmServer
    files_d: VllmServer
    files: Path
    passes: Path
    owed: int = 0

    @property
    def servers(self) -> tuple[VllmServer, ...]:
        return self.layers, self.whole, self.decode, self.ahead, self.files_p, self.files_d


# The servers.


@contextlib.contextmanager
def fleet(args: argparse.Namespace) -> Iterator[Fleet]:
    """All six, serving."""
    model = ensure_model(MODEL)
    settings = [
        *("--served-model-name", NAME, "--dtype", MODEL.dtype, "--block-size", str(args.block_size)),
        *("--max-model-len", str(max(args.tokens) + 2 * STEP_TOKENS)),
        *("--max-num-batched-tokens", str(args.chunk_tokens)),
    ]
    with tempfile.TemporaryDirectory(prefix="decode-leg-") as folder, contextlib.ExitStack() as stack:
        files, passes = Path(folder, "files"), Path(folder, "passes")
        files.mkdir()

        def server(name: str, **more: Any) -> VllmServer:
            return VllmServer(
                model, extra_args=settings, name=name, log_path=args.logs / f"{name}.log", **more
            )

        both = Fleet(
            server("layers", role="P"),
            server(
                "whole",
                role="P",
                connector="WholeRequestConnector",
                connector_module="decode_leg_whole",
                env={"PYTHONPATH": _path_with(Path(__file__).parent)},
            ),
            _counting_decode(server, passes),
            server("ahead", role="D", extra_config={"prefetch_bytes": AHEAD_BYTES}),
            server("files-p", kv_transfer_config=_example("kv_producer", files)),
            server("files-d", kv_transfer_config=_example("kv_consumer", files)),
            files,
            passes,
        )
        for each in both.servers:
            each.log_path.unlink(missing_ok=True)
            stack.enter_context(each)
            # One after the other: six at once would need more memory and time than one machine has.
            say(f"{each.name} serves after {each.wait_ready(args.start_seconds):.0f} s")
            # A process may use AMX once a large product has asked for it: vLLM's decode does not ask.
            ask(each, fresh_prompt(max(args.tokens)))
        yield both


def _counting_decode(server: Any, passes: Path) -> VllmServer:
    """D, whose connector counts passes; its own port is in the configuration that it is given."""
    port = free_ports()
    decode: VllmServer = server(
        "decode",
        kv_port=port,
        env={"P2PKV_PASSES": str(passes), "PYTHONPATH": _path_with(Path(__file__).parent)},
        kv_transfer_config={
            "kv_connector": "CountingConnector",
            "kv_connector_module_path": "decode_leg_passes",
            "kv_role": "kv_consumer",
            "kv_port": port,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"host": LOOPBACK},
        },
    )
    return decode


def _path_with(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def _example(role: str, files: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }


# The requests.


def fresh_prompt(tokens: int) -> list[int]:
    """Token ids that no cache knows."""
    return [random.randrange(300, MODEL.vocab) for _ in range(tokens)]


def body(prompt: Sequence[int], tokens: int = 1) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def pair_headers(p: VllmServer, d: VllmServer) -> dict[str, str]:
    name = f"___prefill_addr_{p.zmq_address}___decode_addr_{d.zmq_address}_{uuid.uuid4().hex}"
    return {"X-Request-Id": name}


def ask(
    server: VllmServer, prompt: Sequence[int], headers: dict[str, str] | None = None
) -> tuple[float, float]:
    """Ask for one token; when it was asked, and when it had answered."""
    begin = time.monotonic()
    client.post(f"{server.base_url}/v1/completions", body(prompt), headers=headers)
    return begin, time.monotonic()


def request(servers: Fleet, kind: str, tokens: int) -> Taken:
    """One request of this kind, timed; nothing is left of it."""
    way, order = kind.split()
    prompt = fresh_prompt(tokens)
    if way == "files":
        p, d, headers = servers.files_p, servers.files_d, None
    else:
        p = servers.whole if way == "whole" else servers.layers
        d = servers.ahead if way == "ahead" else servers.decode
        headers = pair_headers(p, d)
        servers.owed += (tokens - 1) * MODEL.kv_bytes_per_token if d is servers.decode else 0
    try:
        if order == "sequential":
            (p_asked, p_answered), (d_asked, d_answered) = ask(p, prompt, headers), ask(d, prompt, headers)
        else:
            (p_asked, p_answered), (d_asked, d_answered) = ask_both(p, d, prompt, headers)
    finally:
        for folder in servers.files.iterdir():
            shutil.rmtree(folder)
    return Taken(
        p_answered - p_asked,
        d_answered - d_asked,
        d_answered - p_answered,
        d_answered - min(p_asked, d_asked),
    )


def ask_both(
    p: VllmServer, d: VllmServer, prompt: Sequence[int], headers: dict[str, str] | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ask P and D at once. Raises what either raises."""
    answers: list[tuple[float, float]] = []
    errors: list[Exception] = []

    def on_p() -> None:
        try:
            answers.append(ask(p, prompt, headers))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=on_p)
    thread.start()
    try:
        on_d = ask(d, prompt, headers)
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return answers[0], on_d


# What the lag is held against.


def decode_step(servers: Fleet, tokens: int) -> float:
    """Seconds between two tokens of D, the median of one answer."""
    prompt, headers = fresh_prompt(tokens), pair_headers(servers.layers, servers.decode)
    servers.owed += (tokens - 1) * MODEL.kv_bytes_per_token
    ask(servers.layers, prompt, headers)
    url = f"{servers.decode.base_url}/v1/completions"
    times = [time.monotonic() for _ in client.stream(url, body(prompt, STEP_TOKENS), headers=headers)]
    gaps: list[float] = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(gaps)


def layer_of_p(servers: Fleet, tokens: int, chunk: int) -> float:
    """Seconds of one layer of P's last chunk."""
    last = tokens % chunk or chunk
    begin, end = ask(servers.layers, fresh_prompt(tokens))
    rest_begin, rest_end = ask(servers.layers, fresh_prompt(max(1, tokens - last)))
    whole, rest = end - begin, rest_end - rest_begin
    layers: int = MODEL.layers
    return (whole - rest) / layers


def copy(tokens: int) -> float:
    """Seconds of one copy of so many tokens' KV."""
    source = np.ones(tokens * MODEL.kv_bytes_per_token, np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(4):
        begin = time.monotonic()
        np.copyto(target, source)
        times.append(time.monotonic() - begin)
    return min(times)


def scheduler_pass(servers: Fleet) -> float:
    """Seconds of one pass of D's scheduler that computes nothing."""
    headers = pair_headers(servers.layers, servers.decode)
    url = f"{servers.decode.base_url}/v1/completions"

    def wait_in_vain() -> None:
        with contextlib.suppress(TimeoutError):
            client.post(url, body(fresh_prompt(64)), headers=headers, timeout_seconds=2.0)

    before = _passes(servers)
    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    try:
        wait_until(lambda: _passes(servers) > before + 50, "D's scheduler polls")
        begin, first = time.monotonic(), _passes(servers)
        time.sleep(1.0)
        end, last = time.monotonic(), _passes(servers)
    finally:
        thread.join()
    if last == first:
        raise TimeoutError("D's scheduler made no pass in a second")
    return (end - begin) / (last - first)


def _passes(servers: Fleet) -> int:
    count: int = struct.unpack("<Q", servers.passes.read_bytes())[0] if servers.passes.stat().st_size else 0
    return count


# The run.


def measure(args: argparse.Namespace, servers: Fleet) -> Results:
    """Everything, in turns; the first turn of each length only warms up."""
    results = Results()
    longest = max(args.tokens)
    for tokens in args.tokens:
        taken: dict[str, list[Taken]] = {kind: [] for kind in KINDS}
        for number in range(1 + args.repeat):
            for kind in KINDS:
                one = request(servers, kind, tokens)
                if number:
                    taken[kind].append(one)
                time.sleep(SETTLE_SECONDS)
            if tokens == longest:
                results.steps.append(decode_step(servers, tokens))
                results.layers.append(layer_of_p(servers, tokens, args.chunk_tokens))
                results.passes.append(scheduler_pass(servers))
                results.copies.append(copy(longest))
        results.taken[tokens] = taken
        parts = ", ".join(f"{kind} {milliseconds([one.d for one in taken[kind]])}" for kind in KINDS)
        say(f"{tokens} tokens: D's answer after ms: {parts}")
    return results


def check_receipt(servers: Fleet) -> list[str]:
    """What the servers' own counters say is wrong: every load must have come from P."""
    pushed = client.metrics(servers.decode.base_url).get("p2pkv_bytes_scattered_total", 0.0)
    ahead = client.metrics(servers.ahead.base_url).get("p2pkv_bytes_prefetched_total", 0.0)
    hits = client.metrics(servers.files_d.base_url).get("vllm:external_prefix_cache_hits_total", 0.0)
    wrong = []
    if pushed < servers.owed:
        wrong.append(f"D wrote {pushed:.0f} bytes that P pushed, but {servers.owed} were expected at least")
    if not ahead:
        wrong.append("nothing came ahead to the D with prefetch_bytes")
    if not hits:
        wrong.append("ExampleConnector's D loaded nothing")
    return wrong


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 2048], help="prompt lengths")
    parser.add_argument("--repeat", type=int, default=10, help="measurements of each kind and length")
    parser.add_argument("--block-size", type=int, default=32, help="tokens in a block of every server")
    parser.add_argument(
        "--chunk-tokens", type=int, default=2048, help="tokens that a server computes in a step"
    )
    parser.add_argument(
        "--start-seconds", type=float, default=300.0, help="how long a server may take to start"
    )
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where the servers' logs go")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results"
    )
    args = parser.parse_args()
    with ending_on_signals(), fleet(args) as servers:
        results = measure(args, servers)
        wrong = check_receipt(servers)
    reached = [*marks(results), *((False, sentence) for sentence in wrong)]
    text = report(args, results, reached)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "decode_leg.md").write_text(text)
    values = {
        str(tokens): {kind: [vars(one) for one in all_] for kind, all_ in taken.items()}
        for tokens, taken in results.taken.items()
    }
    rest = {
        "decode_steps": results.steps,
        "layers_of_p": results.layers,
        "scheduler_passes": results.passes,
        "copies": results.copies,
    }
    (args.out / "decode_leg.json").write_text(
        json.dumps({"about": description(args), "seconds": values} | rest, indent=1) + "\n"
    )
    say(text)
    return 0 if all(ok for ok, _ in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
