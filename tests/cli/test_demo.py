"""The demo's HTTP client, how it compares answers, its server processes, and its tiny model."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from p2pkv.demo import client, processes
from p2pkv.demo.answers import Answer, answer_of, difference
from p2pkv.demo.tiny_model import TinyLlama, default_cache_dir, ensure_model, llama_8b_geometry

PAGES = {
    "/metrics": (
        200,
        '# HELP a b\n# TYPE a counter\na 1e3\nb{x="} 9",y="z"} 5 1700000000\nb 7.0\n'
        "nonsense\nc NaNo\nvllm:d{} 0.5\n",
    ),
    "/teapot": (418, "short and stout"),
    "/whole": (200, 'data: {"n": 1}\n\n: a comment\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'),
    "/cut": (200, 'data: {"n": 1}\n\n'),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(*PAGES[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(*PAGES[self.path])

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


@pytest.fixture
def base_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_error_carries_status_and_text(base_url: str) -> None:
    with pytest.raises(client.RequestFailed, match="answered 418: short and stout") as caught:
        client.get(f"{base_url}/teapot")
    assert (caught.value.status, caught.value.body) == (418, "short and stout")


def test_a_stream_yields_each_event(base_url: str) -> None:
    assert list(client.stream(f"{base_url}/whole", {})) == [{"n": 1}, {"n": 2}]


def test_a_stream_that_breaks_off_is_an_error(base_url: str) -> None:
    events = client.stream(f"{base_url}/cut", {})
    assert next(events) == {"n": 1}
    with pytest.raises(ConnectionError, match="without"):
        next(events)


def test_metrics_are_summed_over_labels_and_read_in_every_form(base_url: str) -> None:
    assert client.metrics(base_url) == {"a": 1000.0, "b": 12.0, "vllm:d": 0.5}


# Comparing answers: what counts as different.


EXPECTED = Answer(text="a b c", tokens=(1, 2, 3), margins=(0.5, 0.0005, 0.5))


@pytest.mark.parametrize("got", [EXPECTED, Answer(text="y", tokens=(1, 9, 9), margins=(0.5, 0.1, 0.1))])
def test_equal_answers_and_what_follows_a_tie_are_no_difference(got: Answer) -> None:
    assert difference(EXPECTED, got) is None


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((9, 2, 3), "token 0 is 9 instead of 1, which was ahead by 0.5000"),
        ((1, 2), "2 tokens instead of 3"),
        ((1, 2, 3, 4), "4 tokens instead of 3"),
    ],
)
def test_another_token_or_length_is_named(tokens: tuple[int, ...], said: str) -> None:
    sentence = difference(EXPECTED, Answer(text="z", tokens=tokens, margins=(0.5,) * len(tokens)))
    assert sentence is not None and sentence.startswith(said)


def test_choices_of_both_endpoints_are_read() -> None:
    completion = {
        "text": "hi",
        "token_ids": [7],
        "logprobs": {"top_logprobs": [{"token_id:7": -0.25, "token_id:9": -1.5}]},
    }
    chat = {
        "message": {"content": "hi"},
        "token_ids": [7],
        "logprobs": {"content": [{"top_logprobs": [{"logprob": -0.25}, {"logprob": -1.5}]}]},
    }
    assert answer_of(completion) == answer_of(chat) == Answer(text="hi", tokens=(7,), margins=(1.25,))


# Server processes: started, waited for, frozen, and gone with all their children.


# Serves /, with a child that does not listen to SIGTERM.
SERVER = """
import http.server, signal, subprocess, sys
deaf = "from signal import *; signal(SIGTERM, SIG_IGN); print('deaf', flush=True); pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print("serving", flush=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def health_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


def process(tmp_path: Path, code: str, *arguments: str, port: int = 1) -> processes.ServerProcess:
    return processes.ServerProcess(
        "demo server",
        [sys.executable, "-c", code, *arguments],
        health_url=health_url(port),
        log_path=tmp_path / "logs" / "server.log",
        env=os.environ,
    )


@pytest.fixture
def port() -> int:
    return processes.free_ports()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[processes.ServerProcess]:
    server = process(tmp_path, SERVER, str(port), port=port)
    with server:
        server.wait_ready(30.0)
        yield server
        server.stop(grace_seconds=0.2)


def test_a_page_of_this_machine_is_asked_without_a_proxy(
    server: processes.ServerProcess, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{processes.free_ports()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert processes.answers_ok(health_url(port))


def test_kill_and_stop_take_the_children_along_and_the_server_can_start_again(
    server: processes.ServerProcess,
) -> None:
    killed = server.pid
    assert len(processes.group_members(killed)) == 2
    server.kill()
    assert processes.group_members(killed) == []
    server.start()
    server.wait_ready(30.0)
    group = server.pid
    assert group != killed
    server.stop(grace_seconds=0.5)
    assert processes.group_members(group) == [] and not server.running()
    server.stop()


def test_a_frozen_server_answers_again_when_thawed_and_can_be_stopped(
    server: processes.ServerProcess, port: int
) -> None:
    url, group = health_url(port), server.pid
    server.freeze()
    assert not processes.answers_ok(url, timeout_seconds=0.3)
    server.thaw()
    processes.wait_until(lambda: processes.answers_ok(url), "an answer", 10.0)
    server.freeze()
    server.stop(grace_seconds=0.5)
    assert processes.group_members(group) == []


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", 30.0, r"(?s)ended before it served.*no such model"),
        ("import time; time.sleep(600)", 0.3, r"did not serve within 0\.3 s"),
    ],
)
def test_a_server_that_does_not_serve_is_reported(
    tmp_path: Path, code: str, seconds: float, said: str
) -> None:
    with process(tmp_path, code) as server, pytest.raises(processes.ServerFailed, match=said):
        server.wait_ready(seconds)
    assert not server.running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_servers_on_the_way_out(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from p2pkv.demo.processes import ServerProcess, ending_on_signals
with ending_on_signals():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    log = Path({str(tmp_path / "log")!r})
    with ServerProcess("s", sleep, health_url="", log_path=log, env=os.environ) as server:
        print(server.pid, flush=True)
        time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as demo:
        group = int(demo.stdout.readline())
        demo.send_signal(number)
        assert demo.wait(30.0) == 128 + number
    assert processes.group_members(group) == []


def test_processes_that_ask_for_ports_at_the_same_time_get_different_ones() -> None:
    code = """
from p2pkv.demo.processes import free_ports
print(*(free_ports(3) for _ in range(100)), flush=True)
input()
"""
    ask = [sys.executable, "-c", code]
    with ExitStack() as stack:
        asking = [
            stack.enter_context(
                subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(3)
        ]
        firsts = [int(first) for each in asking for first in each.stdout.readline().split()]
        for each in asking:
            each.communicate("\n")
    assert len(firsts) == 300
    assert len({first + offset for first in firsts for offset in range(3)}) == 900


def test_ports_are_given_again_only_when_all_were_used() -> None:
    ports = processes.Ports(processes.free_ports(32), blocks=1, block=32)
    first_round = [ports.take(15) for _ in range(2)]
    assert len(set(first_round)) == 2
    assert [ports.take(15) for _ in range(2)] == first_round
    with pytest.raises(ValueError, match="32 consecutive ports, expected 1 to 31"):
        ports.take(32)


def test_a_block_that_another_holds_is_left_to_it() -> None:
    first = processes.free_ports(32)
    holder, other = (processes.Ports(first, blocks=1, block=32) for _ in range(2))
    holder.take(1)
    with pytest.raises(RuntimeError, match=f"all ports from {first} to {first + 31}"):
        other.take(1)


def test_wait_until_names_what_did_not_come() -> None:
    with pytest.raises(TimeoutError, match="the tide: not within 0"):
        processes.wait_until(lambda: False, "the tide", 0.0)


# The tiny model: made once for its parameters, readable, and refused with a sentence.


SMALL = TinyLlama(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64, vocab=512)


def test_equal_parameters_give_equal_files(tmp_path: Path) -> None:
    one, two = ensure_model(SMALL, tmp_path / "one"), ensure_model(SMALL, tmp_path / "two")
    names = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in names
    assert names == sorted(path.name for path in two.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_a_model_is_made_once_even_by_several_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: ensure_model(SMALL, tmp_path), range(4)))
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in paths] == [SMALL.name]


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    greedy = TinyLlama(layers=1, vocab=1 << 20)
    with pytest.raises(ValueError, match="choose a smaller vocab"):
        ensure_model(greedy, tmp_path)
    with pytest.raises(OSError, match="cannot be written: disk"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", Mock(side_effect=SafetensorError("disk is full")))
        ensure_model(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_files_say_what_was_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    path = ensure_model(SMALL, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (2, 16, 512)
    weights = load_file(path / "model.safetensors")
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "Any text, even Ünïcode, comes back."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bytes_per_token_of_the_8b_geometry() -> None:
    spec = llama_8b_geometry()
    assert spec.kv_bytes_per_token == 128 << 10
    assert spec.name != llama_8b_geometry(hidden=64).name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": 0}, "at least 1"),
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"vocab": 300}, "need at least 320"),
        ({"dtype": "float16"}, "use float32 or bfloat16"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TinyLlama(**changes)  # type: ignore[arg-type]


def test_the_cache_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("P2PKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/p2pkv")
