"""Who may ask the proxy: API keys, TLS, and browsers on pages of other origins."""

import asyncio
import itertools
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import answers, stream_of, streams
from proxy_fakes import Deployment, deployed, error_of
from proxy_process import running, served
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from p2pkv.demo.processes import free_ports
from p2pkv_proxy.access import Access
from p2pkv_proxy.cors import Cors

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
            assert "as many connections as it takes" in await proxy.refusal(503)
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


PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
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
        (PAGE, OTHER), ("POST", "GET", "TRACE"), (None, "authorization,x-mine", "x-other")
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
        for origin, cookie, body in itertools.product((PAGE, OTHER, None), ({}, {"Cookie": "a=b"}), bodies):
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


async def test_the_options_of_the_command() -> None:
    options = ("--allowed-origins", "https://b", "--allowed-origins", f'["{OTHER}", "{PAGE}"]')
    options = (*options, "--allowed-methods", '["POST"]')
    async with served(*options, "--allow-credentials") as proxy:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with proxy.client.options(proxy.url + PATH, headers=asked) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert answer.headers["Access-Control-Allow-Methods"] == "POST"
        for origin, status in (("https://b", 200), (OTHER, 200), ("https://c", 400)):
            async with proxy.client.options(proxy.url + PATH, headers=asked | {"Origin": origin}) as answer:
                assert answer.status == status
