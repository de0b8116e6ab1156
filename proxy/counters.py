"""What a proxy has counted since it started; GET /health shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Only ever growing.

    Attributes:
        admitted: requests that were given a place at an instance.
        refused_full: turned away because too many waited, or their bodies held too much.
        refused_late: turned away after the longest wait.
        left_waiting: whose client left while they waited.
        alone: requests that a decode instance was given because no prefill instance could serve them.
        refused_alone: turned away because as many of those as may were under way.
        retried: tries at another instance.
        retries_refused: failures that were not tried again because the budget of retries was spent.
        breakers_opened: how often an instance was given a pause.
        cut_off: requests that were ended because the proxy stopped.
    """

    admitted: int = 0
    refused_full: int = 0
    refused_late: int = 0
    left_waiting: int = 0
    alone: int = 0
    refused_alone: int = 0
    retried: int = 0
    retries_refused: int = 0
    breakers_opened: int = 0
    cut_off: int = 0
