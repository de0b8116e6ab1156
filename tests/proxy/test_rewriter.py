"""The streaming replacement equals bytes.replace, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proxy_fakes import join

from p2pkv.control.discovery import Ping
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.relay import Rewriter, Scrubber
from p2pkv_proxy.routing import Choice

MINTED = b"___prefill_addr_127.0.0.1:21001___decode_addr_[::1]:21002_" + b"0123456789abcdef" * 2
CLEAN = b"0123456789abcdef" * 2
# Small alphabets make overlaps and near misses likely.
STREAM = st.lists(st.sampled_from([b"_", b"a", b"__a", b"ab"]), max_size=30).map(b"".join)


def rewritten(rewriter: Rewriter, chunks: list[bytes]) -> bytes:
    return b"".join([*(rewriter.feed(chunk) for chunk in chunks), rewriter.flush()])


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def test_every_cut_in_two_of_a_stream_with_the_id() -> None:
    stream = b'data: {"id": "cmpl-' + MINTED + b'"}\n\ndata: {"id": "cmpl-' + MINTED + b'-0"}\n\n'
    expected = stream.replace(MINTED, CLEAN)
    for cut in range(len(stream) + 1):
        assert rewritten(Rewriter(MINTED, CLEAN), [stream[:cut], stream[cut:]]) == expected


def test_byte_by_byte() -> None:
    stream = b"__" + MINTED + MINTED[:-1] + MINTED + b"_"
    chunks = [bytes([byte]) for byte in stream]
    assert rewritten(Rewriter(MINTED, CLEAN), chunks) == stream.replace(MINTED, CLEAN)


@settings(deadline=None, max_examples=300)
@given(
    STREAM,
    st.binary(min_size=1, max_size=4).map(lambda b: bytes(b"_ab"[x % 3] for x in b)),
    st.lists(st.integers(0, 90)),
)
@example(b"a_a_a_a", b"a_a", [3])
def test_any_stream_any_cuts(stream: bytes, old: bytes, cuts: list[int]) -> None:
    assert rewritten(Rewriter(old, b"NEW"), chunks_of(stream, cuts)) == stream.replace(old, b"NEW")


@settings(deadline=None, max_examples=200)
@given(STREAM, st.integers(0, 90))
def test_nothing_waits_without_need(stream: bytes, cut: int) -> None:
    rewriter = Rewriter(b"__ab", b"x")
    seen = rewriter.feed(stream[:cut])
    held = rewriter.flush()
    assert b"__ab".startswith(held)
    assert held != b"__ab"
    assert seen + held == stream[:cut].replace(b"__ab", b"x")


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to replace"):
        Rewriter(b"", b"x")


@pytest.mark.parametrize("named", ["[::1]:21001", "[0:0:0:0:0:0:0:1]:21001", "[::1]:8100"])
def test_an_error_names_no_instance_however_it_spells_the_address(named: str) -> None:
    """A ping may spell it in full, and what vLLM writes is the short form."""
    message = Ping(type="D", http_address="[::1]:8100", zmq_address="[0:0:0:0:0:0:0:1]:21001")
    scrubber = Scrubber(Choice(None, join(Registry(), message)), "the id", "mine")
    assert scrubber.text(f"the id: no KV from {named}") == "mine: no KV from (decode instance)"
