"""Random number generators, which resume bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import CheckpointableExample, CheckpointableHandlerTests

import ckptcore
from ckptcore.errors import CheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.handlers import NumpyGeneratorHandler, NumpyRandomStateHandler, PythonRandomHandler
from ckptcore.plugins import installed_plugins

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator(kind: str, seed: int) -> np.random.Generator:
    """Return a generator that keeps the unused half of a draw."""
    made = np.random.Generator(getattr(np.random, kind)(seed))
    made.integers(0, 5, dtype=np.uint32)
    return made


def numpy_draws(made: np.random.Generator) -> object:
    """Return the next draws. Does not change `made`."""
    state = made.bit_generator.state
    draws = (made.integers(0, 1 << 31, 5, dtype=np.uint32).tobytes(), made.random(5).tobytes())
    made.bit_generator.state = state
    return draws


def random_state(seed: int) -> np.random.RandomState:
    """Return a generator that keeps an unused normal draw."""
    made = np.random.RandomState(seed)
    made.normal()
    return made


def random_state_draws(made: np.random.RandomState) -> object:
    """Return the next draws. Does not change `made`."""
    state = made.get_state()
    draws = (made.normal(size=5).tobytes(), made.bytes(9))
    made.set_state(state)
    return draws


def python_random(seed: int, normals: int) -> random.Random:
    """Return a generator that keeps an unused normal draw if `normals` is odd."""
    made = random.Random(seed)
    for _ in range(normals):
        made.gauss(0, 1)
    return made


def python_draws(made: random.Random) -> object:
    """Return the next draws. Does not change `made`."""
    state = made.getstate()
    draws = (made.gauss(0, 1), made.gauss(0, 1), made.random(), made.getrandbits(200))
    made.setstate(state)
    return draws


def _numpy_example(kind: str) -> CheckpointableExample:
    return CheckpointableExample(kind, lambda: generator(kind, 1), lambda: generator(kind, 2), numpy_draws)


EXAMPLES: tuple[CheckpointableExample, ...] = (
    *[_numpy_example(kind) for kind in BIT_GENERATORS],
    CheckpointableExample("RandomState", lambda: random_state(1), lambda: random_state(2), random_state_draws),
    CheckpointableExample("odd", lambda: python_random(1, 1), lambda: python_random(2, 2), python_draws),
    CheckpointableExample("even", lambda: python_random(1, 2), lambda: python_random(2, 1), python_draws),
)


class TestNumpyGenerators(CheckpointableHandlerTests):
    """`numpy.random.Generator`."""

    handler = NumpyGeneratorHandler()
    examples = EXAMPLES[:5]


class TestNumpyRandomStates(CheckpointableHandlerTests):
    """`numpy.random.RandomState`."""

    handler = NumpyRandomStateHandler()
    examples = EXAMPLES[5:6]


class TestPythonRandom(CheckpointableHandlerTests):
    """`random.Random`."""

    handler = PythonRandomHandler()
    examples = EXAMPLES[6:]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_a_generator_resumes(example: CheckpointableExample, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step", {"random": example.make()})
    target = example.make_other()
    ckptcore.load_into(tmp_path / "step", {"random": target})
    assert example.fingerprint(target) == example.fingerprint(example.make())


def test_states_of_128_bits_are_kept(tmp_path: Path) -> None:
    made = np.random.Generator(np.random.PCG64(1))
    state: Any = made.bit_generator.state
    state["state"] = {"state": (1 << 128) - 1, "inc": (1 << 127) + 1}
    made.bit_generator.state = state
    ckptcore.save(tmp_path / "step", made)
    loaded: Any = ckptcore.load(tmp_path / "step")
    assert loaded["state"] == {"state": (1 << 128) - 1, "inc": (1 << 127) + 1}


def _unnamed_bit_generator() -> Any:
    """Return a type of bit generators whose state lacks its name, as another library may define it."""
    base: Any = np.random.PCG64

    def get_state(self: Any) -> dict[str, Any]:
        return {"state": base.state.__get__(self)["state"]}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        base.state.__set__(self, {"bit_generator": "Unnamed", "has_uint32": 0, "uinteger": 0, **state})

    return type("Unnamed", (base,), {"state": property(get_state, set_state)})


def test_a_bit_generator_whose_state_has_no_name_resumes(tmp_path: Path) -> None:
    unnamed = _unnamed_bit_generator()
    made = np.random.Generator(unnamed(1))
    ckptcore.save(tmp_path / "c", {"g": made})
    expected = made.random()
    other = np.random.Generator(unnamed(2))
    ckptcore.load_into(tmp_path / "c", {"g": other})
    assert other.random() == expected


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (lambda: generator("PCG64", 1), lambda: generator("MT19937", 1)),
        (lambda: generator("PCG64", 1), lambda: generator("PCG64DXSM", 1)),
        (lambda: np.random.RandomState(np.random.PCG64(1)), lambda: random_state(1)),
    ],
    ids=["another structure", "the same structure", "RandomState"],
)
def test_another_kind_of_generator_is_refused(
    saved: Callable[[], Any], target: Callable[[], Any], tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "step", saved())
    made = target()
    before = repr(made.get_state()) if isinstance(made, np.random.RandomState) else numpy_draws(made)
    with pytest.raises(CheckpointError):
        ckptcore.load_into(tmp_path / "step", made)
    after = repr(made.get_state()) if isinstance(made, np.random.RandomState) else numpy_draws(made)
    assert after == before


def test_the_error_names_both_kinds() -> None:
    handler = NumpyGeneratorHandler()
    with pytest.raises(
        TreeMismatchError, match=r"one of PCG64, the generator has PCG64DXSM\. Create the generator with PCG64"
    ):
        handler.flatten_to_load(generator("PCG64DXSM", 1), handler.flatten(generator("PCG64", 1)))


def test_a_generator_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="SystemRandom"):
        ckptcore.save(tmp_path / "step", {"random": random.SystemRandom()})


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_each_process_has_its_own_state_of_a_generator(example: CheckpointableExample) -> None:
    handler = installed_plugins().dispatch(example.make()).checkpointable
    assert handler is not None and handler.per_process
