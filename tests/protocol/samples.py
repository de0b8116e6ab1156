"""Messages of every kind: any that the declared types allow, and one of each."""

from typing import Any, get_args

from hypothesis import strategies as st
from msgspec import UNSET, inspect

from p2pkv.protocol.messages import AnyMessage

KINDS: tuple[type[Any], ...] = get_args(AnyMessage)


def values(info: inspect.Type) -> st.SearchStrategy[Any]:
    """What the declared type allows, as msgspec itself reads the declaration."""
    match info:
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(1 << 63) if ge is None else ge, (1 << 63) - 1 if le is None else le)
        case inspect.StrType(min_length=low, max_length=high):
            return st.text(max_size=min(20, high or 20), min_size=low or 0)
        case inspect.BytesType(max_length=high):
            return st.binary(max_size=min(20, high or 20))
        case inspect.BoolType():
            return st.booleans()
        case inspect.FloatType():
            return st.floats()
        case inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case inspect.VarTupleType(item_type=item, min_length=low):
            return st.lists(values(item), min_size=low or 0, max_size=4).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=4)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.StructType(cls=cls, fields=fields):
            left_out = [st.just(UNSET) if field.default is UNSET else st.nothing() for field in fields]
            drawn = [values(field.type) | no for field, no in zip(fields, left_out, strict=True)]
            return st.builds(cls, *drawn)
    raise AssertionError(f"messages have a type that is not known here: {info}")


any_message: st.SearchStrategy[AnyMessage] = st.one_of(*(values(inspect.type_info(kind)) for kind in KINDS))


def example(kind: type[Any]) -> AnyMessage:
    """One valid message of this kind, the same each time."""
    return smallest(inspect.type_info(kind))  # type: ignore[no-any-return]


def smallest(info: inspect.Type) -> Any:
    """One value that the declared type allows, the same each time."""
    match info:
        case inspect.IntType(ge=ge):
            return ge or 0
        case inspect.StrType(min_length=low):
            return "x" * max(1, low or 0)
        case inspect.BytesType():
            return b"x"
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=allowed):
            return allowed[0]
        case inspect.VarTupleType(item_type=item):
            return (smallest(item),)
        case inspect.TupleType(item_types=items):
            return tuple(map(smallest, items))
        case inspect.DictType():
            return {"a": 1, "b": 2.5, "c": "d"}
        case inspect.StructType(cls=cls, fields=fields):
            return cls(*(smallest(field.type) for field in fields))
    raise AssertionError(f"messages have a type that is not known here: {info}")
