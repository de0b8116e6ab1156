"""Real vLLM: a prefill and a decode server with the proxy answer as a single server does.

In each setting of SETTINGS, the cheapest first; on a CPU too, so that these lines are tried where no GPU is.
With `verify` every chunk's checksum is compared: that D's blocks hold what P's held is shown by that, and the
answers show that the blocks are used. Answers in bfloat16 may part where two tokens are as good as equal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from gpu.figures import figure
from gpu.servers import NAME, Servers, setting, started

from p2pkv.demo import answers, client
from p2pkv.demo.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.servers, pytest.mark.timeout(600)]

LENGTHS = (1, 15, 16, 17, 300, 1500)
LOAD_PROMPTS = 8
LOAD_TOKENS = 1200
STREAM_TOKENS = 300

SETTINGS = [
    setting("cpu", pytest.mark.long, p="", d=""),
    setting("one-gpu", pytest.mark.gpu, p="0", d="0"),
    setting("one-gpu-graphs", pytest.mark.gpu, p="0", d="0", graphs="FULL_AND_PIECEWISE"),
    setting("one-gpu-ipc", pytest.mark.gpu, p="0", d="0", link="ipc"),
    setting("two-gpus-ipc", pytest.mark.two_gpus, p="0", d="1", link="ipc"),
    setting("two-gpus", pytest.mark.two_gpus, p="0", d="1"),
    setting("two-gpus-piecewise", pytest.mark.two_gpus, p="0", d="1", graphs="PIECEWISE"),
    setting("two-gpus-full", pytest.mark.two_gpus, p="0", d="1", graphs="FULL_AND_PIECEWISE"),
    setting("two-gpus-tp2", pytest.mark.two_gpus, p="0,1", d="0,1", tp=2, graphs="FULL_AND_PIECEWISE"),
]


@pytest.fixture(scope="module", params=SETTINGS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started(request.param, tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.mark.parametrize("length", LENGTHS)
def test_the_pair_answers_as_a_single_server(servers: Servers, length: int) -> None:
    prompt = servers.prompt(f"gpu {length}", length)
    before = servers.counters()
    (expected,) = answers.complete(servers.single.base_url, NAME, prompt)
    (pair,) = answers.complete(servers.proxy.base_url, NAME, prompt)
    assert servers.differs(expected, pair) is None
    after = servers.counters()
    if length > 1:
        assert int(after["transfers_loaded"]) == int(before["transfers_loaded"]) + 1
    assert int(after["transfers_failed"]) == int(after["chunks_corrupt"]) == 0


class Stream(threading.Thread):
    """One long answer of the pair, token by token, and when each token came."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.error: Exception | None = None
        body = {"model": NAME, "prompt": servers.prompt("stream", 40), "max_tokens": STREAM_TOKENS}
        body |= {"temperature": 0.0, "ignore_eos": True}
        self._chunks = client.stream(f"{servers.proxy.base_url}/v1/completions", body)
        self.start()

    def run(self) -> None:
        try:
            for _ in self._chunks:
                self.times.append(time.monotonic())
        except Exception as error:
            self.error = error

    def longest_pause(self) -> float:
        """Seconds between two tokens, once all have come."""
        self.join(300.0)
        assert not self.is_alive() and self.error is None, f"the stream broke: {self.error}"
        assert len(self.times) > STREAM_TOKENS // 2
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def test_a_stream_that_breaks_is_reported_on_a_cpu() -> None:
    nowhere = SimpleNamespace(
        proxy=SimpleNamespace(base_url="http://127.0.0.1:1"), prompt=lambda seed, length: [1]
    )
    with pytest.raises(AssertionError, match="the stream broke: "):
        Stream(nowhere).longest_pause()  # type: ignore[arg-type]


class Load:
    """Long prompts for the pair, all at once, and their answers."""

    def __init__(self, servers: Servers, seed: str) -> None:
        self.prompts = [servers.prompt(f"{seed} {number}", LOAD_TOKENS) for number in range(LOAD_PROMPTS)]
        self.answers: list[answers.Answer] = []
        self._thread = threading.Thread(target=self._ask, args=(servers,), daemon=True)
        self._thread.start()

    def _ask(self, servers: Servers) -> None:
        self.answers = answers.complete(servers.proxy.base_url, NAME, self.prompts, max_tokens=8)

    def finish(self, servers: Servers) -> None:
        """The pair answers all of them as the single server does."""
        self._thread.join(300.0)
        assert len(self.answers) == LOAD_PROMPTS, "the pair has not answered all prompts"
        expected = answers.complete(servers.single.base_url, NAME, self.prompts, max_tokens=8)
        wrong = [servers.differs(want, have) for want, have in zip(expected, self.answers, strict=True)]
        assert wrong == [None] * LOAD_PROMPTS


def test_d_decodes_while_prompts_arrive(servers: Servers) -> None:
    """The answers are right, and the longest pause between two tokens of one that runs is a figure."""
    quiet = Stream(servers).longest_pause()
    stream = Stream(servers)
    load = Load(servers, "load")
    pause = stream.longest_pause()
    load.finish(servers)
    figure("longest pause between tokens, nothing else running", quiet, "s", servers.setting.name)
    figure("longest pause between tokens, prompts arriving", pause, "s", servers.setting.name)


def test_d_decodes_on_when_p_is_killed(servers: Servers) -> None:
    """The last test of a setting: P is gone afterwards. D computes what P owed."""
    before = int(servers.counters()["receives_posted"]), int(servers.counters()["chunks_scattered"])
    stream = Stream(servers)
    wait_until(lambda: len(stream.times) > 3, "the stream's first tokens", 60.0)
    load = Load(servers, "killed")
    # D has granted something, or has just got it: P is in the midst of it.
    wait_until(
        lambda: (
            int((seen := servers.counters())["receives_posted"]) > before[0]
            or int(seen["chunks_scattered"]) > before[1]
        ),
        "a push under way",
        60.0,
    )
    servers.p.kill()
    pause = stream.longest_pause()
    load.finish(servers)
    figure("longest pause between tokens, P killed", pause, "s", servers.setting.name)
