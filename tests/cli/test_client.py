"""The demo's small HTTP client, against a real server on loopback; and comparing answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from p2pkv.demo import client
from p2pkv.demo.answers import Answer, answer_of, difference

PAGES = {
    "/metrics": (200, 'p2pkv_bytes_sent_total{rank="0"} 5\np2pkv_bytes_sent_total{rank="1"} 7.0\n'),
    "/health?prefill=1&decode=2": (200, "enough"),
    "/teapot": (418, "short and stout"),
    "/whole": (200, 'data: {"n": 1}\n\n: a comment\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'),
    "/cut": (200, 'data: {"n": 1}\n\n'),
}


class Handler(BaseHTTPRequestHandler):
    """Serves PAGES; /echo gives back the body that it was sent, and one of its headers."""

    def do_GET(self) -> None:
        self._answer(*PAGES[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/echo":
            self._answer(200, json.dumps({"body": body, "id": self.headers["X-Request-Id"]}))
        else:
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


def test_post_sends_json_and_headers(base_url: str) -> None:
    answer = client.post(f"{base_url}/echo", {"prompt": [1, 2]}, headers={"X-Request-Id": "abc"})
    assert answer == {"body": {"prompt": [1, 2]}, "id": "abc"}


def test_a_query_is_sent(base_url: str) -> None:
    assert client.get(f"{base_url}/health?prefill=1&decode=2") == "enough"


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


def test_metrics_are_summed_over_labels(base_url: str) -> None:
    assert client.metrics(base_url) == {"p2pkv_bytes_sent_total": 12.0}


def test_metrics_skip_comments_and_read_every_form() -> None:
    text = (
        '# HELP a b\n# TYPE a counter\na 1e3\nb{x="} 9",y="z"} 2 1700000000\nnonsense\nc NaNo\nvllm:d{} 0.5\n'
    )
    assert client.parse_metrics(text) == {"a": 1000.0, "b": 2.0, "vllm:d": 0.5}


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
