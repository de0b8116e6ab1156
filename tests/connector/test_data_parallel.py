"""Instances of several data-parallel engines: real schedulers, connectors, ranks and blocks, without vLLM's
servers."""

from __future__ import annotations

import pytest
from connector_support import inner_id, pair_id, tokens
from real_ranks_support import data_parallel, finish

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2)])
def test_each_engine_of_p_serves_each_engine_of_d(tp_p: int, tp_d: int) -> None:
    """The id names the two engines; every block that D reads is what the prompt's tokens make."""
    with data_parallel(2, 2, tp_p, tp_d, budget=48) as engines:
        for p in engines[:2]:
            for d in engines[2:]:
                outer = pair_id(f"{p.address} {d.address}", prefill=p.address, decode=d.address)
                for index, length in enumerate((1, 17, 100)):
                    prompt = tokens(length, f"{outer} {index}")
                    p.ask(inner_id(outer, prompt=index), prompt, max_tokens=1)
                    d.ask(inner_id(outer, prompt=index), prompt, max_tokens=9)
        finish(*engines)
        for d in engines[2:]:
            assert set(d.ended.values()) == {"length"}
            assert sum(d.computed.values()) == 9 * 6, "D computed one token of each prompt"
