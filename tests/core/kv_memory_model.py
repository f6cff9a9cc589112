"""A device that stores, instead of keys and values, a number for the whole prefix that a position's KV depends on.

Whatever the scheduler does with blocks, a query must find, at each position that it reads, exactly the number of its
own prefix. Salts are part of the number, so that a block shared across salts is found too.
"""

from __future__ import annotations

from octavo.core.block_pool import NULL_BLOCK
from octavo.core.request import Request
from octavo.core.step import IN_FLIGHT_TOKEN, ScheduledRequest, Step

GARBAGE = None


class Truth:
    """What the model knows of a request, independently of the scheduler: its tokens and the number of each prefix."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.contents: list[int] = []
        self.root = hash((17, request.cache_salt is None, len(request.cache_salt or "")))
        self.num_rows = 0  # prompt logprob rows delivered
        self.num_keys = 0  # block keys whose content is noted
        self.extend(request.tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.contents.append(hash((self.contents[-1] if self.contents else self.root, token)))

    def contents_with(self, start: int, tokens: list[int]) -> list[int]:
        """Numbers of the positions from `start` on, if the tokens there were `tokens`."""
        previous = self.contents[start - 1] if start else self.root
        result = []
        for token in tokens:
            previous = hash((previous, token))
            result.append(previous)
        return result


class KVMemory:
    """Content a cache group, block and offset; executes steps in order and checks all they read and write."""

    def __init__(self, windows: list[int | None], num_blocks: int, block_size: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.slots: list[list[list[int | None]]] = [
            [[GARBAGE] * block_size for _ in range(num_blocks)] for _ in windows
        ]

    def execute(self, step: Step, truths: dict[Request, Truth], has_failed: bool) -> None:
        """All writes of a step come before its reads, as in every layer of a model."""
        for item in step.requests:
            truth = truths[item.request]
            if has_failed:
                self._write(item, [])
            elif not item.is_void:
                self._write(item, self._inputs(item, truth))
            else:  # the device does not know that the results are void: from right KV it makes right KV
                self._write(item, truth.contents[item.start : item.start + item.num_tokens])
        void = [item for item in step.requests if item.is_void and not has_failed]
        while wrong_items := [item for item in void if self._wrong_reads(item, truths[item.request], item.start)]:
            for item in wrong_items:  # and from garbage it makes garbage, which others of the step may read in turn
                self._write(item, [])
                void.remove(item)
        for item in step.requests:
            if not has_failed and not item.is_void:
                wrong = self._wrong_reads(item, truths[item.request], item.start + item.num_tokens - item.num_drafts)
                assert not wrong, f"{item.request} reads foreign or stale KV (group, block, position): {wrong}"

    def _inputs(self, item: ScheduledRequest, truth: Truth) -> list[int]:
        """The numbers of the step's positions; its tokens must be the request's (placeholders are filled in)."""
        start, num_known = item.start, item.num_tokens - item.num_drafts
        known = truth.tokens[start : start + num_known]
        assert len(known) == num_known, "tokens are computed that nobody sampled"
        for given, true in zip(item.token_ids, known, strict=False):
            assert given in (true, IN_FLIGHT_TOKEN), f"input {given} instead of {true}"
        if item.num_drafts == 0:
            return truth.contents[start : start + num_known]
        return truth.contents_with(start, known + item.token_ids[num_known:])

    def _write(self, item: ScheduledRequest, contents: list[int]) -> None:
        """Write `contents` and, where they are too short, garbage."""
        size = self.block_size
        for table, slots in zip(item.block_ids, self.slots, strict=True):
            for i in range(item.num_tokens):
                position = item.start + i
                block_id = table[position // size]
                assert block_id != NULL_BLOCK, "the null block is written"
                slots[block_id][position % size] = contents[i] if i < len(contents) else GARBAGE

    def _wrong_reads(self, item: ScheduledRequest, truth: Truth, end: int) -> list[tuple[int, int, int]]:
        """Where, among the positions below `end` that the step's queries read, the KV is not that of the prefix."""
        size = self.block_size
        wrong = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, item.start - window + 1)
            for index in range(first // size, -(-end // size)):
                base = index * size
                low, high = max(first, base), min(end, base + size)
                block_id = item.block_ids[group][index]
                if self.slots[group][block_id][low - base : high - base] != truth.contents[low:high]:
                    wrong.append((group, block_id, low))
        return wrong
