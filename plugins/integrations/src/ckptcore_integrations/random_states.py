"""States of random generators in processes and in workers of data loaders."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["WithRandomState", "keeping_random_states", "problem_with_random_states"]

_Row_co = TypeVar("_Row_co", covariant=True)


class WithRandomState(torch.utils.data.Dataset[_Row_co]):
    """A dataset whose workers save and restore their random generators: ``DataLoader(WithRandomState(dataset), ...)``.

    `torchdata.stateful_dataloader.StatefulDataLoader` saves the state of the dataset of each worker after each batch.
    So augmentations that draw from the generators of Python, NumPy and PyTorch continue bit for bit.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[_Row_co]) -> None:
        """Wrap a dataset with ``__getitem__`` and ``__len__``.

        Raises:
            TypeError: the dataset is iterable, or has its own state.
        """
        if isinstance(dataset, torch.utils.data.IterableDataset) or hasattr(dataset, "state_dict"):
            raise TypeError(
                f"WithRandomState({type(dataset).__name__}): an iterable dataset, or one with a state_dict, saves its "
                "own state. Let its state_dict include what its random generators need"
            )
        self.dataset = dataset

    def __getitem__(self, index: Any) -> _Row_co:
        """Return a row."""
        return self.dataset[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)  # type: ignore[arg-type]  # `Dataset` of torch does not declare a length

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker. The generators of the process itself are saved with the process."""
        if torch.utils.data.get_worker_info() is None:
            return {}
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        return {  # strings, because torchdata compares the states of two batches
            "python": json.dumps([version, np.asarray(words, np.uint32).tobytes().hex(), gauss]),
            "numpy": json.dumps([kind, np.asarray(keys).tobytes().hex(), position, has_gauss, cached]),
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states in this worker."""
        if not state or torch.utils.data.get_worker_info() is None:
            return
        version, words, gauss = json.loads(state["python"])
        kind, keys, *others = json.loads(state["numpy"])
        _set_states(
            (version, tuple(np.frombuffer(bytes.fromhex(words), np.uint32).tolist()), gauss),
            (kind, np.frombuffer(bytes.fromhex(keys), np.uint32), *others),
            np.frombuffer(bytearray.fromhex(state["torch"]), np.uint8),
        )


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore the present states of this process's generators at the end of the context."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        _set_states(*states)
        if devices:
            torch.cuda.set_rng_state_all(devices)


def _set_states(of_python: Any, of_numpy: Any, of_torch: Any) -> None:
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(torch.from_numpy(of_torch))


def problem_with_random_states(directory: Path, rank: int) -> str | None:
    """Return the reason why generators of this process differ from the saved states of a rank, or None.

    Accelerate restores the states that it can, and logs the others below the level of warnings.
    """
    from accelerate.utils import RNG_STATE_NAME, load

    path = directory / f"{RNG_STATE_NAME}_{rank}.pkl"
    if not path.exists():
        return f"{path.name} is missing"
    try:
        states = load(path)
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        return f"{path.name} cannot be read: {error}"
    present: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        present["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    lacking = [name for name, state in present.items() if name not in states or not _equal(states[name], state)]
    return f"{path.name} cannot be applied: {', '.join(lacking)}" if lacking else None


def _equal(first: Any, other: Any) -> bool:
    if isinstance(first, tuple | list) and isinstance(other, tuple | list):
        return len(first) == len(other) and all(map(_equal, first, other))
    return bool(np.array_equal(np.asarray(first), np.asarray(other)))
