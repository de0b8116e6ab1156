"""Time to first token, and pauses between tokens: a P and a D of vLLM for each link, beside a single server.
A step of `make gpu-first-day`.

    python tests/gpu/first_tokens.py --json OUT.json --links nccl ipc

All servers start together and share a card, so run it under CUDA MPS. On GPUs the model has Llama-3B's
geometry with 20 layers and random weights; elsewhere it is tiny, which only tries these lines.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # this is a script

from p2pkv.control.endpoint import inspect  # noqa: E402
from p2pkv.demo import client  # noqa: E402
from p2pkv.demo.processes import ending_on_signals  # noqa: E402
from p2pkv.demo.servers import ProxyServer, VllmServer  # noqa: E402
from p2pkv.demo.tiny_model import TinyLlama, ensure_model  # noqa: E402
from p2pkv.links.mps_check import mps_runs, pipe_directory  # noqa: E402
from p2pkv.pairing import Address  # noqa: E402

NAME = "model"
SINGLE = "single"
ANSWER_TOKENS = 8
LOAD_AT = 1
"""Event of an answer, of one or several tokens, with which the load begins."""

GEOMETRY = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 20,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        lengths: tokens of the prompts.
        rounds: prompts of each length, after one that warms up.
        stream: tokens of the answer whose pauses are measured.
        long: tokens of each of the `load` prompts that come in meanwhile.
        arguments: of vLLM.
    """

    lengths: tuple[int, ...]
    rounds: int
    stream: int
    long: int
    load: int
    arguments: tuple[str, ...]


ON_A_GPU = Scale(
    (64, 512, 2048, 8192, 16384), 11, 200, 8192, 5,
    (
        *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "20000"),
        *("--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", str(1800 << 20)),
        *("--gpu-memory-utilization", "0.05", "--block-size", "16", "--compilation-config"),
        '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}',
    ),
)  # fmt: skip
ON_A_CPU = Scale((16, 300), 1, 64, 200, 1, ("--dtype", "float32", "--max-model-len", "1024"))


def make_model(folder: Path, gpu: bool) -> tuple[Path, int]:
    """Its files, and its vocabulary. vLLM draws the weights itself where they are large."""
    if not gpu:
        tiny = TinyLlama()
        return ensure_model(tiny, folder), tiny.vocab
    shape = TinyLlama(dtype="bfloat16", head_dim=64)  # needs a GPU
    return enlarged(ensure_model(shape, folder), folder / "large"), shape.vocab  # needs a GPU


def enlarged(tiny: Path, large: Path) -> Path:
    """The tokenizer of one model and the geometry of another, without weights."""
    large.mkdir()
    for file in tiny.glob("*.json"):
        if not file.name.startswith("model"):
            shutil.copy(file, large)
    config = json.loads((tiny / "config.json").read_text()) | GEOMETRY
    (large / "config.json").write_text(json.dumps(config))
    return large


@dataclass(frozen=True)
class System:
    """What a client talks to, and the D behind it, if there is one."""

    url: str
    d: VllmServer | None = None


@contextmanager
def systems(
    model: Path, links: Sequence[str], cards: tuple[str, str] | None, scale: Scale, logs: Path
) -> Iterator[dict[str, System]]:
    """A single server, and a pair with its proxy for each link, by name. `cards`: P's and D's, if any."""

    def server(name: str, card: str, **options: Any) -> VllmServer:
        return VllmServer(
            model,
            extra_args=("--served-model-name", NAME, *scale.arguments),
            env={"CUDA_VISIBLE_DEVICES": card} if card else {},
            eager=cards is None,
            name=name,
            log_path=logs / f"{name}.log",
            **options,
        )

    p_card, d_card = cards or ("", "")
    with ExitStack() as stack:
        single = server(SINGLE, p_card)
        found, started = {SINGLE: System(single.base_url)}, [single]
        proxies = []
        for link in links:
            proxy = ProxyServer(log_path=logs / f"proxy-{link}.log")
            paired = {"proxy": proxy.discovery, "extra_config": {"link": link, "weights_name": NAME}}
            p = server(f"P-{link}", p_card, role="P", **paired)
            d = server(f"D-{link}", d_card, role="D", load_failure_policy="recompute", **paired)
            started += [p, d]
            proxies.append(proxy)
            found[link] = System(proxy.base_url, d)
        for each in (*started, *proxies):
            stack.enter_context(each)
        for each in (*started, *proxies):
            each.wait_ready(200.0)
        yield found


class Prompts:
    """Random prompts, the same in each run."""

    def __init__(self, vocab: int) -> None:
        self._draw = random.Random(7)
        self._vocab = vocab

    def make(self, length: int) -> list[int]:
        return [self._draw.randrange(300, self._vocab) for _ in range(length)]

    def shuffled(self, names: Iterable[str]) -> list[str]:
        several = list(names)
        return self._draw.sample(several, len(several))


def ask(
    system: System, prompt: list[int], tokens: int, at: Callable[[int], None] = lambda event: None
) -> tuple[list[float], str]:
    """When each event came, in seconds since the question, and the whole text. `at`: called with the number
    of each event."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    times, text, begin = [], "", time.perf_counter()
    for event in client.stream(f"{system.url}/v1/completions", body):
        times.append(time.perf_counter() - begin)
        at(len(times))
        text += "".join(choice.get("text", "") for choice in event.get("choices", []))
    return times, text


def first_tokens(all_of_them: Mapping[str, System], prompts: Prompts, scale: Scale) -> dict[str, Any]:
    """Seconds by length and system to the first token, and from it to the second (`_2nd`); and how many
    answers of pairs differ from the single server's, of how many."""
    times: dict[str, dict[str, list[float]]] = {}
    wrong = total = 0
    for length in scale.lengths:
        row = times[str(length)] = {}
        for turn in range(scale.rounds + 1):
            prompt, texts = prompts.make(length), {}
            for name in prompts.shuffled(all_of_them):  # none always comes behind the same one
                came, texts[name] = ask(all_of_them[name], prompt, ANSWER_TOKENS)
                if turn:  # the first one only warms up
                    row.setdefault(name, []).append(came[0])
                    row.setdefault(f"{name}_2nd", []).append(came[1] - came[0])
            total += len(texts) - 1
            wrong += sum(each != texts[SINGLE] for each in texts.values())
        said = ", ".join(f"{name} {statistics.median(each) * 1e3:.1f}" for name, each in row.items())
        print(f"{length} tokens, ms: {said}", flush=True)
    return {"ttft": times, "wrong": [wrong, total]}


def pauses(all_of_them: Mapping[str, System], prompts: Prompts, scale: Scale) -> dict[str, list[float]]:
    """Seconds between two tokens of one answer, median, 95% and longest, by system: alone ("quiet") and while
    long prompts come in ("loaded")."""
    found = {}
    for name, system in all_of_them.items():
        for loaded in (False, True):
            load = Load(system, prompts, scale)
            came, _ = ask(system, prompts.make(100), scale.stream, load.at if loaded else lambda event: None)
            load.finish(loaded)
            # An answer that came as one event has had no pause.
            gaps = sorted(after - before for before, after in pairwise(came)) or [0.0]
            key = f"{name} {'loaded' if loaded else 'quiet'}"
            found[key] = [gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.95)], gaps[-1]]
            print(f"pauses, {key}, ms: {', '.join(f'{each * 1e3:.1f}' for each in found[key])}", flush=True)
    return found


class Load:
    """Long prompts, one after the other, from the LOAD_AT-th event of an answer on."""

    def __init__(self, system: System, prompts: Prompts, scale: Scale) -> None:
        self._prompts = [prompts.make(scale.long) for _ in range(scale.load)]
        self._system = system
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.answered = 0

    def _ask(self) -> None:
        for prompt in self._prompts:
            ask(self._system, prompt, 2)
            self.answered += 1

    def at(self, event: int) -> None:
        if event == LOAD_AT:
            self._thread.start()

    def finish(self, began: bool) -> None:
        """Wait for its answers. Raises RuntimeError if one is missing."""
        if began:
            self._thread.join(120.0)
            if self.answered < len(self._prompts):
                raise RuntimeError(f"{self.answered} of {len(self._prompts)} long prompts were answered")


def loaded_transfers(all_of_them: Mapping[str, System]) -> dict[str, list[int]]:
    """By link: transfers that D has loaded, and those that failed."""
    found = {}
    for name, system in all_of_them.items():
        if system.d is not None:
            counted = inspect(Address.parse(system.d.zmq_address))
            found[name] = [int(counted["transfers_loaded"]), int(counted["transfers_failed"])]
    return found


def complaint(data: Mapping[str, Any]) -> str:
    """Why these figures are not worth much; "" if they are. One answer in twenty may differ: in bfloat16 two
    tokens may be as good as equal."""
    wrong, total = data["wrong"]
    if 20 * wrong > total:
        return f"{wrong} of {total} answers differ from the single server's"
    if bad := [name for name, (loaded, failed) in data["transfers"].items() if failed or not loaded]:
        return f"transfers failed, or none was loaded: {', '.join(bad)}: {data['transfers']}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--links", nargs="+", default=["nccl", "ipc"])
    parser.add_argument("--cards", nargs=2, metavar=("P", "D"), default=["0", "0"])
    args = parser.parse_args(argv)
    gpu = args.links != ["host"]
    scale, cards = (ON_A_GPU, tuple(args.cards)) if gpu else (ON_A_CPU, None)
    logs = args.json.parent / "logs"
    with ending_on_signals(), tempfile.TemporaryDirectory() as folder:
        model, vocab = make_model(Path(folder), gpu)
        begin, prompts = time.monotonic(), Prompts(vocab)
        with systems(model, args.links, cards, scale, logs) as found:
            print(f"all servers were ready after {time.monotonic() - begin:.0f} s", flush=True)
            for system in found.values():  # what vLLM and NCCL do at first use
                for length in scale.lengths:
                    ask(system, prompts.make(length), 4)
            data = first_tokens(found, prompts, scale)
            data["itl"] = pauses(found, prompts, scale)
            data["transfers"] = loaded_transfers(found)
            data["mps"] = mps_runs(pipe_directory())
    args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    said = complaint(data)
    print(said or "answers and transfers are as they should be", flush=True)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
