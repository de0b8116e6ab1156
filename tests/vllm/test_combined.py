"""What users combine with a pair: each answer of the pair is that of one server that is asked the same.

The first tests use the servers that all tests share. The others start their own (`make test-long`).
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import ServerProcess, free_ports, wait_until
from p2pkv.demo.servers import LOOPBACK, ProxyServer, Role, VllmServer
from support.servers.fleet import (
    BLOCK,
    CHUNK,
    FORKED,
    MODEL,
    MODEL_NAME,
    SETTINGS,
    Fleet,
    Hits,
    Traffic,
    answers_as_one,
    ask_pair,
    assert_at_rest,
    assert_same,
    at_rest,
    complete,
    counter,
    forked,
    kv_bytes,
    metric,
    paired_headers,
    probing_server,
    tokens,
)
from support.servers.probes import Compared

# With the servers that all tests share.


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return client.post(f"{server.base_url}{path}", {"model": MODEL_NAME, **body})


def test_prompts_with_other_salts_share_nothing(fleet: Fleet) -> None:
    length = 3 * BLOCK + 5
    prompt = tokens(length, "salted")
    for salt, cached in (("one", 0), ("other", 0), ("one", 3 * BLOCK)):
        with Hits(fleet.p, cached):
            answers_as_one(fleet, "concurrent", prompt, (cached, length - 1), cache_salt=salt)
    assert_at_rest(fleet)


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": "[a-z]{3,9} [0-9]{4}"}}, "[a-z]{3,9} [0-9]{4}"),
    "choice": ({"structured_outputs": {"choice": ["northern", "southern"]}}, "northern|southern"),
    # Penalties look at the prompt, too, and D has it.
    "repetition": ({"repetition_penalty": 1.4, "max_tokens": 16}, ""),
    "presence": ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 16}, ""),
    "bias": ({"logit_bias": {"400": 30.0}, "max_tokens": 16}, ""),
    "shortest": ({"min_tokens": 10, "max_tokens": 12}, ""),
    "bad-words": ({"bad_words": ["ba", "ku"], "max_tokens": 16}, ""),
}
"""What the request says, and a pattern of the answer."""


@pytest.mark.parametrize(("asked", "pattern"), ASKED.values(), ids=ASKED.keys())
def test_what_steers_the_sampling(fleet: Fleet, asked: dict[str, Any], pattern: str) -> None:
    prompt = tokens(CHUNK + 9, f"steered {asked}")
    (got,) = answers_as_one(fleet, "concurrent", prompt, (0, len(prompt) - 1), **{"max_tokens": 64, **asked})
    assert not pattern or re.fullmatch(pattern, got.text), got.text


@pytest.mark.parametrize("include", [False, True], ids=["left-out", "included"])
def test_stop_strings(fleet: Fleet, include: bool) -> None:
    prompt = tokens(CHUNK + 9, f"stop {include}")
    (free,) = answers.complete(fleet.single.base_url, MODEL_NAME, prompt, max_tokens=32)
    stop = free.text[len(free.text) // 2 :][:4]
    body = {"prompt": prompt, "max_tokens": 32, "stop": [stop], "temperature": 0.0}
    body["include_stop_str_in_output"] = include
    traffic = Traffic(fleet)
    single, pair = (
        post(server, "/v1/completions", body)["choices"][0] for server in (fleet.single, fleet.concurrent)
    )
    assert pair["text"] == single["text"]
    assert (pair["finish_reason"], pair["stop_reason"]) == ("stop", stop)
    assert pair["text"].endswith(stop) == include
    assert traffic.scattered(at_least=kv_bytes(0, len(prompt) - 1)) > 0


def test_log_probabilities(fleet: Fleet) -> None:
    prompt = tokens(CHUNK + 9, "log-probabilities")
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "logprobs": 5}
    traffic = Traffic(fleet)
    single, pair = (
        post(server, "/v1/completions", body)["choices"][0]["logprobs"]
        for server in (fleet.single, fleet.concurrent)
    )
    assert pair["tokens"] == single["tokens"]
    assert pair["token_logprobs"] == pytest.approx(single["token_logprobs"], abs=1e-3)
    for ours, theirs in zip(pair["top_logprobs"], single["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert traffic.scattered(at_least=kv_bytes(0, len(prompt) - 1)) > 0


# Adapters and prompt embeddings: a P, a D and a single server of their own.

RANK = 8


def write_adapter(folder: Path, seed: int) -> Path:
    """A random adapter of the tiny Llama that changes K and V, so that a wrong one shows."""
    draw = torch.Generator().manual_seed(seed)
    folder.mkdir()
    sizes = {
        "q_proj": (MODEL.heads * MODEL.head_dim, MODEL.hidden),
        "k_proj": (MODEL.kv_heads * MODEL.head_dim, MODEL.hidden),
        "v_proj": (MODEL.kv_heads * MODEL.head_dim, MODEL.hidden),
        "o_proj": (MODEL.hidden, MODEL.heads * MODEL.head_dim),
    }
    weights = {}
    for layer in range(MODEL.layers):
        for name, (rows, columns) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weights[f"{prefix}A.weight"] = torch.randn(RANK, columns, generator=draw) / columns**0.5
            weights[f"{prefix}B.weight"] = torch.randn(rows, RANK, generator=draw) / RANK**0.5
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Combined:
    """A pair, and the single server that knows its answers; behind a proxy, or asked by both addresses."""

    p: VllmServer
    d: VllmServer
    single: VllmServer
    probes: Path
    proxy: ProxyServer | None = None

    @property
    def url(self) -> str:
        return self.proxy.base_url

    def moved(self) -> float:
        return counter(self.d, "bytes_scattered")

    def rests(self) -> None:
        # P keeps a prompt for which D has not come for a lease, since D might still come.
        at_rest(self.p, seconds=60.0)
        at_rest(self.d)


def pair_of(
    name: str, model: Path, logs: Path, single: VllmServer, p: Sequence[str], d: Sequence[str], **options: Any
) -> Combined:
    """With these settings. `options`: `proxy`, whether there is one, and those of both servers."""
    probes = logs / f"{name}-probes"
    probes.mkdir()
    proxy = ProxyServer(log_path=logs / f"{name}-proxy.log") if options.pop("proxy", True) else None
    if proxy is not None:
        options["proxy"] = proxy.discovery
    made = [
        probing_server(
            model, role, probes, name=f"{name}-{role}", plugins=FORKED, extra_args=settings, **options
        )
        for role, settings in (("P", p), ("D", d))
    ]
    return Combined(made[0], made[1], single, probes, proxy)


@pytest.fixture(scope="module")
def own(fleet_keeper) -> Iterator[ExitStack]:
    """The pair that runs now, in the place of the shared servers: each test's pair stops the one before."""
    fleet_keeper.stop()
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, made: Combined) -> None:
    """Have these running in the place of what `stack` holds; some may have been started elsewhere."""
    servers = [*([made.proxy] if made.proxy else []), made.p, made.d, made.single]
    stack.close()
    for server in servers:
        if not server.running():
            stack.enter_context(server)
    for server in servers:
        server.wait_ready()


@pytest.fixture(scope="module")
def single(tiny_model: Path, adapters: dict[str, Path], logs: Path, own: ExitStack) -> Iterator[VllmServer]:
    """Knows the answers of all pairs that serve the tiny Llama; started here, waited for with the pairs."""
    extra = adapted(style=adapters["style"], mixed=adapters["other"])
    with forked(tiny_model, logs, "combined-single", extra_args=extra) as server:
        yield server


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("style", "other", "third"))}


def adapted(**named: Path) -> tuple[str, ...]:
    return (
        *(*SETTINGS, "--enable-prompt-embeds", "--enable-lora", "--max-loras", "4"),
        *("--max-lora-rank", str(RANK), "--lora-modules"),
        *(f"{name}={path}" for name, path in named.items()),
    )


@pytest.fixture(scope="module")
def adapted_pair(
    own: ExitStack, tiny_model: Path, adapters: dict[str, Path], single: VllmServer, logs: Path
) -> Combined:
    """`style` is the same adapter everywhere; `mixed` another one on P than elsewhere; `lonely` on P only."""
    on_p = adapted(style=adapters["style"], mixed=adapters["third"], lonely=adapters["other"])
    on_d = adapted(style=adapters["style"], mixed=adapters["other"])
    made = pair_of("adapted", tiny_model, logs, single, on_p, on_d, load_failure_policy="recompute")
    start(own, made)
    return made


@pytest.mark.long
@pytest.mark.parametrize("length", [20, 2 * CHUNK + 40])
def test_an_adapters_answer_is_a_single_servers(adapted_pair: Combined, length: int) -> None:
    prompt = tokens(length, f"adapter {length}")
    compared = Compared(adapted_pair.probes)
    # The base model first: what it leaves in the caches is no adapter's.
    for model in (MODEL_NAME, "style"):
        got = answers.complete(adapted_pair.url, model, prompt)
        assert_same(answers.complete(adapted_pair.single.base_url, model, prompt), got)
    assert compared.spans(2) == [(0, length - 1)] * 2
    base, style = (
        answers.complete(adapted_pair.single.base_url, model, prompt)[0] for model in (MODEL_NAME, "style")
    )
    assert answers.difference(base, style), "the adapter changes nothing, so this test shows nothing"


@pytest.mark.long
def test_base_and_adapter_in_the_same_steps(adapted_pair: Combined) -> None:
    asked = [("style" if n % 2 else MODEL_NAME, tokens(30 + 25 * n, f"mixture {n}")) for n in range(12)]
    compared = Compared(adapted_pair.probes)

    def ask(one: tuple[str, list[int]]) -> Answer:
        return answers.complete(adapted_pair.url, *one)[0]

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, asked))
    assert compared.spans(12) == sorted((0, len(prompt) - 1) for _, prompt in asked)
    expected = [answers.complete(adapted_pair.single.base_url, *one)[0] for one in asked]
    assert_same(expected, got)


@pytest.mark.long
def test_another_adapter_of_the_same_name_on_p_is_noticed(adapted_pair: Combined) -> None:
    """D computes the prompt itself, as its policy says."""
    prompt, before = tokens(CHUNK + 9, "of the same name"), adapted_pair.moved()
    got = answers.complete(adapted_pair.url, "mixed", prompt)
    assert_same(answers.complete(adapted_pair.single.base_url, "mixed", prompt), got)
    wait_until(lambda: counter(adapted_pair.d, "transfers_failed") >= 1, "a transfer that D has refused")
    at_rest(adapted_pair.d)
    assert adapted_pair.moved() == before


@pytest.mark.long
def test_an_adapter_that_only_p_has_is_not_served(adapted_pair: Combined) -> None:
    with pytest.raises(client.RequestFailed) as failed:
        answers.complete(adapted_pair.url, "lonely", tokens(20, "lonely"))
    assert failed.value.status == 404
    assert "lonely" in failed.value.body


def encoded(embeds: torch.Tensor) -> str:
    out = io.BytesIO()
    torch.save(embeds, out)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.long
@pytest.mark.parametrize("length", [20, 2 * CHUNK + 40])
def test_prompt_embeddings(adapted_pair: Combined, tiny_model: Path, length: int) -> None:
    """A second prompt that differs in its first token only takes nothing from the first one's cache."""
    rows = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]
    embeds = rows[torch.tensor(tokens(length, f"embeddings {length}"))].clone()
    other = embeds.clone()
    other[0] = -other[0]
    compared = Compared(adapted_pair.probes)
    for prompt in (embeds, other):
        body = {"prompt_embeds": encoded(prompt), "max_tokens": 16, "logprobs": 2, **answers.GREEDY}
        single, pair = (
            answers.answer_of(post(server, "/v1/completions", body)["choices"][0])
            for server in (adapted_pair.single, adapted_pair.proxy)
        )
        assert_same([single], [pair])
    assert compared.spans(2) == [(0, length - 1)] * 2
    adapted_pair.rests()


# Few blocks: preemption on P and on D.

FEW = ("--scheduling-policy", "priority", "--max-model-len", "1024", "--num-gpu-blocks-override")


def all_at_once(pair: Combined, prompts: list[list[int]], count: int) -> list[Answer]:
    headers = [paired_headers(pair.p, pair.d) for _ in prompts]

    def on(server: VllmServer, number: int, count: int) -> Answer:
        return complete(server, prompts[number], count, headers=headers[number], priority=number % 4)

    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        prefills = [pool.submit(on, pair.p, number, 1) for number in range(len(prompts))]
        decodes = [pool.submit(on, pair.d, number, count) for number in range(len(prompts))]
        for each in prefills:
            each.result()
        return [each.result() for each in decodes]


@pytest.fixture(scope="module")
def small_pair(own: ExitStack, tiny_model: Path, single: VllmServer, logs: Path) -> Combined:
    on_p, on_d = ((*SETTINGS, *FEW, blocks) for blocks in ("256", "64"))
    made = pair_of(
        "small", tiny_model, logs, single, on_p, on_d, proxy=False, load_failure_policy="recompute"
    )
    start(own, made)
    return made


@pytest.mark.long
def test_preemption_on_d(small_pair: Combined, single: VllmServer) -> None:
    """What D preempts after its load it computes again by itself."""
    prompts = [tokens(100 + number, f"preempted on D {number}") for number in range(16)]
    preempted = "vllm:num_preemptions_total"
    before, compared = metric(small_pair.d, preempted), Compared(small_pair.probes)
    got = all_at_once(small_pair, prompts, 150)
    assert metric(small_pair.d, preempted) > before, "nothing was preempted, so this test shows nothing"
    assert compared.spans(16) == sorted((0, len(prompt) - 1) for prompt in prompts)
    assert_same(alone(single, prompts, 150), got)
    small_pair.rests()


def alone(single: VllmServer, prompts: list[list[int]], count: int) -> list[Answer]:
    return [complete(single, each, count) for each in prompts]


# Beside a connector that stores prompts.

LEASE = 5
SETTLE_SECONDS = 10 * LEASE + 30.0
"""P keeps D's last word about a prompt for which P was never asked for ten leases, and looks once a lease."""


@dataclass(frozen=True)
class Storing:
    """A P and a D with vLLM's ExampleConnector beside p2pkv, each with its own folder and no other cache."""

    p: VllmServer
    d: VllmServer
    p_folder: Path

    def ask(self, prompt: list[int]) -> Answer:
        return ask_pair(self.p, self.d, prompt)

    def moved(self) -> float:
        at_rest(self.d)
        return counter(self.d, "bytes_scattered")


@pytest.fixture(scope="module")
def storing_pair(own: ExitStack, tiny_model: Path, single: VllmServer, logs: Path) -> Storing:
    folders = {role: logs / f"stored-on-{role}" for role in ("P", "D")}
    extra = [each for each in SETTINGS if each != "--enable-prefix-caching"]
    # ExampleConnector stores nothing right of a prompt that is computed in several steps.
    extra[extra.index("--max-num-batched-tokens") + 1] = "1024"

    def server(role: Role, kv_role: str) -> VllmServer:
        folders[role].mkdir()
        port = free_ports()
        store = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folders[role])},
        }
        ours = {
            "kv_connector": "P2pKvConnector",
            "kv_role": kv_role,
            "kv_port": port,
            "kv_connector_extra_config": {"host": LOOPBACK, "lease_seconds": LEASE},
        }
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": "p2pkv.connector.multi",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [ours, store]},
        }
        return forked(
            tiny_model,
            logs,
            f"storing-{role}",
            role=role,
            kv_port=port,
            kv_transfer_config=transfer,
            extra_args=[*extra, "--no-enable-prefix-caching"],
        )

    p, d = server("P", "kv_producer"), server("D", "kv_consumer")
    start(own, Combined(p, d, single, logs))
    return Storing(p, d, folders["P"])


@pytest.mark.long
def test_p_pushes_and_stores_and_d_takes_what_is_stored(storing_pair: Storing, single: VllmServer) -> None:
    prompts = [tokens(150 + 40 * number, f"stored {number}") for number in range(4)]
    expected = alone(single, prompts, 16)
    # Nothing is stored yet: all comes from P.
    before = storing_pair.moved()
    got = [storing_pair.ask(prompt) for prompt in prompts]
    assert_same(expected, got)
    pushed = storing_pair.moved() - before
    assert pushed == sum(kv_bytes(0, len(prompt) - 1, whole_blocks=True) for prompt in prompts)
    # Both have stored it: D does not ask for it again, and does not even wait for P, which is not asked.
    before = storing_pair.moved()
    failed = counter(storing_pair.d, "transfers_failed")
    headers = [paired_headers(storing_pair.p, storing_pair.d) for _ in prompts]
    got = [
        answers.complete(storing_pair.d.base_url, MODEL_NAME, prompt, headers=each)[0]
        for prompt, each in zip(prompts, headers, strict=True)
    ]
    assert_same(expected, got)
    assert storing_pair.moved() == before
    assert counter(storing_pair.d, "transfers_failed") == failed


@pytest.mark.long
def test_what_p_loads_from_its_store_is_pushed_right(storing_pair: Storing, single: VllmServer) -> None:
    prompts = [tokens(150 + 40 * number, f"stored on P {number}") for number in range(8)]
    expected = alone(single, prompts, 16)
    alone(storing_pair.p, prompts, 1)
    stored = len(list(storing_pair.p_folder.iterdir()))
    assert stored >= len(prompts)
    before = storing_pair.moved()
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(storing_pair.ask, prompts))
    assert_same(expected, got)
    pushed = storing_pair.moved() - before
    assert pushed == sum(kv_bytes(0, len(prompt) - 1, whole_blocks=True) for prompt in prompts)
    at_rest(storing_pair.p, seconds=SETTLE_SECONDS)
