"""Which links are closed when there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pkv.engine.peers import surplus


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.booleans()), unique_by=lambda link: link[0], max_size=20),
    st.integers(1, 20),
)
def test_only_idle_ones_and_the_longest_unused_first(links: list[tuple[int, bool]], most: int) -> None:
    chosen = surplus(len(links) - most, [link for link in links if link[1]], lambda link: link[0])
    idle = sorted(link for link in links if link[1])
    assert chosen == idle[: max(0, len(links) - most)]
