"""P and D of different shapes, or with drafters, with real servers: the pages of D hold what those of P hold.

Servers are grouped into families of one model; one family runs at a time. Drafters are an n-gram drafter, an
EAGLE head, and a copy of the model, which guesses right as long as its KV is right: so it shows whether the
drafter's KV is P's.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pkv.demo import answers
from p2pkv.demo.answers import Answer
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import TinyFiles, TinyLlama, ensure_model
from support.models.eagle import TinyEagle
from support.models.families import TinyDeepseek, TinyFalconH1, TinyGemma, TinyGptOss, TinyLfm2, TinyQwen
from support.servers import fleet
from support.servers.probes import Compared, notes

CHUNK = 256
"""Prompt tokens that an instance computes in one step."""


class Copy:
    """The tiny Llama itself, but with other bytes in its KV: its keys are longer by a little."""

    name = f"copy-of-{fleet.MODEL.name}"

    def write(self, directory: Path) -> None:
        fleet.MODEL.write(directory)
        file = directory / "model.safetensors"
        weights = {
            name: weight * (1 + 2**-12) if "k_proj" in name else weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})


DRAFTERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ngram": lambda models: {"prompt_lookup_max": 3},
    "eagle": lambda models: {"model": str(ensure_model(TinyEagle(), models))},
    "draft_model": lambda models: {"model": str(ensure_model(Copy(), models))},
}
"""What vLLM's --speculative-config says of each method; the models are written to the folder."""
DRAFTERS_LAYERS = {"ngram": 0, "eagle": 1, "draft_model": fleet.MODEL.layers}
"""With KV, beside the model's."""


@dataclass(frozen=True)
class Instance:
    tp: int = 1
    block: int = 32
    layout: str = "SD"
    """Of a convolution's window: [steps, channels] or, as "DS", [channels, steps]."""
    drafter: str = ""
    """One of DRAFTERS."""

    @property
    def name(self) -> str:
        shape = f"tp{self.tp}-block{self.block}{'' if self.layout == 'SD' else '-' + self.layout}"
        return self.drafter or shape


@dataclass(frozen=True)
class Family:
    """One model, and the pairs (P, D) of instances that are tried with it."""

    model: TinyFiles
    pairs: tuple[tuple[Instance, Instance], ...]
    settings: tuple[str, ...] = ()
    dtype: str = "float32"
    prefix_cache: bool = True
    """Whether vLLM caches prefixes with this model."""
    cached: int = 256
    """Tokens of a prompt that is half cached, in whole blocks."""
    dropped: int = 0
    """Those at the end of what is cached that vLLM computes again: with EAGLE the last block, as a token's KV
    depends on the token behind it."""
    states: bool = False
    """Whether layers keep a state: a prefix is cached where they have one at its end only."""
    in_chunks: bool = True
    """Whether vLLM computes a prompt in several steps with this model."""
    tie: float = answers.TIE
    """Two tokens whose log-probabilities are closer than this may swap places, because vLLM's kernels give a
    token another likelihood when it comes in other steps. `inf`: only the pages can be compared."""
    plain: Instance | None = None
    """A P that knows the answers; None: the pair's."""
    answer: int = 6
    """Tokens of one."""


def _pairs(*sizes: tuple[int, int], block: int = 32) -> tuple[tuple[Instance, Instance], ...]:
    return tuple((Instance(p, block), Instance(d, block)) for p, d in sizes)


SMALL, LARGE, SPLIT = Instance(), Instance(block=128), Instance(2)
NGRAM, EAGLE, COPY = (Instance(drafter=each) for each in DRAFTERS)
ROUNDINGS = 1.0
"""A tie of kernels in bfloat16."""
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
FAMILIES = {
    "4 heads": Family(fleet.MODEL, ((LARGE, SPLIT), (SPLIT, SPLIT), (SPLIT, LARGE))),
    "1 head": Family(TinyLlama(kv_heads=1, heads=4), _pairs((2, 1), (1, 2), (2, 2))),
    # Layers with a window shorter than the longer prompts, in blocks that leave it while P computes.
    # Where D caches prefixes, P's blocks have to be as large as D's, or larger.
    "window": Family(TinyGemma(), ((LARGE, SMALL), (Instance(2, block=128), SMALL))),
    "window at TP 2": Family(TinyGemma(), ((SMALL, SPLIT),)),
    "window with larger blocks on D": Family(
        TinyGemma(), ((SMALL, LARGE),), ("--no-enable-prefix-caching",), prefix_cache=False
    ),
    # Every other layer has a window, all have sinks.
    "gpt-oss": Family(TinyGptOss(), ((LARGE, SMALL), (SPLIT, SMALL), (SMALL, SPLIT))),
    # vLLM's CPU kernels for a gated delta net want bfloat16. P alone computes a prompt in other steps than
    # the pair, so that likelihoods differ by roundings.
    "recurrent": Family(
        TinyQwen(),
        (*_pairs((1, 1), (2, 1), (1, 2)), (SMALL, Instance(layout="DS"))),
        ("--mamba-ssm-cache-dtype", "float32"),  # CPUs with AVX-512's bfloat16 know no other
        "bfloat16",
        cached=288,  # vLLM makes a block as large as a state
        states=True,
        tie=ROUNDINGS,
    ),
    "recurrent without prefixes": Family(
        TinyQwen(),
        _pairs((1, 1)),
        ("--no-enable-prefix-caching",),
        "bfloat16",
        prefix_cache=False,
        tie=ROUNDINGS,
    ),
    # With prefixes vLLM moves the states of guesses by a kernel that a CPU does not have.
    "recurrent with MTP": Family(
        TinyQwen(mtp=True),
        _pairs((1, 1), (2, 1), (1, 2)),
        ("--no-enable-prefix-caching", "--speculative-config", MTP),
        "bfloat16",
        prefix_cache=False,
        tie=ROUNDINGS,
    ),
    # One plain server answers 3 of 60 prompts otherwise with a prefix hit than without: only pages compare.
    "short convolutions": Family(
        TinyLfm2(), (*_pairs((1, 1), (2, 1), (1, 2)), (SMALL, LARGE)), tie=inf, states=True
    ),
    # vLLM saves the states of Mamba-2 in the middle of a step with a kernel that a CPU does not have. So
    # either no prefixes are cached, or no step is longer than a block.
    "Mamba-2 without prefixes": Family(
        TinyFalconH1(), _pairs((1, 1), (2, 1), (1, 2)), ("--no-enable-prefix-caching",), prefix_cache=False
    ),
    "Mamba-2": Family(
        TinyFalconH1(),
        (*_pairs((1, 1), block=256), (Instance(block=256), Instance(block=256, layout="DS"))),
        states=True,
    ),
    # One server, no connector: log-probabilities differ by 0.1 to 1 and more, decoded or prefilled.
    "MLA": Family(
        TinyDeepseek(),
        _pairs((1, 2), (2, 1), block=16),
        # vLLM's reference kernel for MLA: the other one needs AMX, and bfloat16.
        ("--attention-backend", "CPU_MLA"),
        prefix_cache=False,
        in_chunks=False,
        tie=inf,
    ),
    "MLA with AMX": Family(
        TinyDeepseek(), _pairs((1, 2), (2, 1)), ("--attention-backend", "AMX_MLA"), "bfloat16", tie=inf
    ),
    "n-gram": Family(fleet.MODEL, ((SMALL, NGRAM), (NGRAM, NGRAM)), plain=SMALL, answer=16),
    "EAGLE": Family(fleet.MODEL, ((EAGLE, EAGLE),), dropped=32, plain=SMALL, answer=16),
    "draft model": Family(fleet.MODEL, ((COPY, COPY),), plain=SMALL, answer=16),
}
IN_MAKE_TEST = ("4 heads", "window")
"""Families of which `make test` has the first pair: tests/engine/test_many_ranks.py has the other shapes. All
else is in `make test-long`."""
LANES = [
    pytest.param(
        (name, *pair),
        id=f"{name}, {pair[0].name} to {pair[1].name}".replace(" ", "-"),
        marks=[pytest.mark.long] if name not in IN_MAKE_TEST or number else [],
    )
    for name, family in FAMILIES.items()
    for number, pair in enumerate(family.pairs)
]


@dataclass
class Running:
    """The servers of the family that runs now. `wanted`: the lanes of the tests that are to run; servers of
    others are not started."""

    folder: Path
    wanted: frozenset[tuple[str, Instance, Instance]]
    name: str = ""
    servers: dict[tuple[str, Instance], VllmServer] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def probes(self) -> Path:
        return self.folder / self.name.replace(" ", "-")

    def start(self, name: str) -> None:
        if name == self.name and all(server.running() for server in self.servers.values()):
            return
        self.stop()
        self.name, family = name, FAMILIES[name]
        self.probes.mkdir(exist_ok=True)
        model = ensure_model(family.model, self.folder)
        for prefill, decode in (pair for pair in family.pairs if (name, *pair) in self.wanted):
            for role, instance in (("P", family.plain or prefill), ("P", prefill), ("D", decode)):
                if (role, instance) not in self.servers:
                    self.servers[role, instance] = self._server(model, family, role, instance)
        try:
            fleet.start_all(self.stack, *self.servers.values())
        except BaseException:
            self.stop()  # so that the next test starts them anew
            raise

    def _server(self, model: Path, family: Family, role: str, instance: Instance) -> VllmServer:
        settings = [
            *("--served-model-name", fleet.MODEL_NAME, "--dtype", family.dtype, "--max-model-len", "1024"),
            *("--block-size", str(instance.block), "--max-num-batched-tokens", str(CHUNK)),
            *("--max-num-seqs", "16", "--tensor-parallel-size", str(instance.tp), *family.settings),
        ]
        if not family.in_chunks:
            settings[settings.index(str(CHUNK))] = "1024"
        if method := instance.drafter:
            guesses = {"method": method, "num_speculative_tokens": 3, **DRAFTERS[method](self.folder)}
            settings += ["--speculative-config", json.dumps(guesses)]
        return fleet.probing_server(
            model,
            role,
            self.probes,
            plugins=() if instance.drafter else fleet.FORKED,  # in a fork the n-gram drafter may hang
            name=f"{role}-{instance.name}",
            ranks=instance.tp,
            extra_args=settings,
            env={"VLLM_SSM_CONV_STATE_LAYOUT": instance.layout},
        )

    def stop(self) -> None:
        self.stack.close()
        self.servers.clear()
        self.name = ""


@dataclass(frozen=True)
class Lane:
    family: Family
    p: VllmServer
    d: VllmServer
    plain: VllmServer
    shapes: tuple[Instance, Instance]
    probes: Path

    @property
    def drafter(self) -> str:
        return self.shapes[1].drafter

    def prompt(self, length: int, seed: str) -> list[int]:
        """One in which a drafter finds what it has seen before."""
        return (fleet.tokens(20, seed) * length)[:length] if self.drafter else fleet.tokens(length, seed)

    def ask(self, prompt: list[int], *, at_once: bool = True) -> Answer:
        return fleet.ask_pair(self.p, self.d, prompt, self.family.answer, at_once=at_once)

    def alone(self, prompt: list[int]) -> Answer:
        return fleet.complete(self.plain, prompt, self.family.answer)

    @property
    def tie(self) -> float:
        """As `Family.tie`, where both compute in the same steps."""
        return answers.TIE if self.shapes[0].tp == self.shapes[1].tp else self.family.tie

    def check(self, prompts: list[list[int]], got: list[Answer]) -> None:
        fleet.assert_same([self.alone(prompt) for prompt in prompts], got, self.family.tie)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """What D's drafter guesses meanwhile is right, as far as it can be, and its layers travel too."""
        before = self._drafted()
        yield
        if not self.drafter:
            return
        drafts, accepted = (now - then for now, then in zip(self._drafted(), before, strict=True))
        assert drafts > 0
        if self.drafter == "draft_model":
            assert accepted > 0.7 * drafts, f"{accepted:.0f} of {drafts:.0f} guesses were right"
        layers = {
            (group, layer)
            for ranks in notes(self.probes, "D").values()
            for note in ranks.values()
            for group, layer, _ in note.hashes
        }
        assert len(layers) >= fleet.MODEL.layers + DRAFTERS_LAYERS[self.drafter]

    def _drafted(self) -> tuple[float, float]:
        guessed, right = (
            fleet.metric(self.d, f"vllm:spec_decode_num_{each}_tokens_total")
            for each in ("draft", "accepted")
        )
        return guessed, right


@pytest.fixture(scope="module")
def running(
    fleet_keeper, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    fleet_keeper.stop()
    here = [item for item in request.session.items if item.path == request.path]
    wanted = frozenset(item.callspec.params["pair"] for item in here if isinstance(item, pytest.Function))
    running = Running(tmp_path_factory.mktemp("shapes"), wanted)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module", params=LANES)
def pair(request: pytest.FixtureRequest) -> tuple[str, Instance, Instance]:
    """Of the module, so that pytest orders the tests by it: a family is started once."""
    return request.param


@pytest.fixture
def lane(running: Running, servers_on_failure, pair: tuple[str, Instance, Instance]) -> Iterator[Lane]:
    """The lane, at rest after the test."""
    name, prefill, decode = pair
    if "AMX" in name and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    running.start(name)
    p, d = running.servers["P", prefill], running.servers["D", decode]
    servers_on_failure(p, d)
    plain = running.servers["P", FAMILIES[name].plain or prefill]
    yield Lane(FAMILIES[name], p, d, plain, (prefill, decode), running.probes)
    for server, instance in ((p, prefill), (d, decode)):
        fleet.at_rest(server, instance.tp)


@pytest.mark.parametrize("at_once", [True, False], ids=["concurrent", "sequential"])
@pytest.mark.parametrize("length", [1, 2, 65, CHUNK * 2 + 33])
def test_prompts(lane: Lane, at_once: bool, length: int, request: pytest.FixtureRequest) -> None:
    """The longest is computed in three chunks, where vLLM computes in chunks."""
    compared = Compared(lane.probes)
    prompt = lane.prompt(length, request.node.name)
    got = lane.ask(prompt, at_once=at_once)
    assert length == 1 or compared.spans(1) == [(0, length - 1)]
    lane.check([prompt], [got])


def _needs_prefixes(lane: Lane) -> None:
    if not lane.family.prefix_cache:
        pytest.skip("no prefixes are cached here: MLA's reference kernel cannot, other families are told so")


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_prompt_half_cached(lane: Lane, side: str, request: pytest.FixtureRequest) -> None:
    _needs_prefixes(lane)
    cached, server = lane.family.cached, lane.p if side == "P" else lane.d
    prompt = fleet.tokens(CHUNK * 2 + 33, request.node.name)
    first = [*prompt[:cached], 299]
    before = fleet.complete(server, first, 1)
    compared = Compared(lane.probes)
    hits = cached - lane.family.dropped
    with fleet.Hits(server, hits):
        got = lane.ask(prompt)
    assert compared.spans(1) == [(hits if side == "D" else 0, len(prompt) - 1)]
    lane.check([prompt], [got])
    # What was cached is as it was, although a request has written behind it.
    with fleet.Hits(server, hits):
        fleet.assert_same([before], [fleet.complete(server, first, 1)])


@pytest.mark.parametrize("more", [0, 38])
def test_what_has_come_is_a_prefix_for_others(lane: Lane, more: int, request: pytest.FixtureRequest) -> None:
    """D caches whole blocks, with a state at their end, and of a window all that a shorter prompt sees."""
    _needs_prefixes(lane)
    stop, block = lane.family.cached + more, lane.shapes[1].block
    whole = stop // block * block
    first = fleet.tokens(stop + 1, request.node.name)
    compared = Compared(lane.probes)
    lane.ask(first)
    assert compared.spans(1) == [(0, stop)]
    other = [*first[:whole], *fleet.tokens(3, f"{request.node.name} other")]
    with fleet.Hits(lane.d, 0 if lane.family.states and whole < stop else whole - lane.family.dropped):
        got = fleet.complete(lane.d, other, lane.family.answer)
    fleet.assert_same([lane.alone(other)], [got], lane.tie)


def test_several_at_once(lane: Lane, request: pytest.FixtureRequest) -> None:
    """Ranks of D end at different times; each request is reported once, when all have."""
    compared = Compared(lane.probes)
    prompts = [lane.prompt(40 + 15 * number, f"{request.node.name} {number}") for number in range(16)]
    with lane.drafting(), ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lane.ask, prompts))
    assert compared.spans(16) == sorted((0, len(prompt) - 1) for prompt in prompts)
    lane.check(prompts, got)
