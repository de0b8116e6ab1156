"""`p2pkv demo`: a prefill and a decode server behind the proxy, beside one plain server that checks them."""

import argparse
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from p2pkv.demo import answers, client
from p2pkv.demo.processes import ServerFailed, ending_on_signals
from p2pkv.demo.servers import ProxyServer, Role, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model

_SERVED_NAME = "demo"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The servers' own counters of the KV that moved, in bytes."""

    sent: int
    """Pushed by P."""
    early: int
    """Taken by D before the last layer of their prompt was computed on P."""
    scattered: int
    """Written by D into its cache."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `p2pkv demo`."""
    parser.add_argument("--model", help="folder or name of a model (default: a tiny Llama, made here)")
    parser.add_argument("--dtype", default="float32", help="type of weights and cache (default: %(default)s)")
    parser.add_argument(
        "--max-model-len", type=int, default=4096, help="longest prompt plus answer, in tokens"
    )
    parser.add_argument(
        "--chunk-tokens", type=int, default=256, help="prompt tokens that P computes in one step"
    )
    parser.add_argument("--answer-tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where the servers' logs go")
    parser.add_argument(
        "--start-seconds", type=float, default=300.0, help="how long a server may take to start"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if the pair answers as the single server does and the KV was pushed, else 1."""
    try:
        with ending_on_signals():
            return _demo(args)
    except (ServerFailed, client.RequestFailed, TimeoutError, OSError) as error:
        print(f"\n{error}\n\nFAIL: the demo did not run to its end (logs: {args.logs})", flush=True)
        return 1


def _demo(args: argparse.Namespace) -> int:
    _say("p2pkv demo: two vLLM servers and a proxy, and one plain vLLM server to compare with")
    model = args.model or str(ensure_model(TinyLlama()))
    _say(
        f"model: {model}"
        + ("" if args.model else " (a tiny Llama with random weights: its words mean nothing)")
    )
    with contextlib.ExitStack() as stack:
        proxy = ProxyServer(log_path=args.logs / "proxy.log")
        p, d, single = _vllm_servers(args, model, proxy)
        for server in (proxy, p, d, single):
            server.log_path.unlink(missing_ok=True)
            stack.enter_context(server)
        _wait_ready([p, d, single], proxy, args.start_seconds)
        wrong, (pair_text, single_text) = _compare_answers(args, proxy, single)
        moved = _wait_settled(p, d)
    _say("servers stopped")
    return _report(pair_text, single_text, moved, wrong)


def _vllm_servers(
    args: argparse.Namespace, model: str, proxy: ProxyServer
) -> tuple[VllmServer, VllmServer, VllmServer]:
    """P, D and the single server, not started yet; all of the same settings."""
    settings = [
        *("--served-model-name", _SERVED_NAME, "--dtype", args.dtype),
        *("--max-model-len", str(args.max_model_len), "--max-num-batched-tokens", str(args.chunk_tokens)),
    ]
    if Path("/dev/nvidia0").exists():
        settings += ["--gpu-memory-utilization", "0.25"]

    def server(name: str, role: Role | None) -> VllmServer:
        return VllmServer(
            model,
            role=role,
            proxy=proxy.discovery,
            extra_args=settings,
            name=name,
            log_path=args.logs / f"{name}.log",
        )

    return server("prefill", "P"), server("decode", "D"), server("single", None)


def _wait_ready(vllm: list[VllmServer], proxy: ProxyServer, timeout_seconds: float) -> None:
    _say(f"starting {', '.join(server.name for server in vllm)} and the proxy; half a minute or more ...")
    for server in vllm:
        _say(f"  {server.name} serves after {server.wait_ready(timeout_seconds):.0f} s (pid {server.pid})")
    # Its health page answers 503 until a P and a D have registered, which they do once they are warm.
    proxy.wait_ready(timeout_seconds)
    _say("  the proxy has found prefill and decode")


def _compare_answers(
    args: argparse.Namespace, proxy: ProxyServer, single: VllmServer
) -> tuple[list[str], tuple[str, str]]:
    """What differs, a sentence for each prompt, and the two answers to the last prompt."""
    wrong: list[str] = []
    texts = ("", "")
    for number, (kind, prompt) in enumerate(_prompts(), 1):
        begun = time.monotonic()
        pair = answers.complete(proxy.base_url, _SERVED_NAME, prompt, max_tokens=args.answer_tokens)[0]
        took = time.monotonic() - begun
        alone = answers.complete(single.base_url, _SERVED_NAME, prompt, max_tokens=args.answer_tokens)[0]
        differs = answers.difference(alone, pair)
        verdict = "DIFFERENT" if differs else "equal"
        _say(f"prompt {number} ({kind}, {len(prompt)} characters): {took:.2f} s through the proxy, {verdict}")
        if differs:
            wrong.append(f"prompt {number}: {differs}")
        texts = (pair.text, alone.text)
    return wrong, texts


def _prompts() -> list[tuple[str, str]]:
    """(kind, text); the last is computed in several chunks, whatever the tokenizer."""
    story = " ".join(
        f"On day {day} the ship sailed {day * 7 % 31} miles and saw {day * 5 % 13} whales."
        for day in range(60)
    )
    paragraphs = [f"In year {year}: {story[at : at + 400]}" for year, at in enumerate(range(0, 1600, 400), 1)]
    return [
        *(("a paragraph", text + " What did the ship see next?") for text in paragraphs),
        ("short", "A cache is"),
        ("several chunks", story[:2800] + " How many whales did it see?"),
    ]


def _wait_settled(p: VllmServer, d: VllmServer) -> Moved:
    """The counters, once D has written all that P has sent; their values after ten seconds if not."""
    deadline = time.monotonic() + 10.0
    while True:
        on_p, on_d = client.metrics(p.base_url), client.metrics(d.base_url)
        moved = Moved(
            sent=int(on_p.get("p2pkv_bytes_sent_total", 0)),
            early=int(on_p.get("p2pkv_bytes_before_last_layer_total", 0)),
            scattered=int(on_d.get("p2pkv_bytes_scattered_total", 0)),
        )
        if 0 < moved.sent == moved.scattered or time.monotonic() > deadline:
            return moved
        time.sleep(0.2)


def _report(pair_text: str, single_text: str, moved: Moved, wrong: list[str]) -> int:
    if not moved.sent:
        wrong = [*wrong, "P pushed nothing; the decode server computed every prompt by itself"]
    elif moved.sent != moved.scattered:
        wrong = [*wrong, f"P pushed {moved.sent} bytes, but D wrote {moved.scattered} into its cache"]
    share = moved.early / moved.sent if moved.sent else 0.0
    print()
    print(f"answer of the pair:          {pair_text!r}")
    print(f"answer of the single server: {single_text!r}")
    print(f"KV pushed from P to D:       {moved.sent:,} bytes")
    print(f"arrived before P's last layer ended: {share:.0%}")
    for sentence in wrong:
        print(f"wrong: {sentence}")
    print(
        "FAIL" if wrong else "PASS: the decode server answers from KV that the prefill server computed",
        flush=True,
    )
    return 1 if wrong else 0


def _say(text: str) -> None:
    print(text, flush=True)
