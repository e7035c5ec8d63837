"""Measurements in new processes: imports, the first save and the first load, and peaks of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.alternating import Case, Contender, compare
from benchmarks.local import Clearing
from benchmarks.report import Row
from benchmarks.setting import Setting

_TIMED = """
import numpy, os, sys, time
{setup}
before, start = set(sys.modules), time.perf_counter()
{timed}
print(time.perf_counter() - start, len(set(sys.modules) - before))
# Exit at once: the shutdown of the interpreter is not measured, and no thread has work left to finish.
sys.stdout.flush()
os._exit(0)
"""
_STATE = "state = {'w': numpy.ones(1 << 18, numpy.float32)}"
_OURS = "import ckptcore"
_THEIRS = "import safetensors.numpy"

_PEAK = """
import logging, warnings
logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")
import torch, ckptcore
from benchmarks.states import large_state
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
def reset():
    open("/proc/self/clear_refs", "w").write("5")
    return peak()
location = {location!r}
state = large_state({gigabytes})
size = sum(tensor.nbytes for tensor in state.values())
"""
_TORCH_PEAK = """
ckptcore.save(location + "-warm", {"w": torch.zeros(4)})
ckptcore.load(location + "-warm", {"w": torch.zeros(4, device="meta")})
before = reset()
ckptcore.save(location, state)
saved = peak() - before
abstract = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
del state
before = reset()
loaded = ckptcore.load(location, abstract)
print(size, saved, peak() - before - size)
"""
_JAX_PEAK = """
from orbax.checkpoint import v1
from benchmarks.orbax import jax_state
def save(location, arrays):
    {save}
state = jax_state(state)
save(location + "-warm", {{"w": next(iter(state.values()))[:4]}})
before = reset()
save(location, state)
print(size, peak() - before)
"""
_JAX_SAVES = {
    "ckptcore.save, ocdbt": 'ckptcore.save(location, arrays, layout="ocdbt")',
    "Orbax v1": "v1.save(location, arrays)",
    "Orbax v1, no compression": (
        "with v1.Context(array_options=v1.options.ArrayOptions("
        "saving=v1.options.ArrayOptions.Saving(use_compression=False))): v1.save(location, arrays)"
    ),
}
_MOST_IMPORT_SECONDS = 0.1
_MOST_PEAK_BYTES = 128 << 20


def rows(setting: Setting) -> Iterator[Row]:
    """Measure imports and first calls in new processes, and peaks of memory."""
    yield from _import_rows(setting)
    yield from _first_rows(setting)
    yield from _peak_rows(setting)


def _import_rows(setting: Setting) -> Iterator[Row]:
    modules: dict[str, int] = {}
    contenders = [
        _in_process("import ckptcore", modules, timed=_OURS),
        _in_process("import safetensors.numpy", modules, timed=_THEIRS),
    ]
    ours, *others = compare(Case("import after numpy", contenders), setting.rounds)
    most = f"at most {_MOST_IMPORT_SECONDS * 1e3:.0f} ms"
    yield _with_modules(ours, modules, target=most, reached=ours.median <= _MOST_IMPORT_SECONDS)
    for other in others:
        yield _with_modules(other, modules)


def _first_rows(setting: Setting) -> Iterator[Row]:
    """Measure the import of the library with the first save or load in a process, of an array of 1 MiB."""
    ours, theirs = setting.directory / "first", setting.directory / "first.safetensors"
    save = f"{_OURS}; ckptcore.save({str(ours)!r}, state)"
    save_file = f"{_THEIRS}; safetensors.numpy.save_file(state, {str(theirs)!r})"
    clear = Clearing(ours, theirs)
    for case, saves, programs in (
        ("first save of a process", True, (save, save_file)),
        (
            "first load of a process",
            False,
            (f"{_OURS}; ckptcore.load({str(ours)!r})", f"{_THEIRS}; safetensors.numpy.load_file({str(theirs)!r})"),
        ),
    ):
        modules: dict[str, int] = {}
        contenders = [
            _in_process(name, modules, setup=_STATE, timed=timed, clear=clear if saves else None)
            for name, timed in zip(("ckptcore", "safetensors"), programs, strict=True)
        ]
        if not saves:  # the save case removed its files before each run
            clear()
            for timed in (save, save_file):
                _run(_TIMED.format(setup=_STATE, timed=timed))
        for row in compare(Case(case, contenders, writes=saves), setting.rounds):
            yield _with_modules(row, modules)


def _in_process(
    name: str, modules: dict[str, int], *, timed: str, setup: str = "", clear: Clearing | None = None
) -> Contender:
    """Time statements in a new process, and count the modules that they import."""
    program = _TIMED.format(setup=setup, timed=timed)

    def note(figures: Sequence[float]) -> None:
        modules[name] = int(figures[1])

    return Contender(name, partial(_run, program), clear or (lambda: None), note, lambda figures: float(figures[0]))


def _with_modules(row: Row, modules: dict[str, int], *, target: str = "", reached: bool = True) -> Row:
    imported = f"{modules[row.contender]} modules imported"
    return replace(row, cpu=None, note=imported, target=target, reached=reached)


def _peak_rows(setting: Setting) -> Iterator[Row]:
    """Measure the peak memory of saves and loads in addition to the state."""
    gigabytes = 1.5 * setting.scale
    head = _PEAK.format(location=str(setting.directory / "peak"), gigabytes=gigabytes)
    _, saved, loaded = _run(head + _TORCH_PEAK)
    limit = f"at most {_MOST_PEAK_BYTES >> 20} MiB"
    for name, above in (("ckptcore.save", saved), ("ckptcore.load", loaded)):
        reached = above <= _MOST_PEAK_BYTES
        yield Row("peak memory above the state", name, above, "B", target=limit, reached=reached)
    for number, (name, save) in enumerate(_JAX_SAVES.items()):
        head = _PEAK.format(location=str(setting.directory / f"peak-{number}"), gigabytes=gigabytes)
        size, above = _run(head + _JAX_PEAK.format(save=save))
        is_ours = number == 0
        yield Row(
            "peak memory above the state, jax.Arrays",
            name,
            above,
            "B",
            target="at most 10 % of the state" if is_ours else "",
            reached=not is_ours or above <= size / 10,
            note=f"{above / size:.0%} of the state",
        )


def _run(program: str) -> Sequence[float]:
    """Run a program, and return the numbers on the last line that it prints."""
    # Let Python cache compiled modules, as it does for an installed package.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [float(word) for word in done.stdout.splitlines()[-1].split()]
