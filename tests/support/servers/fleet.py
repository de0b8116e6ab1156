"""The servers that the end-to-end tests share, and what the tests ask of them."""

import http.client
import itertools
import json
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import ServerProcess, free_ports, wait_until
from p2pkv.demo.servers import LOOPBACK, ProxyServer, Role, VllmServer
from p2pkv.demo.tiny_model import TinyLlama
from p2pkv.pairing import Address

MODEL_NAME = "tiny"
MODEL = TinyLlama()
BLOCK = 32
PROBE_FOLDER = str(Path(__file__).parents[2] / "vllm")
PLUGIN_FOLDER = str(Path(__file__).parents[2] / "vllm_plugins")
PLUGINS: dict[str, dict[str, str]] = {"deepseek_v4": {"TRITON_INTERPRET": "1"}, "forked": {}, "moe_dp": {}}
"""The modules in `vllm_plugins`, and what else their processes need in the environment."""
FORKED = ("forked",)
"""The plug-ins of servers of which no test stops or watches a single process: they start in half the time."""
LEASE = 10.0
"""`lease_seconds` of the fleet: some tests wait for its end."""
CHUNK = 128
"""Prompt tokens that an instance computes in one step."""

SETTINGS = (
    *("--served-model-name", MODEL_NAME, "--dtype", MODEL.dtype, "--max-model-len", "2048"),
    *("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "64"),
    "--enable-prefix-caching",
)
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
COUNTS = ("--enable-prompt-tokens-details",)
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Responses of /v1/responses are kept, for `previous_response_id`."""


def each_of(*proxies: tuple[str, int]) -> tuple[str, int]:
    """The `proxy` of a VllmServer that pings all of these."""
    return ",".join(f"{host}:{port}" for host, port in proxies), proxies[0][1]


@dataclass(frozen=True)
class Fleet:
    """One P, one D, a proxy of each dispatch over the two, and a single server that knows the answers."""

    p: VllmServer
    d: VllmServer
    single: VllmServer
    concurrent: ProxyServer
    sequential: ProxyServer
    spare: tuple[str, int]
    """Where P and D send their pings, too: for a router that a test starts."""
    probes: Path
    """Where P and D write down what their pages hold; see vllm/probe_connector.py."""

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        return self.p, self.d, self.single, self.concurrent, self.sequential

    def proxy(self, dispatch: str) -> ProxyServer:
        return {"concurrent": self.concurrent, "sequential": self.sequential}[dispatch]


def python_path(*folders: str) -> str:
    return os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])


def plugin_environment(*plugins: str) -> dict[str, str]:
    """Environment in which vLLM loads these of `PLUGINS`, besides p2pkv's own. vLLM finds them by the
    folder's dist-info: its entry points have the modules' names."""
    env = {"PYTHONPATH": python_path(PLUGIN_FOLDER), "VLLM_PLUGINS": ",".join(["p2pkv", *plugins])}
    return {**env, **{name: value for plugin in plugins for name, value in PLUGINS[plugin].items()}}


def needs_cpu_build() -> None:
    """Skips what is for `PLUGINS`: they stand in for parts that vLLM's build for a CPU lacks."""
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    if not platforms.current_platform.is_cpu():
        pytest.skip("this vLLM was not built for a CPU")


def needs_deepseek_v4() -> None:
    import torch

    needs_cpu_build()
    if not torch.cpu._is_avx512_supported():
        pytest.skip("this CPU has no AVX-512, and vLLM no other kernels of DeepSeek V4 for a CPU")


def probing_server(
    model: Path, role: Role, probes: Path, *, plugins: Sequence[str] = (), **options: Any
) -> VllmServer:
    """A server whose connector also writes down what its pages hold, in the folder `probes`."""
    name = options.pop("name", role)
    env = {
        "P2PKV_PROBE_DIR": str(probes),
        "P2PKV_PROBE_HOLD": str(probes / f"hold-{name}"),
        **(plugin_environment(*plugins) if plugins else {}),
        "PYTHONPATH": python_path(PROBE_FOLDER, *([PLUGIN_FOLDER] if plugins else [])),
        **options.pop("env", {}),
    }
    return VllmServer(
        model,
        role=role,
        connector="ProbeConnector",
        connector_module="probe_connector",
        name=name,
        env=env,
        **{"extra_args": SETTINGS, "log_path": probes / f"{name}.log", **options},
    )


def forked(model: Path, logs: Path, name: str, **options: Any) -> VllmServer:
    """A server that starts in half the time, of which no test stops or watches a single process."""
    return VllmServer(
        model,
        name=name,
        env={**plugin_environment(*FORKED), **options.pop("env", {})},
        log_path=logs / f"{name}.log",
        **{"extra_args": SETTINGS, **options},
    )


def by_vllm_serve(server: VllmServer, *options: str) -> VllmServer:
    module = server.command.index("vllm.entrypoints.openai.api_server")
    server.command[module - 1 : module + 1] = [str(Path(PROBE_FOLDER, "vllm_serve.py")), *options]
    return server


def start_all(stack: ExitStack, *servers: ServerProcess) -> None:
    """Side by side, and wait until each serves; `stack` stops them."""
    for server in servers:
        stack.enter_context(server)
    for server in servers:
        server.wait_ready()


def start_fleet(model: Path, logs: Path, stack: ExitStack) -> Fleet:
    concurrent = ProxyServer(dispatch="concurrent", log_path=logs / "proxy-concurrent.log")
    sequential = ProxyServer(dispatch="sequential", log_path=logs / "proxy-sequential.log")
    spare = LOOPBACK, free_ports()
    discovery = each_of(concurrent.discovery, sequential.discovery, spare)
    probes = logs / "probes"
    probes.mkdir(exist_ok=True)
    settings = (*SETTINGS, *TOOLS, *COUNTS)
    options = {
        "plugins": FORKED,
        "extra_args": settings,
        "extra_config": {"lease_seconds": LEASE},
        "env": STORE,
    }
    fleet = Fleet(
        probing_server(model, "P", probes, proxy=discovery, **options),
        probing_server(model, "D", probes, proxy=discovery, **options),
        forked(model, logs, "single", extra_args=settings, env=STORE),
        concurrent,
        sequential,
        spare,
        probes,
    )
    start_all(stack, *fleet.servers)
    return fleet


def paired_headers(p: VllmServer, d: VllmServer) -> dict[str, str]:
    """What a router sends with both halves of one request."""
    name = f"___prefill_addr_{p.zmq_address}___decode_addr_{d.zmq_address}_{uuid.uuid4().hex}"
    return {"X-Request-Id": name}


def tokens(count: int, seed: int | str) -> list[int]:
    """A prompt of `count` token ids, different for every seed, so that no cache knows it."""
    draw = random.Random(f"{seed}")
    return [draw.randrange(300, MODEL.vocab) for _ in range(count)]


def complete(
    at: VllmServer | ProxyServer,
    prompt: answers.Prompt,
    count: int = 16,
    model: str = MODEL_NAME,
    **more: Any,
) -> Answer:
    return answers.complete(at.base_url, model, prompt, max_tokens=count, **more)[0]


def ask_pair(
    p: VllmServer, d: VllmServer, prompt: answers.Prompt, count: int = 16, *, at_once: bool = True
) -> Answer:
    """D's answer to a prompt that P computes: both asked at once, or D when P has answered."""
    headers = paired_headers(p, d)
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(complete, p, prompt, 1, headers=headers)
        if not at_once:
            prefill.result()
        answer = complete(d, prompt, count, headers=headers)
        prefill.result()
    return answer


DISPATCHES = ("concurrent", "sequential")
each_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)
first_dispatch = pytest.mark.parametrize(
    "dispatch", [DISPATCHES[0], *(pytest.param(each, marks=pytest.mark.long) for each in DISPATCHES[1:])]
)
"""For what clients see of either, which tests/proxy shows of both without servers."""


def ask_all(
    base_url: str, prompts: Sequence[answers.Prompt], *, at_once: int, max_tokens: int = 16
) -> list[Answer]:
    """One request for each prompt, `at_once` of them under way at any time; the answers in order."""

    def ask(prompt: answers.Prompt) -> Answer:
        return answers.complete(base_url, MODEL_NAME, prompt, max_tokens=max_tokens)[0]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


@contextmanager
def asking(clients: int, ask: Callable[[int], object]) -> Iterator[Callable[[], bool]]:
    """Until the block ends, so many clients ask one request after the other, numbered over all of them; then
    each has had its last answer. Yields whether one has failed; its error is raised at the end."""
    numbers, enough = itertools.count(), threading.Event()

    def one_client() -> None:
        while not enough.is_set():
            ask(next(numbers))

    with ThreadPoolExecutor(clients) as pool:
        all_clients = [pool.submit(one_client) for _ in range(clients)]
        try:
            yield lambda: any(each.done() for each in all_clients)
        finally:
            enough.set()
        for each in all_clients:
            each.result(120.0)


class Caller:
    def __init__(self, base_url: str, prompt: list[int], headers: dict[str, str] | None = None, **more: Any):
        body = {"model": MODEL_NAME, "prompt": prompt, **answers.GREEDY, **more}
        self._connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=60)
        head = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", "/v1/completions", json.dumps(body), head)

    def hang_up(self) -> None:
        self._connection.close()

    def first_words(self) -> bytes:
        return self._connection.getresponse().readline()

    def answer(self) -> bytes:
        return self._connection.getresponse().read()


def letters(prompt: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in prompt)


def chat_all(base_url: str, texts: Sequence[str], *, at_once: int) -> list[Answer]:
    def ask(text: str) -> Answer:
        return answers.chat(base_url, MODEL_NAME, [{"role": "user", "content": text}])[0]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, texts))


def joined(parts: Sequence[Answer]) -> Answer:
    """One of all parts of a stream."""
    return Answer(
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        margins=tuple(margin for part in parts for margin in part.margins),
    )


def streamed(choices: Sequence[Mapping[str, Any]], margins: tuple[float, ...]) -> Answer:
    """That of a stream without log-probabilities, whose margins are known."""
    return Answer(
        text="".join(choice["text"] for choice in choices),
        tokens=tuple(token for choice in choices for token in choice["token_ids"]),
        margins=margins,
    )


def assert_same(expected: Sequence[Answer], got: Sequence[Answer], tie: float = answers.TIE) -> None:
    """Fail, saying which answer differs where, unless all are the same but for ties."""
    assert len(expected) == len(got)
    pairs = enumerate(zip(expected, got, strict=True))
    wrong = {index: answers.difference(*pair, tie) for index, pair in pairs}
    wrong = {index: sentence for index, sentence in wrong.items() if sentence}
    assert not wrong, "\n".join(f"answer {index}: {sentence}" for index, sentence in wrong.items())


def metric(server: VllmServer, name: str) -> float:
    """Of its metrics page, summed over labels; 0 where it is not there."""
    return client.metrics(server.base_url).get(name, 0.0)


def counter(server: VllmServer, name: str) -> float:
    return metric(server, f"p2pkv_{name}_total")


class Hits:
    """What is asked within finds so many tokens in vLLM's own prefix cache, and no more."""

    def __init__(self, server: VllmServer, tokens: int) -> None:
        self._server = server
        self._tokens = tokens

    def __enter__(self) -> None:
        self._before = self._now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # vLLM counts after it has answered.
            expected = self._before + self._tokens
            wait_until(lambda: self._now() >= expected, f"{self._tokens} tokens of the prefix cache", 5.0)
            assert self._now() == expected

    def _now(self) -> float:
        return metric(self._server, "vllm:prefix_cache_hits_total")


class Traffic:
    """What P has sent and D has written since this was made, by their own counters, in bytes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        on_p, on_d = client.metrics(self._fleet.p.base_url), client.metrics(self._fleet.d.base_url)
        return on_p.get("p2pkv_bytes_sent_total", 0.0), on_d.get("p2pkv_bytes_scattered_total", 0.0)

    def scattered(self, at_least: int) -> int:
        """Wait until D has written that much and all that P has sent; how much D has written."""
        moved = (0.0, 0.0)

        def settled() -> bool:
            nonlocal moved
            sent, scattered = (now - before for now, before in zip(self._now(), self._before, strict=True))
            moved = (sent, scattered)
            return sent == scattered >= at_least

        try:
            wait_until(settled, "the counters", 15.0)
        except TimeoutError:
            raise AssertionError(
                f"P sent {moved[0]:.0f} bytes, D wrote {moved[1]:.0f}, at least {at_least} were expected"
            ) from None
        return int(moved[1])


def kv_bytes(first: int, past: int, *, whole_blocks: bool = False) -> int:
    """Bytes of KV of the prompt's tokens [first, past), or of the blocks that hold them."""
    if past <= first:
        return 0
    if whole_blocks:
        first, past = first // BLOCK * BLOCK, -(-past // BLOCK) * BLOCK
    return (past - first) * MODEL.kv_bytes_per_token


def assert_moved(traffic: Traffic, *spans: tuple[int, int]) -> None:
    """What D wrote are the tokens [first, past) of each span, or at most the whole blocks around them."""
    least = sum(kv_bytes(*span) for span in spans)
    most = sum(kv_bytes(*span, whole_blocks=True) for span in spans)
    assert traffic.scattered(at_least=least) <= most


def answers_as_one(
    fleet: Fleet,
    dispatch: str,
    prompt: answers.Prompt | list[list[int]],
    *spans: tuple[int, int],
    **more: Any,
) -> list[Answer]:
    """The pair answers as the single server, from these tokens of P's."""
    traffic = Traffic(fleet)
    pair = answers.complete(fleet.proxy(dispatch).base_url, MODEL_NAME, prompt, **more)
    assert_same(answers.complete(fleet.single.base_url, MODEL_NAME, prompt, **more), pair)
    assert_moved(traffic, *spans)
    return pair


def assert_at_rest(fleet: Fleet) -> None:
    """P and D hold no blocks, run nothing, and have nothing staged; waits until it is so."""
    for server in (fleet.p, fleet.d):
        at_rest(server)


def at_rest(server: VllmServer, ranks: int = 1, seconds: float = 20.0) -> None:
    busy: dict[str, float] = {}

    def is_at_rest() -> bool:
        busy.clear()
        for rank in range(ranks):
            held = inspect(Address.parse(server.zmq_address).shifted(rank))
            busy.update((f"{name} of rank {rank}", float(held[name])) for name in GAUGES if held.get(name))
        busy.update(
            (name, value) for name, value in client.metrics(server.base_url).items() if _held(name, value)
        )
        return not busy

    try:
        wait_until(is_at_rest, "rest", seconds)
    except TimeoutError:
        raise AssertionError(f"{server.name} is not back at its baseline: {busy}") from None


GAUGES = (
    *("prompts", "prompts_held", "early_claims", "sends_under_way"),
    *("requests", "loads", "receives_posted", "receives_asked", "staging_bytes", "prefetch_bytes"),
)
"""What p2pkv itself holds: 0 when nothing is under way."""

_AT_REST_ZERO = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def _held(name: str, value: float) -> bool:
    # p2pkv's gauges are 0 at the baseline; its counters end in _total.
    ours = name.startswith("p2pkv_") and not name.endswith(
        ("_total", "_created", "_bucket", "_sum", "_count")
    )
    return value != 0 and (ours or name in _AT_REST_ZERO)


def worker_of(server: VllmServer) -> psutil.Process:
    (worker,) = (
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "Worker" in " ".join(child.cmdline()) or "Worker" in child.name()
    )
    return worker
