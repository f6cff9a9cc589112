"""A queue with one reader, for the outputs of one request."""

from __future__ import annotations

import asyncio
from collections import deque

from octavo.engine.messages import EngineOutput


class Mailbox:
    """What asyncio.Queue does, for one reader and without a bound, at a third of its cost a token."""

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[EngineOutput] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput) -> None:
        self._items.append(output)
        reader = self._reader
        if reader is not None and not reader.done():  # a reader that was cancelled is done
            reader.set_result(None)

    async def get(self) -> EngineOutput:
        """The oldest output, once there is one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()
