"""GET /v1/models while instances do not answer."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_fakes import Deployment


async def listed(deployment: Deployment, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, page = await deployment.get("/v1/models", headers)
    return status, [model["id"] for model in page["data"]] if status == 200 else page


async def two(deployment: Deployment, **options: Any) -> None:
    """Two D's, each with an adapter of its own, which have been listed once."""
    for number, name in enumerate(("one", "other"), start=1):
        await deployment.add("D", models=("tiny", name), **options)
        await deployment.ready(prefill=0, decode=number)  # in this order
    await deployment.add("P", models=("a P's own",))
    await deployment.ready(prefill=1, decode=2)
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr("p2pkv_proxy.models._OTHERS_SECONDS", 1000.0)
        assert await listed(deployment, options.get("key", "")) == (200, ["tiny", "other", "one"])


@pytest.mark.parametrize("frozen", [0, 1])
async def test_one_that_is_frozen_holds_up_nothing_and_its_models_are_known(
    lonely: Deployment, frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 1000.0)
    await two(lonely)
    lonely.decodes[frozen].frozen = True
    lonely.decodes[1 - frozen].models = ("tiny", "new")
    expected = ["tiny", "new", "one"] if frozen == 0 else ["tiny", "other", "new"]
    assert await listed(lonely) == (200, expected)


async def test_what_is_remembered_is_for_those_who_show_the_key(
    lonely: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 1000.0)
    await two(lonely, key="a key")
    assert (await listed(lonely))[0] == 401
    lonely.decodes[0].frozen = True
    assert (await listed(lonely, "another key"))[0] == 401
    assert await listed(lonely, "a key") == (200, ["tiny", "other", "one"])


async def test_if_none_answers_it_is_a_502(lonely: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await two(lonely)
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 0.3)
    for each in lonely.decodes:
        each.frozen = True
    status, page = await listed(lonely)
    assert (status, page["error"]["message"]) == (502, "No decode instance listed its models.")
