"""vLLM's queue of waiting requests on D, without a walk over those that wait for P in every scheduling pass.

A request for which the connector answers "ask again" is deferred: it stays one of the waiting requests, and
may be counted and removed like them, but passes do not come to it until the connector has another answer.
docs/design.md, "Requests that wait for P", has the reasons.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Set

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus


class DeferringQueue(RequestQueue):
    """A queue of vLLM's scheduler around the one that it had, which holds the requests not deferred.

    What a pass asks (whether there is a request, which is next) concerns these; all else concerns all.
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
        """These are decided: those that were deferred come back into the queue, by age."""
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
