"""Which tokens of a prompt each rank of a context-parallel group keeps, and which two ranks have in common.

vLLM divides the tokens of a prompt over the ranks of a decode-context-parallel group in turn: `run` tokens
to the first rank, the next `run` to the second, and so on (`--cp-kv-cache-interleave-size`). A rank's blocks
hold its own tokens only, one behind the other, so that a block of the scheduler covers as many tokens as the
blocks of all ranks of the group together.

What two ranks have in common is numbered on its own, from 0, in the order of the prompt. Chunks name these
numbers, so each rank counts rows without a gap, whatever the other's division is.
"""

from functools import cached_property, lru_cache
from math import lcm

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

MAX_CYCLE = 1 << 20
"""Tokens after which two divisions repeat; more are an error in a configuration."""

Positions = NDArray[np.int64]


class Part(Struct, frozen=True, array_like=True):
    """The tokens of each prompt that `rank` of so many `ranks` keeps: all where `ranks` is 1.

    `run`: tokens that follow each other on one rank.
    """

    rank: int
    ranks: int
    run: int

    @property
    def cycle(self) -> int:
        """Tokens after which the first rank has its turn again."""
        return self.ranks * self.run

    def positions(self, tokens: Positions) -> Positions:
        """Where these tokens, which the rank keeps, are among all that it keeps."""
        positions: Positions = tokens // self.cycle * self.run + tokens % self.run
        return positions


class Common(Struct, frozen=True, array_like=True, dict=True):
    """The tokens that a rank of P and a rank of D both keep, of which one rank or both do not keep all.

    They are numbered from 0, in the order of the prompt.
    """

    source: Part
    target: Part

    @property
    def cycle(self) -> int:
        """Tokens after which the pattern repeats."""
        return lcm(self.source.cycle, self.target.cycle)

    @cached_property
    def pattern(self) -> Positions:
        """The common tokens of the first cycle."""
        tokens = np.arange(self.cycle, dtype=np.int64)
        kept = [tokens // part.run % part.ranks == part.rank for part in (self.source, self.target)]
        found: Positions = tokens[kept[0] & kept[1]]
        return found

    def count(self, stop: int) -> int:
        """How many of the prompt's first `stop` tokens are common."""
        cycles, rest = divmod(stop, self.cycle)
        return cycles * len(self.pattern) + int(np.searchsorted(self.pattern, rest))

    def on_source(self, start: int, stop: int) -> Positions:
        """Where the common tokens with these numbers are among those that P's rank keeps."""
        return self.source.positions(self._tokens(start, stop))

    def on_target(self, start: int, stop: int) -> Positions:
        return self.target.positions(self._tokens(start, stop))

    def _tokens(self, start: int, stop: int) -> Positions:
        numbers = np.arange(start, stop, dtype=np.int64)
        tokens: Positions = self.pattern[numbers % len(self.pattern)]
        tokens += numbers // len(self.pattern) * self.cycle
        return tokens


@lru_cache(maxsize=4096)
def common(source: Part, target: Part) -> Common | None:
    """What the two ranks have in common; the same object when asked again. None if each keeps all tokens."""
    return None if source.ranks == target.ranks == 1 else Common(source, target)
