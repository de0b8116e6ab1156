"""Reads what was written for one option: the value that is meant, or a sentence about a bad one.

A reader is given the option's name, for that sentence, and what was written; it raises ConfigError.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable

from p2pkv.pairing import PairingError, normal_host
from p2pkv.trust import Networks, TrustError

Reader = Callable[[str, object], object]


class ConfigError(ValueError):
    """An option that cannot be used: what was given, what was expected, what to do."""


_short = reprlib.Repr()
_short.maxstring = 80


def shown(value: object) -> str:
    """A value as sentences quote it: cut, if it is long."""
    return _short.repr(value)


def whole(name: str, value: object) -> int:
    """A number without a fraction."""
    read = number(name, value, "a whole number")
    if read != int(read):
        raise ConfigError(f"{name} is {shown(value)}: expected a whole number; leave out the fraction")
    return int(read)


def number(name: str, value: object, expected: str = "a number") -> float:
    """An int stays one, however large; strings are read as numbers."""
    try:
        if isinstance(value, str):
            read = float(value) if set(value) & set(".eEn") else int(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            read = value
        else:
            raise TypeError
        if not math.isfinite(read):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f'{name} is {shown(value)}: expected {expected}, as 8 or as "8"; correct it'
        ) from None
    return read


def flag(name: str, value: object) -> bool:
    """A bool, or a text that says one."""
    known = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ConfigError(f"{name} is {shown(value)}: expected true or false; correct it")


def host(name: str, value: object) -> str:
    """A host name or address in its normal form, without a port."""
    try:
        return normal_host(str(value))
    except PairingError as error:
        raise ConfigError(
            f"{name}: {error}; write the host alone, its port is an option of its own"
        ) from None


def own_host(name: str, value: object) -> str:
    """A host that peers can connect to: no wildcard."""
    read = host(name, value)
    if read in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{name} is {shown(value)}: expected an address that peers can connect to, since it is "
            "advertised to them; write this machine's own address"
        )
    return read


def one_of(*known: str) -> Callable[[str, object], str]:
    """A reader for one of these words."""

    def read(name: str, value: object) -> str:
        if value in known:
            return str(value)
        raise ConfigError(f"{name} is {shown(value)}: expected one of {', '.join(known)}; choose one of them")

    return read


def path(name: str, value: object) -> str:
    """A text; whether there is such a file is not looked at."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is {shown(value)}: expected the path of a file; correct it")


def text(name: str, value: object) -> str:
    """Any text. What was written is not quoted: it may be a key."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is a {type(value).__name__}: expected a text; put it in quotes")


def networks(name: str, value: object) -> Networks:
    """A list, or one text with commas."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f'{name} is {shown(value)}: expected a list of networks, as ["10.0.0.0/8"]; correct it'
        )
    try:
        return Networks.parse(texts)
    except TrustError as error:
        raise ConfigError(f"{name}: {error}; leave the option out to admit any") from None
