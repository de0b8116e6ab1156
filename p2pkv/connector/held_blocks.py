"""How many of vLLM's KV blocks requests may hold that wait for another instance: P's finished prompts for one
D, and, in an instance of both roles, all prompts for others and all loads.

docs/design.md, "Instances of both roles", argues why these bounds prevent deadlocks.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from p2pkv.log import RateLimit
from p2pkv.pairing import Address

log = logging.getLogger("p2pkv")

FULL_SECONDS = 60.0
"""Between two log lines about one D that takes too little."""


class HeldBlocks:
    """P's blocks of finished prompts, which wait until D has taken them: how many each D holds.

    A D that takes nothing must not keep P from working for the others. It is full when it holds `share` of
    the blocks that no other D holds; so with the share 0.5, three Ds that take nothing leave an eighth.
    """

    def __init__(self, total: int, share: float) -> None:
        """`total`: blocks that finished prompts may hold at all."""
        self._total = total
        self._share = share
        self._by_decode: dict[Address, Counter[int]] = {}
        """Of each D: by block, how many prompts hold it."""
        self._prompts: dict[str, tuple[Address, list[int]]] = {}
        self._said = RateLimit(seconds=FULL_SECONDS)
        self.all = 0
        """Blocks that all D's hold together; one that two of them hold counts twice."""

    def hold(self, request_id: str, decode: Address, blocks: Iterable[Iterable[int]]) -> None:
        """The prompt is computed, and its blocks wait for D."""
        mine = sorted({block for table in blocks for block in table})
        self._prompts[request_id] = decode, mine
        if mine:
            of_this_decode = self._by_decode.setdefault(decode, Counter())
            self.all -= len(of_this_decode)
            of_this_decode.update(mine)
            self.all += len(of_this_decode)

    def free(self, request_id: str) -> None:
        """The workers have reported its blocks as free."""
        decode, mine = self._prompts.pop(request_id)
        if not mine:  # it was preempted before it ended
            return
        of_this_decode = self._by_decode[decode]
        of_this_decode.subtract(mine)
        for block in mine:
            if not of_this_decode[block]:
                del of_this_decode[block]
                self.all -= 1
        if not of_this_decode:
            del self._by_decode[decode]

    def full(self, decode: Address) -> bool:
        """Whether this D holds so many blocks that P begins no further prompt for it."""
        mine = len(self._by_decode.get(decode, ()))
        others = self.all - mine
        if not mine or mine < self._share * (self._total - others):
            return False
        if self._said.admits(decode):
            log.warning(
                f"the D at {decode} holds {mine} of the {self._total} KV blocks that P has for finished "
                f"prompts, and other Ds hold {others}: P begins no further prompt for it (held_share is "
                f"{self._share:g}; logged once a minute)"
            )
        return True


def most_blocks(tables: Sequence[tuple[int, int]], lookahead: int, tokens: int) -> int:
    """How many blocks vLLM gives a request of so many tokens at most. `tables`: of each of its block tables,
    tokens in a block, and blocks for the longest context; `lookahead`: tokens beyond the request's own."""
    return sum(min(-(-(tokens + lookahead) // size), most) for size, most in tables)


class BlockQuota:
    """The blocks that requests of one kind may hold at once. Who has waited longest goes first, so that short
    requests do not keep a long one waiting for ever."""

    def __init__(self, limit: float = math.inf, blocks: Callable[[int], int] = lambda tokens: 0) -> None:
        """`limit`: in blocks; `blocks`: the most that a request of so many tokens takes."""
        self.limit = limit
        self.taken = 0
        """Blocks of the admitted requests: as many as they may come to hold at most."""
        self.blocks = blocks
        self._admitted: dict[str, int] = {}
        self._waiting: dict[str, None] = {}

    def ever_admits(self, tokens: int) -> bool:
        """Whether a request of so many tokens may be admitted, if it is the only one."""
        return self.blocks(tokens) <= self.limit

    def admits(self, request_id: str, tokens: int, other_blocks: int = 0) -> bool:
        """Whether this request may `enter` now; if not it waits, and those that ask later wait behind it.

        `other_blocks`: blocks that are not of admitted requests, and count all the same.
        """
        first = next(iter(self._waiting), request_id)
        if first == request_id and self.taken + other_blocks + self.blocks(tokens) <= self.limit:
            return True
        self._waiting.setdefault(request_id)
        return False

    def enter(self, request_id: str, tokens: int) -> None:
        """The request has blocks now."""
        self.leave(request_id)
        self._admitted[request_id] = need = self.blocks(tokens)
        self.taken += need

    def leave(self, request_id: str) -> None:
        """The request does not wait for another instance any more, or will not enter."""
        self._waiting.pop(request_id, None)
        self.taken -= self._admitted.pop(request_id, 0)

    @property
    def admitted(self) -> list[str]:
        return list(self._admitted)

    @property
    def next_waiting(self) -> list[str]:
        """The request that has waited longest, if one waits."""
        return [next(iter(self._waiting))] if self._waiting else []
