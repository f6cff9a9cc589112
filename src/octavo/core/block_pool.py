"""Fixed-size KV blocks with reference counts, a prefix cache over them, and least-recently-used reuse.

    free list:  head <-> next to be taken <-> ... <-> freed last <-> head
                         (without a key first)       (still cached)

A block whose reference count is 0 is in the free list and may still carry a key: its content stays usable until the
block is taken again (lazy eviction). A hit takes it out of the middle of the list in O(1).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from octavo.errors import UserError

NULL_BLOCK = 0
"""Stands in tables for blocks that left the window; never read, written, freed or cached."""


def root_key(salt: str | None) -> bytes:
    """The parent key of a first block; different salts never share blocks."""
    return hashlib.sha256(b"salt:" + salt.encode() if salt is not None else b"").digest()


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256 of the parent's key and the block's token ids, so it names a whole prefix."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class Block:
    """One slot of `block_size` tokens in every layer of the cache group that owns it."""

    __slots__ = ("group", "id", "key", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.group = 0
        self.prev: Block = self
        self.next: Block = self


class BlockPool:
    """Owns all blocks. Ids run from 1 to `num_blocks - 1`; 0 is the null block.

    `cached[group]` maps the key of a full block to the block of that cache group that holds its content.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise UserError(
                f"the KV cache has {num_blocks} blocks; it needs at least 2 (one is never used): give it more memory"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[NULL_BLOCK].ref_count = 1
        self.cached: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self.num_free = 0
        self._head = Block(-1)
        for block in self.blocks[1:]:
            self._push(block, at_front=False)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1; cached but unreferenced blocks count as free."""
        return 1.0 - self.num_free / self.num_usable

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently used first, and evict what they had cached. The caller checked room."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        for _ in range(count):
            block = self._head.next
            self._unlink(block)
            if block.key is not None:
                self.withdraw(block)
            block.ref_count = 1
            taken.append(block.id)
        return taken

    def share(self, block_id: int) -> None:
        """Take one more reference to a block that a lookup found; a free one leaves the free list."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each. Give a sequence's blocks tail first, so that its beginning stays cached longest."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} was freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._push(block, at_front=block.key is None)

    def publish(self, group: int, key: bytes, block_id: int) -> Block | None:
        """Make a full block findable. None if another block has the same content already, which then stays the one."""
        block = self.blocks[block_id]
        cached = self.cached[group]
        if key in cached or block.key is not None or not self.enable_caching:
            return None
        block.key, block.group = key, group
        cached[key] = block
        return block

    def withdraw(self, block: Block) -> None:
        """Make a block unfindable: it is reused, or the step that was to write it failed."""
        if block.key is not None:
            del self.cached[block.group][block.key]
            block.key = None

    def clear_cache(self) -> None:
        """Forget every key, as after a change of the weights."""
        for cached in self.cached:
            for block in cached.values():
                block.key = None
            cached.clear()

    def _push(self, block: Block, at_front: bool) -> None:
        after = self._head if at_front else self._head.prev
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self.num_free -= 1
