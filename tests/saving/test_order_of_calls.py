"""The order of saves to one location. Saves of several Contexts in one process commit in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore.results import SaveHandle
from tests.checkpointer.runs import Gate, Watch, through, watched

_Save = Callable[[str, int, ckptcore.Context], SaveHandle | None]


def _state(number: int) -> dict[str, object]:
    return {"a": np.full(5000, number), "n": number}


def _async(location: str, number: int, context: ckptcore.Context) -> SaveHandle | None:
    return ckptcore.save_async(location, _state(number), overwrite="non-atomic", context=context)


def _exported(location: str, number: int, context: ckptcore.Context) -> SaveHandle | None:
    """Export a save of another location to this location."""
    exports = [ckptcore.Export(location=location, layout="safetensors")]
    state = _state(number)
    return ckptcore.save_async(
        f"{location}-of", state, strategy=ckptcore.WithExports(exports), overwrite="non-atomic", context=context
    )


def _several(location: str, number: int, context: ckptcore.Context) -> SaveHandle | None:
    state = {"model": _state(number)}
    return ckptcore.save_checkpointables_async(location, state, overwrite="non-atomic", context=context)


def _update(location: str, number: int, context: ckptcore.Context) -> SaveHandle | None:
    base = f"{location}-base"
    return ckptcore.save_async(
        location, {"n": number}, strategy=ckptcore.Update(base), overwrite="non-atomic", context=context
    )


def _blocking(location: str, number: int, context: ckptcore.Context) -> None:
    ckptcore.save(location, _state(number), overwrite="non-atomic", context=context)


def _copied(location: str, number: int, context: ckptcore.Context) -> None:
    ckptcore.copy(f"{location}-base", location, overwrite="non-atomic", context=context)


def _converted(location: str, number: int, context: ckptcore.Context) -> None:
    ckptcore.copy(f"{location}-base", location, layout="dcp", overwrite="non-atomic", context=context)


@pytest.fixture(params=["local", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    location = through(f"{tmp_path}/run/step" if request.param == "local" else f"memory://{tmp_path.name}/run/step")
    ckptcore.save(f"{location}-base", _state(2), context=watched(Watch()))
    return location


@pytest.mark.parametrize("first", [_async, _exported, _several])
@pytest.mark.parametrize("second", [_async, _exported, _several, _update])
def test_the_second_of_two_saves_in_the_background_remains(first: _Save, second: _Save, location: str) -> None:
    watch = Watch()
    gate = Gate(watch)
    earlier = first(location, 1, watched(watch))
    assert earlier is not None and gate.arrived.wait(60)
    other = watched(Watch())
    later = second(location, 2, other)
    assert later is not None
    with pytest.raises(TimeoutError):
        later.exception(0.1)
    gate.open()
    earlier.result()
    later.result()
    if second is _several:
        assert ckptcore.load_checkpointables(location, context=other)["model"]["n"] == 2
    else:
        assert ckptcore.load(location, context=other)["n"] == 2


@pytest.mark.parametrize("second", [_blocking, _copied, _converted])
def test_a_blocking_call_waits_for_an_earlier_save_in_the_background(
    second: Callable[[str, int, ckptcore.Context], None], location: str
) -> None:
    watch = Watch()
    gate = Gate(watch)
    earlier = _async(location, 1, watched(watch))
    assert earlier is not None and gate.arrived.wait(60)
    other = watched(Watch())
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(second, location, 2, other)
        with pytest.raises(TimeoutError):
            later.exception(0.1)
        gate.open()
        later.result()
        assert earlier.done()
    assert ckptcore.load(location, context=other)["n"] == 2
