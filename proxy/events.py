"""What the first events of a stream say: nothing yet, something, or that the server has failed. No IO.

vLLM has sent the head of its answer, a success, before it knows any of that.
"""

from __future__ import annotations

from typing import Any

import msgspec


def begun(head: bytes) -> bool:
    """Whether there is a whole event that says more than whose turn it is to speak."""
    return _first(head) is not None


def failed(head: bytes) -> bool:
    """Whether that event is an error, and the server's own."""
    event = _first(head)
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    return not (isinstance(code, int) and 400 <= code < 500)


def said(head: bytes) -> str:
    """The message of the error that it is; "" if it has none."""
    event = _first(head)
    error = event.get("error") if isinstance(event, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _first(head: bytes) -> Any:
    """The first event that says something, decoded; None while there is none."""
    *lines, _ = head.split(b"\n")
    for line in lines:
        if line.startswith(b"data:"):
            event = _decoded(line.removeprefix(b"data:"))
            if not _announces(event):
                return event
    return None


def _decoded(data: bytes) -> Any:
    """What is no JSON, such as [DONE], or is empty, stands for itself."""
    try:
        return msgspec.json.decode(data) or data
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return data


def _announces(event: Any) -> bool:
    """Whether all that it has is the role of the speaker, as a chat's first event."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return isinstance(choices, list) and bool(choices) and all(_says_nothing(each) for each in choices)


def _says_nothing(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")
