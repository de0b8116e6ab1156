"""Speculative decoding with real servers: D's blocks hold the drafter's KV too, and no answer changes.

P and D serve one tiny model, with an n-gram drafter, an EAGLE head, or a copy of the model that drafts for
it. Such a copy guesses right as long as its KV is right: so it shows whether the drafter's KV is P's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from probes import Compared, notes
from safetensors.torch import load_file, save_file
from tiny_eagle import TinyEagle
from vllm_support import (
    MODEL,
    MODEL_NAME,
    ask_pair,
    assert_same,
    at_rest,
    complete,
    metric,
    probing_server,
    tokens,
)

from p2pkv.demo import client
from p2pkv.demo.answers import Answer
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import ensure_model

pytestmark = pytest.mark.long

CHUNK = 256
"""Prompt tokens that an instance computes in one step."""
BLOCK = 32
GUESSES = 3


@dataclass(frozen=True)
class Drafter:
    """One way of drafting. `layers`: with KV, beside the model's."""

    name: str
    layers: int = 0

    def config(self, models: Path) -> dict[str, Any]:
        match self.name:
            case "ngram":
                return {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 3}
            case "eagle":
                head = ensure_model(TinyEagle(), models)
                return {"method": "eagle", "model": str(head), "num_speculative_tokens": GUESSES}
            case _:
                copy = ensure_model(Copy(), models)
                return {"method": "draft_model", "model": str(copy), "num_speculative_tokens": GUESSES}


class Copy:
    """The model itself, but with other bytes in its KV: its keys are longer by a little."""

    name = f"copy-of-{MODEL.name}"

    def write(self, directory: Path) -> None:
        MODEL.write(directory)
        file = directory / "model.safetensors"
        weights = {
            name: weight * (1 + 2**-12) if "k_proj" in name else weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})


NONE = Drafter("none")
NGRAM = Drafter("ngram")
EAGLE = Drafter("eagle", layers=1)
COPY = Drafter("copy", layers=MODEL.layers)
PAIRS = [(NONE, NGRAM), (NGRAM, NGRAM), (EAGLE, EAGLE), (COPY, COPY)]


@dataclass
class Running:
    """The servers that run now: a P without a drafter, which knows the answers, and one pair."""

    folder: Path
    servers: dict[tuple[str, Drafter], VllmServer] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def have(self, *wanted: tuple[str, Drafter]) -> list[VllmServer]:
        """These, and the one that knows the answers; others are stopped."""
        wanted = (("P", NONE), *wanted)
        for key in self.servers.keys() - set(wanted):
            self.servers.pop(key).stop()
        new = [key for key in dict.fromkeys(wanted) if key not in self.servers]
        for role, drafter in new:
            server = self.servers[role, drafter] = self._server(role, drafter)
            self.stack.enter_context(server)
        for key in wanted:
            self.servers[key].wait_ready()
        return [self.servers[key] for key in wanted[1:]]

    def _server(self, role: str, drafter: Drafter) -> VllmServer:
        settings = [
            *("--served-model-name", MODEL_NAME, "--dtype", MODEL.dtype, "--max-model-len", "1024"),
            *("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16"),
        ]
        if drafter is not NONE:
            settings += ["--speculative-config", json.dumps(drafter.config(self.folder))]
        name = f"{role}-{drafter.name}"
        return probing_server(
            ensure_model(MODEL, self.folder),
            role,
            self.folder,
            name=name,
            extra_args=settings,
            log_path=self.folder / f"{name}.log",
        )


@dataclass(frozen=True)
class Lane:
    """A P and a D that work together; `plain` answers by itself, without drafts."""

    p: VllmServer
    d: VllmServer
    plain: VllmServer
    drafters: tuple[Drafter, Drafter]
    probes: Path

    def ask(self, prompt: list[int], *, at_once: bool = True) -> Answer:
        return ask_pair(self.p, self.d, prompt, at_once=at_once)

    def check(self, prompts: list[list[int]], got: list[Answer]) -> None:
        assert_same([complete(self.plain, prompt) for prompt in prompts], got)


@pytest.fixture(scope="module")
def running(fleet_keeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    fleet_keeper.stop()
    running = Running(tmp_path_factory.mktemp("speculative"))
    with running.stack:
        yield running


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0].name}-to-{pair[1].name}")
def drafters(request: pytest.FixtureRequest) -> tuple[Drafter, Drafter]:
    """Of the module, so that pytest orders the tests by it: a server is started once."""
    return request.param


@pytest.fixture
def lane(running: Running, servers_on_failure, drafters: tuple[Drafter, Drafter]) -> Iterator[Lane]:
    """The lane, at rest after the test."""
    p, d = running.have(("P", drafters[0]), ("D", drafters[1]))
    servers_on_failure(p, d)
    yield Lane(p, d, running.servers["P", NONE], drafters, running.folder)
    for server in (p, d):
        at_rest(server)


def repeating(length: int, seed: str) -> list[int]:
    """A prompt in which an n-gram drafter finds what it has seen before."""
    return (tokens(20, seed) * length)[:length]


@pytest.mark.parametrize("at_once", [True, False], ids=["concurrent", "sequential"])
@pytest.mark.parametrize("length", [1, 2, 65, CHUNK * 2 + 33])
def test_prompts(lane: Lane, at_once: bool, length: int, request: pytest.FixtureRequest) -> None:
    compared = Compared(lane.probes)
    prompt = repeating(length, request.node.name)
    got = lane.ask(prompt, at_once=at_once)
    if length > 1:
        assert compared.spans(1) == [(0, length - 1)]
    lane.check([prompt], [got])


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_prompt_half_cached(lane: Lane, side: str, request: pytest.FixtureRequest) -> None:
    """With EAGLE vLLM drops the last block of a hit: a token's KV depends on the token behind it."""
    length, cached = CHUNK * 2 + 33, 256
    prompt = tokens(length, request.node.name)
    complete(lane.p if side == "P" else lane.d, [*prompt[:cached], 299], 1)
    compared = Compared(lane.probes)
    got = lane.ask(prompt)
    local = cached - (BLOCK if lane.drafters[1] is EAGLE else 0)
    assert compared.spans(1) == [(local if side == "D" else 0, length - 1)]
    lane.check([prompt], [got])


def test_sixteen_at_once(lane: Lane, request: pytest.FixtureRequest) -> None:
    compared = Compared(lane.probes)
    prompts = [repeating(40 + 15 * number, f"{request.node.name} {number}") for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lane.ask, prompts))
    assert compared.spans(16) == sorted((0, len(prompt) - 1) for prompt in prompts)
    lane.check(prompts, got)


def test_d_drafts_and_its_blocks_hold_the_drafters_layers(lane: Lane, request: pytest.FixtureRequest) -> None:
    """A copy of the model guesses every token, if its KV of the prompt is right."""
    before = drafted(lane.d)
    prompts = [repeating(200 + number, f"{request.node.name} {number}") for number in range(8)]
    got = [lane.ask(prompt) for prompt in prompts]
    lane.check(prompts, got)
    drafts, accepted = (now - then for now, then in zip(drafted(lane.d), before, strict=True))
    assert drafts > 0
    if lane.drafters[1] is COPY:
        assert accepted > 0.7 * drafts, f"{accepted:.0f} of {drafts:.0f} guesses were right"
    layers = {
        (group, layer)
        for ranks in notes(lane.probes, "D").values()
        for note in ranks.values()
        for group, layer, _ in note.hashes
    }
    assert len(layers) >= MODEL.layers + lane.drafters[1].layers


def drafted(server: VllmServer) -> tuple[float, float]:
    """Tokens that the server has guessed, and those that were right."""
    guessed, right = (
        metric(server, f"vllm:spec_decode_num_{each}_tokens_total") for each in ("draft", "accepted")
    )
    return guessed, right


def test_a_d_with_a_drafter_and_a_p_without_are_refused(
    running: Running, servers_on_failure, request: pytest.FixtureRequest
) -> None:
    (d,) = running.have(("D", COPY))
    p = running.servers["P", NONE]
    servers_on_failure(p, d)
    with pytest.raises(client.RequestFailed):
        ask_pair(p, d, tokens(50, request.node.name))
    log = d.log_path.read_text()
    assert "with drafter draft_model" in log and "with the same --speculative-config on both sides" in log
