"""Clients that are programs: LiteLLM's proxy in front of ours, and `vllm bench serve`. What
they get from one vLLM they get here.

LiteLLM comes from the Python Package Index into an environment of its own, which pytest's cache keeps. Where
it cannot be had, its tests are skipped and say why.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from environments import Unavailable, environment

from p2pkv.demo.processes import ServerProcess, free_ports
from p2pkv.demo.servers import LOOPBACK
from support.servers.clients import GREEDY, NAMED, WEATHER, WORDS, said, story
from support.servers.fleet import DISPATCHES, MODEL_NAME, Fleet, Traffic, each_dispatch, kv_bytes

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("compared")]

LISTED = Path(__file__).parents[2] / "requirements" / "clients.txt"
LITELLM = [line for line in LISTED.read_text().splitlines() if line.startswith("litellm")]
KEY = "sk-of-the-tests"
SINGLE = "single"


class LiteLlm(ServerProcess):
    """LiteLLM's proxy. Each of its models is a server, taken for one of OpenAI's, or (text-, claude-) for
    one of completions or of Anthropic's."""

    def __init__(self, folder: Path, servers: dict[str, str], work: Path) -> None:
        self.base_url = f"http://{LOOPBACK}:{(port := free_ports())}"
        models = []
        for name, url in servers.items():
            kinds = (
                (name, "openai", f"{url}/v1"),
                (f"text-{name}", "text-completion-openai", f"{url}/v1"),
                (f"claude-{name}", "anthropic", url),
            )
            for shown, kind, base in kinds:
                asked = {"model": f"{kind}/{MODEL_NAME}", "api_base": base, "api_key": "none"}
                models.append({"model_name": shown, "litellm_params": asked})
        settings = {"num_retries": 0, "telemetry": False, "request_timeout": 120}
        config = work / "litellm.yaml"
        # YAML takes JSON.
        config.write_text(
            json.dumps(
                {"model_list": models, "litellm_settings": settings, "general_settings": {"master_key": KEY}}
            )
        )
        command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", LOOPBACK]
        super().__init__(
            "litellm",
            [*command, "--port", str(port)],
            health_url=f"{self.base_url}/health/liveliness",
            log_path=work / "litellm.log",
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True"},
        )


@pytest.fixture(scope="module")
def litellm_folder(pytestconfig: pytest.Config) -> Path:
    try:
        return environment(pytestconfig.cache.mkdir("environments"), *LITELLM)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def _litellms() -> Iterator[dict[tuple[str, ...], LiteLlm]]:
    """By the servers behind them; those of a fleet that has died stay to the end."""
    started: dict[tuple[str, ...], LiteLlm] = {}
    yield started
    for each in started.values():
        each.__exit__(None, None, None)


@pytest.fixture
def litellm(
    litellm_folder: Path, fleet: Fleet, _litellms: dict[tuple[str, ...], LiteLlm], logs: Path
) -> LiteLlm:
    servers = {each: fleet.proxy(each).base_url for each in DISPATCHES} | {SINGLE: fleet.single.base_url}
    if (key := tuple(servers.values())) not in _litellms:
        started = _litellms[key] = LiteLlm(litellm_folder, servers, logs)
        started.__enter__()
        started.wait_ready()
    return _litellms[key]


def of_openai(litellm: LiteLlm) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{litellm.base_url}/v1", api_key=KEY, max_retries=0)


def chat(litellm: LiteLlm, model: str, seed: str) -> Any:
    asked = GREEDY | {"model": model, "messages": said(seed)}
    made = of_openai(litellm).chat.completions.create(**asked)
    return made.choices[0].message.content, made.choices[0].finish_reason, made.usage.completion_tokens


def streamed_chat(litellm: LiteLlm, model: str, seed: str) -> Any:
    asked = GREEDY | {"model": model, "messages": said(seed), "stream": True}
    events = list(of_openai(litellm).chat.completions.create(**asked, stream_options={"include_usage": True}))
    assert not NAMED.search("".join(each.model_dump_json() for each in events))
    text = "".join(choice.delta.content or "" for each in events for choice in each.choices)
    return text, events[-1].usage.completion_tokens


def completion(litellm: LiteLlm, model: str, seed: str) -> Any:
    asked = GREEDY | {"model": f"text-{model}", "prompt": story(seed)}
    return of_openai(litellm).completions.create(**asked).choices[0].text


def tool(litellm: LiteLlm, model: str, seed: str) -> Any:
    function = {"name": "weather", "parameters": WEATHER, "strict": True}
    made = of_openai(litellm).chat.completions.create(
        **GREEDY | {"model": model, "max_tokens": 160},
        messages=said(seed),
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    return [(each.function.name, each.function.arguments) for each in made.choices[0].message.tool_calls]


def response(litellm: LiteLlm, model: str, seed: str) -> Any:
    asked = {"model": model, "input": story(seed), "max_output_tokens": WORDS, "temperature": 0.0}
    return of_openai(litellm).responses.create(**asked).output_text


def message(litellm: LiteLlm, model: str, seed: str) -> Any:
    """Of Anthropic's client, to a server of that kind."""
    made = anthropic.Anthropic(base_url=litellm.base_url, api_key=KEY, max_retries=0).messages.create(
        model=f"claude-{model}",
        max_tokens=WORDS,
        messages=said(seed),  # type: ignore[arg-type]
        extra_body={"temperature": 0.0},
    )
    return [each.text for each in made.content if each.type == "text"], made.usage.output_tokens


@each_dispatch
@pytest.mark.parametrize("ask", [chat, streamed_chat, completion, tool, response, message])
def test_litellm(litellm: LiteLlm, dispatch: str, ask: Callable[..., Any]) -> None:
    seed = f"litellm {ask.__name__} {dispatch}"
    pair = ask(litellm, dispatch, seed)
    assert pair == ask(litellm, SINGLE, seed) and pair


REQUESTS = 24


@each_dispatch
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(
    fleet: Fleet, dispatch: str, backend: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Every request is answered, with as many tokens as of one server, from KV that moved."""
    found, traffic = [], Traffic(fleet)
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    for name, url in (("pair", fleet.proxy(dispatch).base_url), ("single", fleet.single.base_url)):
        command = [sys.executable, str(Path(__file__).with_name("vllm_bench.py")), "--backend", backend]
        command += ["--base-url", url, "--endpoint", endpoint, "--model", MODEL_NAME]
        command += ["--tokenizer", str(tiny_model), "--dataset-name", "random", "--random-input-len", "150"]
        command += ["--random-output-len", "8", "--num-prompts", str(REQUESTS), "--max-concurrency", "8"]
        command += ["--ignore-eos", "--seed", dispatch[:1].encode().hex()[:1], "--save-result"]
        command += ["--result-dir", str(tmp_path), "--result-filename", f"{name}.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads((tmp_path / f"{name}.json").read_text())
        found.append({each: result[each] for each in ("completed", "failed", "total_output_tokens")})
    assert found[0] == found[1] == {"completed": REQUESTS, "failed": 0, "total_output_tokens": 8 * REQUESTS}
    assert traffic.scattered(at_least=REQUESTS * kv_bytes(0, 100)) > 0
