"""Whose breaker a failure is charged to, and whose it is not."""

from __future__ import annotations

import asyncio

import pytest
from proxy_behaviours import Behaviour, answer_error, answer_json, dies, stops
from proxy_fakes import Deployment, quiet
from test_given_up import after_p

from proxy.dispatch import PrefillFailed, _first_token
from proxy.upstream import CallFailed

MISTAKE = answer_error(400)


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("failure", [dies, stops, answer_error(500), answer_error(307), MISTAKE])
async def test_what_counts_as_a_failure_and_whose_it_is(
    either: Deployment, role: str, failure: Behaviour
) -> None:
    """Five in a row; the mistakes of clients are nobody's."""
    (p,), (d,) = either.registry.known("P"), either.registry.known("D")
    guilty, innocent = (p, d) if role == "P" else (d, p)
    (either.p if role == "P" else either.d).behaviour = failure
    if role == "P":
        either.d.behaviour = after_p(either, answer_json)
    for _ in range(5):
        assert guilty.breaker.closed
        await (await either.post()).read()
        await quiet(either)
    assert guilty.breaker.closed is (failure is MISTAKE)
    assert innocent.breaker.closed


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["P", "D"])
async def test_failures_among_more_successes_are_no_reason(sequential: Deployment, role: str) -> None:
    instance = sequential.p if role == "P" else sequential.d
    for number in range(30):
        instance.behaviour = answer_error(500) if number % 3 == 2 else answer_json
        await (await sequential.post()).read()
    assert all(each.breaker.closed for each in sequential.everyone())


@pytest.mark.asyncio
async def test_if_both_fail_at_once_it_is_ps_failure() -> None:
    """D fails for want of P's KV."""

    async def fail(error: Exception) -> None:
        raise error

    prefilling = asyncio.create_task(fail(PrefillFailed("it died")))
    decoding = asyncio.create_task(fail(CallFailed("died")))
    with pytest.raises(PrefillFailed):
        await _first_token(prefilling, decoding)
    assert isinstance(decoding.exception(), CallFailed)
