"""Checkpointables that handlers of Orbax save as files."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any


class Item:
    """A checkpointable with its handler, as an object that saves itself into a directory."""

    def __init__(self, handler: Any, value: Any) -> None:
        self._handler = handler
        self._value = value

    async def save(self, directory: Any) -> Awaitable[None]:
        """Begin to save. The result writes the files when it is awaited."""
        rest: Awaitable[None] = await self._handler.save(directory, self._value)
        return rest

    async def load(self, directory: Any) -> Awaitable[None]:
        """Raise: Orbax's handler loads the files."""
        raise NotImplementedError("load items with ckptcore_integrations.orbax_v1.load_checkpointables")
