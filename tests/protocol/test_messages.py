"""Bytes from the network: a message of the protocol, or BadMessage; never anything else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from protocol.samples import KINDS, any_message, example, smallest

from p2pkv.protocol import messages as m

budget = settings(deadline=None, max_examples=100)
HUGE = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "str": b"\xdb\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x01",
    "int": b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    "negative": b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    "never used": b"\xc1",
    "1,000 arrays": b"\x91" * 1000 + b"\x90",
    "1,000 maps": b"\x81\xa1k" * 1000 + b"\x80",
    "100,000 arrays": b"\x91" * 100_000 + b"\x90",
}


def raw(message: m.AnyMessage) -> dict[str, bytes]:
    """The fields of a message and the bytes of their values, in order; the tag is the first."""
    packed: dict[str, msgspec.Raw] = msgspec.msgpack.decode(m.encode(message), type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in packed.items()}


def join(fields: list[tuple[str, bytes]]) -> bytes:
    count = len(fields)
    head = bytes([0x80 + count]) if count < 16 else b"\xde" + count.to_bytes(2, "big")
    return head + b"".join(msgspec.msgpack.encode(name) + value for name, value in fields)


def is_optional(name: str) -> bool:
    return name.startswith(m.OPTIONAL)


def read(data: bytes) -> m.AnyMessage | None:
    """The message, or None if it is refused in the one way that is allowed."""
    try:
        message = m.decode(data)
        return None if isinstance(message, m.UnknownHello) else message
    except m.BadMessage as error:
        assert len(str(error)) < 400
        return None


def parse(data: bytes) -> m.AnyMessage | None:
    """The same, of a message that has nothing beside what is known."""
    message = read(data)
    assert message is None or m.encode(message) == data
    return message


@given(any_message)
@budget
def test_every_message_survives_the_wire(message: m.AnyMessage) -> None:
    data = m.encode(message)
    again = m.decode(memoryview(data))
    assert type(again) is type(message) and m.encode(again) == data
    if not isinstance(message, m.Report):  # a NaN is not equal to itself
        assert again == message


@given(any_message)
@budget
def test_every_truncation_is_refused(message: m.AnyMessage) -> None:
    data = m.encode(message)
    assert [parse(data[:length]) for length in range(len(data))] == [None] * len(data)
    assert parse(data + b"\x00") is None and parse(data + data) is None


@given(any_message, st.data())
@budget
def test_mutations_are_messages_or_refused(message: m.AnyMessage, data: st.DataObject) -> None:
    wire = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(wire) - 1)))
        match data.draw(st.sampled_from(["set", "insert", "delete", "double"])):
            case "set":
                wire[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                wire[at:at] = data.draw(
                    st.one_of(st.binary(max_size=8), st.sampled_from(sorted(HUGE.values())))
                )
            case "delete":
                del wire[at : at + data.draw(st.integers(1, 8))]
            case "double":
                wire[at:at] = wire[at : at + 12]
    parse(bytes(wire))


def test_tags_are_those_that_peers_know_whatever_the_classes_are_called() -> None:
    """With another tag PROTOCOL_VERSION has to move. (`Partners` passes between the ranks of one engine.)"""
    assert m.PROTOCOL_VERSION == 5
    assert " ".join(sorted(kind.__struct_config__.tag for kind in KINDS)) == (
        "Ahead Cancel Chunk Done Elsewhere Failed Grant Heartbeat HeartbeatAck Hello Inspect LinkAccept "
        "LinkDown LinkInvite Offer Partners Referral Refuse Report Sent Stranger Want Welcome"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_needed_once_and_no_other_is_known(kind: type[Any]) -> None:
    """An optional one may be left out."""
    fields = list(raw(example(kind)).items())
    assert fields[0] == ("t", msgspec.msgpack.encode(kind.__struct_config__.tag))
    assert parse(join(fields)) == example(kind)
    for index, field in enumerate(fields):
        without = parse(join([*fields[:index], *fields[index + 1 :]]))
        assert (without is None) != is_optional(field[0]), f"without {field[0]}"
        assert parse(join([*fields, field])) is None, f"twice {field[0]}"
    assert parse(join([*fields, ("another", b"\x01")])) is None
    assert parse(join([("t", msgspec.msgpack.encode("Shutdown")), *fields[1:]])) is None


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(any_message, st.lists(st.tuples(st.text(max_size=20), anything), min_size=1, max_size=3), st.data())
@budget
def test_optional_fields_of_a_later_version_are_dropped_wherever_they_stand(
    message: m.AnyMessage, extra: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """The first, last and between the others, in the message and in what it carries (a Hello's cache)."""
    fields = msgspec.msgpack.decode(m.encode(message))
    for name, value in extra:
        inside = data.draw(st.sampled_from(_maps(fields, isinstance(message, m.Report))))
        items = list(inside.items())
        items.insert(data.draw(st.integers(inside is fields, len(items))), (f"?{name}", value))
        inside.clear()
        inside.update(items)
    again = read(msgspec.msgpack.encode(fields))
    assert again is not None and m.encode(again) == m.encode(message)


def _maps(value: Any, only: bool) -> list[dict[str, Any]]:
    """This map and, unless `only` it, those in it: they are structs on the wire but for a Report's values."""
    if isinstance(value, list):
        return [each for item in value for each in _maps(item, only)]
    if not isinstance(value, dict):
        return []
    return [value, *([] if only else [each for item in value.values() for each in _maps(item, only)])]


@pytest.mark.parametrize("kind", KINDS)
def test_optional_fields_excuse_nothing_else(kind: type[Any]) -> None:
    fields = list(raw(example(kind)).items())
    optional = ("?later", b"\x01")
    assert read(join([*fields, optional])) == example(kind)
    assert read(join([*fields, optional, optional])) is None, "twice"
    assert read(join([*fields, optional, ("another", b"\x01")])) is None
    assert read(join([*fields, ("later?", b"\x01")])) is None
    assert read(join([*fields, ("?later", b"\xd0\x01")])) is None, "1 in two bytes"
    for index, (name, _) in enumerate(fields[1:], 1):
        without = read(join([*fields[:index], *fields[index + 1 :], optional]))
        assert (without is None) != is_optional(name)
    for what, value in HUGE.items():
        kept = read(join([*fields, ("?later", value)]))
        assert kept == example(kind) if what in ("int", "negative") else kept is None, what


def test_an_optional_field_that_is_known_stays_beside_one_that_is_not() -> None:
    data = msgspec.msgpack.encode({"t": "Done", "?a": 1, "?b": {"?a": 2, "?c": 3}, "key": "k"})
    kept = msgspec.msgpack.decode(m.without_optional(data, {"?a"}))
    assert kept == {"t": "Done", "?a": 1, "key": "k"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", HUGE)
def test_huge_and_deep_values_are_refused_wherever_they_stand(kind: type[Any], what: str) -> None:
    fields = list(raw(example(kind)).items())
    for index, (name, _) in enumerate(fields):
        assert parse(join([*fields[:index], (name, HUGE[what]), *fields[index + 1 :]])) is None, name
    assert parse(join([("another", HUGE[what]), *fields])) is None
    assert parse(HUGE[what]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_is_kept(kind: type[Any]) -> None:
    info = inspect.type_info(kind)
    message = example(kind)
    for field in info.fields:
        for beyond in _beyond(field.type):
            if field.name == "reason":
                continue  # shortened by whoever says it
            broken = msgspec.structs.replace(message, **{field.name: beyond})
            assert parse(m.encode(broken)) is None, f"{field.name} = {str(beyond)[:40]}"


def _beyond(info: inspect.Type) -> list[Any]:
    """Values just outside of what is declared; every number and every length must be declared."""
    match info:
        case inspect.IntType(ge=int() as ge, le=int() as le):
            return [ge - 1, le + 1]
        case inspect.StrType(max_length=int() as high):
            return ["x" * (high + 1)]
        case inspect.BytesType(max_length=int() as high):
            return [b"x" * (high + 1)]
        case inspect.VarTupleType(item_type=item, max_length=int() as high, min_length=low):
            inner = [(value,) for value in _beyond(item)]
            return [*inner, (smallest(item),) * (high + 1), *([()] if low else [])]
        case inspect.TupleType(item_types=items):
            least = tuple(map(smallest, items))
            return [
                (*least[:at], value, *least[at + 1 :])
                for at, item in enumerate(items)
                for value in _beyond(item)
            ]
        case inspect.StructType(fields=fields) as struct:
            least = smallest(struct)
            return [
                msgspec.structs.replace(least, **{field.name: value})
                for field in fields
                for value in _beyond(field.type)
            ]
        case inspect.DictType(key_type=key):
            return [{value: 1} for value in _beyond(key)] + [{"a": None}, {1: 1}]
        case inspect.BoolType() | inspect.LiteralType():
            return [None, 7]
    raise AssertionError(f"a field without bounds: {info}")


def test_pieces_are_bounded_in_number_and_messages_in_size() -> None:
    most = m.Chunk("k", 1, 1, 1, (m.Piece(0, 1 << 20, 1 << 20, 1 << 40, 1 << 40),) * m.MAX_PIECES)
    assert len(m.encode(most)) < m.MAX_MESSAGE_BYTES and parse(m.encode(most)) == most
    large = m.Report({"x": "y" * (m.MAX_MESSAGE_BYTES - 100)})
    assert parse(m.encode(large)) == large
    with pytest.raises(
        m.BadMessage, match=f"of {m.MAX_MESSAGE_BYTES + 1} bytes exceeds {m.MAX_MESSAGE_BYTES}"
    ):
        m.decode(b"\x00" * (m.MAX_MESSAGE_BYTES + 1))


def test_what_is_refused_is_not_repeated_at_length() -> None:
    with pytest.raises(m.BadMessage) as error:
        m.decode(join([*raw(example(m.Cancel)).items(), ("x" * 100_000, b"\x01")]))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("kind", [m.Refuse, m.LinkDown, m.Failed, m.Cancel])
def test_a_reason_is_shortened_by_who_says_it_and_refused_from_who_does_not(kind: type[Any]) -> None:
    long = msgspec.structs.replace(example(kind), reason="\udcff" + "ü" * 5000)
    assert parse(m.encode(long)) == long
    assert long.reason == "?" + "ü" * 2047  # type: ignore[union-attr]
    fields = raw(long) | {"reason": msgspec.msgpack.encode("x" * 2049)}
    assert parse(join(list(fields.items()))) is None


def test_numbers_in_a_longer_form_than_needed_are_refused() -> None:
    fields = raw(example(m.Heartbeat)) | {"transfers": b"\x91\x92\xa1k\xcd\x00\x07"}
    assert parse(join(list(fields.items()))) is None
    fields["transfers"] = b"\x91\x92\xa1k\x07"
    assert parse(join(list(fields.items()))) == m.Heartbeat((("k", 7),))
