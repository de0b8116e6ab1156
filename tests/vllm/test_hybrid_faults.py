"""P dies or freezes while models with several KV groups travel: all is answered.

Whatever of a load has failed, D computes all of that request, and what it answers is right. The next request
finds pages that hold what P computed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2pkv.demo import answers, client, processes, servers, tiny_model
from p2pkv.demo.answers import Answer
from support.models.deepseek_v4 import TinyDeepseekV4
from support.models.families import TinyGemma, TinyQwen
from support.servers import fleet
from support.servers.deployments import LEASE, PROXYS, Deployment, deployed, grows
from support.servers.probes import Compared

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROMPTS, LENGTH, ANSWER = 8, 500, 16


@dataclass(frozen=True)
class Kind:
    """`tie`: tokens closer than this in log-probability may swap places. `plugins`: that this model needs."""

    model: tiny_model.TinyFiles
    dtype: str
    tie: float
    plugins: tuple[str, ...] = ()


KINDS = {
    "window": Kind(TinyGemma(), "float32", answers.TIE),
    "recurrent": Kind(TinyQwen(), "bfloat16", 1.0),
    # One server without P, which preempts, differs from itself by more than 0.05 (2026-11-27).
    "DeepSeek-V4": Kind(TinyDeepseekV4(), "bfloat16", 0.5, ("deepseek_v4",)),
}


@dataclass
class Pair(Deployment):
    kind: Kind = KINDS["window"]
    probes: Path = Path()
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1000)))

    def some(self, count: int = PROMPTS) -> list[list[int]]:
        return [fleet.tokens(LENGTH, f"hybrid {next(self._numbers)}") for _ in range(count)]

    def alone(self, prompt: list[int], count: int = ANSWER) -> Answer:
        return fleet.complete(self.d, prompt, count)

    def answer(self, prompt: list[int], count: int = ANSWER) -> Answer:
        return fleet.complete(self.proxy, prompt, count)

    def check(self, expected: list[Answer], got: list[Answer]) -> None:
        assert [len(each.tokens) for each in got] == [len(each.tokens) for each in expected]
        fleet.assert_same(expected, got, self.kind.tie)

    def pushing(self) -> Callable[[], None]:
        return grows(self.p, "p2pkv_bytes_sent_total")

    def works_again(self) -> None:
        """Both hold nothing; the next request is loaded from P, and its pages are P's."""
        self.rests()
        processes.wait_until(self.serving, "a pair that serves again", 200.0)
        compared, (prompt,) = Compared(self.probes), self.some(1)
        expected = [self.alone(prompt)]
        self.check(expected, [self.answer(prompt)])
        assert compared.spans(1) == [(0, LENGTH - 1)]


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, fleet_keeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    fleet_keeper.stop()
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("hybrid-faults")
    if kind.plugins:
        fleet.needs_deepseek_v4()
    model = tiny_model.ensure_model(kind.model, folder)
    proxy = servers.ProxyServer(log_path=folder / "proxy.log", extra_args=PROXYS)
    settings = [
        *("--served-model-name", fleet.MODEL_NAME, "--dtype", kind.dtype, "--max-model-len", "1024"),
        *("--block-size", "32", "--max-num-batched-tokens", "128", "--max-num-seqs", "16"),
        # Every prompt is computed by P, and moved as a whole.
        "--no-enable-prefix-caching",
    ]
    p, d = (
        fleet.probing_server(
            model,
            role,
            folder,
            plugins=kind.plugins,
            proxy=proxy.discovery,
            extra_args=settings,
            extra_config={"lease_seconds": LEASE, "chunk_bytes": 16384},
            load_failure_policy="recompute" if role == "D" else None,
            env={"VLLM_SERVER_DEV_MODE": "1"} if role == "D" else {},
        )
        for role in ("P", "D")
    )
    with deployed(Pair(p, [d], proxy, kind=kind, probes=folder)) as made:
        processes.wait_until(made.serving, "a pair that serves", 100.0)
        yield made  # type: ignore[misc]


@pytest.mark.parametrize("pair", ["DeepSeek-V4"], indirect=True)
def test_preemption_on_d(pair: Pair, servers_on_failure: Callable[..., None]) -> None:
    """What D preempts after its load it computes again by itself. vLLM is told to preempt all that runs:
    windows give blocks back as requests grow, so that few blocks make requests wait, and preempt none."""
    servers_on_failure(pair.p, pair.d)
    prompts, many = pair.some(4), 100
    expected = [pair.alone(prompt, many) for prompt in prompts]
    preempted, before = (
        fleet.metric(pair.d, f"vllm:{name}_total") for name in ("num_preemptions", "generation_tokens")
    )
    compared = Compared(pair.probes)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(pair.answer, prompt, many) for prompt in prompts]
        processes.wait_until(
            lambda: (
                fleet.metric(pair.d, "vllm:num_requests_running") == 4
                and fleet.metric(pair.d, "vllm:generation_tokens_total") - before >= 16
            ),
            "four requests that D decodes",
            60.0,
        )
        answer = client.post(f"{pair.d.base_url}/reset_prefix_cache?reset_running_requests=true", {})
        assert answer == {"success": True}
        got = [each.result(120.0) for each in asked]
    processes.wait_until(
        lambda: fleet.metric(pair.d, "vllm:num_preemptions_total") - preempted == 4, "four preemptions", 10.0
    )
    assert compared.spans(4) == [(0, LENGTH - 1)] * 4
    pair.check(expected, got)
    pair.works_again()


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_p_fails_while_it_pushes_and_d_computes_what_has_not_come(
    pair: Pair, servers_on_failure: Callable[..., None], fault: str
) -> None:
    servers_on_failure(pair.p, pair.d)
    prompts = pair.some()
    expected = [pair.alone(prompt) for prompt in prompts]
    failed, pushed = fleet.metric(pair.d, "p2pkv_transfers_failed_total"), pair.pushing()
    with ThreadPoolExecutor(PROMPTS) as pool:
        asked = [pool.submit(pair.answer, prompt) for prompt in prompts]
        pushed()
        (pair.p.freeze if fault == "freeze" else pair.p.kill)()
        try:
            got = [each.result(120.0) for each in asked]
        finally:
            (pair.p.thaw if fault == "freeze" else pair.p.start)()
    assert fleet.metric(pair.d, "p2pkv_transfers_failed_total") > failed, (
        "P failed when it had pushed everything"
    )
    pair.check(expected, got)
    if fault == "kill":
        pair.p.wait_ready()
    pair.works_again()
