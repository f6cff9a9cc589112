"""Block tables of requests: a table a cache group, all over one pool, with prefix hits that all groups agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.block_pool import NULL_BLOCK, Block, BlockPool, chained_key, root_key
from octavo.core.cache_groups import CacheGroup
from octavo.core.request import NEVER, Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks that are cached: a table a group (null block where a window no longer reads).

    `num_free` of them are unreferenced, so that taking them uses up free blocks like an allocation does.
    """

    num_blocks: int
    tables: list[list[int]]
    num_free: int


class KVCacheManager:
    """Gives requests their blocks and takes them back. Tables are append-only but for entries that left a window."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.groups = list(groups)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching, len(self.groups))
        self._rules = [(group.spec, group.spec.behaviour) for group in self.groups]
        self._windows = [i for i, (_, kind) in enumerate(self._rules) if not kind.reserves_prompt]

    def max_blocks(self, length: int, in_flight: int) -> int:
        """Blocks that a sequence of `length` tokens may hold at once, over all groups."""
        return sum(kind.max_blocks(spec, length, min(in_flight, length), self.block_size) for spec, kind in self._rules)

    def may_hit(self, request: Request) -> bool:
        """Whether the prefix cache serves a request; prompt logprobs need the logits of every position, so no."""
        return self.enable_caching and request.params.prompt_logprobs is None

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest cached prefix on which all groups agree; the last token is never part of it."""
        limit = (request.known - 1) // self.block_size if self.may_hit(request) else 0
        self._extend_keys(request, limit)
        keys = request.block_keys
        previous = -1
        while limit != previous:  # a group may shorten the hit of the groups before it
            previous = limit
            for group, (spec, kind) in enumerate(self._rules):
                cached = self.pool.cached[group]
                limit = kind.longest_hit(spec, lambda i, c=cached: keys[i] in c, limit, self.block_size)  # type: ignore[misc]
        return self._hit_of(request, limit)

    def _hit_of(self, request: Request, num_blocks: int) -> PrefixHit:
        tables, num_free = [], 0
        for group, (spec, kind) in enumerate(self._rules):
            first = min(num_blocks, kind.first_needed(spec, num_blocks * self.block_size) // self.block_size)
            cached = self.pool.cached[group]
            found = [cached[request.block_keys[i]] for i in range(first, num_blocks)]
            num_free += sum(block.ref_count == 0 for block in found)
            tables.append([NULL_BLOCK] * first + [block.id for block in found])
        return PrefixHit(num_blocks, tables, num_free)

    def admit(self, request: Request, hit: PrefixHit, end: int) -> bool:
        """Give a request its hit and blocks for its whole prompt (windows: up to `end`); False if there is no room.

        The hit's unreferenced blocks are charged like new ones: taking them leaves fewer to allocate.
        """
        counts = []
        for _, kind in self._rules:
            tokens = request.known if kind.reserves_prompt else end
            counts.append(-(-tokens // self.block_size) - hit.num_blocks)
        need = sum(counts) + hit.num_free
        if need > self.pool.num_free:
            request.admission_need = need
            return False
        for table in hit.tables:
            for block_id in table:
                if block_id != NULL_BLOCK:
                    self.pool.share(block_id)
        request.window_starts = [table.count(NULL_BLOCK) for table in hit.tables]
        request.tables = [table + self.pool.allocate(n) for table, n in zip(hit.tables, counts, strict=True)]
        self._note_room(request)
        request.num_published = hit.num_blocks
        request.publish_at = (hit.num_blocks + 1) * self.block_size if self.enable_caching else NEVER
        return True

    def grow(self, request: Request, end: int) -> bool:
        """Make the tables cover `end` tokens; False, with nothing taken, if the pool lacks blocks."""
        for group in self._windows:
            self._free_left_of_window(request, group)
        num_blocks = -(-end // self.block_size)
        missing = [max(0, num_blocks - len(table)) for table in request.tables]
        if sum(missing) > self.pool.num_free:
            return False
        for table, count in zip(request.tables, missing, strict=True):
            if count:
                table += self.pool.allocate(count)
        self._note_room(request)
        return True

    def _free_left_of_window(self, request: Request, group: int) -> None:
        """Free what no later query reads; by `computed`, so that steps in flight still find what they read."""
        spec, kind = self._rules[group]
        first = kind.first_needed(spec, request.computed) // self.block_size
        start, table = request.window_starts[group], request.tables[group]
        if first > start:
            self.pool.release(reversed(table[start:first]))
            table[start:first] = [NULL_BLOCK] * (first - start)
            request.window_starts[group] = first

    def publish(self, request: Request, num_tokens: int) -> list[Block]:
        """Make the full blocks among the first `num_tokens` tokens findable; returns the blocks that now are."""
        num_full = num_tokens // self.block_size
        self._extend_keys(request, num_full)
        published = []
        for index in range(request.num_published, num_full):
            for group, table in enumerate(request.tables):
                if table[index] != NULL_BLOCK:
                    block = self.pool.publish(group, request.block_keys[index], table[index])
                    if block is not None:
                        published.append(block)
        if num_full > request.num_published:
            request.num_published = num_full
            request.publish_at = (num_full + 1) * self.block_size
        return published

    def withdraw(self, request: Request) -> None:
        """Make all blocks of a request unfindable, because their content is not to be trusted."""
        for table in request.tables:
            for block_id in table:
                self.pool.withdraw(self.pool.blocks[block_id])

    def release(self, request: Request) -> None:
        """Free all blocks of a request, tail first. Its table objects stay as they are, for steps that hold them."""
        for table in request.tables:
            self.pool.release(reversed(table))
        request.tables, request.window_starts = [], []
        request.room = 0
        request.num_published, request.publish_at = 0, NEVER

    def _note_room(self, request: Request) -> None:
        request.room = min(map(len, request.tables)) * self.block_size

    def _extend_keys(self, request: Request, count: int) -> None:
        """Hash blocks up to `count`; each is hashed once in a request's life."""
        keys, size = request.block_keys, self.block_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else root_key(request.cache_salt)
            keys.append(chained_key(parent, request.tokens[index * size : (index + 1) * size]))
