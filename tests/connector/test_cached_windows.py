"""What a D caches after a load, by vLLM's own block manager: of a window all that a hit may show."""

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from p2pkv.connector import describe
from p2pkv.protocol.handshake import row_format
from p2pkv.protocol.messages import KvGroup
from support.connector.instances import ATTENTION, BLOCK, kv_groups, make_request, tokens


def _sees_window(window: int, ahead: int, block: int) -> SlidingWindowSpec:
    sizes = ATTENTION | {"block_size": block}
    return SlidingWindowSpec(**sizes, sliding_window=window, extra_retained_tokens=ahead)


def _manager(window: SlidingWindowSpec) -> KVCacheManager:
    block = window.block_size
    sees_all = FullAttentionSpec(**(ATTENTION | {"block_size": block}))
    config = kv_groups((["all"], sees_all), (["window"], window), blocks=200)
    return KVCacheManager(config, max_model_len=512, scheduler_block_size=block, hash_block_size=block)


def _group(window: SlidingWindowSpec) -> KvGroup:
    seen, block = describe._window(window), window.block_size
    return KvGroup((1,), 2, 256, 1, "float32", "dense", "names", window=seen, block=block)


@pytest.mark.parametrize("window", [2, 16, 20, 32, 50])
@pytest.mark.parametrize("ahead", [0, 3], ids=["no drafter", "a drafter of four modules"])
@pytest.mark.parametrize("prefill_block", [BLOCK, 4 * BLOCK])
def test_no_hit_of_d_s_prefix_cache_shows_a_token_that_has_not_come(
    window: int, ahead: int, prefill_block: int
) -> None:
    """And P, which computes the prompt in steps, still has what is asked of it."""
    ps, ds = (_sees_window(window, ahead, block) for block in (prefill_block, BLOCK))
    wire = row_format(_group(ps), _group(ds))
    hits = set()
    for stop in (1, 15, 16, 17, 63, 70, 95, 96, 97, 127, 161):
        first, past = wire.needed(0, stop)
        assert past == stop
        decode = _manager(ds)
        request = make_request("d", tokens(stop + 1))
        assert decode.allocate_slots(request, 0, num_external_computed_tokens=stop, delay_cache_blocks=True)
        _check_table(decode, request, first, BLOCK)
        decode.cache_blocks(request, stop)
        for shared in range(1, stop + 1):
            other = make_request("o", [*tokens(stop + 1)[:shared], *tokens(20, seed=1)])
            _, hit, *_ = decode.get_computed_blocks(other)
            hits.add(hit)
            assert not hit or first <= max(0, hit - window + 1)
        prefill = _manager(ps)
        request = make_request("p", tokens(stop), max_tokens=1)
        while request.num_computed_tokens < stop:
            step = min(48, stop - request.num_computed_tokens)
            assert prefill.allocate_slots(request, step)
            request.num_computed_tokens += step
        _check_table(prefill, request, first, prefill_block)
    assert hits > {0} if window != 2 * BLOCK else hits > {0, 64, 96, 160}


def _check_table(manager: KVCacheManager, request: object, first: int, block: int) -> None:
    table = manager.get_blocks(request.request_id).blocks[1]  # type: ignore[attr-defined]
    assert not any(entry.is_null for entry in table[first // block :])
