"""One request between a made-up P and D: what both are told of it, step by step, and how it ends."""

from typing import Any

from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.engine.engines import Engine, at_baseline, prefill, step, wrong_cells
from support.waiting import wait_for

TOKENS = 96
BLOCKS = list(range(6))
"""Which hold so many tokens on either side, if nothing else is said."""


def expect(p: Engine | Address, d: Engine, *keys: str, tokens: int = TOKENS) -> None:
    for key in keys or ("k",):
        d.do(do.Expect(key, getattr(p, "address", p), tokens, b"digest"))


def begin(
    p: Engine, d: Engine, key: str = "k", tokens: int = TOKENS, blocks: list[int] = BLOCKS, salt: int = 0
) -> None:
    """D waits for a prompt, and P computes all of it."""
    expect(p, d, key, tokens=tokens)
    prefill(p, key, d.address, tokens, blocks, chunk=tokens, salt=salt)


def ask(
    p: Engine, d: Engine, key: str = "k", tokens: int = TOKENS, blocks: list[int] = BLOCKS, start: int = 0
) -> None:
    """D has blocks for a prompt that P has offered, and of which it has computed nothing."""
    expect(p, d, key, tokens=tokens)
    p.do(do.OfferPrompt(key, d.address, tokens, b"digest"))
    load(d, key, tokens, blocks, start)


def half(p: Engine, d: Engine, key: str = "k") -> None:
    """D loads a prompt of which P has computed the first half, and some of that has come."""
    ask(p, d, key)
    before = value(d, "bytes_scattered")
    step(p, key, BLOCKS, 0, TOKENS // 2)
    wait_for(lambda: value(d, "bytes_scattered") > before, what="a part of the first half")


def load(
    d: Engine, key: str = "k", tokens: int = TOKENS, blocks: list[int] = BLOCKS, start: int = 0, **more: Any
) -> None:
    """D has blocks for a prompt that P has begun. `more`: of the command."""
    d.wait(do.Begun(key))
    d.do(do.Load(key, start, tokens - 1, (blocks,), **more))


def arrives(
    d: Engine,
    key: str = "k",
    tokens: int = TOKENS,
    blocks: list[int] = BLOCKS,
    start: int = 0,
    salt: int = 0,
    seconds: float = 20.0,
) -> None:
    """All ranks of D say that they have loaded it, and every number is what P has computed."""
    d.wait(do.Loaded(key), seconds)
    assert [wrong_cells(rank, blocks, start, tokens - 1, salt) for rank in d.ranks] == [[]] * len(d.ranks)


def ends(p: Engine, d: Engine, *keys: str) -> None:
    for key in keys or ("k",):
        p.wait(do.BlocksFree(key))
        for engine in (p, d):
            engine.do(do.Forget(key))


def push(
    p: Engine, d: Engine, key: str = "k", salt: int = 0, tokens: int = 32, blocks: list[int] = BLOCKS
) -> None:
    begin(p, d, key, tokens, blocks, salt)
    load(d, key, tokens, blocks)
    arrives(d, key, tokens, blocks, salt=salt)
    ends(p, d, key)


def rest(*engines: Engine) -> None:
    busy = lambda each: [rank.rank.counters.snapshot() for rank in each.ranks]  # noqa: E731
    wait_for(lambda: all(map(at_baseline, engines)), what=f"the baseline of {[*map(busy, engines)]}")


def failure(d: Engine, key: str = "k", seconds: float = 10.0) -> str:
    """Wait until this load has failed; why. It fails once."""
    found: list[str] = []

    def failed() -> bool:
        found[:] = [event.reason for event in d.ranks[0].events(do.LoadFailed) if event.key == key]  # type: ignore[attr-defined]
        return bool(found)

    wait_for(failed, seconds, f"the failure of {key}")
    (reason,) = found
    return reason


def value(engine: Engine, name: str) -> int:
    return sum(each.rank.counters.snapshot()[name] for each in engine.ranks)


def scribble(engine: Engine, blocks: list[int], number: float = 7.0) -> None:
    """Somebody else gets these blocks."""
    for page in engine.ranks[0].pages:
        page[blocks] = number
