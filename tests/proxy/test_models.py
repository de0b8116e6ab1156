"""GET /v1/models while instances do not answer, and models that are loaded and unloaded while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import Seen, answer_error, answer_json
from proxy_fakes import FAKE, Deployment, FakeInstance, deployed, quiet

from p2pkv_proxy.attempt import Dispatch
from support.waiting import eventually


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


async def loads(deployment: Deployment, name: str, *instances: FakeInstance) -> None:
    """An adapter, at run time; a server that does not have it answers 404, as vLLM does."""
    for each in deployment.instances:
        each.behaviour = with_adapters
    for each in instances:
        each.models += (name,)


async def with_adapters(request: web.Request, seen: Seen) -> web.StreamResponse:
    serves = request.app[FAKE].models
    known = seen.body["model"] in serves
    return await (answer_json if known else answer_error(404, "no such model"))(request, seen)


@pytest.fixture
async def unlike(dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """Two P's and two D's; one of each has an adapter from the start."""
    monkeypatch.setattr("p2pkv_proxy.models._LOOK_SECONDS", 0.05)
    async with deployed(dispatch) as deployment:
        for role in ("P", "D", "P", "D"):
            more = ("early",) if len(deployment.instances) > 1 else ()
            await deployment.add(role, models=("tiny", *more))
        await deployment.ready(2, 2)
        yield deployment


async def test_what_the_list_shows_is_served(unlike: Deployment) -> None:
    """An adapter that is loaded at run time, where instances list different names."""
    await loads(unlike, "late", unlike.prefills[0], unlike.decodes[0])
    assert "late" in (await listed(unlike))[1]
    await unlike.serves(4, model="late")
    assert len(unlike.prefills[0].requests) == len(unlike.decodes[0].requests) == 4
    assert not unlike.prefills[1].requests and not unlike.decodes[1].requests
    await unlike.serves(2, model="early")
    assert len(unlike.decodes[1].requests) == 2


async def test_an_adapter_that_is_unloaded_at_one_is_served_by_the_other(unlike: Deployment) -> None:
    await loads(unlike, "late", *unlike.instances)
    await unlike.serves(4, model="late")
    for each in (unlike.prefills[0], unlike.decodes[0]):
        each.models = ("tiny",)
    gone = unlike.known(unlike.decodes[0])
    while "late" in gone.names:
        async with await unlike.post(model="late") as answer:
            assert answer.status in (200, 404)
        await quiet(unlike)
    await unlike.serves(4, model="late")


async def test_a_name_that_nobody_has_is_looked_for_once_for_all_who_ask(unlike: Deployment) -> None:
    await loads(unlike, "late")
    for _ in range(2):
        before = sum(each.lists for each in unlike.instances)
        whys = await asyncio.gather(*(unlike.refusal(404, model="nobody") for _ in range(20)))
        assert set(whys) == {"The model `nobody` does not exist; served here: early, tiny."}
        asked = sum(each.lists for each in unlike.instances) - before
        assert 4 <= asked <= 8, "four instances, at most twice"


async def test_who_asks_leaves_before_the_lists(unlike: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 0.2)
    for each in unlike.instances:
        each.frozen = True
    asking = asyncio.create_task(unlike.post(model="late"))
    await eventually(lambda: len(unlike.proxy.active) == 1)
    asking.cancel()
    await eventually(lambda: len(unlike.proxy.active) == 0)
    for each in unlike.instances:
        each.frozen = False
