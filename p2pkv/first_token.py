"""What a router that hands P's token on to the client says of it to P and to D: kv_transfer_params with one
field of this name, and one of these values."""

from enum import StrEnum
from typing import Any

FIRST_TOKEN = "first_token"


class FirstToken(StrEnum):
    """A router says the first three to P, and the last to D."""

    HANDED_ON = "handed_on"
    """The client gets P's token, and D has it behind the prompt. If the answer ends with it, no D asks."""
    WHOLE = "whole"
    """P's token is all of the answer: no D will ask."""
    RELEASED = "released"
    """No D will ask for what P has computed under this id. This request's own prompt is of no use."""
    IN_PROMPT = "in_prompt"
    """P's token is the last one of this prompt, which P has computed without it."""


def params(what: FirstToken) -> dict[str, str]:
    """For kv_transfer_params."""
    return {FIRST_TOKEN: str(what)}


def found(kv_transfer_params: Any) -> FirstToken | None:
    """What these params say of P's token; None: nothing that this version knows."""
    value = kv_transfer_params.get(FIRST_TOKEN) if isinstance(kv_transfer_params, dict) else None
    known = {str(each): each for each in FirstToken}
    return known.get(value) if isinstance(value, str) else None
