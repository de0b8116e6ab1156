"""Addresses, request ids that carry a pair, and transfer keys that P and D agree on."""

import importlib.util
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.pairing import Address, Pair, PairingError, find_pair, mint, transfer_key

UNIQUE = "0123456789abcdef0123456789abcdef"
P = Address("10.0.0.1", 21001)
D = Address("10.0.0.2", 22001)
ID = mint(P, D, UNIQUE)

labels = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
names = (
    st.lists(labels, min_size=1, max_size=3).map(".".join).filter(lambda n: not n.split(".")[-1].isdigit())
)
hosts = st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), names)
addresses = st.builds(Address, hosts, st.integers(1, 65535))
uniques = st.text("0123456789abcdef", min_size=32, max_size=32)
suffixes = st.text("0123456789abcdef", min_size=8, max_size=8)
pairs = st.builds(Pair, addresses, addresses, uniques)
# What clients and routers call their own requests, without a mark of a pair; a chat id that ends like
# `_7` would read as an index.
plain_ids = st.text(string.ascii_letters + string.digits + "-_.", min_size=1, max_size=40).filter(
    lambda text: not re.search(r"_[0-9]+$|-[0-9a-f]{8}$|_addr_", text)
)
budget = settings(max_examples=150)


def completion(request_id: str, index: int, suffix: str) -> str:
    return f"cmpl-{request_id}-{index}-{suffix}"


def chat(request_id: str, suffix: str) -> str:
    return f"chatcmpl-{request_id}-{suffix}"


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("10.0.0.1:21001", "10.0.0.1", 21001),
            ("node-7.rack2:1", "node-7.rack2", 1),
            ("my_service:80", "my_service", 80),
            ("Node-7:65535", "node-7", 65535),
            ("[::1]:21001", "::1", 21001),
            ("[FD00:0::1]:21001", "fd00::1", 21001),
        ],
    )
    def test_parse(self, text: str, host: str, port: int) -> None:
        assert Address.parse(text) == Address(host, port)
        assert Address.parse(text).host == host

    @given(address=addresses)
    @budget
    def test_round_trip(self, address: Address) -> None:
        assert Address.parse(str(address)) == address

    def test_spelling_does_not_matter(self) -> None:
        assert Address("[FD00::0:1]", 5) == Address("fd00::1", 5)
        assert hash(Address("Node.", 5)) == hash(Address("node", 5))
        # vLLM's disagg_prefill_proxy_server.py writes it into ids, for instances with VLLM_HOST_IP=127.0.0.1.
        assert Address("LocalHost", 5) == Address("127.0.0.1", 5)

    def test_shifted_names_the_port_of_a_rank(self) -> None:
        assert str(Address("::1", 21001).shifted(3)) == "[::1]:21004"
        with pytest.raises(PairingError, match="65536"):
            Address("a", 65535).shifted(1)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "expected host:port"),
            ("node", "expected host:port"),
            (":5", "not a host"),
            ("node:", "expected host:port"),
            ("node:http", "the port must be a number"),
            ("node:0", "not from 1 to 65535"),
            ("node:65536", "not from 1 to 65535"),
            ("node:-1", "the port must be a number"),
            ("node:٣", "the port must be a number"),
            ("::1:21001", "needs brackets"),
            ("[10.0.0.1]:5", "brackets are for IPv6"),
            ("[::g]:5", "not an IPv6 address"),
            ("[fe80::1%eth0]:5", "zone id"),
            ("300.0.0.1:5", "not an IPv4 address"),
            ("10.0.1:5", "not an IPv4 address"),
            ("010.0.0.1:5", "not an IPv4 address"),
            ("a b:5", "not a host"),
            ("-a:5", "not a host"),
            ("a___b:5", "not a host"),
            ("tcp://a:5", "without a scheme"),
        ],
    )
    def test_malformed(self, text: str, told: str) -> None:
        with pytest.raises(PairingError, match=re.escape(told)):
            Address.parse(text)


class TestPairs:
    def test_what_the_original_connector_parses(self) -> None:
        prefill = re.search(r"___prefill_addr_(.*):(\d+)___", ID)
        decode = re.search(r"___decode_addr_(.*):(\d+)", ID)
        assert prefill is not None and prefill.groups() == ("10.0.0.1", "21001")
        assert decode is not None and decode.groups() == ("10.0.0.2", "22001")

    def test_minted_ids_differ(self) -> None:
        assert len({mint(P, D) for _ in range(100)}) == 100

    def test_minting_refuses_what_is_not_32_hex_digits(self) -> None:
        with pytest.raises(PairingError, match="32 hex"):
            mint(P, D, "abc")

    @given(pair=pairs, index=st.integers(0, 9999), suffix=suffixes, child=st.integers(0, 200))
    @budget
    def test_found_in_every_wrapping(self, pair: Pair, index: int, suffix: str, child: int) -> None:
        request_id = mint(pair.prefill, pair.decode, pair.unique)
        wrapped = [
            request_id,
            f"cmpl-{request_id}-{index}",
            completion(request_id, index, suffix),
            chat(request_id, suffix),
            f"chatcmpl-{request_id}_{index}-{suffix}",
            f"{request_id}-{suffix}",
        ]
        wrapped += [f"{child}_{one}" for one in wrapped]
        assert [find_pair(one) for one in wrapped] == [pair] * len(wrapped)

    @pytest.mark.parametrize("text", ["", "cmpl-abc-0-deadbeef", "prefill_addr_a:1", "chatcmpl-___decode"])
    def test_no_pair(self, text: str) -> None:
        assert find_pair(text) is None

    @pytest.mark.parametrize(
        "text",
        [
            ID[:-1],
            ID + "0",
            ID.replace(":21001", ""),
            ID.replace("10.0.0.2", "10.0.0.999"),
            ID.replace(":22001", ":99999"),
            ID.replace("___decode_addr_", "_"),
            ID.replace("___prefill_addr_", "_"),
            ID + "-0-deadbeef-more",
            ID + ID,
            "___decode_addr_a:1___prefill_addr_a:1_" + UNIQUE,
        ],
    )
    def test_malformed_pair(self, text: str) -> None:
        for wrapped in (text, f"cmpl-{text}-0-deadbeef"):
            with pytest.raises(PairingError):
                find_pair(wrapped)


class TestTransferKeys:
    @given(pair=pairs, index=st.integers(0, 9999), one=suffixes, two=suffixes, child=st.integers(0, 200))
    @budget
    def test_stable_across_suffixes_and_children(
        self, pair: Pair, index: int, one: str, two: str, child: int
    ) -> None:
        def ids(suffix: str) -> list[str]:
            return [completion(str(pair), index, suffix), chat(str(pair), suffix)]

        for on_p, on_d in zip(ids(one), ids(two), strict=True):
            assert transfer_key(on_p) == transfer_key(f"{child}_{on_d}")

    def test_no_index_is_index_zero(self) -> None:
        alone = transfer_key(chat(ID, "deadbeef"))
        assert (
            alone == transfer_key(f"chatcmpl-{ID}_0-deadbeef") == transfer_key(completion(ID, 0, "deadbeef"))
        )
        assert alone != transfer_key(f"chatcmpl-{ID}_1-deadbeef")

    def test_a_suffix_of_decimal_digits_is_no_index(self) -> None:
        assert transfer_key(chat(ID, "12345678")) == transfer_key(chat(ID, "deadbeef"))
        assert transfer_key(completion(ID, 3, "12345678")) == transfer_key(completion(ID, 3, "deadbeef"))

    def test_without_the_random_suffix(self) -> None:
        assert transfer_key(f"cmpl-{ID}-2") == transfer_key(completion(ID, 2, "deadbeef"))
        assert transfer_key(f"chatcmpl-{ID}") == transfer_key(chat(ID, "deadbeef"))

    @given(prompts=st.sets(st.tuples(pairs, st.integers(0, 99)), min_size=2, max_size=8), suffix=suffixes)
    @budget
    def test_distinct_prompts_have_distinct_keys(self, prompts: set[tuple[Pair, int]], suffix: str) -> None:
        keys = {transfer_key(completion(str(pair), index, suffix)) for pair, index in prompts}
        assert len(keys) == len(prompts)

    def test_ids_of_one_number_for_two_pairs_have_distinct_keys(self) -> None:
        """A router may use its digits again for another pair, which is another transfer."""
        elsewhere = [
            mint(P, P, UNIQUE),
            mint(D, D, UNIQUE),
            mint(D, P, UNIQUE),
            mint(P, D.shifted(1), UNIQUE),
        ]
        keys = {transfer_key(completion(each, 0, "deadbeef")) for each in [ID, *elsewhere]}
        assert len(keys) == 5

    @given(request_id=plain_ids, transfer_id=st.none() | st.text(max_size=20))
    @budget
    def test_an_id_without_a_pair_has_no_key(self, request_id: str, transfer_id: str | None) -> None:
        with pytest.raises(PairingError, match="names no pair"):
            transfer_key(completion(request_id, 0, "deadbeef"), transfer_id)

    @given(
        transfer_id=st.text(min_size=1, max_size=300),
        request_id=pairs.map(str),
        other=pairs.map(str),
        index=st.integers(0, 99),
        one=suffixes,
        two=suffixes,
    )
    @budget
    def test_a_transfer_id_stands_for_the_request_id(
        self, transfer_id: str, request_id: str, other: str, index: int, one: str, two: str
    ) -> None:
        on_p = transfer_key(completion(request_id, index, one), transfer_id)
        on_d = transfer_key(f"2_{completion(other, index, two)}", transfer_id)
        assert on_p == on_d
        assert transfer_key(completion(other, index + 1, two), transfer_id) != on_p
        assert transfer_key(completion(other, index, two), transfer_id + "x") != on_p

    def test_a_transfer_id_cannot_pass_for_a_request(self) -> None:
        own = transfer_key(ID)
        assert transfer_key(ID, own.removesuffix("/0")) != own

    def test_an_empty_transfer_id(self) -> None:
        with pytest.raises(PairingError, match="empty transfer_id"):
            transfer_key(ID, "")

    @given(pair=pairs, transfer_id=st.none() | st.text(min_size=1, max_size=2000))
    @budget
    def test_keys_are_bounded_and_printable(self, pair: Pair, transfer_id: str | None) -> None:
        key = transfer_key(str(pair), transfer_id)
        assert 1 <= len(key) <= 512
        assert key.isascii() and key.isprintable()

    def test_a_lone_surrogate_in_an_id(self) -> None:
        assert transfer_key(ID, "\udfff").isascii()


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(
                ["___prefill_addr_", "___decode_addr_", "cmpl-", "chatcmpl-", "0_", ":", "_", "-"]
            ),
            st.sampled_from(["[::1]", "10.0.0.1", "21001", UNIQUE, "deadbeef", "[", "]", "9" * 5000, "\n"]),
            st.text(max_size=5),
            st.characters(categories=["Cs"]),
        ),
        max_size=14,
    )
)
@settings(max_examples=400)
def test_garbage_is_understood_or_refused(parts: list[str]) -> None:
    """The invariant: a value, or a PairingError; never anything else."""
    text = "".join(parts)
    for read in (find_pair, transfer_key, Address.parse):
        try:
            read(text)
        except PairingError as error:
            assert len(str(error)) < 600


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_wrapping_of_the_installed_vllm() -> None:
    """vLLM's own code wraps the ids here, so that a new format is noticed."""
    from types import SimpleNamespace

    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    def wrapped(request_id: str) -> SimpleNamespace:
        request = SimpleNamespace(request_id=request_id, external_req_id=None, params=SimpleNamespace(n=2))
        request.params.output_kind = request.params.seed = None
        InputProcessor.assign_request_id(request)
        return request

    one, two = wrapped(f"cmpl-{ID}-1"), wrapped(f"cmpl-{ID}-1")
    assert one.request_id != two.request_id
    child, _ = ParentRequest(two).get_child_info(1)
    assert transfer_key(one.request_id) == transfer_key(child) == transfer_key(f"cmpl-{ID}-1")
