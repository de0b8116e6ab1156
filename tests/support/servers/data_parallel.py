"""What the tests of data-parallel servers share."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from p2pkv.demo import client
from p2pkv.demo.processes import answers_ok, wait_until
from p2pkv.demo.servers import ProxyServer
from support.servers.fleet import BLOCK, CHUNK, ask_all, assert_same, tokens
from support.servers.probes import Compared

LENGTHS = (2, BLOCK, BLOCK + 1, CHUNK + 1, 2 * CHUNK + 7)


def engines(size: int) -> tuple[str, ...]:
    return ("--data-parallel-size", str(size)) if size > 1 else ()


def answered(base_url: str) -> dict[str, float]:
    """Requests that each engine behind this HTTP server has answered."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get(f"{base_url}/metrics")):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total":
                engine = sample.labels["engine"]
                counts[engine] = counts.get(engine, 0.0) + sample.value
    return counts


def known(proxy: ProxyServer, prefill: int, decode: int) -> None:
    health = f"{proxy.base_url}/health?prefill={prefill}&decode={decode}"
    wait_until(lambda: answers_ok(health), f"{prefill} prefill and {decode} decode engines", 90.0)


def serves_as_one(url: str, single: str, probes: Path, seed: str) -> int:
    """Prompts of each length, 16 at once, every other one half cached: blocks, answers, and how many."""
    prompts = [tokens(length, f"{seed} {length} {count}") for length in LENGTHS for count in range(4)]
    halves = [prompt[: len(prompt) // 2] for prompt in prompts[::2] if len(prompt) > 2 * BLOCK]
    compared = Compared(probes)
    ask_all(url, halves, at_once=16, max_tokens=2)  # one token would be P's alone
    compared.spans(len(halves))
    expected = ask_all(single, prompts, at_once=16)
    compared = Compared(probes)
    got = ask_all(url, prompts, at_once=16)
    compared.spans(len(prompts))
    assert_same(expected, got)
    return len(prompts)
