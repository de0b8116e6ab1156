"""vLLM's queue of waiting requests on D, without a walk over those that wait for P in every scheduling pass.

A request for which the connector answers "ask again" comes back in each pass of vLLM's scheduler, and vLLM
looks up its prompt in the prefix cache before it asks: with 1,000 such requests that took 6 to 180 ms of each
step. Here such a request is deferred: it stays one of the waiting requests, and may be counted and removed
like them, but passes do not come to it until the connector has another answer.

docs/design.md, "Requests that wait for P", has the reasons and what else was considered.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Set
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from p2pkv.connector.idle_steps import untested
from p2pkv.connector.scheduler import ConsumerScheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

log = logging.getLogger("p2pkv")


class DeferringQueue(RequestQueue):
    """A queue of vLLM's scheduler around the one that it had, which holds the requests not deferred.

    What a pass asks (whether there is a request, which is next) concerns these only; the length, iteration
    and removal concern all.
    """

    def __init__(self, queue: RequestQueue, undecided: Set[str]) -> None:
        """`undecided`: ids of the requests for which the connector's answer would be "ask again"."""
        self._queue = queue
        self._undecided = undecided
        self._deferred: dict[str, Request] = {}

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM puts back what a pass has skipped, the last first."""
        again = []
        for request in requests:
            if request.request_id in self._undecided:
                self._deferred[request.request_id] = request
            else:
                again.append(request)
        self._queue.prepend_requests(again)

    def resume(self, request_ids: Iterable[str]) -> None:
        """These are decided: those that were deferred come back into the queue, each to its place by age."""
        found = [request for each in request_ids if (request := self._deferred.pop(each, None))]
        queue = self._queue
        if not isinstance(queue, deque):
            queue.prepend_requests(found)
            return
        before = []
        for request in sorted(found, key=_age):
            # vLLM puts preempted requests first, whatever their age.
            while queue and (queue[0].status is RequestStatus.PREEMPTED or _age(queue[0]) <= _age(request)):
                before.append(queue.popleft())
            before.append(request)
        queue.extendleft(reversed(before))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        others = [each for each in requests if self._deferred.pop(each.request_id, None) is None]
        if others:
            self._queue.remove_requests(others)

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def add_request(self, request: Request) -> None:
        self._queue.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.prepend_request(request)

    def peek_request(self) -> Request:
        return self._queue.peek_request()

    def pop_request(self) -> Request:
        return self._queue.pop_request()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + len(self._deferred)

    def __iter__(self) -> Iterator[Request]:
        yield from self._deferred.values()
        yield from self._queue


def _age(request: Request) -> float:
    return float(request.arrival_time)


class Deferral:
    """Puts a DeferringQueue into each scheduler of this process whose connector is p2pkv's, as D.

    vLLM gives a connector no way to its scheduler, so `Scheduler.add_request` is replaced by one that looks
    first. A scheduler with a MultiConnector keeps its queue: what else is in there wants to be asked.
    """

    def __init__(self) -> None:
        self._installed = False

    def install(self) -> None:
        """Once; only a log line where vLLM's scheduler is not the one that we know."""
        if self._installed:
            return
        from vllm.v1.core.sched.scheduler import Scheduler

        if reason := untested() or self._misfit(Scheduler):
            log.info("vLLM looks up each request that waits for P in every scheduling pass: %s", reason)
            return
        self._installed = True
        add_request = Scheduler.add_request

        @wraps(add_request)
        def defer_and_add(scheduler: Scheduler, request: Request) -> None:
            if not isinstance(scheduler.waiting, DeferringQueue):
                self._defer(scheduler)
            add_request(scheduler, request)

        Scheduler.add_request = defer_and_add

    def _misfit(self, scheduler: Any) -> str:
        """Why this vLLM's scheduler is left alone; empty if it is the one that we know."""
        schedule = inspect.unwrap(getattr(scheduler, "schedule", lambda: None))
        known = {"waiting", "peek_request", "prepend_requests", "get_num_new_matched_tokens"}
        if not known <= set(schedule.__code__.co_names):
            return "this vLLM's scheduler keeps its waiting requests in a way that p2pkv does not know"
        return ""

    def _defer(self, scheduler: Scheduler) -> None:
        half = getattr(scheduler.connector, "consuming", None)
        if isinstance(half, ConsumerScheduler):
            scheduler.waiting = queue = DeferringQueue(scheduler.waiting, half.undecided)
            half.decided = queue.resume


DEFERRAL = Deferral()
"""Of this process."""
