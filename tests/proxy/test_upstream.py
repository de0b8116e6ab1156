"""One call to one instance, ended at the worst of moments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from multidict import CIMultiDict
from proxy_fakes import join, ping

from proxy.registry import Registry
from proxy.upstream import Call


class Answer:
    """Knows whether it has been closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.asyncio
async def test_an_answer_that_comes_as_its_call_is_cancelled_is_closed() -> None:
    answer = Answer()

    class Session:
        async def post(self, *arguments: Any, **options: Any) -> Answer:
            # Runs before the caller is told of the answer.
            asyncio.get_running_loop().call_soon(asking.cancel)
            return answer

    instance = join(Registry(), ping("D"))
    call = Call(Session(), instance, "/v1/completions")

    async def ask() -> None:
        try:
            await call.open(b"", CIMultiDict())
        finally:
            call.close()

    asking = asyncio.create_task(ask())
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert answer.closed
    assert instance.in_flight == 0
