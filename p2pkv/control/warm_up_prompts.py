"""The first prompts of an instance, which it sends to itself before its proxies may send it requests.

vLLM compiles in them what it compiles in its first steps, so no client waits for that.
"""

import http.client
import json
import logging
import secrets
import ssl
import time
import urllib.parse

from msgspec import Struct

log = logging.getLogger("p2pkv.control.announcer")
"""The log of the process that announces the instance."""

REQUEST_MARK = "p2pkv-warm-up-"
"""What the request id of a warm-up begins with. It names no P and no D, so nothing is transferred."""

ANSWER_TOKENS = 2
"""A step that prefills, and one that decodes."""

# vLLM compiles parts of its sampler when they are first used: log-probabilities, random tokens, and each of
# them again for a batch that is not the first one's.
_KINDS = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "n": 3})

_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 2.0
_LONGEST_QUOTE = 200


class WarmUp(Struct, frozen=True):
    """Where the first prompts go, and how long they are."""

    url: str
    """The instance's own HTTP API, as http://10.0.0.1:8000. With https its certificate is not checked."""
    model: str
    """A name under which the instance serves its model."""
    tokens: int
    """Tokens of a prompt."""
    seconds: float
    """How long to wait for the health page, and then again for the answers."""
    api_key: str = ""
    """The key of the HTTP API; "": it needs none."""
    replica: int | None = None
    """See `discovery.Ping`."""


def warm_up(plan: WarmUp) -> None:
    """Wait until the instance serves, and send it a prompt of each kind, one after the other."""
    failure, begun = _wait_for_health(plan), time.monotonic()
    for kind in _KINDS:
        failure = failure or _ask(plan, kind, begun + plan.seconds)
    if failure:
        rest = "the instance is announced all the same, and its first request may be slow"
        log.warning("not warmed up: %s; %s", failure, rest)
        return
    took = time.monotonic() - begun
    log.info("warmed up: %d prompts of %d tokens were answered in %.1f s", len(_KINDS), plan.tokens, took)


def _wait_for_health(plan: WarmUp) -> str:
    """Until the health page answers 200; "" then, else what is wrong."""
    end, seen = time.monotonic() + plan.seconds, ""
    while time.monotonic() < end:
        try:
            status, _ = _call(plan, "GET", "/health", None, min(_HEALTH_SECONDS, plan.seconds))
        except (OSError, http.client.HTTPException) as error:
            seen = str(error) or type(error).__name__
        else:
            if status == 200:
                return ""
            seen = f"status {status}"
        time.sleep(_POLL_SECONDS)
    return (
        f"{plan.url}/health did not answer 200 in {plan.seconds:g} s ({seen}): is http_port the number given "
        "to --port, and does --host include this address? With TLS set warm_up_tls"
    )


def _ask(plan: WarmUp, kind: dict[str, float], end: float) -> str:
    """One prompt, random so that no cache holds it; "" if it was answered, else what is wrong."""
    text = " ".join(secrets.token_hex(4) for _ in range(plan.tokens))  # a word is a token at least
    body = {
        "model": plan.model,
        "prompt": text,
        "truncate_prompt_tokens": plan.tokens,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "logprobs": 1,
        **kind,
    }
    try:
        left = max(_POLL_SECONDS, end - time.monotonic())
        status, answer = _call(plan, "POST", "/v1/completions", body, left)
    except TimeoutError:
        return f"the first prompts were not answered in {plan.seconds:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"the first prompt was not answered: {str(error) or type(error).__name__}"
    if status == 401:
        return "the HTTP API wants a key: set VLLM_API_KEY in the instance's environment, or warm_up_api_key"
    if status != 200:
        return f"the first prompt was answered with status {status}: {answer[:_LONGEST_QUOTE]}"
    return ""


def _call(
    plan: WarmUp, method: str, path: str, body: dict[str, object] | None, seconds: float
) -> tuple[int, str]:
    """Status and text. Raises OSError or HTTPException; TimeoutError if nothing comes for so long."""
    if not (plan.api_key.strip().isascii() and plan.api_key.strip().isprintable()):
        raise OSError("VLLM_API_KEY or warm_up_api_key has characters that no HTTP header can carry")
    parts = urllib.parse.urlsplit(plan.url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)
    headers = {"Content-Type": "application/json", "X-Request-Id": REQUEST_MARK + secrets.token_hex(8)}
    if plan.replica is not None:
        headers["X-data-parallel-rank"] = str(plan.replica)
    if plan.api_key:
        headers["Authorization"] = f"Bearer {plan.api_key.strip()}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
