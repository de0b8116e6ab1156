"""Time of vLLM's engine core that p2pkv is the cause of: before and after a change, in interleaved rounds.

The engine core schedules each step before the model runs it, so what a scheduling pass takes is a part of the
pause between two tokens of every request that runs.

    D: vLLM's own scheduler with p2pkv in it, one request that decodes, and so many others that wait for P.
       Microseconds of one step: the scheduling pass, and taking the step's output. "cached": D has the first
       tokens of all prompts in its prefix cache, "new": it has none.
    P: microseconds of the one pass that schedules so many prompts, which begin alike and in the prefix cache.
    digest: milliseconds of the digest of a prompt of 32,768 x 8,192 embeddings in bfloat16.
    pause: milliseconds between two tokens of a stream of a real D (a tiny model on a CPU)
       while so many other requests wait for a real P, which has not been asked for them ("servers").

All but the last are the CPU time of the thread (time.thread_time), without a model and without workers. Each
round is a process of its own for each tree, --before and this one in turn; servers of both trees run side by
side, and only one is asked at a time. Writes engine_core_cost.md and engine_core_cost.json to --out; with
--only, what they have of the other part stays.

    git archive 4556372 | tar x -C /some/folder
    python benchmarks/engine_core_cost.py --before /some/folder
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parents[1]
BLOCK, PREFIX, OWN = 16, 2000, 40
"""Tokens: of a block, of the beginning that prompts share, and of what is a prompt's own."""

WAITING = (0, 256, 1000)
PROMPTS = (16, 64)
STEPS, WARM = 60, 5
EMBEDDINGS = 32768, 8192
P_ADDRESS, D_ADDRESS = "127.0.0.1:21001", "127.0.0.1:21101"
SERVER_PREFIX, SERVER_TOKENS = 1000, 400
LEASE = 900.0
"""Seconds. P keeps claims of prompts that it does not know for a lease."""

Costs = dict[str, float]
"""Seconds by what was measured."""

# One round, in a process of its own. What is imported here is the tree's.


def measure() -> Costs:
    import logging

    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    costs: Costs = {}
    for waiting in WAITING:
        for cached in (False, True):
            costs[f"D, {waiting:,} waiting, {'cached' if cached else 'new'}"] = step_of_d(waiting, cached)
    for prompts in PROMPTS:
        costs[f"P, {prompts} prompts"] = pass_of_p(prompts)
    costs["digest"] = digest()
    return costs


def step_of_d(waiting: int, cached: bool) -> float:
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = make_scheduler("D")
    shared = prompt(PREFIX, 0)
    scheduler.add_request(make_request("decoding", [*shared, 1], 1 << 10))
    for number in range(waiting):
        beginning = shared if cached else prompt(PREFIX, 1 + number)
        tokens = [*beginning, *prompt(OWN, number)]
        scheduler.add_request(make_request(f"cmpl-{pair_id(number)}-0-{number:08x}", tokens, 16))
    spent = []
    for step in range(-WARM, STEPS):
        begin = time.thread_time()
        scheduled = scheduler.schedule()
        middle = time.thread_time()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7]],
        )
        if scheduler.running[0].is_prefill_chunk:
            output.sampled_token_ids = [[]]
        resumed = time.thread_time()
        scheduler.update_from_output(scheduled, output)
        if step >= 0:
            assert names == ["decoding"], names
            spent.append(time.thread_time() - resumed + middle - begin)
    assert len(scheduler.requests) == 1 + waiting
    return statistics.median(spent)


def pass_of_p(prompts: int) -> float:
    from vllm.v1.outputs import ModelRunnerOutput

    spent = []
    for _ in range(5):
        scheduler = make_scheduler("P")
        shared = prompt(PREFIX, 0)
        scheduler.add_request(make_request("first", [*shared, 1], 1))
        scheduled = scheduler.schedule()
        output = ModelRunnerOutput(req_ids=["first"], req_id_to_index={"first": 0}, sampled_token_ids=[[7]])
        scheduler.update_from_output(scheduled, output)
        for number in range(prompts):
            tokens = [*shared, *prompt(OWN, number)]
            scheduler.add_request(make_request(f"cmpl-{pair_id(number)}-0-{number:08x}", tokens, 1))
        begin = time.thread_time()
        scheduled = scheduler.schedule()
        spent.append(time.thread_time() - begin)
        meta: Any = scheduled.kv_connector_metadata
        assert [each.cached for each in meta.prefills] == [PREFIX] * prompts
    return statistics.median(spent)


def digest() -> float:
    import torch

    from p2pkv.connector.identity import prompt_digest

    embeds = torch.zeros(EMBEDDINGS, dtype=torch.bfloat16)
    request: Any = SimpleNamespace(
        prompt_token_ids=None,
        mm_features=None,
        lora_request=None,
        cache_salt=None,
        prompt_embeds=embeds,
        prompt_is_token_ids=None,
    )
    spent = []
    for _ in range(3):
        begin = time.thread_time()
        prompt_digest(request)
        spent.append(time.thread_time() - begin)
    return statistics.median(spent)


def make_scheduler(role: str) -> Any:
    """vLLM's, with p2pkv and enough blocks for everything."""
    import torch
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    load_general_plugins()
    host, port = (P_ADDRESS if role == "P" else D_ADDRESS).split(":")
    most, budget, blocks = 4096, 1 << 15, 1 << 12
    config = VllmConfig(
        model_config=ModelConfig(model=str(model()), max_model_len=most, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=budget,
            max_model_len=most,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="P2pKvConnector",
            kv_role={"P": "kv_producer", "D": "kv_consumer"}[role],
            kv_port=int(port),
            kv_connector_extra_config={"host": host},
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def model() -> Path:
    from p2pkv.demo.tiny_model import TinyLlama, ensure_model

    return ensure_model(TinyLlama(max_positions=4096), Path(tempfile.gettempdir()) / "p2pkv-benchmarks")


def make_request(name: str, tokens: list[int], most: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=most, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def prompt(count: int, seed: int) -> list[int]:
    """Token ids, others for each seed."""
    return [300 + (seed * 7919 + index * 31 + index * index % 17) % 700 for index in range(count)]


def pair_id(number: int, prefill: str = P_ADDRESS, decode: str = D_ADDRESS) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{number:032x}"


# Servers.


async def pause_of(p: Any, d: Any, waiting: int) -> float:
    """Median seconds between two events of a stream of D, while so many others wait for P."""
    import aiohttp

    shared = prompt(SERVER_PREFIX, 0)
    url, body = f"{d.base_url}/v1/completions", {"model": "tiny", "temperature": 0, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as client:

        async def ask(number: int) -> None:
            name = pair_id(time.time_ns() << 16 | number, p.zmq_address, d.zmq_address)
            tokens = [*shared, *prompt(OWN, number)]
            async with client.post(
                url, json={**body, "prompt": tokens, "max_tokens": 1}, headers={"X-Request-Id": name}
            ) as response:
                raise AssertionError(f"P was not asked, and D answers {response.status}")

        others = [asyncio.ensure_future(ask(number)) for number in range(waiting)]
        try:
            await counted(client, d, waiting)
            gaps: list[float] = []
            body |= {"prompt": shared, "max_tokens": SERVER_TOKENS, "stream": True}
            async with client.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                last = 0.0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        gaps.append(now - last)
                        last = now
            assert not any(each.done() for each in others), "a request that waited has ended"
        finally:
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await counted(client, d, 0)
    return statistics.median(gaps[10:])


async def counted(client: Any, d: Any, waiting: int) -> None:
    """Wait until so many requests wait on D."""
    deadline = time.monotonic() + 120.0
    found = -1.0
    while time.monotonic() < deadline:
        async with client.get(f"{d.base_url}/metrics") as response:
            page = await response.text()
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_waiting{")]
        found = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        if found == waiting:
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{found:.0f} requests wait on D, not {waiting}")


def measure_servers(trees: dict[str, Path], rounds: int) -> list[dict[str, Costs]]:
    from p2pkv.demo.servers import VllmServer

    settings = (
        *("--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "2048"),
        *("--block-size", "32", "--max-num-seqs", "64", "--enable-prefix-caching"),
    )
    more: dict[str, Any] = {"extra_args": settings, "extra_config": {"lease_seconds": LEASE}}
    found = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        pairs = {}
        for name, tree in trees.items():
            env = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}  # and not what is in this folder
            pairs[name] = [
                VllmServer(model(), role=role, env=env, log_path=Path(logs) / f"{name}-{role}.log", **more)
                for role in ("P", "D")
            ]
        for pair in pairs.values():  # two at a time, as two cores start no more in good time
            for server in pair:
                stack.enter_context(server)
            for server in pair:
                server.wait_ready(600.0)
        for turn in range(rounds + 1):
            costs: dict[str, Costs] = {name: {} for name in pairs}
            for waiting in WAITING:
                for name in in_turn(list(pairs), turn):
                    costs[name][f"pause, {waiting:,} waiting"] = asyncio.run(pause_of(*pairs[name], waiting))
            if turn:  # the first one only warms up
                found.append(costs)
                print(json.dumps(costs), file=sys.stderr, flush=True)
    return found


# The whole.


def in_turn(names: list[str], turn: int) -> list[str]:
    return names if turn % 2 else names[::-1]


def rounds_of(trees: dict[str, Path], rounds: int) -> Iterator[dict[str, Costs]]:
    for turn in range(rounds):
        costs = {}
        for name in in_turn(list(trees), turn):
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trees[name]), str(HERE / "benchmarks")])}
            done = subprocess.run(
                [sys.executable, __file__, "--one-round"],
                env=env, cwd=trees[name], stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            costs[name] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(costs), file=sys.stderr, flush=True)
        yield costs


def spread(values: Sequence[float], form: str) -> str:
    """Median [lowest - highest]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}} - {max(values):{form}}]"


def table(found: list[dict[str, Costs]], names: list[str]) -> Iterator[str]:
    past = names[:-1]
    yield f"| | {' | '.join(names)} |{' after / before |' if past else ''}"
    yield f"|---|{'---:|' * (len(names) + bool(past))}"
    for what in found[0][names[-1]]:
        unit, scale = ("ms", 1e3) if what.startswith(("digest", "pause")) else ("us", 1e6)
        cells = [spread([scale * each[name][what] for each in found], ",.1f") for name in names]
        if past:
            cells.append(spread([each[names[-1]][what] / each[past[0]][what] for each in found], ".3f"))
        yield f"| {what}, {unit} | {' | '.join(cells)} |"


def growth(found: list[dict[str, Costs]], names: list[str], label: Callable[[int], str]) -> str:
    """Times what it is with none."""
    said = []
    for name in names:
        ratios = [each[name][label(WAITING[-1])] / each[name][label(0)] for each in found]
        said.append(f"{name} {spread(ratios, '.2f')}")
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the root of another version of p2pkv")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--only", choices=("core", "servers"), help="measure this part alone")
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder")
    args = parser.parse_args()
    if args.one_round:
        gc.freeze()
        print(json.dumps(measure()))
        return
    from engine_cost import environment  # here, since a round imports nothing but its own tree

    trees = {"after": HERE} if args.before is None else {"before": args.before.resolve(), "after": HERE}
    names = list(trees)
    written = args.out / "engine_core_cost.json"
    kept = json.loads(written.read_text()) if args.only and written.exists() else {}
    core, servers = kept.get("core", []), kept.get("servers", [])
    if args.only != "servers":
        core = list(rounds_of(trees, args.rounds))
    if args.only != "core":
        servers = measure_servers(trees, args.rounds)
    lines = [
        f"# Engine core time ({environment()})",
        "",
        "Median [lowest - highest] of the rounds, and ratios within a round. What is measured and how: "
        "engine_core_cost.py.",
    ]
    if core:
        per_step = [growth(core, names, f"D, {{:,}} waiting, {kind}".format) for kind in ("new", "cached")]
        lines += ["", f"{len(core)} rounds of CPU time:", "", *table(core, names), ""]
        lines.append(
            f"D's step with {WAITING[-1]:,} waiting, times that with none: new {per_step[0]}; "
            f"cached {per_step[1]}."
        )
    if servers:
        times = growth(servers, names, "pause, {:,} waiting".format)
        lines += ["", f"{len(servers)} rounds of real servers:", "", *table(servers, names), ""]
        lines.append(f"The pause with {WAITING[-1]:,} waiting, times that with none: {times}.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "engine_core_cost.md").write_text("\n".join(lines) + "\n")
    result = {"environment": environment(), "core": core, "servers": servers}
    written.write_text(json.dumps(result) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
