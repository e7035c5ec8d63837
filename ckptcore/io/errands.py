"""Errands: one thing to do for each of many, by the threads that move bytes and whoever asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from ckptcore.io.threads import IOThreads

__all__ = ["ask_each", "run_each"]

S = TypeVar("S")
T = TypeVar("T")


def run_each(threads: IOThreads, items: Iterable[T], do: Callable[[T], None], *, parallelism: int = 1) -> None:
    """Call `do` with each of the items, several at once; returns when all calls have returned.

    Args:
        threads: what does the calls, together with the calling thread.
        items: taken in their order, one when a thread has nothing to do, so that they may come from a generator.
        do: what is to be done.
        parallelism: how many calls are worth having under way at once, where that is more than a thread for each processor.

    Raises:
        The first error of a call. No item is taken after it, and no call goes on when it is raised.
    """
    errands = _Errands(iter(items), do)
    threads.run(errands.work, max(threads.count, parallelism), parallelism)
    error, errands.error = errands.error, None  # it holds the frames that hold it
    if error is not None:
        raise error


def ask_each(threads: IOThreads, items: Sequence[T], ask: Callable[[T], S], *, parallelism: int = 1) -> Sequence[S]:
    """What `ask` returns of each of the items, in their order, several calls at once; the rest as of `run_each`."""
    found: dict[int, S] = {}

    def note(number: int) -> None:
        found[number] = ask(items[number])

    run_each(threads, range(len(items)), note, parallelism=parallelism)
    return [found[number] for number in range(len(items))]


class _Errands(Generic[T]):
    def __init__(self, items: Iterator[T], do: Callable[[T], None]) -> None:
        self._items = items
        self._do = do
        self._taking = threading.Lock()
        self._over = False
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take items until none is left or something failed. Never raises."""
        try:
            while True:
                with self._taking:
                    if self._over:
                        return
                    try:
                        item = next(self._items)
                    except StopIteration:
                        self._over = True
                        return
                self._do(item)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for all
            with self._taking:
                if self.error is None:
                    self.error = error
                self._over = True
