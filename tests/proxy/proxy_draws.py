"""What requests may have in them, drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def json_values(
    texts: Any = None, names: Any = None, integers: Any = None, leaves: int = 20
) -> st.SearchStrategy[Any]:
    """JSON of any form; `names` are those of objects."""
    names = st.text(max_size=8) if names is None else names
    return st.recursive(
        st.none()
        | st.booleans()
        | (st.integers(-(2**60), 2**60) if integers is None else integers)
        | st.floats(allow_nan=False, allow_infinity=False)
        | (st.text(max_size=8) if texts is None else texts),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=leaves,
    )
