"""The child process that announces an instance: it warms the instance up, and then pings its proxies for it.

While a worker compiles or collects garbage, one thread may hold the interpreter's lock for many seconds, and
no other thread of the worker runs. Pings from a thread would stop, and the proxy would forget an instance in
good health. So they come from a process of its own, which imports neither torch nor vLLM.

The worker is the child's parent and holds the other end of its stdin: it writes one line that says what to
announce, a beat every second, and `STOP` at a clean end. A beat has whether the instance is to be announced,
and whether it is paused; while it is not to be announced, the child sends no ping. When the worker is silent,
the child goes on as before for `stall_seconds`, and then sends none until the worker beats again. When the
worker dies, the pipe ends, so does the child, and with it the connection to the proxy. Both are in one
process group: a signal that freezes or kills the whole instance reaches the child, too.

What the proxies answer to a D, its partners, the child passes on through its stdout, a socket that keeps
messages apart; the worker looks there at each beat.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import secrets
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq
from msgspec import Struct

from p2pkv.control.discovery import (
    MAX_PARTNERS_BYTES,
    PING_INTERVAL,
    BadPartners,
    Ping,
    decode_partners,
    encode_partners,
    encode_ping,
    goodbye,
)
from p2pkv.control.security import Failure, Members, Watch, members_of, no_answer
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

# By name: in the child this module is called __main__.
logger = logging.getLogger("p2pkv.control.announcer")

BEAT_SECONDS = 1.0
"""Between two beats of the worker. The child looks as often whether the worker is still its parent."""

STOP_SECONDS = 2.0
"""How long a clean end may take, with the goodbye."""

_NAMED_SECONDS = 20 * PING_INTERVAL
"""What a proxy that answers no more has named counts for this long, where another one answers."""

_RUNS, _PAUSED, _FAILS, _STOP = b".", b"p", b"-", b"q"
"""What the worker writes: three kinds of beats, and the end."""

Addresses = tuple[str, ...]
Hear = Callable[[Addresses], None]
"""Takes the partners that the proxy has named."""


def _ignore(addresses: Addresses) -> None: ...


class Standing(Struct, frozen=True):
    """Whether requests may come to the instance, as its worker sees it.

    Attributes:
        trouble: why it is not to be announced, in words; "" if it is.
        paused: vLLM's /pause has been called, and /resume has not.
    """

    trouble: str = ""
    paused: bool = False


def _runs() -> Standing:
    return Standing()


_FORMAT = "(p2pkv-announcer pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class WarmUp(Struct, frozen=True):
    """Where the first prompts go, and how long they are.

    Attributes:
        url: of the instance's own HTTP API, as http://10.0.0.1:8000. With https no certificate is checked:
            it is our own, and may be for another name.
        model: a name under which the instance serves its model.
        tokens: of a prompt.
        seconds: how long to wait for the health page, and then again for the answers.
        api_key: of the HTTP API; "" for none.
    """

    url: str
    model: str
    tokens: int
    seconds: float
    api_key: str = ""


class Announcement(Struct, frozen=True, kw_only=True):
    """What the child is told.

    Attributes:
        proxies: host:port of the discovery socket of each proxy that is pinged.
        interval: seconds between two pings.
        stall_seconds: how long the child pings for a worker that is silent.
        secret: with it the child pings as a member; None to ping in the clear.
        warm_up: what is done before the first ping, if anything.
        log_level: of the child's log, which goes to the worker's stderr.
    """

    proxies: tuple[str, ...]
    ping: Ping
    interval: float = PING_INTERVAL
    stall_seconds: float = 120.0
    secret: bytes | None = None
    warm_up: WarmUp | None = None
    log_level: int = logging.INFO


class _Orders(Struct, frozen=True):
    """The first line of the pipe. `parent`: the worker's process id."""

    parent: int
    announcement: Announcement


class Announcer:
    """The worker's side: starts the child, beats, and starts it again should it end by itself.

    Raises ValueError for a malformed address of a proxy.

    Args:
        hear: called from a thread of the announcer's with the partners that the proxy has named, each time
            they change.
        standing: called from that thread before each beat.
    """

    def __init__(
        self,
        announcement: Announcement,
        hear: Hear = _ignore,
        standing: Callable[[], Standing] = _runs,
    ) -> None:
        for proxy in announcement.proxies:
            Address.parse(proxy)
        self._announcement = announcement
        self._hear = hear
        self._standing = standing
        self._trouble = ""
        self._partners: Addresses | None = None
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._said: socket.socket | None = None
        """What the child passes on."""
        self._thread = threading.Thread(target=self._beat, name="p2pkv-announcer", daemon=True)

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None, "it has not been started"
        return self._child.pid

    def start(self) -> None:
        """Start the child. Raises OSError if there can be no process."""
        self._spawn(self._announcement)
        self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Have the child say goodbye and end, within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is None:
            return
        self._thread.join(timeout)
        with contextlib.suppress(OSError):
            _write(self._child, _STOP)
        _close(self._child)
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("the announcing process did not end in %g s; it is killed", timeout)
            self._child.kill()
            self._child.wait()
        if self._said is not None:
            self._said.close()

    def _spawn(self, announcement: Announcement) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._child = _spawn(announcement, theirs)
            except OSError:
                ours.close()
                raise
        if self._said is not None:
            self._said.close()
        self._said = ours

    def _listen(self) -> None:
        """Hand on what the child has heard from the proxy since the last beat."""
        assert self._said is not None
        try:
            while data := self._said.recv(MAX_PARTNERS_BYTES, socket.MSG_DONTWAIT):
                partners = decode_partners(data)
                if partners != self._partners:
                    self._partners = partners
                    self._hear(partners)
        except BlockingIOError:
            return  # it has heard no more
        except (OSError, BadPartners) as error:
            logger.debug("what the announcing process passed on could not be read: %s", error)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            assert self._child is not None
            self._listen()
            if self._child.poll() is None:
                beat = self._next_beat()
                with contextlib.suppress(OSError):  # it has ended, or is frozen and reads nothing
                    _write(self._child, beat)
                continue
            logger.warning(
                "the announcing process ended with status %d; it is started again", self._child.returncode
            )
            _close(self._child)
            with contextlib.suppress(OSError):
                # The instance is warm by now, or the child has waited for as long as it may.
                self._spawn(msgspec.structs.replace(self._announcement, warm_up=None))

    def _next_beat(self) -> bytes:
        now = self._standing()
        if now.trouble and not self._trouble:
            logger.warning("this instance is not announced any more: %s", now.trouble)
        elif self._trouble and not now.trouble:
            logger.warning("this instance is announced again")
        self._trouble = now.trouble
        return _FAILS if now.trouble else _PAUSED if now.paused else _RUNS


def _spawn(announcement: Announcement, said: socket.socket) -> subprocess.Popen[bytes]:
    # -P: a file of the working directory must not stand in for a module. Its stdout is not the worker's:
    # what a worker writes there may be read by a program.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=said.fileno(),
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which the next beat finds out
        _write(child, msgspec.json.encode(_Orders(os.getpid(), announcement)) + b"\n")
    return child


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    os.write(child.stdin.fileno(), data)


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()


# The child.


class _Parent:
    """The worker, as its child knows it. Its thread ends the process when the worker is gone."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""
        self._parent = os.getppid()
        self._stall = 0.0
        self._beaten = time.monotonic()
        self._silent = False
        self._last = _RUNS
        self.changed: Callable[[], None] = _nothing
        """Called when a beat differs from the one before."""
        self.announced = False
        self.stopping = threading.Event()

    def orders(self) -> _Orders | None:
        """The first line; None if the worker has gone before."""
        line = b""
        while b"\n" not in line:
            if not (data := os.read(self._pipe, 65536)):
                return None
            line += data
        line, _, self._rest = line.partition(b"\n")
        orders = msgspec.json.decode(line, type=_Orders)
        self._parent, self._stall = orders.parent, orders.announcement.stall_seconds
        self._beaten = time.monotonic()
        return orders

    def follow(self) -> None:
        """Hear the worker's beats, until it stops or is gone; for a thread."""
        self._hear(self._rest)
        while not self.stopping.is_set():
            ready, _, _ = select.select([self._pipe], [], [], BEAT_SECONDS)
            # A process that the worker has forked may hold its end of the pipe open.
            gone = os.getppid() != self._parent
            if ready and not gone:
                data = os.read(self._pipe, 65536)
                gone = not data
                self._hear(data)
            if gone and not self.stopping.is_set():
                os._exit(0)

    def _hear(self, data: bytes) -> None:
        if not data:
            return
        self._beaten = time.monotonic()
        last, self._last = self._last, data[-1:]
        if self._last != last:
            self.changed()
        if _STOP in data:
            self.stopping.set()
            if not self.announced:
                os._exit(0)

    @property
    def paused(self) -> bool:
        return self._last == _PAUSED

    def vouched_for(self) -> bool:
        """Whether the worker has beaten within `stall_seconds`, and its last beat does not forbid a ping."""
        silent = time.monotonic() - self._beaten > self._stall
        if silent and not self._silent:
            logger.warning(
                "the worker has been silent for %g s: it is not announced until it is back", self._stall
            )
        elif self._silent and not silent:
            logger.warning("the worker is back: it is announced again")
        self._silent = silent
        return not silent and self._last != _FAILS


def _nothing() -> None: ...


class _Passing:
    """Passes on to the worker all that any proxy names, and never waits for a worker that does not read."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._lock = threading.Lock()
        self._named: dict[str, tuple[float, Addresses]] = {}
        """By proxy: the time of its last answer, and whom it named."""

    def hear(self, proxy: str) -> Hear:
        """What takes the answers of this proxy, in a thread of its own."""

        def on(partners: Addresses) -> None:
            with self._lock:
                now = time.monotonic()
                self._named[proxy] = now, partners
                named = [who for when, who in self._named.values() if now - when < _NAMED_SECONDS]
                everyone = tuple(dict.fromkeys(itertools.chain(*named)))
                # Without room the worker has not read for long. The proxy says it again.
                with contextlib.suppress(OSError):
                    self._socket.send(encode_partners(everyone), socket.MSG_DONTWAIT)

        return on


def main() -> None:
    # A signal to the process group is for the worker: it says goodbye through us, or ends, and so do we.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker = _Parent(sys.stdin.fileno())
    orders = worker.orders()
    if orders is None:
        return
    told = orders.announcement
    logging.basicConfig(level=told.log_level, format=_FORMAT, datefmt=_DATE_FORMAT)
    threading.Thread(target=worker.follow, name="p2pkv-worker", daemon=True).start()
    if told.warm_up is not None:
        warm_up(told.warm_up)
    passing, members = _Passing(sys.stdout.fileno()), members_of(told.secret)
    pingers = [
        Pinger(
            proxy,
            told.ping,
            told.interval,
            members,
            vouched_for=worker.vouched_for,
            paused=lambda: worker.paused,
            hear=passing.hear(proxy),
        )
        for proxy in told.proxies
    ]
    worker.announced = True
    worker.changed = lambda: hurry(pingers)
    for pinger in pingers:
        pinger.start()
    worker.stopping.wait()
    # All at once: a proxy that does not take its goodbye keeps nothing from the others.
    with ThreadPoolExecutor(len(pingers)) as pool:
        list(pool.map(Pinger.stop, pingers))


def hurry(pingers: Iterable[Pinger]) -> None:
    for pinger in pingers:
        pinger.hurry()


# The child's pings.

_GOODBYE_LINGER_MS = 500
# ZMQ gives a connection up for good if its other end ever spoke something else than ZMTP.
_PATIENCE_SECONDS = 2.0
# For a handshake that neither succeeds nor fails: the proxy may be busy.
_HANDSHAKE_SECONDS = 30.0
_COMPLAIN_SECONDS = 60.0  # between two lines about one proxy


class Pinger:
    """Sends `ping` to the proxy's discovery socket every `interval` seconds, from a daemon thread.

    The proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing
    is expected in return, and nothing is read unless the ping asks for partners. The thread has a ZMQ context
    of its own and touches no other.

    Args:
        proxy_address: host:port of the proxy's discovery socket.
        interval: seconds between two pings.
        members: show the proxy that we are one of them; None to ping in the clear.
        vouched_for: called before each ping, in the pinger's thread; while it returns False none is sent.
        paused: called likewise; the value of the ping's `paused`.
        hear: takes the partners that the proxy names, in the pinger's thread.

    Raises:
        ValueError: malformed address, or an interval that is not positive.
    """

    def __init__(
        self,
        proxy_address: str,
        ping: Ping,
        interval: float = PING_INTERVAL,
        members: Members | None = None,
        vouched_for: Callable[[], bool] = lambda: True,
        paused: Callable[[], bool] = lambda: False,
        hear: Hear = _ignore,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the ping interval must be more than 0 seconds, not {interval}")
        self._proxy = Address.parse(proxy_address)
        self._frame = encode_ping(ping)
        self._paused_frame = encode_ping(msgspec.structs.replace(ping, paused=True))
        self._goodbye = encode_ping(goodbye(ping))
        self._interval = interval
        self._members = members
        self._vouched_for = vouched_for
        self._paused = paused
        self._asks = ping.partners > 0
        self._hear = hear
        self._complaints = RateLimit(seconds=_COMPLAIN_SECONDS)
        self._stopping = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="p2pkv-pinger", daemon=True)

    def start(self) -> None:
        """Begins to ping."""
        self._thread.start()

    def hurry(self) -> None:
        """Pings at once, not only when the next ping is due. For any thread."""
        with contextlib.suppress(OSError):  # as many wake-ups wait as fit; or it has stopped
            self._waker.send(b"!")

    def stop(self, timeout: float = 2.0) -> None:
        """Says goodbye to a proxy that is there, and ends the thread within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._waker.send(b"!")
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                "the discovery pinger did not end within %.1f s; it dies with the process", timeout
            )
            return
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping.is_set():
                self._converse(context)
        finally:
            context.term()

    def _converse(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Pings over one socket until it is told to stop, or until a new socket may help."""
        dealer = context.socket(zmq.DEALER)
        watch = Watch(dealer, dials=True)
        try:
            if self._members is not None:
                self._members.join(dealer, "proxy")
            _configure(dealer, self._proxy, self._asks)
            while not self._stopping.is_set():
                if not self._ping_once(dealer, watch):
                    break
            self._say_goodbye(dealer)
        except zmq.ZMQError as error:
            logger.warning("discovery ping to %s failed, trying again: %s", self._proxy, error)
            self._stopping.wait(self._interval)
        finally:
            watch.close()
            dealer.close()

    def _complain(self, failure: Failure) -> None:
        """One line a minute about a proxy that is there and does not take our pings."""
        if not failure.lost and self._complaints.admits():
            secret = self._members is not None
            logger.warning("not registered: %s", no_answer(f"the proxy at {self._proxy}", failure, secret))

    def _ping_once(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Pings, and waits until the next ping is due. False if a new socket may help."""
        due = time.monotonic() + self._interval
        if self._connected(dealer, watch):
            if self._vouched_for():
                dealer.send(self._paused_frame if self._paused() else self._frame, zmq.NOBLOCK)
            while (left := due - time.monotonic()) > 0 and not self._stopping.is_set():
                ready = self._wait(left, *([(dealer, zmq.POLLIN)] if self._asks else []))
                if dealer in ready:
                    self._read(dealer)
                if self._wakened.fileno() in ready:
                    break
            return True
        return False

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        """One message of the proxy's. Empty ones only show whether the connection stands."""
        frames = dealer.recv_multipart(zmq.NOBLOCK)
        if frames == [b""]:
            return
        try:
            self._hear(decode_partners(frames[0] if len(frames) == 1 else b""))
        except BadPartners as error:
            logger.debug("the proxy at %s: %s", self._proxy, error)

    def _connected(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Waits until the proxy takes a ping, for a while; a stop ends the wait."""
        end = time.monotonic() + _HANDSHAKE_SECONDS
        while (left := end - time.monotonic()) > 0 and not self._stopping.is_set():
            ready = self._wait(left, (dealer, zmq.POLLOUT), (watch.socket, zmq.POLLIN))
            if dealer in ready:
                return True
            for failure in watch.failures():
                self._complain(failure)
                end = min(end, time.monotonic() + _PATIENCE_SECONDS)
        return False

    def _wait(self, seconds: float, *sockets: tuple[zmq.Socket[bytes], int]) -> dict[object, int]:
        """Until one of these is ready, the time is over, or we are to stop."""
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        for each, events in sockets:
            poller.register(each, events)
        ready = dict(poller.poll(max(0, int(seconds * 1000))))
        if self._wakened.fileno() in ready and not self._stopping.is_set():
            self._wakened.recv(64)
        return ready

    def _say_goodbye(self, dealer: zmq.Socket[bytes]) -> None:
        if self._stopping.is_set() and dealer.poll(0, zmq.POLLOUT):
            dealer.setsockopt(zmq.LINGER, _GOODBYE_LINGER_MS)
            dealer.send(self._goodbye, zmq.NOBLOCK)


def _configure(dealer: zmq.Socket[bytes], proxy: Address, asks: bool) -> None:
    """No identity: an explicit one would lock a restarted instance out while the old one is frozen."""
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, 4)
    dealer.setsockopt(zmq.RCVHWM, 4 if asks else 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PARTNERS_BYTES if asks else 1024)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # For names this stays off: "localhost" would mean ::1 only, and proxies bind 127.0.0.1.
    dealer.setsockopt(zmq.IPV6, ":" in proxy.host)
    dealer.connect(f"tcp://{proxy}")


# The first prompts. vLLM compiles in them what it compiles in its first steps, so no client waits for that.

REQUEST_MARK = "p2pkv-warm-up-"
"""What the request id of a warm-up begins with. It names no P and no D, so nothing is transferred."""

ANSWER_TOKENS = 2
"""A step that prefills, and one that decodes."""

_GREEDY = {"temperature": 0.0}
_SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "n": 3}
# vLLM compiles parts of its sampler when they are first used: log-probabilities, random tokens, and each of
# them again for a batch that is not the first one's.
_KINDS = (_GREEDY, _SAMPLED)

_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 2.0
_LONGEST_QUOTE = 200


def warm_up(plan: WarmUp) -> bool:
    """Wait until the instance serves, and send it a few prompts. Whether it has answered all of them."""
    failure = _wait_for_health(plan) or _ask_all(plan)
    if failure:
        logger.warning(
            "not warmed up: %s; the instance is announced all the same, and its first request may be slow",
            failure,
        )
    return not failure


def _wait_for_health(plan: WarmUp) -> str:
    """Until the health page answers 200; "" then, else what is wrong."""
    end, seen = time.monotonic() + plan.seconds, ""
    while time.monotonic() < end:
        try:
            status, _ = _call(plan, "GET", "/health", None, min(_HEALTH_SECONDS, plan.seconds))
        except (OSError, http.client.HTTPException) as error:
            seen = str(error) or type(error).__name__
        else:
            if status == 200:
                return ""
            seen = f"status {status}"
        time.sleep(_POLL_SECONDS)
    return (
        f"{plan.url}/health did not answer 200 in {plan.seconds:g} s ({seen}): is http_port the number given "
        "to --port, and does --host include this address? With TLS set warm_up_tls"
    )


def _ask_all(plan: WarmUp) -> str:
    """A prompt of each kind, one after the other; "" if all were answered, else what is wrong."""
    begun = time.monotonic()
    for kind in _KINDS:
        if failure := _ask(plan, kind, begun + plan.seconds):
            return failure
    took = time.monotonic() - begun
    logger.info("warmed up: %d prompts of %d tokens were answered in %.1f s", len(_KINDS), plan.tokens, took)
    return ""


def _ask(plan: WarmUp, kind: dict[str, float], end: float) -> str:
    """One prompt, random so that no cache holds it; "" if it was answered, else what is wrong."""
    text = " ".join(secrets.token_hex(4) for _ in range(plan.tokens))  # a word is a token at least
    body = {
        "model": plan.model,
        "prompt": text,
        "truncate_prompt_tokens": plan.tokens,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "logprobs": 1,
        **kind,
    }
    try:
        left = max(_POLL_SECONDS, end - time.monotonic())
        status, answer = _call(plan, "POST", "/v1/completions", body, left)
    except TimeoutError:
        return f"the first prompts were not answered in {plan.seconds:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"the first prompt was not answered: {str(error) or type(error).__name__}"
    if status == 401:
        return "the HTTP API wants a key: set VLLM_API_KEY in the instance's environment, or warm_up_api_key"
    if status != 200:
        return f"the first prompt was answered with status {status}: {answer[:_LONGEST_QUOTE]}"
    return ""


def _call(
    plan: WarmUp, method: str, path: str, body: dict[str, object] | None, seconds: float
) -> tuple[int, str]:
    """Status and text. Raises OSError or HTTPException; TimeoutError if nothing comes for so long."""
    parts = urllib.parse.urlsplit(plan.url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)
    headers = {"Content-Type": "application/json", "X-Request-Id": REQUEST_MARK + secrets.token_hex(8)}
    if plan.api_key:
        headers["Authorization"] = f"Bearer {plan.api_key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
