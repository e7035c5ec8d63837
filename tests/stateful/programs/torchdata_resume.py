"""Save torchdata loaders before their end, and resume with new ones. Prints the cases that are correct."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # ships no types

import ckptcore


class Counting(torch.utils.data.IterableDataset[int]):
    """A data set with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 30:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position."""
        self.position = state["position"]


def mapped(workers: int) -> Any:
    """Return a loader that shuffles with its own generator."""
    generator = torch.Generator().manual_seed(3)
    numbers: Any = list(range(40))
    return StatefulDataLoader(numbers, batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def iterable(workers: int) -> Any:
    """Return a loader of a data set with a state."""
    return StatefulDataLoader(Counting(), batch_size=2, num_workers=workers)


def main(directory: str) -> None:
    """Run every case."""
    for make in (mapped, iterable):
        for workers in (0, 2):
            for taken in (0, 3, 9):
                name = f"{make.__name__} {workers} {taken}"
                loader = make(workers)
                batches = iter(loader)
                for _ in range(taken):
                    next(batches)
                handle = ckptcore.save_async(f"{directory}/{name}", {"data": loader})
                expected = [batch.tolist() for batch in batches]
                handle.result()
                other = make(workers)
                ckptcore.load_into(f"{directory}/{name}", {"data": other})
                resumed = [batch.tolist() for batch in other]
                assert resumed == expected, (name, resumed, expected)
                assert resumed, name
                print(name)


if __name__ == "__main__":
    main(sys.argv[1])
