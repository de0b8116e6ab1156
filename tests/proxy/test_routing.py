"""The policies, each by itself, what they weigh, and what the router keeps between two requests."""

import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace
from proxy_fakes import Deployment, Line, deployed, fail, fleet, ping, prompt_of, quiet
from test_admission import ask, slow

from p2pkv.control.discovery import Ping, goodbye
from p2pkv_proxy import policies
from p2pkv_proxy.bodies import PIECE_TOKENS, Prompt
from p2pkv_proxy.membership import registry as registry_module
from p2pkv_proxy.membership.instance import REQUEST_TOKENS, Instance
from p2pkv_proxy.membership.registry import Registry, random_turn
from p2pkv_proxy.policies import ConsistentHash, Policy, Routing, RoutingRequest
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
        """One thing happens."""
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
