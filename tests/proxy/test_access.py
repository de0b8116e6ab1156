"""Who may ask the proxy: API keys, and TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from proxy_behaviours import streams
from proxy_fakes import deployed, error_of
from proxy_process import running, served

from p2pkv.demo.processes import free_ports
from p2pkv_proxy import options
from p2pkv_proxy.access import Access

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


@pytest.mark.parametrize("where", ["command line", "environment", "file"])
def test_an_empty_key_is_refused(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(f'api-key = ["{KEYS[0].replace(" ", "-")}", ""]' if where == "file" else "")
    environ = {"P2PKV_PROXY_API_KEY": ""} if where == "environment" else {}
    argv = ["--config", str(file), *(["--api-key", ""] if where == "command line" else [])]
    with pytest.raises(SystemExit) as ended:
        options.read(options.make_parser(), argv, environ)
    assert ended.value.code == 2
    assert "an empty key would let every client in" in capsys.readouterr().err


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
