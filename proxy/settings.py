"""Options from the environment and from a file, where the command line does not give them.

The command line comes first, then the environment, then the file, then the default. Every option of a parser
can be given in each of these ways, under the same name:

    --max-requests 64                  on the command line
    P2PKV_PROXY_MAX_REQUESTS=64        in the environment
    max-requests = 64                  in the file, which is TOML
"""

import argparse
import difflib
import logging
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "P2PKV_PROXY_"
FILE_OPTION = "--config"

# Where a service is called p2pkv-proxy, Kubernetes sets P2PKV_PROXY_PORT=tcp://... and variables such as
# P2PKV_PROXY_SERVICE_HOST, which are no options.
_OF_KUBERNETES = re.compile(rf"{PREFIX}(SERVICE_.*|PORT_.*)")
_ADDRESS_OF_KUBERNETES = "tcp://"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    """The options from all places. Ends the process with status 2 and a sentence if one of them is wrong."""
    options = {
        action.option_strings[-1].removeprefix("--"): action
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction | argparse._VersionAction)
    }
    unset = argparse.Namespace(**{each.dest: None for each in options.values()})
    given = {name: value for name, value in vars(parser.parse_args(argv, unset)).items() if value is not None}
    file = given.get("config") or environ.get(f"{PREFIX}CONFIG")
    found = _from_file(parser, file, options) if file else {}
    found |= _from_environment(environ, options)
    values = vars(parser.parse_args([]))
    for name, (where, value) in found.items():
        action = options[name]
        if action.dest not in given:
            try:
                values[action.dest] = _read(action, value)
            except (argparse.ArgumentTypeError, ValueError) as error:
                parser.error(f"{where}: {error}")
    return argparse.Namespace(**values | given)


_Found = dict[str, tuple[str, Any]]
"""By option: the place where it was found, for errors, and its value."""


def _from_file(parser: argparse.ArgumentParser, file: str, options: Iterable[str]) -> _Found:
    try:
        table = read_toml(file)
    except ValueError as error:
        parser.error(f"{FILE_OPTION} {error}")
    found: _Found = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            hint = f"did you mean `{near[0]}`?" if near else "--help lists the options, here without dashes"
            parser.error(f"{FILE_OPTION} {file} has `{key}`, which is no option: {hint}")
        found[name] = (f"`{key}` in {file}", value)
    return found


def read_toml(path: str) -> dict[str, Any]:
    """Raises ValueError, with a sentence, if the file cannot be read or is not TOML."""
    try:
        with open(path, "rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _from_environment(environ: Mapping[str, str], options: Mapping[str, argparse.Action]) -> _Found:
    found: _Found = {}
    names = {f"{PREFIX}{name.replace('-', '_').upper()}": name for name in options}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or _OF_KUBERNETES.fullmatch(variable):
            continue
        if variable not in names:
            logger.warning("the environment has %s, which is ignored: there is no such option", variable)
        elif not text.startswith(_ADDRESS_OF_KUBERNETES):
            name = names[variable]
            value: str | list[str] = text
            if isinstance(options[name], argparse._AppendAction):
                several = [text] if text.startswith("[") else text.split(",")
                value = [each.strip() for each in several if each.strip()]
            found[name] = variable, value
    return found


def _read(action: argparse.Action, value: Any) -> Any:
    """The value as the command line would give it. Raises ArgumentTypeError or ValueError if it is wrong."""
    if action.nargs == 0:
        text = str(value).lower()
        demand(text in (*_YES, *_NO), f"{value!r} is neither true nor false")
        return text in _YES
    several = isinstance(action, argparse._AppendAction)
    values = value if isinstance(value, list) else [value]
    if not values and action.dest == "api_key":
        values = [""]  # which is refused: an operator who sets api-key wants authentication
    demand(several or len(values) == 1, "expected one value, not a list")
    read = []
    for each in values:
        demand(not isinstance(each, bool | dict | list), f"{each!r} is no value for this option")
        read.append(action.type(str(each)) if callable(action.type) else str(each))
        if action.choices is not None:
            demand(read[-1] in action.choices, f"{each!r} is none of {', '.join(map(str, action.choices))}")
    return read if several else read[0]


# The declaration of options.


def add_option(
    group: argparse._ActionsContainer,
    name: str,
    default: Any,
    read: Callable[[str], Any] = str,
    unit: str | None = None,
    what: str = "",
    choices: Collection[str] | None = None,
) -> None:
    """One option.

    Args:
        default: False for a flag, a list for an option that may be repeated; a text is passed to `read`.
        read: makes the value of a text, or raises ValueError or ArgumentTypeError with a sentence.
        choices: all allowed values; None: whatever `read` takes.
    """
    if default is False:
        group.add_argument(name, action="store_true", help=what)
        return
    several = isinstance(default, list)
    form = "g" if isinstance(default, float) else "s"
    group.add_argument(
        name,
        action="append" if several else "store",
        type=_checked(read),
        default=default,
        metavar=unit,
        choices=choices,
        help=what + ("" if several or default in (None, "") else f" (default: %(default){form})"),
    )


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """The same function, whose ValueErrors argparse shows with their own sentence."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def option(name: str, default: Any, read: Callable[[str], Any], *more: Any, **others: Any) -> Any:
    """A field of a dataclass that an option sets, see `add_option`."""
    known = {"name": name, "more": (default, read, *more), "others": others}
    return field(default=read(default) if isinstance(default, str) else default, metadata=known)


def add_fields(group: argparse._ActionsContainer, kind: type[Any], **choices: Collection[str]) -> None:
    """Adds the options of this dataclass; `choices`: for fields whose `option` names none."""
    for each in fields(kind):
        if known := each.metadata:
            others = {"choices": choices.get(each.name), **known["others"]}
            add_option(group, known["name"], *known["more"], **others)


def made(kind: type[T], arguments: argparse.Namespace) -> T:
    """An object of this dataclass, with the values of its options."""
    names = {each.name: each.metadata["name"] for each in fields(kind) if each.metadata}  # type: ignore[arg-type]
    given = {name: getattr(arguments, flag[2:].replace("-", "_")) for name, flag in names.items()}
    return kind(**given)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        demand(text.isdecimal() and int(text) >= least, f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def mib(text: str) -> int:
    return at_least(1)(text) << 20


def header(text: str) -> str:
    good = re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", text)
    demand(good, f"{text!r} is no name of an HTTP header, such as X-Session-Id")
    return text


def seconds(text: str) -> float:
    return not_negative(text, "number of seconds")


def not_negative(text: str, what: str = "number") -> float:
    number = float_of(text)
    demand(0 <= number < float("inf"), f"{text!r} is no {what} of at least 0")
    return number


def share(text: str) -> float:
    share = float_of(text)
    rule = "expected more than 0 and at most 1; to have none, --no-decode-alone"
    demand(0 < share <= 1, f"{text!r} is no share: {rule}")
    return share


def demand(good: object, sentence: str) -> None:
    """Raises ArgumentTypeError with this sentence if the value is not good."""
    if not good:
        raise argparse.ArgumentTypeError(sentence)


def float_of(text: str) -> float:
    """The number; -1 if it is none, as no value that is read with this may be below zero."""
    try:
        return float(text)
    except ValueError:
        return -1.0
