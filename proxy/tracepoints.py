"""Where the proxy stamps a request for `p2pkv waterfall`: see `p2pkv.stamps`."""

from typing import Any

from p2pkv.stamps import Stamps

from .metrics import RequestRecord
from .relay import Relay
from .upstream import Call


def install(stamps: Stamps) -> None:
    """Patches the functions that stamp; to be called once, before the proxy serves."""
    begins, begin, whole, send = RequestRecord.begins, Call.begin, Call.read_answer, Relay._send

    def begun(record: RequestRecord, choice: Any, unique: str) -> None:
        begins(record, choice, unique)
        stamps.stamp("in", unique, record.began)
        stamps.stamp("placed", unique)

    def called(made: Any, what: str) -> Any:
        async def stamped(call: Call, *args: Any, **more: Any) -> Any:
            name = call.headers["X-Request-Id"]
            role = "P" if call.tokens else call.instance.role
            stamps.stamp(f"{role} is asked", name)
            got = await made(call, *args, **more)
            stamps.stamp(f"{role} {what}", name)
            return got

        return stamped

    async def sent(relay: Relay, data: bytes, *, last: bool = False) -> None:
        await send(relay, data, last=last)
        if data:
            first = relay.continuation is None
            stamps.stamp("first token out" if first else "second token out", relay.scrubber.unique)

    stamps.put(RequestRecord, "begins", begun)
    stamps.put(Call, "begin", called(begin, "has a token"))
    stamps.put(Call, "read_answer", called(whole, "has answered"))
    stamps.put(Relay, "_send", sent)
