"""Where each request is, and what a change of place does to its blocks.

                   admit                      finish
    WAITING ------------------->  RUNNING  ------------->  FINISHED
                 PREEMPTED  <-----   preempt                  ^
                     |  ^------ admit                         |
                     +----------------- finish ---------------+

A request that leaves RUNNING while steps in flight still write its blocks is draining: it keeps them until the last of
those steps is back. It is not admitted again before.
"""

from __future__ import annotations

from bisect import insort

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.core.waiting_queue import WaitingQueue

_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class RequestStates:
    """The requests that have not ended, by state. The only place where `Request.status` changes."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.num_draining = 0
        self.num_preemptions = 0
        self._running: list[Request] = []  # by sort key: the last is preempted first
        self._running_has_finished = False

    def running(self) -> list[Request]:
        """The running requests by sort key; the list is live, `preempt_last` shortens it."""
        if self._running_has_finished:  # swept once a step, so that an end costs O(1)
            self._running = [request for request in self._running if request.status is _RUNNING]
            self._running_has_finished = False
        return self._running

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def admit(self, request: Request) -> None:
        """Move the head of the waiting queue, which has its blocks, to the running requests."""
        head = self.waiting.pop()
        assert head is request
        request.status = _RUNNING
        request.admission_need = 0
        insort(self._running, request, key=lambda r: r.sort_key)

    def preempt_last(self) -> Request:
        """Send the youngest or least urgent running request back to the head of its queue, and free its blocks."""
        request = self._running.pop()
        self._requeue(request)
        return request

    def recompute(self, request: Request) -> None:
        """Make a request start over and drop what the steps in flight bring for it."""
        if request.status is _RUNNING:
            self._running.remove(request)
            self._requeue(request)
        request.discards_in_flight = request.in_flight > 0

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is."""
        if request.status is _RUNNING:
            self._running_has_finished = True
        request.finish_reason = reason
        was_queued = request.status is not _RUNNING
        request.status = _FINISHED
        del self.requests[request.request_id]
        if was_queued:
            self.waiting.note_finished(request)
        self._drain(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that does not run and that no step in flight holds."""
        self.cache.release(request)
        request.computed = request.scheduled = request.pending = 0
        request.drafts = []
        request.discards_in_flight = False
        if request.is_draining:
            request.is_draining = False
            self.num_draining -= 1

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)
        self._drain(request)

    def _drain(self, request: Request) -> None:
        """Free the blocks, now or when the last step in flight that writes them is back."""
        if not request.in_flight:
            self.release(request)
        elif not request.is_draining:
            request.is_draining = True
            self.num_draining += 1
