"""What the forward thread orders from the engine thread, and the events that it gets back.

Commands are small and frozen; handing one over is an append to a deque.
"""

from typing import Literal

from msgspec import Struct

from p2pkv.device import Fence
from p2pkv.pairing import Address

Blocks = tuple[list[int], ...]
"""A request's block table, for each KV cache group."""


class Command(Struct, frozen=True):
    """What the forward thread orders."""


class Event(Struct, frozen=True):
    """What the forward thread gets back."""


# To P's engine.


class HoldPrompt(Command, frozen=True):
    """P's scheduler has this request. `named`: if its id names another engine of this instance, that one."""

    key: str
    decode: Address
    named: Address | None = None


class OfferPrompt(Command, frozen=True):
    """The prompt's prefill begins. `generation` names P's weights; "": those it started with."""

    key: str
    decode: Address
    tokens: int
    digest: bytes
    generation: str = ""


class PromptBlocks(Command, frozen=True):
    """Where the prompt's tokens lie, from this step on."""

    key: str
    blocks: Blocks


class Computed(Command, frozen=True):
    """Local layers [layer, layer_stop) hold the prompts' tokens [0, stop) once `fence` is ready."""

    prompts: tuple[tuple[str, int], ...]
    layer: int
    layer_stop: int
    fence: Fence


class Flush(Command, frozen=True):
    """The step is over for these prompts."""

    keys: tuple[str, ...]


class Revoked(Command, frozen=True):
    """The blocks of this prompt were taken back; see Rank.revoke."""

    key: str


class Abort(Command, frozen=True):
    """P's request has ended before its prefill has: give up the transfer."""

    key: str
    reason: str


class Release(Command, frozen=True):
    """No D will ask for this prompt any more: its blocks may go."""

    key: str
    reason: str


# To D's engine.


class Expect(Command, frozen=True):
    """D's scheduler has this request in its queue; P, which has rank 0 at `prefill`, computes its KV."""

    key: str
    prefill: Address
    tokens: int
    digest: bytes


class Load(Command, frozen=True):
    """The request has blocks: load tokens [start, stop); an empty range releases P. `fence`: until it is
    passed the step before may still write to these blocks; None: no step may. `number`: this load's, which
    `Loaded` repeats; 0: it has none."""

    key: str
    start: int
    stop: int
    blocks: Blocks
    fence: Fence | None = None
    number: int = 0


class Invalidate(Command, frozen=True):
    """KV that came before its request is not valid any more. `generation` names D's weights from now on."""

    generation: str
    reason: str


class NamePartners(Command, frozen=True):
    """The proxy has named these P's to rank 0 of D, by the addresses of their rank 0, the likeliest first."""

    addresses: tuple[str, ...]


class Drop(Command, frozen=True):
    """D's request has ended: load nothing more into its blocks."""

    key: str
    reason: str


# To either.


class Forget(Command, frozen=True):
    """The forward thread orders nothing more for this key. `role`: the role of the rank that had it, as one
    key may go in both directions; "": whichever had it."""

    key: str
    role: Literal["P", "D", ""] = ""


# What the forward thread gets back.


class BlocksFree(Event, frozen=True):
    """P: nothing reads this prompt's blocks any more."""

    key: str


class Begun(Event, frozen=True):
    """D: P has begun to compute this prompt. `generation` names P's weights; None: this rank gets no part."""

    key: str
    generation: str | None = ""


class Loaded(Event, frozen=True):
    """D: all that was asked for is in the blocks. `number`: the load's."""

    key: str
    number: int = 0


class PrefetchComplete(Event, frozen=True):
    """D: all of this prompt lies here, for its request's first step; `tokens`, `digest`: as in `Expect`."""

    key: str
    tokens: int
    digest: bytes


class LoadFailed(Event, frozen=True):
    """D: the prompt's KV will not come; nothing is written to the request's blocks any more."""

    key: str
    reason: str
