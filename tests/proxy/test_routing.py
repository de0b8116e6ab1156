"""The policies, what they weigh and keep between two requests; what is made of prompts, and their index."""

import base64
import random
import tracemalloc
from collections import Counter
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from proxy_fakes import Deployment, Line, deployed, fail, fleet, ping, prompt_of, quiet
from test_admission import ask, slow
from test_bodies import json_values

from p2pkv.control.discovery import Ping, goodbye
from p2pkv_proxy import policies
from p2pkv_proxy.bodies import BYTES_PER_TOKEN, DATA_BYTES_PER_TOKEN, MAX_PIECES, PIECE_TOKENS, Chain, Prompt
from p2pkv_proxy.membership import registry as registry_module
from p2pkv_proxy.membership.instance import REQUEST_TOKENS, Instance
from p2pkv_proxy.membership.registry import Registry, random_turn
from p2pkv_proxy.policies import MAX_HOLDERS, ConsistentHash, Policy, PrefixIndex, Routing, RoutingRequest
from p2pkv_proxy.routing import (
    POLICIES,
    Full,
    LeastLoaded,
    NoInstance,
    PowerOfTwo,
    PrefillMode,
    Router,
    UnknownModel,
)
from support.waiting import eventually

least_loaded, consistent_hash = LeastLoaded(), ConsistentHash()


def make_policy(name: str, memory: int) -> Policy:
    return POLICIES[name](Routing(prefix_memory=memory))


def work(instance: Instance) -> float:
    return instance.order[0]


def prompt(tokens: int, first: int = 0) -> Prompt:
    """Of token ids; prompts with the same `first` begin alike."""
    return prompt_of({"prompt": [*range(first, first + tokens)]})


def asked(tokens: int = 10, first: int = 0, session: str = "") -> RoutingRequest:
    return RoutingRequest("m", prompt(tokens, first), session)


def instances(count: int, role: Any = "P", **more: Any) -> list[Instance]:
    return fleet(*[(role, more)] * count)[1]


def test_ps_work_is_the_tokens_of_its_prompts() -> None:
    long, many = instances(2)
    long.expect(1, 5000)
    for _ in range(10):
        many.expect(1, 100)
    assert (work(long), work(many)) == (5000, 1000)
    assert least_loaded([long, many], asked()).instance is many
    long.expect(-1, 5000)
    with long.busy(lambda loss: None, 300):
        assert (work(long), long.load) == (300, 1), "on its way or in flight"
    assert (work(long), long.load) == (0, 0)
    _, (small, large) = fleet("P", ("P", {"tp_size": 2}))
    small.expect(1, 100)
    large.expect(1, 150)
    assert least_loaded([small, large], asked()).instance is large, "twice the ranks do twice the work"


def test_two_proxies_take_idle_instances_in_different_orders() -> None:
    def order() -> list[Any]:
        router, _ = fleet(*"P" * 20, "D", registry=Registry(first_turn=random_turn))
        chosen = [router.choose(asked(), 0.0).prefill for _ in range(40)]
        assert len(set(chosen[:20])) == 20 and chosen[20:] == chosen[:20], "each in its turn"
        return [each and each.name for each in chosen]

    assert order() != order()


def test_ds_work_is_its_requests_and_their_tokens() -> None:
    few, many, long = instances(3, "D")
    few.count_place(1, decode_alone=False, tokens=100)
    for _ in range(3):
        many.count_place(1, decode_alone=False, tokens=1)
    long.count_place(1, decode_alone=False, tokens=10 * REQUEST_TOKENS)
    ranked = sorted([long, many, few], key=work)
    assert ranked == [few, many, long]
    few.count_place(-1, decode_alone=False, tokens=100)
    assert (work(few), few.tokens) == (0, 0)


def test_p_and_d_each_go_by_their_own_policy() -> None:
    """Of these round_robin looks at no load."""
    routing = Routing(prefill="round_robin", decode="consistent_hash")
    router, pool = fleet(*"PPPDDD", routing=routing)
    pool[0].expect(1, 100_000)
    chosen = [router.choose(asked(session="s"), 0.0) for _ in range(9)]
    assert Counter(each.prefill for each in chosen) == dict.fromkeys(pool[:3], 3)
    assert len({each.decode for each in chosen} & set(pool[3:])) == 1


def test_power_of_two_takes_the_one_with_less_to_do_and_looks_at_two_only() -> None:
    everyone = instances(5)
    for rank, instance in enumerate(everyone):
        instance.expect(1, rank * 100)
    policy = PowerOfTwo(dice=random.Random(7))
    chosen = Counter(everyone.index(policy(everyone, asked()).instance) for _ in range(2000))
    assert 4 not in chosen, "the busiest is never the better one of two"
    assert [chosen[rank] for rank in range(4)] == sorted((chosen[rank] for rank in range(4)), reverse=True)
    assert chosen[3] > 0, "although there are idler ones"
    assert policy(everyone[:1], asked()).instance is everyone[0]


def test_a_session_stays_and_only_the_sessions_of_who_goes_move() -> None:
    """Neither a restart nor a load moves one. An instance of twice the size has twice the sessions."""
    everyone, again = instances(5, incarnation="old"), instances(5, incarnation="new")
    sessions = [f"session {number}" for number in range(500)]

    def homes(candidates: list[Instance]) -> dict[str, Any]:
        return {each: consistent_hash(candidates, asked(session=each)).instance.name for each in sessions}

    before = homes(everyone)
    everyone[0].expect(1, 10_000)
    assert before == homes(everyone[::-1]) == homes(again)
    assert consistent_hash(everyone, asked()).instance is not everyone[0], "without a session: least loaded"
    sizes = Counter(before.values())
    assert min(sizes[each.name] for each in everyone) > 60, "about a hundred each"
    gone, *rest = everyone
    after = homes(rest)
    assert {each for each in sessions if before[each] != after[each]} == {
        each for each in sessions if before[each] == gone.name
    }
    _, unlike = fleet(("P", {"tp_size": 2}), "P")
    chosen = Counter(
        consistent_hash(unlike, asked(session=str(number))).instance.ping.tp_size for number in range(3000)
    )
    assert 1.7 < chosen[2] / chosen[1] < 2.3


def test_a_long_session_is_not_read_for_each_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(session: str, instance: Instance) -> float:
        assert len(session) < 1000
        return drawn(session, instance)

    drawn = policies._affinity
    monkeypatch.setattr(policies, "_affinity", affinity)
    everyone = instances(5)
    homes = {consistent_hash(everyone, asked(session=f"{'x' * 10_000}{n}")).instance for n in range(50)}
    assert homes == set(everyone)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_do_with_one_candidate_and_with_an_empty_prompt(name: Any) -> None:
    policy = make_policy(name, 10)
    for role in ("P", "D"):
        (only,) = instances(1, role)
        assert policy([only], RoutingRequest()).instance is only
        assert policy([only], asked(session="s")).instance is only


LONG = 20 * PIECE_TOKENS


def test_the_longest_beginning_decides_although_it_is_not_computed_yet() -> None:
    policy, (one, other) = make_policy("prefix_aware", 10_000), instances(2)
    policy([one], asked(2 * PIECE_TOKENS))
    policy([other], asked(5 * PIECE_TOKENS))
    assert policy([one, other], asked(8 * PIECE_TOKENS)) == (other, 5 * PIECE_TOKENS)
    policy, (warm, idle) = make_policy("prefix_aware", 10_000), instances(2)
    policy([warm], asked(LONG))
    warm.expect(1, LONG)
    assert policy([idle, warm], asked(LONG + 30)) == (warm, LONG)


def test_when_the_load_is_uneven_it_is_the_least_loaded() -> None:
    policy, (warm, cold) = make_policy("prefix_aware", 10_000), instances(2)
    policy([warm], asked(LONG))
    warm.expect(1, 2 * LONG - 1)
    assert policy([warm, cold], asked(LONG)).instance is warm, "better than to compute all of it anew"
    warm.expect(1, 2)
    assert policy([warm, cold], asked(LONG)) == (cold, 0)
    cold.expect(1, 2)
    assert policy([warm, cold], asked(LONG)) == (cold, LONG), "which has been given it now"


def test_four_ranks_compute_all_of_it_sooner_than_one_computes_half() -> None:
    policy, (_, (warm, large)) = make_policy("prefix_aware", 10_000), fleet("P", ("P", {"tp_size": 4}))
    policy([warm], asked(LONG // 2))
    assert policy([warm, large], asked(LONG)) == (large, 0)


def test_who_needs_a_p_is_not_left_to_a_d_alone_where_all_ps_are_in_doubt() -> None:
    """It has been tried without one, or that is decided elsewhere."""
    router, (p, d) = fleet("P", "D", decode_alone=1)
    fail(p)
    assert router.able(RoutingRequest(), 0.1, mode=PrefillMode.WANTED) == ([], [d])
    with pytest.raises(NoInstance):
        router.able(RoutingRequest(), 0.1, mode=PrefillMode.NEEDED)


def test_a_beginning_that_everybody_asks_for_does_not_pile_up_at_one_instance() -> None:
    router, (*prefills, _) = fleet("P", "P", "P", "D", routing=Routing(prefill="prefix_aware"))
    for _ in range(300):  # none of them ends
        choice = router.choose(asked(LONG + 60), 0.0)
        choice.prefill.expect(1, choice.prefill_tokens)
    loads = [p.expected for p in prefills]
    assert max(loads) - min(loads) <= 2 * LONG // 60 + 1, "apart by what the cache is worth, and no more"


def test_what_a_p_has_cached_is_no_work() -> None:
    router, (p, _) = fleet("P", "D", routing=Routing(prefill="prefix_aware"))
    tokens = [router.choose(asked(LONG + 7), 0.0).prefill_tokens for _ in range(2)]
    assert tokens == [LONG + 7, 7]
    assert p.tokens == 0, "nobody has taken a place"


def test_models_and_restarts_have_caches_of_their_own() -> None:
    policy = make_policy("prefix_aware", 10_000)
    before, after = instances(1, incarnation="before"), instances(1, incarnation="after")
    fields = {"model": "a", "prompt": [1] * LONG}
    assert policy(before, RoutingRequest("a", prompt_of(fields))).cached == 0
    assert policy(before, RoutingRequest("a", prompt_of(fields))).cached == LONG
    assert policy(before, RoutingRequest("b", prompt_of(fields | {"model": "b"}))).cached == 0
    assert policy(after, RoutingRequest("a", prompt_of(fields))).cached == 0


async def test_a_session_is_named_by_a_header() -> None:
    routing = Routing(prefill="consistent_hash", decode="consistent_hash", session_header="X-Chat")
    async with deployed("concurrent", 3, 3, routing=routing) as deployment:
        for number in range(12):
            assert (await deployment.post(headers={"x-chat": f"{number % 2}"})).status == 200
        for session in "01":
            for side in (deployment.prefills, deployment.decodes):
                homes = [
                    each
                    for each in side
                    if any(seen.headers.get("X-Chat") == session for seen in each.requests)
                ]
                assert len(homes) == 1


async def test_the_tokens_of_what_is_under_way_are_counted_and_given_back(concurrent: Deployment) -> None:
    (p,), (d,) = concurrent.registry.known("P"), concurrent.registry.known("D")
    with slow(concurrent.p), slow(concurrent.d):
        tasks = [ask(concurrent, "x" * 400) for _ in range(3)]
        await eventually(lambda: len(concurrent.p.requests) == len(concurrent.d.requests) == 3)
        assert (p.tokens, d.tokens) == (300, 300)
    assert [await task for task in tasks] == [200] * 3
    await quiet(concurrent)
    assert (p.tokens, d.tokens) == (0, 0)


@pytest.mark.parametrize("roles", ["PD", ["both"]])
@pytest.mark.parametrize("others", ["y", "yz"])
@pytest.mark.parametrize("how", ["drained", "all gone"])
def test_a_model_that_is_out_for_now_is_no_unknown_one_and_not_asked_of_others(
    how: str, roles: Any, others: str
) -> None:
    """Once all that served it have been gone for ten minutes it is."""
    registry, now, why = Registry(), 0.0, "No decode instance that serves the model `x` is ready"
    router, pool = fleet(
        *((role, {"model": model}) for model in "x" + others for role in roles), registry=registry
    )
    if how == "drained":
        pool[len(roles) - 1].drained = True
    else:
        for now in (20.0, 599.0):
            for each in pool[len(roles) :]:
                each.pinged(each.ping, now)
            registry.expire(now)
    with pytest.raises(NoInstance, match=why):
        router.choose(RoutingRequest("x"), now)
    assert router.missing(now) == [f"{why}."]
    assert router.choose(RoutingRequest("y"), now).decode.names == {"y"}
    if how == "all gone":
        registry.expire(now := now + 1.0)
        assert router.missing(now) == []
        with nullcontext() if others == "y" else pytest.raises(UnknownModel):
            assert router.choose(RoutingRequest("x"), now).decode.names == {"y"}, "who says that it has none"
    pool[len(roles)].learn(frozenset({"y", "on P"}), 0)  # an adapter; the answer to it is 404
    with nullcontext() if others == "y" or "both" in roles else pytest.raises(UnknownModel):
        assert router.choose(RoutingRequest("on P"), now).decode.serves("y")


# What the router keeps of all instances between two requests is what it would compute anew.


LIFE, LEASE = 10.0, 30.0


class TwoRouters:
    """A few instances to which things happen, and two routers: one keeps what it can, one is always new."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.registry = Registry(LIFE, lease=LEASE)
        self.kept = Router(self.registry, room=3, decode_alone=2)
        self.now = 0.0
        self.sources: dict[Ping, Line] = {}
        pings = [
            ping(role, 10 + number, model=model, incarnation="first")
            for role in ("P", "D")
            for number, model in enumerate(["a", "a", "a", "b"])
        ]
        self.pings = {each.http_address + each.type: each for each in pings}
        for each in pings:
            self.ping(each)

    def ping(self, message: Ping) -> None:
        source = self.sources.get(message)
        if source is None or not source.open:
            source = self.sources[message] = Line()
        if (found := self.registry.observe(message, self.now, source)) is not None:
            found.healthy = True

    def step(self) -> None:
        key = self.dice.choice(sorted(self.pings))
        message = self.pings[key]
        instance = self.registry.of(message)
        match self.dice.randrange(11):
            case 0 | 1 | 2:
                self.ping(message)
            case 3:
                self.now += self.dice.choice([0.1, 1.0, LIFE + 0.1])
            case 4:
                self.pings[key] = replace(message, incarnation=str(self.dice.random()))
                self.ping(self.pings[key])
            case 5 if instance is not None:
                self.ping(replace(message, paused=not instance.paused))
            case 6 if instance is not None:
                self.registry.drain(instance, not instance.drained)
            case 7 if instance is not None:
                for _ in range(5):
                    instance.breaker.failed(self.now, "trial")
            case 8 if instance is not None:
                instance.breaker.sent("trial", self.now)
                instance.breaker.succeeded(self.now, "trial")
            case 9 if instance is not None:
                instance.healthy = self.dice.random() < 0.8
            case 10:
                self.sources[message].open = False
                if self.dice.random() < 0.5:
                    self.registry.observe(goodbye(message), self.now, self.sources[message])
                elif self.dice.random() < 0.5:
                    self.registry.expire(self.now)
        if instance is not None and instance.role == "D":
            places = self.dice.randrange(4) - instance.places
            for _ in range(abs(places)):
                instance.count_place(1 if places > 0 else -1, decode_alone=False)

    def able(self, router: Router, model: str | None, mode: PrefillMode) -> Any:
        try:
            prefillers, decoders = router.able(RoutingRequest(model), self.now, mode=mode)
        except (NoInstance, UnknownModel, Full) as error:
            return type(error), str(error)
        return {each.name for each in prefillers}, {each.name for each in decoders}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_is_what_is_true(seed: int) -> None:
    routers = TwoRouters(seed)
    reused = 0
    for _ in range(200):
        before = routers.kept._last
        for model in ("a", "b", "c", None):
            for mode in PrefillMode:
                anew = Router(routers.registry, room=3, decode_alone=2)
                assert routers.able(routers.kept, model, mode) == routers.able(anew, model, mode)
        reused += before is routers.kept._last
        routers.step()
    assert reused > 30, "something is kept at all"


def test_requests_compute_nothing_anew_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    (router, _), looked = fleet(*"PD" * 50, registry=Registry(LIFE, lease=LEASE)), 0
    candidates = Registry.candidates

    def counted(self: Registry) -> Any:
        nonlocal looked
        looked += 1
        return candidates(self)

    monkeypatch.setattr(registry_module.Registry, "candidates", counted)
    for turn in range(100):
        choice = router.choose(RoutingRequest("m"), turn / 100)
        assert choice.prefill is not None
        choice.decode.count_place(1, decode_alone=False)
    assert looked <= 3


@pytest.mark.parametrize("more", [{}, {"model": "m"}])
def test_names_that_are_unknown_make_no_entries(more: dict[str, str]) -> None:
    """One may be that of an adapter that was loaded since."""
    router, _ = fleet(("P", more), ("D", more))
    router.able(RoutingRequest(), 0.0, mode=PrefillMode.WANTED)
    known = dict(router._last._fleets)
    for number in range(100):
        router.able(RoutingRequest(f"unknown {number}"), 0.0, mode=PrefillMode.WANTED)
    assert router._last._fleets == known


# What the proxy makes of prompts without a tokenizer, and the index of their beginnings.


PIECE = PIECE_TOKENS * BYTES_PER_TOKEN
"""Bytes."""


def text(pieces: float, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=int(pieces * PIECE)))


def chat(*contents: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)],
    }


def chain(fields: dict[str, Any]) -> Chain:
    return prompt_of(fields).chain


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    pairs = zip(chain(one), chain(other), strict=False)
    return next(
        (depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(chain(one)), len(chain(other)))
    )


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt": ""}, 0),
        ({"prompt": "x"}, 1),
        ({"prompt": "x" * 400}, 100),
        ({"prompt": ["x" * 40, "x" * 40]}, 22),
        ({"prompt": "7" * 400}, 100),
        ({"prompt": [" 7, 7, 7"]}, 3),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": [[7] * 33, [8] * 2]}, 35),
        ({"prompt": []}, 0),
        ({"prompt": None, "tools": [], "messages": []}, 0),
        ({"messages": [{"role": "user", "content": "x" * 369}]}, 100),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 344}]}]}, 100),
        ({"input": "x" * 40, "instructions": "x" * 40}, 20),
        ({"system": "x" * 40, "messages": [{"role": "user", "content": "x" * 49}]}, 30),
    ],
)
def test_a_prompts_length_is_estimated(fields: dict[str, Any], tokens: int) -> None:
    """By the length of its JSON: a message's frame has about as many tokens as a chat template adds."""
    assert prompt_of(fields).tokens == tokens


def test_token_ids_of_a_long_prompt_are_counted_by_a_part_of_them() -> None:
    ids = [random.Random(1).randrange(100, 150_000) for _ in range(400_000)]
    assert prompt_of({"prompt": ids}).tokens == pytest.approx(400_000, rel=0.01)


def picture(size: int, seed: int) -> dict[str, Any]:
    data = base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize("size", [20_000, 1_000_000, 8_000_000])
def test_a_picture_counts_by_a_figure_of_its_own(size: int) -> None:
    words = {"type": "text", "text": text(10)}
    plain, seen = (prompt_of(chat("you see", parts)) for parts in ([words], [picture(size, 1), words]))
    between_looks = max(2048, size / 512) / BYTES_PER_TOKEN
    assert seen.tokens - plain.tokens == pytest.approx(size / DATA_BYTES_PER_TOKEN, abs=2 * between_looks)


@pytest.mark.parametrize(
    "words", ["ACGT" * 5000, "deadbeef" * 2500, "ä" * 20_000, "https://a.example/?b=c&d=e " * 800]
)
def test_text_without_spaces_is_no_picture(words: str) -> None:
    assert prompt_of(chat(words)).tokens >= len(words.encode()) // BYTES_PER_TOKEN


def test_prompts_with_pictures_are_told_apart_by_these_and_by_what_follows() -> None:
    words = {"type": "text", "text": text(3)}
    others = {"type": "text", "text": text(3, seed=9)}
    first = chat("you see", [picture(1_000_000, 1), words])
    pieces = 1_000_000 / DATA_BYTES_PER_TOKEN / PIECE_TOKENS
    assert len(chain(first)) == pytest.approx(pieces + 3, abs=2)
    assert common(first, chat("you see", [picture(1_000_000, 1), words])) == len(chain(first))
    assert common(first, chat("you see", [picture(1_000_000, 1), others])) == pytest.approx(pieces, abs=2)
    assert common(first, chat("you see", [picture(1_000_000, 2), words])) == 0


def test_a_prompt_that_has_been_let_go_keeps_its_length_and_no_bytes() -> None:
    body = bytearray(b'"' + b"x" * 4000 + b'"')
    prompt = Prompt({"prompt": msgspec.json.Decoder(msgspec.Raw).decode(body)})
    before = prompt.chain
    prompt.let_go()
    assert (prompt.tokens, prompt.chain) == (1000, before)
    body.clear()  # what is still looked at cannot be resized


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x y " * 4_000_000},
        {"prompt": [1] * (MAX_PIECES + 10) * PIECE_TOKENS},
        chat("you see", [picture(16_000_000, 1)]),
    ],
    ids=["text", "ids", "picture"],
)
def test_a_chain_costs_no_more_than_its_beginning(fields: dict[str, Any]) -> None:
    prompt = prompt_of(fields)
    tracemalloc.start()
    try:
        assert len(prompt.chain) <= MAX_PIECES
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_PIECES * PIECE
    finally:
        tracemalloc.stop()
    assert len(prompt.chain) == MAX_PIECES


JSON = json_values(names=st.sampled_from(["content", "text", "role", "type", "x"]))


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "input", "tools", "system", "model", "cache_salt"]), JSON
    )
)
def test_whatever_a_request_says_it_has_a_length_and_a_chain(fields: dict[str, Any]) -> None:
    assert prompt_of(fields).tokens >= 0
    assert chain(fields) == chain(dict(fields))


SHARED, TURNS = text(3), [text(1.5, seed) for seed in range(5)]
ONE, PLAIN = {"prompt": SHARED + text(2, 1)}, chat(text(2), text(1))
IDS = [*range(PIECE_TOKENS * 3), 1]
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "the same beginning": (ONE, {"prompt": SHARED + text(2, 2)}, 5, 3),
    "another beginning": (ONE, {"prompt": "x" + SHARED}, 5, 0),
    "the beginning alone": (ONE, {"prompt": SHARED[:PIECE]}, 5, 1),
    "token ids": ({"prompt": IDS}, {"prompt": IDS[: PIECE_TOKENS * 2] + [9] * PIECE_TOKENS}, 3, 2),
    "of several prompts, the first": ({"prompt": IDS}, {"prompt": [IDS, [5]]}, 3, 3),
    "a conversation that goes on": (chat(*TURNS[:2]), chat(*TURNS[:4]), 3, 3),
    "a tool, which comes first": (PLAIN, PLAIN | {"tools": [{"type": "function"}]}, len(chain(PLAIN)), 0),
    "an adapter": ({"model": "m", **ONE}, {"model": "an-adapter", **ONE}, 5, 0),
    "a salt": (ONE, ONE | {"cache_salt": "mine"}, 5, 0),
}
"""Two prompts, the pieces of the first, and those that they have in common."""


@pytest.mark.parametrize("kind", ALIKE)
def test_prompts_that_begin_alike_have_chains_that_begin_alike(kind: str) -> None:
    one, other, length, shared = ALIKE[kind]
    assert (len(chain(one)), common(one, other)) == (length, shared)


def test_the_oldest_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    index = PrefixIndex(5)
    index.add([b"a", b"b", b"c"], "one")
    index.add([b"x", b"y"], "one")
    index.add([b"z"], "one")
    assert index.held((b"a", b"b", b"c")) == {"one": 2}
    index.add([b"a"], "one")  # used again
    index.add([b"w", b"v"], "one")
    assert index.held((b"a", b"b")) == {"one": 1}


def test_a_shared_beginning_forgets_holders_but_not_who_has_more_of_a_prompt() -> None:
    index = PrefixIndex(1000)
    index.add([b"system prompt", b"turn", b"next turn"], "one")
    for restart in range(500):
        index.add([b"system prompt"], restart)
    held = index.held((b"system prompt", b"turn", b"other turn"))
    assert held.pop("one") == 2
    assert len(held) in (MAX_HOLDERS - 1, MAX_HOLDERS) and set(held) == set(range(500 - len(held), 500))


LINKS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6)


def linked(letters: list[bytes]) -> Chain:
    """A chain: each link says all that came before it."""
    return tuple(b"".join(letters[: depth + 1]) for depth in range(len(letters)))


class IndexMachine(RuleBasedStateMachine):
    """The index beside a twin that gets the same calls, and beside everything that was ever given."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.index, self.twin = PrefixIndex(self.CAPACITY), PrefixIndex(self.CAPACITY)
        self.given: dict[Hashable, set[bytes]] = {}

    @rule(letters=LINKS, holder=st.integers(0, 3))
    def add(self, letters: list[bytes], holder: int) -> None:
        for index in (self.index, self.twin):
            index.add(linked(letters), holder)
        self.given.setdefault(holder, set()).update(linked(letters))
        # Each piece may have all holders that there are.
        least = min(len(letters), self.CAPACITY // len(self.given))
        assert self.index.held(linked(letters)).get(holder, 0) >= least, "what is new is remembered"

    @rule(letters=LINKS)
    def look(self, letters: list[bytes]) -> None:
        chain = linked(letters)
        held = self.index.held(chain)
        assert held == self.twin.held(chain), "the same calls, the same answers"
        for holder, depth in held.items():
            assert 0 < depth <= len(chain) and set(chain[:depth]) <= self.given[holder]

    @invariant()
    def bounded(self) -> None:
        assert self.index._size <= self.CAPACITY
        assert self.index._size == sum(map(len, self.index._links.values()))

    @invariant()
    def whatever_is_remembered_starts_at_the_beginning(self) -> None:
        for link in self.index._links:
            assert all(link[:depth] in self.index._links for depth in range(1, len(link)))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=30)
