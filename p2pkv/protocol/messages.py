"""What two ranks say to each other: typed messages, one tagged union, unknown fields refused unless optional.

P is a rank that prefills and sends, D a rank that decodes and receives. D dials and P answers, so
that no request id can make a P connect anywhere. A transfer is named by (key, attempt), where the
attempt is D's own serial number of this asking; every message is bound to the incarnation of the
connection that carried it, which the handshake proves, so it need not be repeated here.

A new field is at most three files: declared here, set in the file that makes the message, and read in the
file that handles it. What vLLM's side knows or needs also passes engine/commands.py and connector/. Messages
have one form only (see `decode`), so a new field is a new PROTOCOL_VERSION, unless peers may ignore it. Such
a field is optional: its name on the wire begins with OPTIONAL, no other field ever had that name, and UNSET
leaves it out:

    note: Name | UnsetType = field(default=UNSET, name="?note")

Versions that do not know it drop it. A rank that must know looks for it in its peer's messages.
"""

from collections.abc import Callable, Set
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

PROTOCOL_VERSION = 5
OPTIONAL = "?"
MAX_MESSAGE_BYTES = 1 << 20
MAX_PIECES = 4096
MAX_CUT = 16
MAX_GROUPS = 64
_LONGEST_REASON = 2048
_DEEPEST = 32

Key = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Small = Annotated[int, Meta(ge=0, le=1 << 20)]
ChunkBytes = Annotated[int, Meta(ge=1, le=1 << 32)]
Positive = Annotated[int, Meta(ge=1, le=1 << 20)]
Serial = Annotated[int, Meta(ge=0, le=1 << 53)]
Transfers = Annotated[tuple[tuple[Key, Serial], ...], Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=512)]
Reason = Annotated[str, Meta(max_length=_LONGEST_REASON)]
Place = Annotated[str, Meta(min_length=3, max_length=300)]
Incarnation = Annotated[str, Meta(min_length=8, max_length=64)]
Blob = Annotated[bytes, Meta(max_length=4096)]
Digest = Annotated[bytes, Meta(max_length=64)]
Checksum = Annotated[bytes, Meta(max_length=16)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, array_like=False, tag_field="t"):
    """The base of every message. Its tag is what peers see, so it stays when the class is renamed."""


class _Shortened:
    """Cuts `reason`, which may quote anything: a peer could not read a longer message."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        reason = self.reason.encode(errors="replace").decode()
        msgspec.structs.force_setattr(self, "reason", reason[:_LONGEST_REASON])


class TransferMessage(Message, frozen=True):
    key: Key
    attempt: Serial


class KvGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose KV has one form: all of them, in a model whose layers are alike.

    Attributes:
        layers, heads: see `sharding.Shape`.
        row_bytes: bytes of one (layer, head, unit) row in memory.
        unit_tokens: tokens in a row: where the content is dense, those that a row stands for, mostly 1; those
            of a (kernel) block where a kernel packs tokens together.
        dtype: element type, torch's name without the prefix.
        codec: how the bytes of a row are arranged; handshake.py says what travels between which.
        layer_names: digest of the names of all its layers, in order.
        once: a layer has one row per head for a whole request (a recurrent state), and not one per unit.
        window: tokens that attention looks at from each token on, itself counted; 0: all before it. With
            `once`: how many of the last tokens a ring has slots for; 0: a recurrent state.
        chunked: attention looks at no token before the last multiple of `window`, instead.
        block: where there is a window, tokens that are kept together. P has all of a block or nothing, and D
            wants all or nothing, since its prefix cache keeps blocks; 1: D caches no prefixes.
        dcp: over how many ranks of a stage the tokens are divided (decode-context parallelism); 1: every rank
            has all tokens.
        interleave: where they are divided, tokens that follow each other on one rank.
    """

    layers: Annotated[tuple[Small, ...], Meta(min_length=1, max_length=1024)]
    heads: Positive
    row_bytes: Annotated[int, Meta(ge=1, le=1 << 30)]
    unit_tokens: Positive
    dtype: Name
    codec: Name
    layer_names: Name
    once: bool = False
    window: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    block: Positive = 1
    dcp: Positive = 1
    interleave: Positive = 1
    chunked: bool = False


class Cache(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's KV cache, as far as a peer must know it. Messages name KV groups by their number here.

    `tp`, `pcp`: tensor-parallel and prefill-context-parallel size; see `sharding.Shape`.
    """

    tp: Positive
    groups: Annotated[tuple[KvGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    pcp: Positive = 1

    @property
    def stages(self) -> int:
        return len(self.groups[0].layers)

    @property
    def ranks(self) -> int:
        return self.stages * self.pcp * self.tp


class Hello(Message, frozen=True, tag="Hello"):
    """Who I am and what my cache looks like: the first message of a connection, and its answer.

    `digest` is the checksum that this rank can compute, and `verify` whether it wants one of each chunk.
    `address` is where this rank listens, `addresses` those of all ranks of its engine in the order
    of their ranks, `to` what the dialer dialed. `incarnation` is random per start of a rank. `prefetch`: this
    rank of D has room for KV whose request has not come yet. `instance`: where the first engine of its
    data-parallel instance on this host listens, the others behind it with as many ports each; "": it has no
    other engine. `several`: this rank takes several messages that come together, a frame each.
    `together`: it launches receives together, as `Sent` says.
    """

    version: Small
    incarnation: Incarnation
    role: Literal["P", "D"]
    rank: Small
    to: Place
    address: Place
    addresses: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=16384)]
    model: Name
    weights: Name
    cache: Cache
    link: Name
    digest: Name
    verify: bool
    prefetch: bool = field(default=False, name="ahead")
    instance: Annotated[str, Meta(max_length=300)] = ""
    several: bool | UnsetType = field(default=UNSET, name="?several")
    together: bool | UnsetType = field(default=UNSET, name="?together")


class UnknownHello(Struct, frozen=True, tag_field="t", tag="Hello"):
    """What the Hello of each PROTOCOL_VERSION has, so that ranks of different ones can refuse each other."""

    version: Small
    incarnation: Incarnation
    address: Place


class Welcome(Message, frozen=True, tag="Welcome"):
    """Your Hello is accepted; `hello` is mine, `plan` the hash of our common plan."""

    you: Incarnation
    hello: Hello
    plan: Name


class Refuse(_Shortened, Message, frozen=True, tag="Refuse"):
    """Your Hello is refused for good, and why, for a person."""

    you: Incarnation
    reason: Reason


class UnknownPeer(Message, frozen=True, tag="Stranger"):
    """I have no Hello of this connection (I may have restarted): say Hello again."""


class Inspect(Message, frozen=True, tag="Inspect"):
    """Anybody who may connect: what do you hold now?"""


class Report(Message, frozen=True, tag="Report"):
    """The answer to Inspect: counters and gauges of this rank, by name."""

    values: dict[Name, int | float | str]


class LinkInvite(Message, frozen=True, tag="LinkInvite"):
    """P to D: let us build link number `link`; `blob` is the factory's."""

    link: Small
    blob: Blob


class LinkAccept(Message, frozen=True, tag="LinkAccept"):
    """D to P: my end of link number `link` is up, with room for `window` bytes; `blob` is the factory's."""

    link: Small
    window: Annotated[int, Meta(ge=1, le=1 << 40)]
    blob: Blob


class LinkDown(_Shortened, Message, frozen=True, tag="LinkDown"):
    """Either way: I have aborted link number `link`."""

    link: Small
    reason: Reason


class Heartbeat(Message, frozen=True, tag="Heartbeat"):
    """D to P, every beat: these transfers are still wanted or queued here. Renews P's leases."""

    transfers: Transfers


class HeartbeatAck(Message, frozen=True, tag="HeartbeatAck"):
    """P to D, the answer: these I know (or may still learn of in the step that runs), these I do not."""

    held: Transfers
    unknown: Transfers


class Partners(Message, frozen=True, tag="Partners"):
    """Rank 0 of a D (at `engine`) to its other ranks: build links to these P's, by their rank 0's address."""

    engine: Place
    addresses: Annotated[tuple[Place, ...], Meta(max_length=1024)]


class PromptOwner(Message, frozen=True, tag="Elsewhere"):
    """P to another engine of its instance, every third of a lease: `engine` (the address of its rank 0) has
    these requests, whose ids name you."""

    engine: Place
    keys: Annotated[tuple[Key, ...], Meta(max_length=1024)]


class Redirect(TransferMessage, frozen=True, tag="Referral"):
    """P to D: another engine of this instance has this transfer's request: ask it, as if its id named it."""

    engine: Place


class PrefetchOffer(Message, frozen=True, tag="Ahead"):
    """P to D: the prefill of this prompt, which is for you, has begun, and you have not asked for it yet."""

    key: Key
    tokens: Count
    digest: Digest


class Piece(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rectangle of a KV group: global layers [layer, layer_stop) x tokens [start, stop), all heads of the
    edge. In a group with one row per request `tokens` are [0, 1). Where context parallelism divides the
    tokens, `start` and `stop` count those that both ranks keep."""

    group: Annotated[int, Meta(ge=0, le=MAX_GROUPS - 1)]
    layer: Small
    layer_stop: Small
    start: Count
    stop: Count


Pieces = Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=MAX_PIECES)]
Cuts = Annotated[tuple[Pieces, ...], Meta(max_length=MAX_CUT)]


class Offer(TransferMessage, frozen=True, tag="Offer"):
    """P to D: the prefill of this prompt has begun. `generation` names P's weights; "": those of its start.

    `ready`: all of it is computed, and D may cut what it wants into chunks of at most so many bytes itself.
    P then offers it again, if D has not said yet what it wants.
    """

    tokens: Count
    digest: Digest
    generation: Name
    ready: ChunkBytes | UnsetType = field(default=UNSET, name="?ready")


class Want(TransferMessage, frozen=True, tag="Want"):
    """D to P: send me the KV of tokens [start, stop); an empty range releases P.

    `prefetch`: no request has come for it yet, so keep the blocks, until the same is wanted without it; with
    an empty range I have let go of it, as if I had never asked. `cut`: the pieces of the first chunks, as if
    P had announced them: D grants them without being asked. Only after an offer that was `ready`.
    """

    start: Count
    stop: Count
    prefetch: bool = field(default=False, name="ahead")
    cut: Cuts | UnsetType = field(default=UNSET, name="?cut")

    @property
    def empty(self) -> bool:
        return self.stop <= self.start


class Chunk(TransferMessage, frozen=True, tag="Chunk"):
    """P to D: message number `chunk` of this transfer is ready to be gathered; may I send it?"""

    chunk: Small
    nbytes: ChunkBytes
    pieces: Pieces


class Grant(TransferMessage, frozen=True, tag="Grant"):
    """D to P: the receive of this chunk is posted on link number `link`, at `slot`. Grants are
    obeyed in order, and each one is obeyed, with filler if the transfer has ended meanwhile."""

    chunk: Small
    nbytes: ChunkBytes
    link: Small
    slot: Annotated[int, Meta(ge=0, le=1 << 62)]


class Sent(TransferMessage, frozen=True, tag="Sent"):
    """P to D: this chunk has gone out on the link. `filler`: what went out is to be dropped. `digest`: the
    checksum of its bytes, if one of the two ranks wants that, else empty. `together`: so many, this one and
    the next ones, P launches as one, and D must do the same (see Hello)."""

    chunk: Small
    link: Small
    filler: bool
    digest: Checksum = b""
    together: Annotated[int, Meta(ge=2, le=64)] | UnsetType = field(default=UNSET, name="?together")


class Done(TransferMessage, frozen=True, tag="Done"):
    """D to P: every byte that I wanted from you is in my blocks."""


class Failed(_Shortened, TransferMessage, frozen=True, tag="Failed"):
    """P to D: this transfer will not complete, and why."""

    reason: Reason


class Cancel(_Shortened, TransferMessage, frozen=True, tag="Cancel"):
    """D to P: I do not want this transfer any more, and why."""

    reason: Reason


AnyMessage = (
    Hello | Welcome | Refuse | UnknownPeer | Inspect | Report | LinkInvite | LinkAccept | LinkDown | Heartbeat
    | HeartbeatAck | Partners | PromptOwner | Redirect | PrefetchOffer | Offer | Want | Chunk | Grant | Sent
    | Done | Failed | Cancel
)  # fmt: skip


class BadMessage(ValueError):
    """What a peer sent is no message of this protocol."""


encode: Callable[[AnyMessage], bytes] = msgspec.msgpack.Encoder().encode
"""The bytes of one message (msgpack)."""

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_unknown_hello = msgspec.msgpack.Decoder(UnknownHello)
_STRUCTS: tuple[type[Struct], ...] = (*get_args(AnyMessage), KvGroup, Cache)
_KNOWN = frozenset(each.encode_name for kind in _STRUCTS for each in msgspec.structs.fields(kind))


def decode(data: bytes | memoryview) -> AnyMessage | UnknownHello:
    """The message in `data`, without optional fields that this version does not know. Every message has one
    form only; a Hello that only another version can read is an UnknownHello. Raises BadMessage, and nothing
    else, for whatever is no message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a control message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        try:
            message = _decoder.decode(data)
        except msgspec.ValidationError:
            data = without_optional(data, _KNOWN)
            message = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError) as error:
        with suppress(msgspec.MsgspecError, RecursionError, ValueError):
            if (hello := _unknown_hello.decode(data)).version != PROTOCOL_VERSION:
                return hello
        raise BadMessage(f"not a p2pkv message: {str(error)[:200]}") from None
    if encode(message) != data:
        raise BadMessage(
            f"a {type(message).__name__} in another form than p2pkv writes: is a field there twice?"
        )
    return message


def without_optional(data: bytes | memoryview, known: Set[str]) -> bytes:
    """A message without its optional fields but those of these names. Raises what `decode` catches."""
    fields = msgspec.msgpack.decode(data)
    if msgspec.msgpack.encode(fields) != data:
        raise ValueError("fields are in another form than p2pkv writes: is one there twice?")
    return msgspec.msgpack.encode(_kept(fields, known, _DEEPEST))


def _kept(value: object, known: Set[str], depth: int) -> object:
    if depth == 0:  # what Python itself bears depends on its version
        raise ValueError(f"fields nested more than {_DEEPEST} deep")
    if isinstance(value, list):
        return [_kept(each, known, depth - 1) for each in value]
    if isinstance(value, dict):
        kept = {name: _kept(each, known, depth - 1) for name, each in value.items()}
        return {
            name: each
            for name, each in kept.items()
            if name in known or not (isinstance(name, str) and name.startswith(OPTIONAL))
        }
    return value
