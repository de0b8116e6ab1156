"""A small blocking client of the OpenAI API and of /metrics, on the standard library alone."""

import http.client
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)")


class RequestFailed(Exception):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        body: the answer's text.
    """

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status = status
        self.body = body


def get(url: str, *, timeout_seconds: float = 10.0) -> str:
    """The text of a page. Raises RequestFailed unless the status is 200."""
    return _read(url, "GET", None, {}, timeout_seconds)


def post(
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> dict[str, Any]:
    """Send JSON, return the answer's JSON. Raises RequestFailed unless the status is 200."""
    answer = json.loads(_read(url, "POST", body, headers or {}, timeout_seconds))
    assert isinstance(answer, dict), f"{url} answered {type(answer).__name__}, not an object"
    return answer


def stream(
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Send JSON with `stream` set, yield each server-sent event's JSON until `[DONE]`.

    Closing the iterator closes the connection, which is how a request is aborted. Raises RequestFailed
    unless the status is 200, and ConnectionError if the stream ends without `[DONE]`.
    """
    connection, response = _request(url, "POST", {**body, "stream": True}, headers or {}, timeout_seconds)
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
        raise ConnectionError(f"{url}: the stream ended without [DONE]")
    finally:
        connection.close()


def metrics(base_url: str, *, timeout_seconds: float = 10.0) -> dict[str, float]:
    """The server's /metrics: each sample's name with the sum over all its labels."""
    return parse_metrics(get(f"{base_url}/metrics", timeout_seconds=timeout_seconds))


def parse_metrics(text: str) -> dict[str, float]:
    """Sum Prometheus' text format by sample name; comments and lines that are no samples are skipped."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) and (value := _number(found[2])) is not None:
            sums[found[1]] = sums.get(found[1], 0.0) + value
    return sums


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(
    url: str, method: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout: float
) -> str:
    connection, response = _request(url, method, body, headers, timeout)
    try:
        return response.read().decode()
    finally:
        connection.close()


def _request(
    url: str, method: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout: float
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        target = parts._replace(scheme="", netloc="", fragment="").geturl()
        connection.request(method, target, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(url, response.status, response.read().decode(errors="replace"))
        return connection, response
    except BaseException:
        connection.close()
        raise
