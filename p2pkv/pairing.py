"""Who talks to whom: addresses, the request ids that carry a pair of them, and keys of transfers.

P is the instance that prefills, D the one that decodes. A router gives both the same request id,
`___prefill_addr_{P}___decode_addr_{D}_{32 hex}`, and vLLM then wraps it differently on each side:

    completions       cmpl-ID-<prompt index>-<8 hex>
    chat              chatcmpl-ID-<8 hex>
    chat, a batch     chatcmpl-ID_<prompt index>-<8 hex>
    children of n     <child>_ before any of these

A transfer key is what is equal on both sides: the id and the prompt index, without the wrapping.
"""

import ipaddress
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Self

PREFILL_MARK = "___prefill_addr_"
DECODE_MARK = "___decode_addr_"

_EXAMPLES = "such as 10.0.0.1:21001, node-7:21001 or [fd00::1]:21001"
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_UNIQUE = re.compile(r"[0-9a-fA-F]{32}")
_DECODE = re.compile(r"(?P<address>[^\s]{1,300}?:[0-9]{1,5})_(?P<unique>[0-9a-fA-F]{32})(?![0-9a-fA-F])")
# Eight decimal digits are a suffix, not an index: hence at most seven for an index.
_TAIL = re.compile(r"(?:[-_](?P<index>[0-9]{1,7}))?(?:-[0-9a-f]{8})?")
_READABLE = re.compile(r"[A-Za-z0-9._:@+=-]{1,128}")


class PairingError(ValueError):
    """An address, a request id or a transfer id that cannot be used, and why, in a sentence."""


def normal_host(text: str) -> str:
    """The one spelling of a host: an IPv4 address, a name in lower case, or IPv6 without its brackets.

    Raises PairingError for anything else, zone ids such as `fe80::1%eth0` included: they mean
    nothing on another host. `localhost` is 127.0.0.1.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    labels = host.lower().removesuffix(".").split(".")
    if labels == ["localhost"]:  # so vLLM's routers write it, for instances that go by the number
        return "127.0.0.1"
    if ":" in host or labels[-1].isdigit():
        return _numeric(host)
    # Three underscores in a row would be mistaken for a mark inside a request id.
    if len(host) > 253 or "___" in host or not all(_LABEL.fullmatch(label) for label in labels):
        raise PairingError(
            f"{_shown(text)} is not a host: expected an IPv4 address, a host name, or an IPv6 address"
        )
    return ".".join(labels)


def _numeric(host: str) -> str:
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if getattr(address, "scope_id", None) is None:
            return address.compressed
    shown = _shown(host)
    if ":" in host:
        raise PairingError(f"{shown} is not an IPv6 address: expected one such as fd00::1, without a zone id")
    raise PairingError(
        f"{shown} is not an IPv4 address: expected four numbers from 0 to 255, such as 10.0.0.1"
    )


def _shown(text: object) -> str:
    """`text` as an error message quotes it: escaped, and short whatever a stranger sent."""
    quoted = repr(text)
    return quoted if len(quoted) <= 120 else quoted[:117] + "..."


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host and a TCP port, 1 to 65535. Equal hosts compare equal however they were spelled.

    Making one raises PairingError if the host or the port cannot be one.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", normal_host(self.host))
        if not 1 <= self.port <= 65535:
            raise PairingError(
                f"port {self.port} of {_shown(self.host)} is not from 1 to 65535: choose another"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in `host:port` or `[IPv6]:port`. Raises PairingError for anything else."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise PairingError(f"{_shown(text)} is not an address: {_complaint(text)}, {_EXAMPLES}")
        host = match["host"] if match["six"] is None else f"[{match['six']}]"
        if match["six"] is not None and ":" not in match["six"]:
            raise PairingError(f"{_shown(text)}: brackets are for IPv6 addresses only, {_EXAMPLES}")
        return cls(host, int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def shifted(self, ranks: int) -> "Address":
        """The address `ranks` ports further: rank r of an engine listens on the first port + r."""
        return Address(self.host, self.port + ranks)


def of_one_instance(engine: Address, first: Address, ranks: int) -> bool:
    """Whether an engine of so many `ranks` may begin at `engine`, of an instance that begins at `first`."""
    return engine.host == first.host and engine.port >= first.port and not (engine.port - first.port) % ranks


def _complaint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if "/" in text:
        return "expected host:port without a scheme or a path"
    if ":" in host and not host.startswith("["):
        return "an IPv6 address needs brackets"
    if not host or not port:
        return "expected host:port"
    return "the port must be a number from 1 to 65535"


@dataclass(frozen=True, slots=True)
class Pair:
    """Where rank 0 of the two instances that serve one request listens, and 32 hex digits, `unique`."""

    prefill: Address
    decode: Address
    unique: str

    def __post_init__(self) -> None:
        if _UNIQUE.fullmatch(self.unique) is None:
            raise PairingError(f"{_shown(self.unique)} does not make an id unique: expected 32 hex digits")

    def __str__(self) -> str:
        return f"{PREFILL_MARK}{self.prefill}{DECODE_MARK}{self.decode}_{self.unique}"


def mint(prefill: Address, decode: Address, unique: str | None = None) -> str:
    """A new request id for this pair; random unless `unique`, 32 hex digits, is given."""
    return str(Pair(prefill, decode, secrets.token_hex(16) if unique is None else unique))


def find_pair(request_id: str) -> Pair | None:
    """The pair inside a request id, wrapped by vLLM or not; None if there is none.

    Raises PairingError if the id has a part of a pair but not a whole one, or goes on after it in a
    way that this version does not know.
    """
    found = _locate(request_id)
    return found[0] if found else None


@lru_cache(maxsize=16)  # for its pair, and for its key
def _locate(request_id: str) -> tuple[Pair, str, int] | None:
    """The pair in an id, its addresses as they are spelled there, and the prompt index after it."""
    _, mark, rest = request_id.partition(PREFILL_MARK)
    prefill, second, after = rest.partition(DECODE_MARK)
    if not mark and DECODE_MARK not in request_id:
        return None
    match = _DECODE.match(after) if second else None
    if match is None:
        raise PairingError(
            f"request id {_shown(request_id)} has no whole pair in it: expected "
            f"{PREFILL_MARK}HOST:PORT{DECODE_MARK}HOST:PORT_ and 32 hex digits, as of uuid4().hex"
        )
    pair = Pair(Address.parse(prefill), Address.parse(match["address"]), match["unique"])
    tail = _TAIL.fullmatch(after, match.end())
    if tail is None:
        # Guessing would give P and D different keys, and every request would wait out its lease.
        raise PairingError(
            f"a request id goes on with {_shown(after[match.end() :])} after its pair: expected a prompt "
            "index and vLLM's 8 hex digits; is this version of vLLM one that p2pkv supports?"
        )
    return pair, f"{prefill}|{match['address']}", int(tail["index"] or 0)


def transfer_key(request_id: str, transfer_id: str | None = None) -> str:
    """What P and D both call the transfer of a request: at most 512 printable characters.

    It is made of the prompt index in the id (0 where it has none) and of `transfer_id`, from
    kv_transfer_params, if the router sent one, else of the pair in the id. The children of `n` share a key,
    because they share their prompt's KV. Raises PairingError without a whole pair or with an empty id.
    """
    found = _locate(request_id)
    if found is None:
        raise PairingError(f"request id {_shown(request_id)} names no pair; let the proxy make the id")
    pair, spelled, prompt = found
    if transfer_id == "":
        raise PairingError("kv_transfer_params has an empty transfer_id: leave it out, or send one")
    if transfer_id is not None:
        if _READABLE.fullmatch(transfer_id):
            return f"tx:{transfer_id}/{prompt}"
        # A key is bounded and always printable.
        tag = blake2b(transfer_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"tx#{tag}/{prompt}"
    # A router may use its digits again for another pair, which is another transfer. As spelled: how
    # Python writes an IPv6 address has changed between its versions.
    tag = blake2b(spelled.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return f"pair:{pair.unique}:{tag}/{prompt}"
