"""Who may take part: the secret that members share, the networks that peers live in, and loopback.

Sentences and values only; `control.security` derives keys from the secret.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Self

SECRET_VARIABLE = "P2PKV_SECRET"
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_MAKE_ONE = "make one with `openssl rand -hex 32` and give the same to every instance and to the proxy"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustError(ValueError):
    """A secret or a network that cannot be used, with a sentence. It never quotes a secret."""


def read_secret(file: str | None, environ: Mapping[str, str]) -> bytes | None:
    """The secret in `file` or in the environment, without white space around it; None if neither is set.

    Raises TrustError if both are set, if the file cannot be read, or if the secret is too short.
    """
    given = environ.get(SECRET_VARIABLE, "")
    if file and given:
        raise TrustError(
            f"secret_file is {file!r} and {SECRET_VARIABLE} is set too: expected one of them, since they may "
            "differ; remove one"
        )
    if given:
        return _checked(given.encode("utf-8", "surrogateescape"), f"{SECRET_VARIABLE} in the environment")
    if not file:
        return None
    try:
        with open(file, "rb") as stream:
            content = stream.read(MAX_SECRET_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TrustError(
            f"secret_file {file!r} cannot be read ({reason}): expected a file that holds the secret and that "
            "this process may read; correct the path or the file's owner"
        ) from None
    return _checked(content, f"secret_file {file!r}")


def _checked(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise TrustError(
            f"the secret of {where} has {len(secret)} bytes: expected at least {MIN_SECRET_BYTES}, since "
            f"anyone who guesses it is a member; {_MAKE_ONE}"
        )
    if len(secret) > MAX_SECRET_BYTES:
        raise TrustError(
            f"the secret of {where} has more than {MAX_SECRET_BYTES} bytes: is it the right file? {_MAKE_ONE}"
        )
    return secret


class Networks:
    """Where peers may be: numeric addresses only, since a name server decides what a name means."""

    def __init__(self, networks: tuple[_Network, ...]) -> None:
        self.networks = networks

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Networks in CIDR notation. Raises TrustError for what is none, and if there are none."""
        networks = tuple(_network(text.strip()) for text in texts)
        if not networks:
            raise TrustError("no network is given: expected one or more, such as 10.0.0.0/8")
        return cls(networks)

    def admits(self, host: str) -> bool:
        """Whether `host`, a numeric address, lies in one of them."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # A socket for both families names an IPv4 peer so.
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self.networks)

    def __str__(self) -> str:
        return ", ".join(map(str, self.networks))


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise TrustError(
            f"{text[:80]!r} is no network ({str(error)[:120]}): expected CIDR notation, such as 10.0.0.0/8, "
            "10.1.2.3/32 or fd00::/8"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether `host` is loopback, by its spelling alone: a name may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
