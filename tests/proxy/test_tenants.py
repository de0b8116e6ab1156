"""Who may ask the proxy: keys, TLS, browsers on other pages; and what each tenant gets of its places."""

import asyncio
import itertools
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from proxy_behaviours import answers, stream_of, streams, streams_at_once
from proxy_fakes import Deployment, called, deployed, error_of, fleet, join, ping, prompt_of, quiet
from proxy_process import running, served
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from test_admission import slow, small
from test_metrics import documented, page, shown_on
from test_process import given as options_given
from test_process import refused

from p2pkv.demo.processes import free_ports
from p2pkv_proxy import options
from p2pkv_proxy.access import OTHER, Access, Tenant, Tenants, TenantSettings, read_tenants
from p2pkv_proxy.admission import Admission
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.cors import Cors
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from support.waiting import eventually

KEYS = ("the key of one client", "the key of another")


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({}, None),
        ({"Authorization": f"Bearer {KEYS[0]}x"}, None),
        ({"Authorization": f"Basic {KEYS[0]}"}, None),
        ({"Authorization": "Bearer"}, None),
        ({"X-Api-Key": "é"}, None),
        ({"Authorization": "Bearer "}, None),
        ({"Authorization": f"Bearer {KEYS[0]}"}, f"Bearer {KEYS[0]}"),
        ({"Authorization": f"bearer {KEYS[1]}"}, f"bearer {KEYS[1]}"),
        ({"X-Api-Key": KEYS[1]}, f"Bearer {KEYS[1]}"),
        ({"X-Api-Key": KEYS[1], "Authorization": "Bearer of something else"}, "Bearer of something else"),
        ({"X-Api-Key": "x", "Authorization": f"Bearer {KEYS[0]}"}, f"Bearer {KEYS[0]}"),
    ],
    ids=str,
)
async def test_who_shows_a_key_is_served_and_it_goes_on(headers: dict[str, str], sent: str | None) -> None:
    """An empty key lets nobody in, and vLLM reads no X-Api-Key. Probes need none."""
    async with deployed("concurrent", 1, 1, guard=Access(keys=(*KEYS, ""))) as deployment:
        async with await deployment.post(headers=headers) as response:
            assert response.status == (200 if sent else 401)
            if sent is None:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await error_of(response))["type"] == "authentication_error"
        async with deployment.client.get(f"{deployment.url}/v1/models", headers=headers) as response:
            assert response.status == (200 if sent else 401)
        for instance in (deployment.p, deployment.d):
            seen = [each.headers["Authorization"] for each in instance.requests]
            assert seen == ([sent] if sent else [])
        for path in ("/health", "/ready", "/metrics"):
            assert await deployment.text(path)


async def test_https(certificate: tuple[Path, Path]) -> None:
    """A request and its stream cross TLS; another one is turned away, and plain HTTP gets nowhere."""
    file, key = map(str, certificate)
    tls = ("--ssl-certfile", file, "--ssl-keyfile", key)
    trusted = ssl.create_default_context(cafile=file)
    async with served(*tls, "--max-connections", "1", tls=trusted, keep=False) as proxy:
        assert proxy.url.startswith("https")
        release = asyncio.Event()
        proxy.d.behaviour = streams(release)
        async with await proxy.begin() as response:
            assert "as many connections as it accepts" in await proxy.refusal(503)
            release.set()
            assert "second" in await response.text()
        with pytest.raises(aiohttp.ClientError):
            await proxy.client.post(f"{proxy.url.replace('https', 'http')}/v1/completions", json={})


def test_files_that_are_no_certificate_are_said(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    file, key = map(str, certificate)
    (tmp_path / "text").write_text("no certificate")
    for one, other in ((file, str(tmp_path / "text")), (str(tmp_path / "nothing"), key)):
        arguments = ["--port", "0", "--discovery", f"127.0.0.1:{free_ports()}"]
        with running(*arguments, "--ssl-certfile", one, "--ssl-keyfile", other) as command:
            assert command.end() == 1
            assert "have to be a certificate and its key" in command.log and "Traceback" not in command.log


# Browsers. What is right here is what vLLM's own middleware answers.


PAGE, OTHER_PAGE = "https://chat.example.com", "https://evil.example.com"
PATH = "/v1/completions"
POLICIES = [
    Cors((PAGE,)),
    Cors((PAGE, "https://b.example.com"), credentials=True),
    Cors(("*",)),
    Cors(("*",), credentials=True, methods=("POST",), headers=("Authorization", "X-Mine")),
]


def vllms(policy: Cors) -> TestClient:
    """A server with what vLLM puts around its own."""
    app = Starlette(routes=[Route(PATH, lambda _: PlainTextResponse("{}"), methods=["POST"])])
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(policy.origins),
        allow_credentials=policy.credentials,
        allow_methods=list(policy.methods),
        allow_headers=list(policy.headers),
    )
    return TestClient(app)


def shown(headers: Any) -> dict[str, Any]:
    """What browsers look at; lists in any order."""
    seen = {name.lower(): value for name, value in headers.items()}
    return {
        # Newer versions of Starlette have QUERY, too.
        name: sorted({each.strip().lower() for each in value.split(",")} - {"query"})
        for name, value in seen.items()
        if name.startswith("access-control-")
    }


def questions() -> list[dict[str, str]]:
    wanted = itertools.product(
        (PAGE, OTHER_PAGE), ("POST", "GET", "TRACE"), (None, "authorization,x-mine", "x-other")
    )
    return [
        {"Origin": origin, "Access-Control-Request-Method": method}
        | ({} if names is None else {"Access-Control-Request-Headers": names})
        for origin, method, names in wanted
    ]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_preflight_gets_the_answer_of_vllm(policy: Cors) -> None:
    async with deployed("concurrent", 1, 1, cors=policy) as deployment:
        theirs = vllms(policy)
        for asked in questions():
            async with deployment.client.options(deployment.url + PATH, headers=asked) as answer:
                expected = theirs.options(PATH, headers=asked)
                assert (answer.status, shown(answer.headers)) == (
                    expected.status_code,
                    shown(expected.headers),
                ), asked
        assert not deployment.p.requests and not deployment.d.requests
        assert 'endpoint="other"' not in await deployment.text("/metrics"), "which are no requests of the API"


@pytest.mark.parametrize("policy", POLICIES)
async def test_answers_and_errors_have_the_headers_of_vllm(policy: Cors) -> None:
    async with deployed("concurrent", 1, 1, cors=policy) as deployment:
        deployment.d.behaviour = stream_of("hi", headers={"Access-Control-Allow-Origin": "null"})
        bodies = ({"model": "tiny", "prompt": "hi"}, {"model": "tiny", "prompt": "hi", "stream": True}, [1])
        for origin, cookie, body in itertools.product(
            (PAGE, OTHER_PAGE, None), ({}, {"Cookie": "a=b"}), bodies
        ):
            headers = cookie | ({} if origin is None else {"Origin": origin})
            expected = vllms(policy).post(PATH, headers=headers)
            answer = await deployment.post(body, PATH, headers)
            await answer.read()
            assert answer.status == (400 if body == [1] else 200)
            assert shown(answer.headers) == shown(expected.headers), headers
            assert answer.headers["Vary"] == expected.headers["Vary"]


async def test_without_the_options_it_is_as_before(concurrent: Deployment) -> None:
    async with concurrent.client.options(concurrent.url + PATH, headers=questions()[0]) as answer:
        assert answer.status == 405 and not shown(answer.headers)
    concurrent.d.behaviour = answers(
        lambda _: web.json_response({}, headers={"Access-Control-Allow-Origin": PAGE})
    )
    answer = await concurrent.post(headers={"Origin": PAGE})
    assert shown(answer.headers) == {"access-control-allow-origin": [PAGE]}, "an instance's own"


async def test_the_options_for_browsers() -> None:
    options = ("--allowed-origins", "https://b", "--allowed-origins", f'["{OTHER_PAGE}", "{PAGE}"]')
    options = (*options, "--allowed-methods", '["POST"]')
    async with served(*options, "--allow-credentials") as proxy:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with proxy.client.options(proxy.url + PATH, headers=asked) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert answer.headers["Access-Control-Allow-Methods"] == "POST"
        for origin, status in (("https://b", 200), (OTHER_PAGE, 200), ("https://c", 400)):
            async with proxy.client.options(proxy.url + PATH, headers=asked | {"Origin": origin}) as answer:
                assert answer.status == status


# Tenants: what a full one gets, what the others notice of it, and who of those that wait goes next.


ALICE, BOB = "the-key-of-alice", "the-key-of-bob"


def tenant(clock: list[float] | None = None, **limits: Any) -> Tenant:
    """One alone; `clock` has the time."""
    now = [0.0] if clock is None else clock
    return Tenants({"one": TenantSettings(**limits)}, clock=lambda: now[0]).by_name["one"]


def some(*weights: float) -> list[Tenant]:
    every = {f"t{at}": TenantSettings(weight=weight) for at, weight in enumerate(weights)}
    made = Tenants(every, clock=lambda: 0.0)
    return [made.by_name[name] for name in every]


def request(of: Tenant, tokens: int = 4, asked: int = 0, model: str | None = None) -> RoutingRequest:
    return RoutingRequest(model, prompt_of({"prompt": [7] * tokens}), "", of, asked)


async def order(admission: Admission, asked: list[RoutingRequest]) -> list[RoutingRequest]:
    """In which they get the one place, having come in the order of `asked` while it was taken."""
    got = list[RoutingRequest]()

    async def enter(each: RoutingRequest) -> None:
        async with admission.place(each, paired=False):
            got.append(each)

    async with admission.place(RoutingRequest(), paired=False):
        tasks = [asyncio.create_task(enter(each)) for each in asked]
        await eventually(lambda: admission.waiting == len(asked))
    await asyncio.gather(*tasks)
    return got


def cost(of: RoutingRequest) -> float:
    """Of a place whose answer is no stream and has a bound below any average."""
    return 1 + of.prompt.tokens + of.asked


@settings(max_examples=25)
@given(
    weights=st.lists(st.sampled_from([0.5, 1, 2, 3, 10]), min_size=2, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 60)), min_size=40, max_size=40),
    data=st.data(),
)
def test_shares_follow_weights_within_two_requests(
    weights: list[float], sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """While two have requests waiting, neither gets more for its weight, but for one request of each."""
    tenants = some(*weights)
    whose = data.draw(st.lists(st.sampled_from(tenants), min_size=len(sizes), max_size=len(sizes)))
    asked = [request(who, tokens, answer) for who, (tokens, answer) in zip(whose, sizes, strict=True)]
    got = asyncio.run(order(small(), asked))
    assert sorted(map(id, got)) == sorted(map(id, asked)), "each is served, once"
    largest = {who: max((cost(each) for each in asked if each.tenant is who), default=0) for who in tenants}
    left, used = Counter(whose), dict.fromkeys(tenants, 0.0)
    for each in got:
        who = each.tenant
        used[who] += cost(each) / who.settings.weight
        waiting = [other for other in tenants if left[other]]
        bound = {other: largest[other] / other.settings.weight for other in waiting}
        for one in waiting:
            for other in waiting:
                assert used[one] - used[other] <= bound[one] + bound[other] + 1e-6
        left[who] -= 1
    for who in tenants:
        assert [each for each in got if each.tenant is who] == [each for each in asked if each.tenant is who]


async def test_who_pauses_saves_nothing_up_and_a_crowd_of_one_s_own_costs_nothing_later() -> None:
    busy, idle = some(1, 1)
    admission = small()
    await order(admission, [request(busy) for _ in range(50)])
    got = await order(admission, [request(who) for _ in range(10) for who in (busy, idle)])
    ahead = [sum(1 if each.tenant is idle else -1 for each in got[: at + 1]) for at in range(len(got))]
    assert max(map(abs, ahead)) <= 2


async def test_a_crowd_for_one_model_does_not_wait_at_the_cost_of_another_tenant_s_model() -> None:
    router, _ = fleet(("D", {"model": "a"}), ("D", {"model": "b"}), room=1)
    admission, (one, other) = Admission(router, Limits(), RequestCounters(), lambda: 0.0), some(1, 1)
    async with admission.place(request(one, model="a"), paired=False):
        place = admission.place(request(one, model="a"), paired=False)
        waiter = asyncio.ensure_future(place.__aenter__())
        await eventually(lambda: one.waiting.total() == 1)
        async with admission.place(request(other, model="b"), paired=False):
            assert admission.waiting == 1
    await waiter
    await place.__aexit__(None, None, None)
    assert (one.waiting.total(), other.waiting.total(), admission.under_way) == (0, 0, 0)


async def test_who_waits_for_a_slow_model_is_not_ahead_by_what_others_used_of_a_fast_one() -> None:
    router, _ = fleet(("D", {"model": "slow"}), ("D", {"model": "fast"}), room=1)
    admission, (crowd, late, other) = (
        Admission(router, Limits(), RequestCounters(), lambda: 0.0),
        some(1, 1, 1),
    )
    got = list[Tenant]()

    async def enter(who: Tenant, model: str) -> None:
        asked = RoutingRequest(model, tenant=who, base=router.fleet_cache(0.0).base_of(model))
        async with admission.place(asked, paired=False):
            got.append(who)

    async with admission.place(RoutingRequest("slow"), paired=False):
        tasks = [asyncio.create_task(enter(crowd, "slow")) for _ in range(10)]
        await eventually(lambda: admission.waiting == 10)
        for _ in range(100):
            await enter(other, "fast")
        tasks += [asyncio.create_task(enter(late, "slow")) for _ in range(10)]
        await eventually(lambda: admission.waiting == 20)
    await asyncio.gather(*tasks)
    assert got[100:110].count(late) == 5


async def test_many_places_at_once_are_shared_too_if_one_asks_for_several_models() -> None:
    registry = Registry()
    router, _ = fleet("D", registry=registry, room=9)
    admission, (greedy, modest) = Admission(router, Limits(), RequestCounters(), lambda: 0.0), some(1, 1)
    async with AsyncExitStack() as leave:
        for _ in range(9):
            await leave.enter_async_context(admission.place(RoutingRequest(), paired=False))
        wanted = [(greedy, f"m{at % 6}") for at in range(18)] + [(modest, "m")] * 18
        places = [admission.place(request(who, model=model), paired=False) for who, model in wanted]
        asked = [asyncio.create_task(leave.enter_async_context(each)) for each in places]
        await eventually(lambda: admission.waiting == 36)
        join(registry, ping("D", 99))
        admission.advance()
        await eventually(lambda: sum(each.done() for each in asked) == 9)
        got = [each.result().request.tenant for each in asked if each.done()]
        assert got.count(modest) in (4, 5)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def test_a_large_bound_of_answers_costs_what_answers_have_and_what_comes_is_paid() -> None:
    (one,) = some(1)
    paid = one.pay("", 100, 32_000)
    assert paid < 1000 and one.used[""] == 1 + 100 + paid
    one.settle("", paid, 700)
    assert one.used[""] == 1 + 100 + 700
    for _ in range(200):
        one.settle("", one.pay("", 100, 0), 700)
    assert 600 < one.pay("", 100, 32_000) <= 700 and one.pay("", 100, 3) == 3


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/v1/completions", b'{"max_tokens": 7}', 7),
        ("/v1/completions", b'{"max_tokens": 7, "max_completion_tokens": 5}', 7),
        ("/v1/chat/completions", b'{"max_tokens": 7, "max_completion_tokens": 5}', 5),
        ("/v1/responses", b'{"max_output_tokens": 6}', 6),
        ("/v1/chat/completions", b'{"max_tokens": "7", "max_completion_tokens": null}', 0),
        ("/v1/completions", b'{"max_tokens": -1}', 0),
        ("/v1/completions", b"{}", 0),
    ],
)
def test_what_a_body_asks_for(path: str, body: bytes, asked: int) -> None:
    assert parse(body, path).asked == asked


async def test_a_streamed_answer_costs_what_came_of_it_although_its_client_left() -> None:
    async with deployed("concurrent", 1, 1, **house(TenantSettings())) as deployment:
        deployment.d.behaviour = streams(asyncio.Event())
        response = await deployment.begin(headers=bearer(ALICE), prompt=[7] * 100, max_tokens=32_000)
        alice = deployment.proxy.tenants.by_name["alice"]
        before = alice.used["tiny"]
        response.close()
        await quiet(deployment)
        assert 101 < alice.used["tiny"] <= 101 + 2 < before and alice.under_way == 0


async def test_a_full_queue_turns_away_those_who_fill_it() -> None:
    greedy, modest = some(1, 1)
    admission = small(max_waiting=10)
    ended = list[tuple[Tenant, int]]()

    async def enter(who: Tenant) -> None:
        try:
            async with admission.place(request(who), paired=False):
                ended.append((who, 200))
        except ProxyError as error:
            assert error.retry_after >= 1
            ended.append((who, error.status))

    async with admission.place(RoutingRequest(), paired=False):
        tasks = [asyncio.create_task(enter(greedy)) for _ in range(30)]
        await eventually(lambda: len(ended) == 20 and admission.waiting == 10)
        tasks += [asyncio.create_task(enter(modest)) for _ in range(4)]
        await eventually(lambda: modest.waiting.total() == 4)
        assert (greedy.waiting.total(), admission.waiting) == (6, 10)
        tasks += [asyncio.create_task(enter(modest)) for _ in range(4)]
        await eventually(lambda: len(ended) == 28)
        assert (greedy.waiting.total(), modest.waiting.total()) == (5, 5)
    await asyncio.gather(*tasks)
    assert Counter(ended) == {(greedy, 429): 25, (greedy, 200): 5, (modest, 429): 3, (modest, 200): 5}
    assert (greedy.refused["queue"], modest.refused["queue"]) == (25, 3)
    assert (greedy.waiting.total(), modest.waiting.total(), admission.waiting) == (0, 0, 0)


async def test_those_who_leave_or_wait_too_long_are_counted_out() -> None:
    one, other = some(1, 1)
    admission = small(max_wait=0.05)
    async with admission.place(RoutingRequest(), paired=False):
        places = [admission.place(request(who), paired=False) for who in (one, other, one)]
        late = [asyncio.ensure_future(each.__aenter__()) for each in places]
        await eventually(lambda: (one.waiting.total(), other.waiting.total()) == (2, 1))
        late[0].cancel()
        ended = await asyncio.gather(*late, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError, ProxyError, ProxyError]
    assert (one.waiting.total(), other.waiting.total()) == (0, 0)


@settings(max_examples=50)
@given(
    rate=st.integers(1, 1000),
    burst=st.sampled_from([0.5, 1.0, 4.0]),
    sent=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3000)), min_size=1, max_size=60),
)
def test_prompt_tokens_stay_within_the_rate_the_burst_and_one_prompt(
    rate: int, burst: float, sent: list[tuple[float, int]]
) -> None:
    """And who comes again when told gets in, but not a second sooner."""
    clock = [0.0]
    one = tenant(clock, prompt_tokens=rate, burst_seconds=burst)
    let_in = list[tuple[float, int]]()
    for pause, tokens in sent:
        clock[0] += pause
        try:
            one.spend(tokens)
        except ProxyError as error:
            assert (error.status, error.retry_after >= 1) == (429, True)
            before = clock[0]
            if error.retry_after > 1:
                clock[0] = before + error.retry_after - 1.001
                with pytest.raises(ProxyError):
                    one.spend(tokens)
            clock[0] = before + error.retry_after + 1e-6
            one.spend(tokens)
        let_in.append((clock[0], tokens))
    for at, (begun, _) in enumerate(let_in):
        for ended, (end, _) in list(enumerate(let_in))[at:]:
            within = sum(tokens for _, tokens in let_in[at:ended])
            assert (
                within <= rate * (end - begun + burst) + max((t for _, t in let_in[at:ended]), default=0) + 1
            )


def test_requests_under_way_are_bounded_and_the_wait_is_that_for_the_next_end() -> None:
    clock = [0.0]
    one = tenant(clock, requests=2)
    for _ in range(200):  # each takes twelve seconds
        with one.enter():
            clock[0] += 12.0
    with one.enter(), one.enter():
        with pytest.raises(ProxyError, match="Tenant `one` has 2 requests under way, the most") as full:
            one.enter().__enter__()
        assert (full.value.status, full.value.retry_after) == (429, 6)
        assert (one.under_way, one.refused["requests"]) == (2, 1)
    with one.enter():
        assert one.under_way == 1
    assert one.under_way == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has 0 tenants: expected at least one"),
        ("x", "is not TOML"),
        ("a = 1", "tenant `a` in {file}: Expected `object`, got `int`"),
        ("[a]\nkeys = 'k'", "tenant `a` in {file}: Expected `array`, got `str` - at `keys`"),
        ("[a]\nkeys = ['']", "each key needs at least one character, and only printable ASCII"),
        ("[a]\nkeys = ['a b']", "each key needs at least one character, and only printable ASCII"),
        ("[a]\nkeys = ['k']\n[b]\nkeys = ['k']", "tenants `a` and `b` in {file} have the same key"),
        ("[a]\nkeys = ['k']\nweight = 0", "Expected `float` > 0.0 - at `weight`"),
        ("[a]\nkeys = ['k']\nrequests = -1", "Expected `int` >= 0 - at `requests`"),
        ("[a]\nkeys = ['k']\nrequest = 1", "Object contains unknown field `request`"),
        ("[a]\nkeys = ['k']\npriority = 9999999999", "Expected `int` <= 2147483647"),
        ("['a b']\nkeys = ['k']", "a name has letters, digits"),
        ("[a]\nweight = 2", "`a` has no keys, and without --tenant-header no request could be its"),
    ],
)
def test_a_mistake_in_the_file_is_said_at_the_start(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    assert told.format(file=file) in " ".join(refused(capsys, "--tenants", str(file)).split())


def test_the_file_s_keys_are_keys_of_the_proxy_and_it_may_be_named_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f"[alice]\nkeys = ['{ALICE}', 'second']\nrequests = 3\n[other]\nweight = 0.5\n")
    read = options_given("--api-key", "plain", TENANTS=str(file))
    assert options.keys(read) == ("plain", ALICE, "second")
    made = options.tenants(read)
    assert made is not None and set(made.by_name) == {"alice", OTHER}
    assert made.by_name["alice"].settings.requests == 3 and made.by_name[OTHER].settings.weight == 0.5
    without = options_given()
    assert options.tenants(without) is None and options.keys(without) == ()
    assert list(read_tenants(str(file))) == ["alice", "other"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def house(alice: TenantSettings, header: str = "", **others: TenantSettings) -> dict[str, Any]:
    """Alice has these limits and Bob none, each by a key; `others`: by header, if at all."""
    keys = {"alice": ALICE, "bob": BOB}
    every = {"alice": alice, "bob": TenantSettings(), **others}
    made = {name: replace(each, keys=(keys[name],) if name in keys else ()) for name, each in every.items()}
    guard = Access() if header else Access(keys=(ALICE, BOB, "of nobody"))
    return {"tenants": Tenants(made, header), "guard": guard}


@pytest.fixture
async def one_each() -> AsyncIterator[Deployment]:
    async with deployed("concurrent", 1, 1, **house(TenantSettings(requests=1))) as deployment:
        yield deployment


async def test_a_full_tenant_gets_429_and_another_is_served(one_each: Deployment) -> None:
    with slow(one_each.d):
        first = asyncio.create_task(one_each.post(headers=bearer(ALICE)))
        await eventually(lambda: called(one_each.d))
        response = await one_each.post(headers=bearer(ALICE))
        assert (response.status, int(response.headers["Retry-After"]) >= 1) == (429, True)
        error = await error_of(response)
        assert error["type"] == "rate_limit_error" and "`alice` has 1 requests under way" in error["message"]
        others = [asyncio.create_task(one_each.post(headers=bearer(BOB))) for _ in range(3)]
        await eventually(lambda: len(one_each.d.requests) == 4)
        found = await page(one_each)
        assert found.value("tenant_requests", tenant="alice") == 1
        assert found.value("tenant_requests", tenant="bob") == 3
    assert [(await each).status for each in (first, *others)] == [200] * 4
    await one_each.serves(1, headers=bearer(ALICE))
    found = await page(one_each)
    assert found.value("tenant_refused_total", tenant="alice", reason="requests") == 1
    assert found.value("tenant_requests_ended_total", tenant="alice", outcome="shed") == 1
    assert found.value("tenant_requests_ended_total", tenant="bob", outcome="answered") == 3
    assert found.value("requests_total", outcome="shed") == 1
    assert found.value("shed_total") == 0, "that is for 503"


async def test_metrics_name_tenants_and_never_keys(one_each: Deployment) -> None:
    one_each.d.behaviour = streams_at_once
    for headers in (bearer(ALICE), {"X-Api-Key": BOB}, bearer("of nobody")):
        await one_each.serves(1, stream=True, headers=headers)
    assert (await one_each.post(headers=bearer("wrong"))).status == 401
    text = await one_each.text("/metrics")
    assert not any(key in text for key in (ALICE, BOB, "of nobody"))
    found = await page(one_each)
    names = {each.labels["tenant"] for each in found.samples if "tenant" in each.labels}
    assert names == {"alice", "bob", OTHER}
    assert found.value("tenant_time_to_first_token_seconds_count") == 3
    assert all(found.value("tenant_requests_ended_total", tenant=each) == 1 for each in names)
    there = {name: labels for name, labels in shown_on(found).items() if "tenant" in labels}
    assert there == documented("| in `/metrics`, by tenant | labels | meaning |"), "as the page has them"
    assert found.value("tenant_prompt_tokens_total", tenant="bob") == 1


async def test_prompt_tokens_a_second_are_bounded_without_harm_to_another() -> None:
    limits = TenantSettings(prompt_tokens=10, burst_seconds=1)
    async with deployed("concurrent", 1, 1, **house(limits)) as deployment:
        await deployment.serves(1, headers=bearer(ALICE), prompt=[7] * 300)
        response = await deployment.post(headers=bearer(ALICE), prompt="x")
        assert response.status == 429 and 25 <= int(response.headers["Retry-After"]) <= 29
        assert "its limit of 10 prompt tokens a second" in (await error_of(response))["message"]
        await deployment.serves(5, headers=bearer(BOB), prompt=[7] * 300)
        assert len(deployment.d.requests) == 6, "what is refused reaches no instance"
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            await deployment.serves(1, None, path, headers=bearer(ALICE))
        assert await deployment.refusal(429, None, "/v1/embeddings", headers=bearer(ALICE), input="x")


async def test_a_prompt_that_no_instance_has_seen_costs_nothing() -> None:
    """It left, or found no place in time."""
    limits = {"max_requests": 1, "max_wait": 0.1, **house(TenantSettings(prompt_tokens=1, burst_seconds=1))}
    async with deployed("concurrent", 1, 1, **limits) as deployment:
        asked = {"headers": bearer(ALICE), "prompt": [7] * 300}
        with slow(deployment.d):
            first = asyncio.create_task(deployment.post(headers=bearer(BOB)))
            await eventually(lambda: called(deployment.d))
            leaver = asyncio.create_task(deployment.post(**asked))
            await eventually(lambda: deployment.proxy.admission.waiting == 1)
            leaver.cancel()
            await eventually(lambda: deployment.proxy.admission.waiting == 0)
            assert "within 0.1 seconds" in await deployment.refusal(503, **asked)
        assert (await first).status == 200
        await deployment.serves(1, **asked)
        assert (await page(deployment)).value("tenant_prompt_tokens_total", tenant="alice") == 300
        assert "of 1 prompt tokens" in await deployment.refusal(429, **asked)


async def test_a_prompt_counts_no_more_than_the_context_has() -> None:
    """What is much longer is refused, and would shut its tenant out for hours."""
    tenants = house(TenantSettings(prompt_tokens=10, burst_seconds=1))
    async with deployed("concurrent", 1, **tenants) as deployment:
        await deployment.newcomer("D", context=100)
        await deployment.serves(1, headers=bearer(ALICE), prompt="x" * 100_000)
        assert "in 9 s" in await deployment.refusal(429, headers=bearer(ALICE), prompt="x")
        assert 100 < tenants["tenants"].by_name["alice"].used["tiny"] < 200


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/chat/completions", "completion_tokens"), ("/v1/messages", "output_tokens")]
)
async def test_an_answer_that_is_no_stream_costs_its_tokens_too(path: str, name: str) -> None:
    tenants = house(TenantSettings())
    async with deployed("concurrent", 1, 1, **tenants) as deployment:
        alice = tenants["tenants"].by_name["alice"]
        for each in (3000, 1):
            before = alice.used["tiny"]
            deployment.d.behaviour = answers(lambda _: web.json_response({"usage": {name: each}}))  # noqa: B023
            await deployment.serves(1, {"messages": []}, path, headers=bearer(ALICE))
            await eventually(lambda: not deployment.proxy.admission.under_way)
            assert each < alice.used["tiny"] - before < each + 10
        assert alice.answer > 64


async def test_a_gateway_names_the_tenant_and_a_tenant_s_key_goes_first() -> None:
    known = house(TenantSettings(), "X-Tenant", carol=TenantSettings())
    async with deployed("concurrent", 1, 1, **known) as deployment:
        for headers in (
            {"X-Tenant": "carol"},
            {"X-Tenant": "carol", **bearer(ALICE)},
            {"X-Tenant": "nobody that the file has"},
            {},
        ):
            await deployment.serves(1, headers=headers)
        found = await page(deployment)
        ended = {
            name: found.value("tenant_requests_ended_total", tenant=name)
            for name in ("alice", "carol", OTHER)
        }
        assert ended == {"alice": 1, "carol": 1, OTHER: 2}
        assert "nobody" not in await deployment.text("/metrics")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_the_body_s_priority_goes_to_both_and_a_tenant_s_where_there_is_none(path: str) -> None:
    async with deployed("concurrent", 1, 1, **house(TenantSettings(priority=-3))) as deployment:
        asked = {"model": "tiny", "prompt": "a", "messages": [], "input": "a", "max_tokens": 3}
        await deployment.serves(1, {**asked, "priority": 7}, path, headers=bearer(ALICE))
        await deployment.serves(1, asked, path, headers=bearer(ALICE))
        await deployment.serves(1, asked, path, headers=bearer(BOB))
        for instance in (deployment.p, deployment.d):
            got = [(e.body.get("priority"), e.headers.get("X-Vllm-Priority")) for e in instance.requests]
            assert got == [(7, None), (None, "-3"), (None, None)]


async def test_the_options_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f"[alice]\nkeys = ['{ALICE}']\nprompt_tokens = 1\nburst_seconds = 1\n")
    async with served("--tenants", str(file)) as proxy:
        assert 'tenant_requests{tenant="alice"} 0.0' in await proxy.text("/metrics")
        await proxy.serves(1, headers=bearer(ALICE), prompt=[7] * 3000)
        assert "prompt tokens a second" in await proxy.refusal(429, headers=bearer(ALICE))
        assert "needs an API key" in await proxy.refusal(401)
        assert 'tenant_requests{tenant="alice"} 0.0' in await proxy.text("/metrics")
        proxy.terminate()
        await proxy.ended()


async def test_without_tenants_there_is_nothing_of_them(concurrent: Deployment) -> None:
    await concurrent.serves(2, headers=bearer(ALICE))
    assert concurrent.proxy.tenants is None
    assert "tenant_requests{" not in await concurrent.text("/metrics")
    assert {each.headers.get("X-Vllm-Priority") for each in concurrent.d.requests} == {None}
