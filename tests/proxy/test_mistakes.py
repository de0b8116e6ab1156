"""What a client gets wrong, and what it hears."""

from __future__ import annotations

import json

import pytest
from proxy_fakes import Deployment, deployed, error_of

from p2pkv_proxy.limits import Limits


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"", b"\xff\xfe", b"[" * 5000])
async def test_what_is_no_json_object_is_a_400(either: Deployment, raw: bytes) -> None:
    async with either.client.post(f"{either.url}/v1/completions", data=raw) as response:
        assert response.status == 400
        assert "not a JSON object" in (await error_of(response))["message"]
    assert either.p.requests == either.d.requests == []


async def test_too_large_a_body_is_a_413() -> None:
    async with deployed("concurrent", 1, 1, max_body=1000) as deployment:
        response = await deployment.post({"prompt": "x" * 2000})
        assert response.status == 413
        assert "1000 bytes" in (await error_of(response))["message"]
        assert deployment.d.requests == []
        body = {"prompt": ""}
        assert (await deployment.post(body | {"prompt": "x" * (1000 - len(json.dumps(body)))})).status == 200


async def test_a_body_that_could_never_be_held_is_a_413_too() -> None:
    async with deployed("concurrent", 1, 1, limits=Limits(max_held=1000)) as deployment:
        response = await deployment.post({"prompt": "x" * 2000})
        assert response.status == 413
        assert "1000 bytes" in (await error_of(response))["message"]
        assert deployment.proxy.counters.refused_full == deployment.proxy.intake.held == 0


async def test_other_paths_are_a_404_that_says_what_there_is(lonely: Deployment) -> None:
    async with lonely.client.get(f"{lonely.url}/v1/rerank") as response:
        assert response.status == 404
        message = (await error_of(response))["message"]
    assert "There is no /v1/rerank here" in message
    assert "/v1/chat/completions" in message


async def test_every_answer_gives_the_clients_id_back(lonely: Deployment) -> None:
    mine = {"X-Request-Id": "mine"}
    async with lonely.client.get(f"{lonely.url}/nowhere", headers=mine) as response:
        assert response.headers["X-Request-Id"] == "mine"
    assert (await lonely.post(headers=mine)).headers["X-Request-Id"] == "mine"
