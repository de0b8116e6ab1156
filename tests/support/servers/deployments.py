"""A P and some D's behind one proxy, to which something happens under requests; and what must hold then."""

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from p2pkv.demo import client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.data_parallel import answered
from support.servers.fleet import SETTINGS, assert_same, at_rest, complete, metric, start_all, tokens

LEASE, STALL = 5.0, 8.0
"""Of the instances, in seconds."""
PROXYS_LEASE = 10.0
"""Its least: three lost pings and a little."""
SETTLE_SECONDS = 10 * LEASE + 20.0
"""P keeps D's last word about a prompt that it does not know for ten leases."""
SHORT = {"lease_seconds": LEASE, "stall_seconds": STALL, "chunk_bytes": 16384}
PROXYS = ("--lease-seconds", f"{PROXYS_LEASE:g}")
LENGTH, TOKENS = 300, 48
"""Of a prompt and of its answer."""
TOKEN = "an-admins-token"


def instance(proxy: ProxyServer, model: Path, logs: Path, role: str, **options: Any) -> VllmServer:
    """One that pings this proxy. Without a prefix cache every prompt is computed by P, and moved as a whole,
    each time. `options`: of a VllmServer; `more_args` come after its settings."""
    name = options.pop("name", role)
    return VllmServer(
        model,
        role=role,  # type: ignore[arg-type]
        proxy=proxy.discovery,
        name=name,
        log_path=logs / f"{name}.log",
        extra_args=[*SETTINGS, "--no-enable-prefix-caching", *options.pop("more_args", ())],
        **{"extra_config": SHORT, "load_failure_policy": "recompute" if role == "D" else None, **options},
    )


def http_address(server: VllmServer) -> str:
    """As the proxy writes it."""
    return server.base_url.removeprefix("http://")


def states(proxy: ProxyServer, server: VllmServer) -> list[str]:
    """What this proxy says of its engines, by rank; without those that it has forgotten."""
    listed = json.loads(client.get(f"{proxy.base_url}/instances"))["instances"]
    listed.sort(key=lambda each: each.get("rank") or 0)
    return [each["state"] for each in listed if each["address"] == http_address(server)]


def order(proxy: ProxyServer, server: VllmServer, what: str) -> None:
    url = f"{proxy.base_url}/instances/{http_address(server)}/{what}"
    client.post(url, {}, headers={"Authorization": f"Bearer {TOKEN}"})


def grows(server: VllmServer, name: str) -> Callable[[], None]:
    """What waits until this counter is higher than it is now."""
    before = metric(server, name)
    return lambda: wait_until(lambda: metric(server, name) > before, f"more of {name}", 60.0)


def works_after(server: VllmServer) -> Callable[[], None]:
    return grows(server, "vllm:prompt_tokens_total" if server.role == "P" else "vllm:generation_tokens_total")


def cores_of(server: VllmServer) -> list[psutil.Process]:
    """The processes of vLLM's engine cores, by rank: neither the HTTP server's nor workers'."""
    children = psutil.Process(server.pid).children(recursive=True)
    named = {" ".join([*each.cmdline(), each.name()]): each for each in children}
    return [named[name] for name in sorted(named) if "EngineCore" in name]


LOSSES: dict[str, Callable[[VllmServer], None]] = {
    "killed": VllmServer.kill,
    "core_killed": lambda server: cores_of(server)[0].kill(),
    "stopped": lambda server: os.kill(server.pid, signal.SIGTERM),
}
"""Ways to lose a server."""


@dataclass
class Deployment:
    """`engines`: of P and of the first D; `lockstep`: those compute so, as vLLM does with experts."""

    p: VllmServer
    ds: list[VllmServer]
    proxy: ProxyServer
    engines: int = 1
    lockstep: bool = False

    @property
    def d(self) -> VllmServer:
        return self.ds[0]

    @property
    def servers(self) -> tuple[VllmServer, ...]:
        return self.p, *self.ds

    def victim(self, who: str) -> VllmServer:
        return self.p if who == "P" else self.d

    def prompts(self, seed: str, count: int = 12) -> list[list[int]]:
        return [tokens(LENGTH, f"{seed} {number}") for number in range(count)]

    def ask(self, prompt: list[int], count: int = TOKENS) -> tuple[Answer | Exception, float]:
        try:
            return complete(self.proxy, prompt, count), time.monotonic()
        except (client.RequestFailed, http.client.HTTPException, OSError) as error:
            return error, time.monotonic()

    def expected(self, prompts: Sequence[list[int]]) -> list[Answer]:
        return [complete(self.ds[-1], each, TOKENS) for each in prompts]

    def are_answered(
        self, prompts: list[list[int]], expected: list[Answer], during: Callable[[], object] = lambda: None
    ) -> list[float]:
        """All at once, rightly, and `during` when they have been asked; when each answer came."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(self.ask, prompt) for prompt in prompts]
            during()
            got = [each.result(200.0) for each in asked]
        assert [what for what, _ in got if isinstance(what, Exception)] == []
        assert_same(expected, [what for what, _ in got if isinstance(what, Answer)])
        return [when for _, when in got]

    # The proxy's view.

    def page(self, name: str) -> Any:
        return json.loads(client.get(f"{self.proxy.base_url}/{name}"))

    def counted(self, name: str) -> float:
        return client.metrics(self.proxy.base_url).get(f"p2pkv_proxy_{name}", 0.0)

    def states(self, server: VllmServer) -> list[str]:
        return states(self.proxy, server)

    def state(self, server: VllmServer) -> str:
        return (*self.states(server), "gone")[0]

    def ready(self) -> bool:
        sizes = [self.engines, self.engines, *[1] * (len(self.ds) - 1)]
        return [self.states(each) for each in self.servers] == [["ready"] * size for size in sizes]

    def trusted(self) -> bool:
        """Whether all engines are ready. The proxy tries one that has failed with one request."""
        if not self.ready():
            self.ask(tokens(LENGTH, "a trial"))
        return self.ready()

    def serving(self) -> bool:
        with contextlib.suppress(client.RequestFailed, http.client.HTTPException, OSError):
            health = self.page("health")
            return bool(health["prefill"] and health["decode"])
        return False

    def order(self, server: VllmServer, what: str) -> None:
        order(self.proxy, server, what)

    # Afterwards.

    def loaded(self) -> float:
        return sum(metric(each, "p2pkv_transfers_loaded_total") for each in self.ds)

    def rests(self, *servers: VllmServer) -> None:
        for each in servers or self.servers:
            at_rest(each, self.engines if each in (self.p, self.d) else 1, seconds=SETTLE_SECONDS)

    def is_as_before(self, seed: str) -> None:
        """Every engine takes requests again, KV moves for all, and nothing is held."""
        wait_until(self.trusted, "all engines", 120.0)
        prompts = self.prompts(f"as before {seed}")
        expected = self.expected(prompts)
        before, loaded = [answered(each.base_url) for each in (self.p, self.d)], self.loaded()
        self.are_answered(prompts, expected)
        assert self.loaded() - loaded == len(prompts)
        for server, then in zip((self.p, self.d), before, strict=True):
            now = answered(server.base_url)
            grown = {engine: count - then.get(engine, 0.0) for engine, count in now.items()}
            assert len(grown) == self.engines and min(grown.values()) > 0, grown
        self.rests()


@contextlib.contextmanager
def deployed(made: Deployment) -> Iterator[Deployment]:
    with ExitStack() as stack:
        start_all(stack, *made.servers, made.proxy)
        yield made


def started_again(server: VllmServer) -> None:
    server.kill()
    server.start()
    server.wait_ready()
