"""Real servers: the first token comes from P, another D goes on where one is lost in mid answer, and the
answers are a single server's. tests/proxy/test_continuation.py has more of the latter, and drains."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import client
from p2pkv.demo.answers import GREEDY, Answer, answer_of
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.deployments import (
    LOSSES,
    PROXYS,
    SHORT,
    TOKEN,
    Deployment,
    deployed,
    instance,
    started_again,
)
from support.servers.fleet import MODEL_NAME, assert_same, metric, tokens

pytestmark = [pytest.mark.long, pytest.mark.timeout(700)]

REQUESTS = int(os.environ.get("P2PKV_FIRST_TOKEN_REQUESTS", "500"))
"""With each dispatch."""
AT_ONCE = 8
WITH_ROOM = {"extra_config": {**SHORT, "prefetch_bytes": 64 << 20}}
CACHING: dict[str, Any] = {"more_args": ("--enable-prefix-caching",)}


@pytest.fixture(scope="module", params=["concurrent", "sequential"])
def dispatch(request: pytest.FixtureRequest) -> Any:
    """D of a greedy stream is asked at once, or behind P, when its KV has come ahead."""
    return request.param


@pytest.fixture(scope="module")
def started(
    fleet_keeper: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, dispatch: Any
) -> Iterator[Deployment]:
    fleet_keeper.stop()
    logs, args = tmp_path_factory.mktemp("first_token"), [*PROXYS, "--admin-token", TOKEN]
    proxy = ProxyServer(log_path=logs / "proxy.log", dispatch=dispatch, extra_args=args)
    p = instance(proxy, tiny_model, logs, "P", **CACHING)
    ds = [instance(proxy, tiny_model, logs, "D", name=name, **WITH_ROOM, **CACHING) for name in ("D1", "D2")]
    with deployed(Deployment(p, ds, proxy)) as made:
        yield made


@dataclass
class Heard:
    """What a client makes of the events of one stream, but for ids and times."""

    parts: list[Answer] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: list[Any] = field(default_factory=list)
    usage: Any = None
    offsets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    prompt: Any = None
    fingerprinted: list[Any] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        self.prompt = event.get("prompt_token_ids") or self.prompt
        for choice in event["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.ids += choice.get("token_ids") or []
            self.prompt = choice.get("prompt_token_ids") or self.prompt
            if "system_fingerprint" in event:
                self.fingerprinted.append(choice["finish_reason"])
            if (logprobs := choice["logprobs"]) is not None:
                rows = logprobs.get("content")
                self.offsets += [] if rows is not None else logprobs["text_offset"]
                self.names += logprobs["tokens"] if rows is None else [row["token"] for row in rows]
                values = logprobs["token_logprobs"] if rows is None else [row["logprob"] for row in rows]
                self.logprobs += [round(value, 1) for value in values]
                if rows is not None:
                    choice = {**choice, "message": {"content": ""}}
                self.parts.append(answer_of({"text": "", **choice}))
            if choice["finish_reason"] is not None:
                self.finish.append((choice["finish_reason"], choice.get("stop_reason")))

    @property
    def answer(self) -> Answer:
        margins = tuple(margin for part in self.parts for margin in part.margins)
        return Answer(text=self.text, tokens=tuple(self.ids), margins=margins)


def ask(base_url: str, path: str, body: dict[str, Any]) -> Heard:
    heard, names = Heard(), set()
    for event in client.stream(f"{base_url}{path}", body, timeout_seconds=300.0):
        heard.add(event)
        names.add((event["id"], event["created"]))
    assert len(names) == len(heard.finish) == 1
    return heard


def request(number: int, single: str) -> tuple[str, dict[str, Any]]:
    """With prefixes that others share; some end with the first token, or with a stop string across it."""
    chat = number % 2
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": (12, 1, 30, 2)[number // 2 % 4], **GREEDY}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": number % 3 == 0}
    if chat:
        shared = "Tell me about the sea and the weather there, please, in a few words. " * (number % 5)
        body |= {"messages": [{"role": "user", "content": f"{shared}{number}?"}]}
        body |= {"logprobs": True, "top_logprobs": 2}
    else:
        shared_tokens = tokens(70 * (number % 4), "shared")
        body |= {"prompt": [*shared_tokens, *tokens(9 + number % 90, f"first {number}")], "logprobs": 2}
    if number % 7 in (3, 5, 6) and body["max_tokens"] > 2:
        first, said = (ask(single, path, {**body, "max_tokens": most}).text for most in (1, 12))
        at = max(0, len(first) - 1 if number % 7 == 3 else len(said) // 2)  # across its border, or behind it
        body["stop"] = [(first if number % 7 == 6 else said[at : at + 3]) or "never", "never at all"]
        body["include_stop_str_in_output"] = number % 4 == 0
    return path, body


def are_the_same(wanted: list[Heard], got: list[Heard]) -> None:
    assert_same([each.answer for each in wanted], [each.answer for each in got])
    alike = [(one, other) for one, other in zip(wanted, got, strict=True) if one.ids == other.ids]
    assert len(alike) >= 0.95 * len(wanted), "ties are rare"
    for one, other in alike:
        assert vars(one) | {"parts": None} == vars(other) | {"parts": None}


def all_answers(base_url: str, asked: list[tuple[str, dict[str, Any]]]) -> list[Heard]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda each: ask(base_url, *each), asked))


def test_answers_are_a_single_servers(trio: Deployment, dispatch: str) -> None:
    single = trio.ds[1].base_url
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = list(pool.map(lambda number: request(number, single), range(REQUESTS)))
    wanted = all_answers(single, asked)
    handed_on, others = (trio.counted(f"first_tokens_from_{who}_total") for who in ("prefill", "decode"))
    late = missed(trio, "late")
    got = all_answers(trio.proxy.base_url, asked)
    are_the_same(wanted, got)
    from_p = trio.counted("first_tokens_from_prefill_total") - handed_on
    from_d = trio.counted("first_tokens_from_decode_total") - others
    alike = sum(one.ids == other.ids for one, other in zip(wanted, got, strict=True))
    print(f"{from_p:g} first tokens came from P, {from_d:g} from D; {alike} of {REQUESTS} without a near tie")
    print(Counter((path, len(body.get("stop", ())) > 0, body["max_tokens"]) for path, body in asked))
    print("ended with their first token:", sum(len(each.logprobs) <= 1 for each in wanted))
    late = missed(trio, "late") - late
    assert from_p + from_d == REQUESTS and from_p + late >= 0.8 * REQUESTS and from_p > late
    assert loaded(trio, "prefetched") > 0
    # A D that was asked at once is left where P's token is the end.
    failed = sum(metric(each, "p2pkv_transfers_failed_total") for each in trio.servers)
    assert failed == 0 or dispatch == "concurrent"
    trio.rests()


def streams(name: str, count: int, most: int) -> list[tuple[str, dict[str, Any]]]:
    """Half of them completions, half chats; some end by themselves."""
    asked = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "max_tokens": most,
            "ignore_eos": number % 4 < 2,
            **GREEDY,
        }
        if number % 2:
            text = f"Tell me about {name} and the number {number}."
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}
        else:
            body |= {"prompt": tokens(200, f"{name} {number}"), "logprobs": 2}
        asked.append(("/v1/chat/completions" if number % 2 else "/v1/completions", body))
    return asked


@pytest.mark.parametrize(
    ("fault", "who"), [*((fault, who) for fault in LOSSES for who in "PD"), ("frozen", "D")]
)
def test_nothing_is_lost_and_nothing_comes_twice(trio: Deployment, fault: str, who: str) -> None:
    """One of them goes while many answers have their first token from P."""
    victim, asked = trio.victim(who), streams(f"{fault} {who}", 48, 40)
    wanted = all_answers(trio.ds[1].base_url, asked)
    before, resumed = (trio.counted(f"{name}_total") for name in ("first_tokens_from_prefill", "resumed"))
    with ThreadPoolExecutor(16) as pool:
        under_way = [pool.submit(ask, trio.proxy.base_url, *each) for each in asked]
        wait_until(lambda: trio.counted("first_tokens_from_prefill_total") > before + 8, "first tokens", 60.0)
        (VllmServer.freeze if fault == "frozen" else LOSSES[fault])(victim)
        got = [each.result() for each in under_way]
    are_the_same(wanted[::2], got[::2])
    assert_same([each.answer for each in wanted], [each.answer for each in got])
    assert trio.counted("not_resumed_total") == 0
    assert who == "P" or trio.counted("resumed_total") > resumed
    started_again(victim)
    wait_until(trio.trusted, "all three", 120.0)


def from_p_or_late(trio: Deployment) -> float:
    """First tokens that came from P, or were sooner from a D that had been asked at once."""
    return trio.counted("first_tokens_from_prefill_total") + missed(trio, "late")


def missed(trio: Deployment, why: str) -> float:
    name = f'p2pkv_proxy_first_tokens_from_decode_total{{reason="{why}"}} '
    lines = client.get(f"{trio.proxy.base_url}/metrics").splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_ds_room_may_be_full(trio: Deployment, dispatch: str) -> None:
    """Then a D that is asked behind P draws the first token itself."""
    bodies = [{"prompt": tokens(1900, f"room {number}"), "max_tokens": 4} for number in range(48)]
    asked = [("/v1/completions", {"model": MODEL_NAME, "logprobs": 2, **GREEDY, **body}) for body in bodies]
    wanted = all_answers(trio.ds[1].base_url, asked)
    from_p, full = from_p_or_late(trio), missed(trio, "room")
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda each: ask(trio.proxy.base_url, *each), asked))
    are_the_same(wanted, got)
    full = missed(trio, "room") - full
    assert full > 0 if dispatch == "sequential" else full == 0
    assert from_p_or_late(trio) - from_p >= 0.8 * (len(asked) - full)
    trio.rests()


def loaded(trio: Deployment, how: str) -> float:
    return sum(metric(each, f"p2pkv_bytes_{how}_total") for each in trio.ds)


def test_half_a_character_is_ds(trio: Deployment) -> None:
    """vLLM cannot go on behind one. The others of the same load have P's token."""
    single = trio.ds[1].base_url
    (half, *_) = client.post(f"{single}/tokenize", {"model": MODEL_NAME, "prompt": "€"})["tokens"][-3:]
    bodies = [{"prompt": tokens(60, f"half {number}"), "max_tokens": 6} for number in range(16)]
    for body in bodies[::2]:
        body["logit_bias"] = {str(half): 100}
    asked = [("/v1/completions", {"model": MODEL_NAME, "logprobs": 2, **GREEDY, **body}) for body in bodies]
    wanted = all_answers(single, asked)
    before = missed(trio, "token")
    got = all_answers(trio.proxy.base_url, asked)
    are_the_same(wanted, got)
    assert missed(trio, "token") >= before + 8
    trio.rests()
