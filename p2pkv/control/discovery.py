"""The discovery ping: how a proxy learns of an instance, and the answer. Messages only, no IO.

A ping is one msgpack map in one frame. Its first three fields are the classic ones, which every
proxy of the original connector reads; the next three satisfy vllm-router's MoRIIO mode; the rest is
ours. Fields that a reader does not know are ignored, and those that are missing have a default, so each side
may be older than the other. Version 2 has added `protocol` and `fit`, version 3 `partners`, version 4
`paused`, version 5 `replica`, version 6 `workload`, version 7 `first_token`, `ahead_tokens`, `parses`,
`sampler` and `resumes`. Since version 4 a ping also means that the engine gets on: none comes while it does
not.

A ping carries no authority: it has where to look, and the ranks' handshake proves who is there.

Goodbye is a ping with `leaving` set, not a message of another type: the original proxy's discovery
thread dies of an unknown type. An old router takes it for one more ping and forgets the instance later.

There is one answer, to a ping that asks for it: the partners of a D. Other proxies answer nothing.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from p2pkv.pairing import Address

DISCOVERY_VERSION = 7
PING_INTERVAL = 3.0
MAX_PING_BYTES = 4096
MAX_PARTNERS = 512
MAX_PARTNERS_BYTES = 1 << 14

_AddressText = Annotated[str, Meta(min_length=3, max_length=300)]
_Text = Annotated[str, Meta(max_length=512)]
_FitText = Annotated[str, Meta(max_length=512, pattern=r"\A[ -~]*\Z")]
_Size = Annotated[int, Meta(ge=1, le=1 << 16)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class Workload(Struct, frozen=True, kw_only=True):
    """What an engine's scheduler has to do.

    Attributes:
        running, waiting: requests, as vLLM counts them.
        prompts: requests whose prompts it has to compute and has not, or not wholly.
        tokens: of these prompts, not computed yet. What vLLM will find in its prefix cache of one that has
            not begun counts.
        answers: requests whose answers are decoded here, begun or not: those for more than one token.
        age: seconds before the ping was sent, when this was so.
    """

    running: _Count = 0
    waiting: _Count = 0
    prompts: _Count = 0
    tokens: _Count = 0
    answers: _Count = 0
    age: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0


class Ping(Struct, frozen=True, kw_only=True):
    """One engine, as it presents itself every few seconds; a data-parallel instance has several.

    Raises ValueError on a malformed address.

    Attributes:
        type: "P" prefills, "D" decodes, "both" does one or the other, as each request's id says. Version 5
            has added that; an older proxy ignores such a ping, and logs it.
        http_address: host:port of the OpenAI API in front of it; engines of one instance may share it.
        zmq_address: host:port of its rank 0, the address that goes into request ids.
        dp_size: before version 5, data-parallel engines behind `http_address`; p2pkv sends 1.
        tp_size: tensor-parallel size.
        transfer_mode: always "WRITE": P pushes.
        version: of this message; 0 is a classic ping.
        incarnation: random per start of the instance; "" if unknown.
        model: a name under which the instance serves its model; "" if unknown.
        dp_rank: its data-parallel rank in the whole instance.
        leaving: a clean stop; no more requests, please.
        protocol: PROTOCOL_VERSION of its ranks; 0 if unknown (p2pkv sent none before version 2 of this
            message).
        fit: what must be equal between a P and a D, as `protocol.handshake.fit` writes it; "" if
            unknown. A P and a D with different texts refuse each other.
        partners: the most P's that the proxy is to name; 0: it takes no answer.
        paused: vLLM's /pause has been called there, and /resume has not, or it finishes what it has and ends;
            no new requests, please.
        replica: the number in the header X-data-parallel-rank with which `http_address` sends a request to
            this engine; None: it needs no header. Before version 5 that was `dp_rank` where `dp_size` is
            above 1.
        workload: None if it is not known: of an older version, and where the worker is not on the host of its
            engine core (Ray).
        first_token: whether P's token may go to the client as the answer's first one. Of a P: 2 if it is the
            one behind the whole prompt, else 0. Of a D: 2 if it takes a prompt that ends with that token; 1:
            only for requests that bound their answer, since the model's own configuration does; else 0.
        ahead_tokens: tokens of prompts whose KV this D has room for before their requests come.
        sampler: what draws tokens there; two that are equal draw the same with one seed. "": no request may
            have one, or that is not known.
        parses: it has a --reasoning-parser, so that its chats may be other than plain text.
        resumes: whether a stream may go on from here to another D, and from there to here. 2: yes; 1: only if
            the request bounds its answer, since the model's own configuration does; 0: no, as what the server
            sets counts the answer's tokens.
    """

    type: Literal["P", "D", "both"]
    http_address: _AddressText
    zmq_address: _AddressText
    dp_size: _Size = 1
    tp_size: _Size = 1
    transfer_mode: _Text = "WRITE"
    version: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    incarnation: Annotated[str, Meta(max_length=64)] = ""
    model: _Text = ""
    dp_rank: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    leaving: bool = False
    protocol: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    fit: _FitText = ""
    partners: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    paused: bool = False
    replica: Annotated[int, Meta(ge=0, lt=1 << 16)] | None = None
    workload: Workload | None = None
    first_token: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    ahead_tokens: _Count = 0
    parses: bool = False
    sampler: _Text = ""
    resumes: Annotated[int, Meta(ge=0, le=1 << 16)] = 2

    def __post_init__(self) -> None:
        for field, text in (("http_address", self.http_address), ("zmq_address", self.zmq_address)):
            try:
                Address.parse(text)
            except ValueError as error:
                raise ValueError(f"{field} of a discovery ping: {error}") from None


def fit_differences(one: str, other: str) -> dict[str, tuple[str, str]]:
    """Where two texts of `Ping.fit` differ: by name, the values of both."""
    here, there = (dict(word.partition("=")[::2] for word in fit.split(", ")) for fit in (one, other))
    names = [name for name in here | there if here.get(name) != there.get(name)]
    if not (one and other):
        names = ["protocol"]
    return {name: (here.get(name, "none"), there.get(name, "none")) for name in names}


class PartnersAnswer(Struct, frozen=True, kw_only=True):
    """The proxy's answer to a D: P's that it may be paired with. Raises ValueError on a malformed address."""

    partners: Annotated[tuple[_AddressText, ...], Meta(max_length=MAX_PARTNERS)]
    """`zmq_address` of each, the likeliest first."""

    def __post_init__(self) -> None:
        for text in self.partners:
            try:
                Address.parse(text)
            except ValueError as error:
                raise ValueError(f"a partner in a proxy's answer: {error}") from None


class BadPing(ValueError):
    """What arrived on the discovery socket is no ping."""


class BadPartners(ValueError):
    """What a proxy sent is no answer to a ping."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ping)
_partners_decoder = msgspec.msgpack.Decoder(PartnersAnswer)
encode_ping: Callable[[Ping], bytes] = _encoder.encode


def decode_ping(frame: bytes | memoryview) -> Ping:
    """The ping in `frame`. Raises BadPing, and nothing else, for whatever is not one."""
    if len(frame) > MAX_PING_BYTES:
        raise BadPing(f"a discovery ping of {len(frame)} bytes exceeds {MAX_PING_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadPing(f"not a discovery ping: {error}") from None


def lasting(ping: Ping) -> Ping:
    """The ping without what changes while the engine runs: `paused` and `workload`."""
    return msgspec.structs.replace(ping, paused=False, workload=None)


def goodbye(ping: Ping) -> Ping:
    """The last ping of an instance that stops."""
    return msgspec.structs.replace(ping, leaving=True)


def encode_partners(addresses: Iterable[str]) -> bytes:
    """The frame of one answer, with as many of these addresses as it may hold."""
    kept: list[str] = []
    room = MAX_PARTNERS_BYTES - 64
    for address in islice(addresses, MAX_PARTNERS):
        room -= len(address) + 3
        if room < 0:
            break
        kept.append(address)
    # Not as a PartnersAnswer, which would check each address again, for each ping of a large fleet.
    return _encoder.encode({"partners": kept})


def decode_partners(frame: bytes | memoryview) -> tuple[str, ...]:
    """The addresses in `frame`. Raises BadPartners, and nothing else, for whatever is no answer."""
    if len(frame) > MAX_PARTNERS_BYTES:
        raise BadPartners(f"a proxy's answer of {len(frame)} bytes exceeds {MAX_PARTNERS_BYTES}")
    try:
        return _partners_decoder.decode(frame).partners
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadPartners(f"not a proxy's answer: {error}") from None
