"""Who may work with whom, in sentences; and when a D says Hello."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pkv.control.discovery import Ping, decode_ping, encode_ping
from p2pkv.protocol.handshake import (
    FIRST_RETRY,
    LAST_RETRY,
    REFUSED_FOR,
    DialState,
    Refused,
    fit,
    negotiate,
    verified,
)
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup

GROUP = KvGroup((2, 2), 4, 64, 1, "bfloat16", "dense", "names-a")
CACHE = Cache(2, (GROUP,))


def hello(role: Any, cache: Cache = CACHE, **changes: Any) -> Hello:
    """A rank 0 with the address p:21000 or d:22000."""
    host, port = ("p", 21000) if role == "P" else ("d", 22000)
    place = f"{host}:{port}"
    ranks = tuple(f"{host}:{port + rank}" for rank in range(1, cache.stages * cache.tp))
    plain = Hello(
        version=PROTOCOL_VERSION,
        incarnation="incarnation",
        role=role,
        rank=0,
        to="x:1",
        address=place,
        addresses=(place, *ranks),
        model="m",
        weights="w",
        cache=cache,
        link="host",
        digest="xxh3-64",
        verify=False,
    )
    return replace(plain, **changes)


def cache(tp: int = 2, **changes: Any) -> Cache:
    return Cache(tp, (replace(GROUP, **changes),))


def test_rings_of_different_sizes_do_not_fit() -> None:
    mine = hello("P", cache(once=True, heads=1, window=8, row_bytes=64))
    theirs = hello("D", cache(once=True, heads=1, window=16, row_bytes=128))
    sizes = "a ring of 8 slots in 64 bytes at p:21000, a ring of 16 slots in 128 bytes at d:22000"
    with pytest.raises(Refused, match=f"{sizes}; .* num_speculative_tokens"):
        negotiate(mine, theirs)


# The sentences.


def differ(what: str, ours: object, theirs: object) -> str:
    return f"{what} differ: {ours} at p:21000, {theirs} at d:22000"


REFUSALS: dict[str, tuple[Hello, list[str]]] = {
    "version": (hello("D", version=99), [f"versions differ: {PROTOCOL_VERSION} at p:21000, 99 at d:22000"]),
    "role": (hello("P", address="q:1"), ["p:21000", "q:1", "both", "role P", "kv_producer", "kv_consumer"]),
    "rank": (hello("D", rank=7), ["d:22000", "rank 7 of 4"]),
    "addresses": (hello("D", addresses=("d:22000",)), ["d:22000 names 1 ranks", "lies on 4"]),
    "weights": (
        hello("D", weights="v", model="other"),
        [differ("weights", "w", "v"), "same model (here m, there other)"],
    ),
    "link": (hello("D", link="nccl"), [differ("links", "host", "nccl"), "`link`"]),
    "checksum": (
        hello("D", digest="fold-64", verify=True),
        [differ("checksums", "xxh3-64", "fold-64"), "`verify`"],
    ),
    "dtype": (
        hello("D", cache(dtype="float8_e4m3fn")),
        [differ("types", "bfloat16", "float8_e4m3fn"), "--kv-cache-dtype"],
    ),
    "codec": (
        hello("D", cache(codec="page:neon", unit_tokens=16, row_bytes=1024)),
        [
            "layouts differ: codec dense with blocks of 1 tokens at p:21000",
            "codec page:neon with blocks of 16 tokens at d:22000",
            "same kind of CPU",
            "--block-size",
        ],
    ),
    "row": (hello("D", cache(row_bytes=128)), [differ("bytes per token and head", 64, 128), "cache type"]),
    "packed row": (
        hello("D", cache(codec="page:vec", unit_tokens=32, row_bytes=32 * 128)),
        [differ("bytes per token and head", "64", "128")],
    ),
    "dtype fp8 in bytes": (
        hello("D", cache(dtype="uint8 (fp8_e4m3)", row_bytes=32)),
        [differ("types", "bfloat16", "uint8 (fp8_e4m3)"), "--kv-cache-dtype", "--dtype"],
    ),
    "dtype, and so the weights": (
        hello("D", cache(dtype="float32"), weights="v"),
        [differ("types", "bfloat16", "float32"), "--dtype"],
    ),
    "names": (hello("D", cache(layer_names="names-b")), [differ("KV layers", "names-a", "names-b")]),
    "window": (
        hello("D", cache(window=64)),
        [differ("attention windows", "0", "64"), "--disable-hybrid-kv-cache-manager"],
    ),
    "once": (hello("D", cache(once=True)), [differ("rows per request", "one for each token", "one")]),
    "tokens of a row": (
        hello("D", cache(unit_tokens=4)),
        [differ("rows per request", "one for each token", "one for 4 tokens")],
    ),
    "layers": (hello("D", cache(layers=(3, 2))), ["p:21000 and d:22000", "4 KV layers", "5"]),
    "heads": (hello("D", cache(heads=8)), ["p:21000 and d:22000", "4 KV heads", "8"]),
    "tp": (hello("D", cache(tp=3)), ["p:21000 and d:22000", "4 KV heads", "tensor-parallel size 3"]),
    # As DeepSeek V4.1's rows with vLLM 0.33 and 0.32, where their values and scales are planes.
    "KV groups": (
        hello("D", Cache(2, (GROUP, GROUP))),
        ["numbers of KV groups differ: 1 at p:21000, 2 at d:22000", "serve the same model", "B12X"],
    ),
    # The P here has no window, and says 1; so does one whose windows are replayed.
    "blocks of a window": (
        hello("D", cache(block=32)),
        [
            "sliding window have 1 tokens at p:21000 and 32 at d:22000",
            "multiple of D's",
            "--block-size",
            "--swa-bounded-replay",
        ],
    ),
    "ranks": (
        hello("D", cache(layers=(1,) * 4, tp=8192), addresses=("d:22000",) * 32768),
        ["p:21000 and d:22000", "32768 ranks", "16384"],
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_names_both_values_and_is_said_on_both_sides(what: str) -> None:
    theirs, words = REFUSALS[what]
    with pytest.raises(Refused) as refused:
        negotiate(hello("P"), theirs)
    assert [word for word in words if word not in str(refused.value)] == []
    if what not in ("rank", "addresses"):
        with pytest.raises(Refused):
            negotiate(theirs, hello("P"))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nowhere", "nowhere"),
        ("p:0", "port 0"),
        ("p:99999", "port 99999"),
        ("p q:1", "p q"),
        ("[::1:1", "::1"),
    ],
)
def test_a_p_whose_ranks_cannot_be_dialed_is_refused(place: str, words: str) -> None:
    good = hello("P").addresses
    with pytest.raises(Refused, match="p:21000 names a rank that cannot be dialed") as refused:
        negotiate(hello("D"), hello("P", addresses=(*good[:3], place)))
    assert words in str(refused.value)
    assert negotiate(hello("P"), hello("D", addresses=(place,) * 4)).edges, "nobody dials a D"


@pytest.mark.parametrize("on_p", [False, True])
@pytest.mark.parametrize("on_d", [False, True])
def test_a_pair_takes_checksums_if_either_asks_and_both_know_it(on_p: bool, on_d: bool) -> None:
    p, d = hello("P", verify=on_p), hello("D", verify=on_d)
    assert verified(p, d) == verified(d, p) == (on_p or on_d)
    assert negotiate(p, d) is negotiate(d, p)
    other = replace(d, digest="fold-64")
    if on_p or on_d:
        with pytest.raises(Refused, match="checksums differ: fold-64 at d:22000, xxh3-64 at p:21000"):
            negotiate(other, p)
    else:
        assert negotiate(p, other) is negotiate(other, p), "nobody computes any"


def test_an_opaque_codec_with_another_block_size_is_refused_with_both_values() -> None:
    packed = [cache(codec="page:neon", unit_tokens=tokens, row_bytes=64 * tokens) for tokens in (32, 128)]
    with pytest.raises(Refused) as refused:
        negotiate(hello("P", packed[0]), hello("D", packed[1]))
    assert str(refused.value) == (
        "memory layouts differ: codec page:neon with blocks of 32 tokens at p:21000, codec page:neon with "
        "blocks of 128 tokens at d:22000; this codec's pages travel whole, so set the same --block-size"
    )
    assert negotiate(hello("P", packed[0]), hello("D", packed[0])).edges


@pytest.mark.parametrize(
    ("form", "keeps"),
    [
        ({"window": 128}, "window: 128"),
        ({"codec": "page:vec", "unit_tokens": 16, "row_bytes": 16 * 64}, "codec page:vec"),
        ({"unit_tokens": 4}, "rows per request: one for 4 tokens"),
        ({"once": True}, "rows per request: one,"),
    ],
)
def test_only_plain_rows_of_tokens_are_divided_over_ranks(form: dict[str, Any], keeps: str) -> None:
    p, d = hello("P", cache(heads=1, tp=2, **form, dcp=2)), hello("D", cache(heads=1, tp=2, **form))
    with pytest.raises(Refused, match=f"sizes are 1 at d:22000 and 2 at p:21000, and .*{keeps}"):
        negotiate(d, p)
    assert negotiate(hello("P", cache(heads=1, tp=2, dcp=2)), hello("D", cache(heads=1, tp=2))).edges


def test_a_head_needs_as_many_ranks_as_its_tokens_are_divided_over() -> None:
    p, d = hello("P", cache(heads=2, tp=2, dcp=2)), hello("D", cache(heads=2, tp=2))
    with pytest.raises(Refused, match="cannot divide the tokens of a KV head over 2 ranks"):
        negotiate(d, p)


# The fingerprint in the ping.


DEMANDED = {
    "version": "protocol",
    "weights": "weights",
    "link": "link",
    "dtype": "cache element types",
    "codec": "memory layout",
    "row": "bytes per token and head",
    "names": "KV layers",
    "window": "attention windows",
    "layers": "layers in all",
    "heads": "KV heads",
}
"""Which of the refusals above the fingerprint foresees, and the name of what differs. The others are about a
pair, or about a Hello that contradicts itself."""


@pytest.mark.parametrize("what", DEMANDED)
def test_a_difference_that_judge_refuses_is_seen_in_the_fingerprint(what: str) -> None:
    here, there = fit(hello("P")).split(", "), fit(REFUSALS[what][0]).split(", ")
    assert [one.partition("=")[0] for one, other in zip(here, there, strict=True) if one != other] == [
        DEMANDED[what]
    ]


CACHES = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([(4,), (2, 2), (1, 3), (3, 2), (1, 1, 1, 1)]),
        "heads": st.sampled_from([2, 4]),
        "tp": st.sampled_from([1, 2, 3]),
        "token_bytes": st.sampled_from([64, 128]),
        "unit_tokens": st.sampled_from([1, 16, 32]),
        "dtype": st.sampled_from(["bfloat16", "float16", "uint8 (fp8_e4m3)"]),
        "codec": st.sampled_from(["dense", "page:vec", "page:amx", "page:neon"]),
        "layer_names": st.sampled_from(["names-a", "names-b"]),
        "once": st.booleans(),
        "window": st.sampled_from([0, 64]),
        "block": st.sampled_from([1, 16, 32]),
        "groups": st.integers(1, 3),
    }
)
RESTS = st.fixed_dictionaries(
    {
        "version": st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION + 1]),
        "weights": st.sampled_from(["w", "v"]),
        "link": st.sampled_from(["host", "nccl 2.27.3"]),
        "digest": st.sampled_from(["xxh3-64", "fold-64"]),
        "verify": st.booleans(),
        "prefetch": st.booleans(),
    }
)
FREE = {"layers", "tp", "unit_tokens", "codec", "block", "digest", "prefetch"}
"""What a P and a D that negotiate accepts may differ in."""


def drawn(role: str, cache: dict[str, Any], rest: dict[str, Any]) -> Hello:
    of_group = {name: value for name, value in cache.items() if name not in ("token_bytes", "tp", "groups")}
    group = KvGroup(row_bytes=cache["token_bytes"] * cache["unit_tokens"], **of_group)
    # The last one is the one that differs.
    others = (GROUP,) * (cache["groups"] - 1) if cache["layers"] == GROUP.layers else ()
    return hello(role, Cache(cache["tp"], (*others, group)), **rest)


@settings(deadline=None, max_examples=500)
@given(CACHES, RESTS, CACHES, RESTS, st.sets(st.sampled_from(sorted(FREE))), st.data())
def test_whoever_judge_accepts_has_the_same_fingerprint(
    cache: dict[str, Any],
    rest: dict[str, Any],
    other_cache: dict[str, Any],
    other_rest: dict[str, Any],
    differ: set[str],
    data: st.DataObject,
) -> None:
    rest["version"] = PROTOCOL_VERSION
    if data.draw(st.booleans(), label="one more thing that differs"):
        differ = differ | {data.draw(st.sampled_from(sorted({*cache, *rest} - FREE)))}
    p = drawn("P", cache, rest)
    d = drawn(
        "D",
        cache | {name: value for name, value in other_cache.items() if name in differ},
        rest | {name: value for name, value in other_rest.items() if name in differ},
    )
    try:
        negotiate(p, d)
    except Refused:
        return
    event(f"accepted, {'not ' * (p.cache == d.cache)}of different caches")
    assert fit(p) == fit(d)


@given(st.text(max_size=512), st.text(max_size=512))
def test_whatever_a_hello_says_its_fingerprint_fits_into_a_ping_and_is_its_own(one: str, other: str) -> None:
    prints = [fit(hello("P", cache(dtype=text, layer_names=text), link=text)) for text in (one, other)]
    assert (prints[0] == prints[1]) == (one == other)
    ping = Ping(type="P", http_address="p:1", zmq_address="p:2", fit=prints[0])
    assert decode_ping(encode_ping(ping)) == ping


# The dial.


def asked(dialing: DialState, start: float, stop: float) -> list[float]:
    """When Hello is said, looked at every hundredth of a second."""
    times = [start + tick / 100 for tick in range(round((stop - start) * 100))]
    return [round(time - start, 2) for time in times if dialing.due(time)]


def test_hello_is_said_at_once_and_then_with_growing_pauses() -> None:
    times = asked(DialState(now=100.0), 100.0, 106.0)
    pauses = [round(after - before, 2) for before, after in pairwise(times)]
    assert times[0] == 0.0
    for before, after in pairwise(pauses):
        assert after == pytest.approx(min(2 * before, LAST_RETRY), abs=0.03)
    assert pauses[0] == pytest.approx(FIRST_RETRY, abs=0.02)
    assert pauses[-1] == pytest.approx(LAST_RETRY, abs=0.02)


def test_an_open_dial_asks_nobody_until_it_is_lost_and_then_at_once() -> None:
    dialing = DialState(now=0.0)
    assert dialing.due(0.0)
    dialing.welcomed()
    assert dialing.open and asked(dialing, 0.0, 5.0) == []
    dialing.lost(5.0)
    assert asked(dialing, 5.0, 5.1) == pytest.approx([0.0, FIRST_RETRY], abs=0.011)


def test_a_peer_that_is_lost_again_and_again_is_not_asked_without_end() -> None:
    dialing = DialState(now=0.0)
    hellos = 0
    for tick in range(1000):
        dialing.lost(tick / 100)
        hellos += dialing.due(tick / 100)
    assert 10 <= hellos <= 16


def test_a_refused_peer_is_asked_again_only_after_a_while_and_if_somebody_needs_it() -> None:
    dialing = DialState(now=0.0)
    assert dialing.due(0.0)
    dialing.refuse("other weights", 0.0)
    assert dialing.reason == "other weights"
    assert asked(dialing, 0.0, REFUSED_FOR) == []
    dialing.lost(1.0)
    assert not dialing.due(REFUSED_FOR - 0.01) and dialing.due(REFUSED_FOR)
    assert dialing.reason == ""


def test_a_welcome_after_a_refusal_is_taken_and_clears_the_reason() -> None:
    dialing = DialState(now=0.0)
    dialing.refuse("other weights", 0.0)
    dialing.welcomed()
    assert dialing.open and dialing.reason == ""
