"""Requests that wait for admission, oldest (or most urgent) first."""

from __future__ import annotations

import heapq

from octavo.core.request import Request, RequestStatus


class WaitingQueue:
    """A heap by `Request.sort_key`, from which finished requests are dropped lazily.

    A preempted request keeps its key, so that it comes back to the head.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._num_stale = 0
        self.num_prompt_tokens = 0  # of those that wait

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def push(self, request: Request) -> None:
        """Add a request; sort keys are unique."""
        heapq.heappush(self._heap, (request.sort_key, request))
        self.num_prompt_tokens += request.num_prompt_tokens

    def peek(self) -> Request | None:
        """The next request to be admitted."""
        heap = self._heap
        while heap and heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
            self._num_stale -= 1
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Remove and return what `peek` showed."""
        request = heapq.heappop(self._heap)[1]
        self.num_prompt_tokens -= request.num_prompt_tokens
        return request

    def note_finished(self, request: Request) -> None:
        """A waiting request became FINISHED. Swept when most of the heap is such, so this is O(1) amortized."""
        self._num_stale += 1
        self.num_prompt_tokens -= request.num_prompt_tokens
        if self._num_stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
            self._num_stale = 0
