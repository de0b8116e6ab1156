"""`p2pkv doctor` for two hosts: do the ranks of a pair answer, and what does a link between two hosts carry?

`--pair` asks the ranks of two running instances. `--listen` on P's host and `--connect` on D's need no
instance: the two doctors exchange Hellos over a connection as ranks have it, build one real link, of
the kind that instances would have, and move some messages. As between ranks, D dials, and P sends.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import TypeVar

import msgspec
import psutil  # as torch it comes with vLLM
import torch

import p2pkv
from p2pkv import plugin
from p2pkv.cli.findings import CheckFailed, Finding
from p2pkv.control.discovery import fit_differences
from p2pkv.control.endpoint import Connection, Endpoint, inspect
from p2pkv.control.security import Members
from p2pkv.device import own_stream
from p2pkv.link_kinds import kind_of
from p2pkv.links import make_factory
from p2pkv.links.base import Inbound, LinkError, LinkFactory, Outbound, Receive, Send
from p2pkv.pairing import Address
from p2pkv.protocol.handshake import SAME_LINK
from p2pkv.protocol.messages import PROTOCOL_VERSION, BadMessage

MESSAGE_BYTES = 8 << 20
WINDOW = 4
"""Messages that are under way at a time."""

COMPARED, TIMED = 4, 32
"""Messages that are compared byte by byte, and those behind them, whose time is taken."""

STAGING_BYTES = 2 * WINDOW * MESSAGE_BYTES
ANSWER_SECONDS = 20.0
"""How long the other doctor may take for anything; a link may take `build_seconds` longer to come up."""

LISTEN_SECONDS = 600.0
LAST_MESSAGE_SECONDS = 1.0
"""How long the reason for a broken link may be on its way."""

PAUSE_SECONDS = 0.0001
"""Between two looks at a link."""

NETWORK = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_NET")
"""Environment variables that decide which network NCCL takes."""


def ask_instances(p: Address, d: Address, members: Members | None) -> Iterator[Finding]:
    """Do all ranks of both answer, and do the two fit? `p` and `d` are the addresses of their first ranks."""
    firsts = []
    for role, address, vllms in (("P", p, "kv_producer"), ("D", d, "kv_consumer")):
        ranks: list[dict[str, int | float | str]] = []
        try:
            ranks.append(inspect(address, members=members))
            # D dials those that P advertises, which may be on several hosts.
            for other in str(ranks[0].get("addresses", "")).split()[1:]:
                ranks.append(inspect(Address.parse(other), members=members))
        except (TimeoutError, BadMessage) as error:
            yield Finding(f"{role} rank {len(ranks)}", f"{error} (via {way_to(address.host)})", ok=False)
            continue
        first, links = ranks[0], sum(int(rank.get("links", 0)) for rank in ranks)
        firsts.append(first)
        stopped = next((str(rank["engine"]) for rank in ranks if rank.get("engine", "runs") != "runs"), "")
        sentence = (
            f"{address} has role {first['role']}, from here by {way_to(address.host)}; all {len(ranks)} of "
            f"its ranks answer; links that are up: {links}"
        )
        if stopped:
            sentence += f"; it cannot serve now: {stopped}"
        if first.get("instance"):
            sentence += "; ask its other data-parallel engines too, each at its first port"
        if not (fits := first["role"] in (role, "both")):
            sentence += f"; expected kv_role {vllms} or kv_both: P comes first, then D"
        yield Finding(role, sentence, ok=fits and not stopped)
        for number, rank in enumerate(ranks):
            if odd := [each for each in ("fit", "link", "addresses") if rank.get(each) != first.get(each)]:
                differ = [*fit_differences(str(rank.get("fit", "")), str(first.get("fit", "")))] or odd
                sentence = f"it and rank 0 differ in {' and '.join(differ)}: start all with the same files"
                yield Finding(f"{role} rank {number}", sentence, ok=False)
    if len(firsts) == 2:
        one, two = firsts
        yield same("link", str(one.get("link")), str(two.get("link")), ("P", "D"), SAME_LINK)
        found = fit_differences(str(one.get("fit", "")), str(two.get("fit", "")))
        differ = [f"{name} ({' and '.join(each)})" for name, each in found.items()]
        sentence = f"{one.get('model')} on P and {two.get('model')} on D may be a pair"
        if differ:
            sentence = f"P and D do not fit: {' and '.join(differ)} differ (docs/compatibility.md)"
        yield Finding("fit", sentence, ok=not differ)


def same(what: str, one: str, two: str, sides: tuple[str, str], advice: str) -> Finding:
    if one == two:
        return Finding(what, f"{one} on both")
    return Finding(what, f"{one} on {sides[0]} and {two} on {sides[1]}: {advice}", ok=False)


def way_to(host: str) -> str:
    """The interface and the address from which this machine reaches `host`."""
    try:
        own = address_towards(host)
    except OSError as error:
        return f"no way ({error})"
    return f"{interface} ({own})" if (interface := interface_of(own)) else own


def address_towards(host: str) -> str:
    """This machine's address from which it would reach `host`; nothing is sent. Raises OSError."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(own: str) -> str | None:
    """The interface that has this address of this machine; None if that cannot be found out."""
    interfaces = psutil.net_if_addrs().items()
    known = {each.address.partition("%")[0]: name for name, some in interfaces for each in some}
    return known.get(own.partition("%")[0])


class PeerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One side. `link`: as instances compare it; `way`: how it reaches the other; `network`: for NCCL."""

    p2pkv: str
    protocol: int
    vllm: str
    link: str
    way: str
    network: dict[str, str]

    @classmethod
    def this_side(cls, link: str, way: str) -> "PeerReport":
        network = {name: os.environ[name] for name in NETWORK if name in os.environ}
        return cls(p2pkv.__version__, PROTOCOL_VERSION, plugin.vllm_version() or "none", link, way, network)


class DoctorMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """From one doctor to the other."""


class CheckRequest(DoctorMessage, frozen=True, tag="Ask"):
    """D to P: the first message. `host`: D's address."""

    about: PeerReport
    host: str


class Invite(DoctorMessage, frozen=True):
    """P to D: the answer. `blob` is the factory's, empty if the kinds differ."""

    about: PeerReport
    blob: bytes


class Accept(DoctorMessage, frozen=True):
    """D to P: D's end is there."""

    blob: bytes


class Granted(DoctorMessage, frozen=True, tag="Grant"):
    """D to P: the receive of this message is posted."""

    number: int
    remote_slot: int


class CheckResult(DoctorMessage, frozen=True, tag="Over"):
    """Either way: that was all. `rate`: bytes per second; `failure`: a sentence, if it went wrong."""

    rate: float = 0.0
    failure: str = ""


SomeMessage = TypeVar("SomeMessage", bound=DoctorMessage)

_decoder = msgspec.msgpack.Decoder(CheckRequest | Invite | Accept | Granted | CheckResult)


def compare(mine: PeerReport, theirs: PeerReport) -> Iterator[Finding]:
    sides, of_p2pkv = ("this side", "the other"), "install the same version of p2pkv on both"
    yield same("p2pkv", mine.p2pkv, theirs.p2pkv, sides, "install the same version on both")
    yield same("protocol", str(mine.protocol), str(theirs.protocol), sides, of_p2pkv)
    yield same("vLLM", mine.vllm, theirs.vllm, sides, "install the same version on both")
    yield same("link", mine.link, theirs.link, sides, SAME_LINK)
    yield Finding("network", f"this side by {mine.way}, the other by {theirs.way}")
    for name in sorted({*mine.network, *theirs.network}):
        one, two = (each.network.get(name, "not set") for each in (mine, theirs))
        yield Finding(name, f"{one} on this side, {two} on the other")


class Conversation:
    """The messages between two doctors, in their order, over a connection as ranks have it."""

    def __init__(self, endpoint: Endpoint, connection: Connection | None = None) -> None:
        """`connection`: the dialed one; None: that of the first doctor that asks."""
        self._endpoint = endpoint
        self._connection = connection
        self._received: deque[DoctorMessage] = deque()
        self._known = False
        """Whether the check has failed, and both sides know."""

    def send(self, message: DoctorMessage) -> bool:
        """False if there is no connection, or not yet."""
        return self._connection is not None and self._connection.send(msgspec.msgpack.encode(message))

    def poll(self, seconds: float = 0.0) -> None:
        """Take in what has come; wait for it so long at most. Raises CheckFailed if the connection fails."""
        self._endpoint.wait(seconds)
        for connection, data in self._endpoint.receive():
            try:
                message = _decoder.decode(data)
            except msgspec.MsgspecError:
                continue  # of another process, such as a rank
            if self._connection is None and isinstance(message, CheckRequest):
                self._connection = connection
            if connection is self._connection:
                self._received.append(message)
        for failure in self._endpoint.failures():
            if failure.connection is not None:
                raise CheckFailed(failure.reason)
            if not failure.quiet:
                print(f"[--] {failure.reason}", flush=True)

    def messages(self) -> Iterator[DoctorMessage]:
        """What has come and was not read. Raises CheckFailed if the check has failed there."""
        while self._received:
            message = self._received.popleft()
            if isinstance(message, CheckResult) and message.failure:
                self.send(CheckResult())  # it may go now
                self._known = True
                raise CheckFailed(f"the other side failed: {message.failure}")
            yield message

    def polls(self, seconds: float) -> Iterator[None]:
        """Take in what comes for so long, with looks at it in between. Raises CheckFailed as `poll` does."""
        end = time.monotonic() + seconds
        while True:
            yield
            if time.monotonic() > end:
                return
            self.poll(0.05)

    def over(self, error: LinkError | CheckFailed) -> CheckFailed:
        """The error to raise; the other side gets it, too, unless it sends the cause of a broken link."""
        if isinstance(error, LinkError):
            try:
                for _ in self.polls(LAST_MESSAGE_SECONDS):
                    deque(self.messages(), maxlen=0)
            except CheckFailed as theirs:
                return theirs
        if not self._known and self.send(CheckResult(failure=str(error))):
            # What a dialing side has not read when we close is lost: so wait for its last message.
            with suppress(CheckFailed):
                for _ in self.polls(ANSWER_SECONDS):
                    if any(isinstance(message, CheckResult) for message in self._received):
                        break
        return CheckFailed(str(error))

    def receive(self, kind: type[SomeMessage], seconds: float) -> SomeMessage:
        """The next message, which is of this kind. Raises CheckFailed."""
        for _ in self.polls(seconds):
            for message in self.messages():
                if isinstance(message, kind):
                    return message
                raise CheckFailed(f"the other doctor sent {type(message).__name__}: expected {kind.__name__}")
        raise CheckFailed(f"no doctor has answered for {seconds:g} s; for running instances use --pair")

    def expect_nothing(self) -> None:
        """Between two looks at a link. Raises CheckFailed if the other side has sent anything."""
        self.poll(PAUSE_SECONDS)
        for message in self.messages():
            raise CheckFailed(f"the other doctor sent {type(message).__name__}: nothing was expected")

    def reach(self, address: Address, message: DoctorMessage) -> None:
        """Send the first message once the other side can be reached. Raises CheckFailed."""
        for _ in self.polls(ANSWER_SECONDS):
            if self.send(message):
                return
        raise CheckFailed(
            f"nothing answers at {address}: is `p2pkv doctor --listen {address}` running there, and does "
            f"every firewall in between let TCP to port {address.port} pass?"
        )


def listen(address: Address, members: Members | None, link: str) -> Iterator[Finding]:
    """P's side: wait for the other doctor at `address`, and send what it grants. Raises PortTaken,
    CheckFailed, and ValueError for a link that this machine cannot have."""
    with ExitStack() as stack:
        factory = _factory(stack, link, address.host)
        endpoint = stack.enter_context(closing(Endpoint(address, members)))
        other = Conversation(endpoint)
        secret = " --secret-file FILE" if members else ""
        print(f"[--] on the other host: p2pkv doctor --connect {address}{secret}", flush=True)
        ask = other.receive(CheckRequest, LISTEN_SECONDS)
        mine = PeerReport.this_side(factory.kind, way_to(ask.host))
        yield from compare(mine, ask.about)
        if ask.about.link != mine.link:
            other.send(Invite(mine, b""))
            other.receive(CheckResult, ANSWER_SECONDS)
            return
        try:
            invitation = factory.invite()
            other.send(Invite(mine, invitation))
            accepted = other.receive(Accept, ANSWER_SECONDS)
            outbound = factory.complete(invitation, accepted.blob)
            stack.callback(outbound.abort)
            rate = _send(other, outbound, ANSWER_SECONDS + factory.build_seconds)
        except (LinkError, CheckFailed) as error:
            raise other.over(error) from None
        yield Finding("data", f"the other side received it at {rate / 1e9:.2f} GB/s")


def connect(address: Address, members: Members | None, link: str) -> Iterator[Finding]:
    """D's side: dial the other doctor, grant it some messages, and look at what comes."""
    try:
        own = address_towards(address.host)
    except OSError as error:
        raise CheckFailed(f"this machine knows no way to {address.host} ({error})") from None
    with ExitStack() as stack:
        factory = _factory(stack, link, own)
        endpoint = stack.enter_context(closing(Endpoint(None, members)))
        other = Conversation(endpoint, endpoint.dial(address))
        mine = PeerReport.this_side(factory.kind, way_to(address.host))
        other.reach(address, CheckRequest(mine, own))
        invited = other.receive(Invite, ANSWER_SECONDS)
        yield from compare(mine, invited.about)
        if not invited.blob:
            other.send(CheckResult())
            return
        try:
            inbound, acceptance = factory.accept(invited.blob, WINDOW * MESSAGE_BYTES)
            stack.callback(inbound.abort)
            other.send(Accept(acceptance))
            rate = _receive(other, inbound, ANSWER_SECONDS + factory.build_seconds)
        except (LinkError, CheckFailed) as error:
            raise other.over(error) from None
        other.send(CheckResult(rate))
        way = inbound.way or factory.kind
        sentence = (
            f"{COMPARED} messages of {MESSAGE_BYTES >> 20} MiB came over {way} as they were sent, and "
            f"{TIMED} more at {rate / 1e9:.2f} GB/s"
        )
        yield Finding("data", sentence)


def _factory(stack: ExitStack, link: str, host: str) -> LinkFactory:
    """Links as an instance has them; on a GPU, the calling thread's work goes to a stream of its own."""
    factory = make_factory(link, host=host, staging_bytes=STAGING_BYTES)
    stack.callback(factory.close)
    on_gpu = torch.cuda.is_available() and kind_of(link, has_gpu=True).memory != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    stack.enter_context(own_stream(device))
    return factory


def contents_of(number: int, device: torch.device) -> torch.Tensor:
    """What message `number` holds: int64, 7919 times the number of each element, and the message's first."""
    made = torch.arange(MESSAGE_BYTES // 8, device=device).mul_(7919)
    made[0] = number
    return made


def _send(other: Conversation, outbound: Outbound, seconds: float) -> float:
    """Send what is granted until the other side has all; returns the rate that it has measured."""
    granted: deque[Granted] = deque()
    sends: deque[Send] = deque()
    contents: torch.Tensor | None = None
    lost: LinkError | None = None
    left, end = COMPARED + TIMED, time.monotonic() + seconds
    while True:
        other.poll(PAUSE_SECONDS)
        try:
            outbound.poll()
        except LinkError as error:
            lost = error
        for message in other.messages():
            if isinstance(message, CheckResult):
                return message.rate
            if isinstance(message, Granted):
                granted.append(message)
                end = time.monotonic() + ANSWER_SECONDS
        while granted and outbound.ready():
            send = outbound.reserve(MESSAGE_BYTES, granted[0].remote_slot)
            if send is None:
                break
            number = granted.popleft().number
            contents = contents_of(0, send.buffer.device) if contents is None else contents
            contents[0] = number
            send.buffer.view(torch.int64).copy_(contents)
            send.commit()
            sends.append(send)
        while sends and sends[0].done():
            sends.popleft()
            left -= 1
        if lost is not None and left:  # else the other side has all: its result is on the way
            raise lost
        if time.monotonic() > end:
            raise CheckFailed("the other side has granted nothing more, and has sent no reason")


def _receive(other: Conversation, inbound: Inbound, seconds: float) -> float:
    """Grant all messages; bytes per second of those whose time is taken. Raises CheckFailed, LinkError."""
    end = time.monotonic() + seconds
    while not inbound.ready():
        inbound.poll()
        other.expect_nothing()
        if time.monotonic() > end:
            raise CheckFailed(
                f"the link did not come up in {seconds:g} s: P's side has to reach this one, too; see that "
                "no firewall is in the way, and which network NCCL takes (NCCL_DEBUG=INFO)"
            )
    _grant(other, inbound, range(COMPARED), compare=True)
    begin = time.monotonic()
    _grant(other, inbound, range(COMPARED, COMPARED + TIMED), compare=False)
    return TIMED * MESSAGE_BYTES / (time.monotonic() - begin)


def _grant(other: Conversation, inbound: Inbound, numbers: range, compare: bool) -> None:
    posted: deque[tuple[int, Receive]] = deque()
    left = deque(numbers)
    end = time.monotonic() + ANSWER_SECONDS
    while left or posted:
        while left and (receive := inbound.post(MESSAGE_BYTES)) is not None:
            number = left.popleft()
            posted.append((number, receive))
            other.send(Granted(number, receive.remote_slot))
        inbound.poll()
        while posted and posted[0][1].done():
            number, receive = posted.popleft()
            came = receive.buffer.view(torch.int64)
            if compare and not torch.equal(came, contents_of(number, came.device)):
                raise CheckFailed(f"message {number} came with other bytes than were sent")
            receive.release()
            end = time.monotonic() + ANSWER_SECONDS
        other.expect_nothing()
        if time.monotonic() > end:
            raise CheckFailed(f"nothing has come over the link for {ANSWER_SECONDS:g} s")
