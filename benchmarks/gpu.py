"""Copies, saves and loads of a CUDA device, compared with other libraries: ``python -m benchmarks.gpu``.

It runs in a checkout of which nothing is installed, and without a network. It needs PyTorch with CUDA, and what
``pyproject.toml`` of the core requires; without CUDA it writes nothing. Peers that are not installed are left out, and
a message says so. The sizes and the number of rounds are chosen so that everything ends within ``--seconds``.

- tests: those of the test suite that wait for a device.
- copies: memory of the host to the device and back. The limit is one asynchronous copy of pinned memory. Other rows use
  several streams, each with a thread; "staged" copies pageable memory through pinned buffers.
- stall: the time for which `save_async` blocks its caller.
- load: a checkpoint into parameters on the device. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.alternating import Case, Contender, measure, timed_rows
from benchmarks.checkout import ROOT, use_checkout
from benchmarks.device_copies import copy_contenders
from benchmarks.report import TABLE_HEAD, Row, write_report
from benchmarks.setting import Setting

NEEDED: Final = ("torch", "numpy", "ml_dtypes", "pluggy", "xxhash")
"""Modules without which nothing can be measured."""

TESTS: Final = (
    "plugins/torch_backend/tests/test_transfers.py::test_copies_of_cuda_tensors_exclude_later_changes",
    "plugins/torch_backend/tests/test_transfers.py::test_cuda_tensors_are_built_and_filled",
    "tests/abstracts/test_torch.py::test_tensors_are_restored_on_their_device",
)
"""The tests that skip without a device, except those with libraries that train."""

_SECONDS: Final = 480.0
_STATE_BYTES: Final = 20_000_000_000
_COPY_BYTES: Final = 1 << 30
_PROBE_BYTES: Final = 256 << 20
_ARRAY_BYTES: Final = 256 << 20
_SMALL_ARRAYS: Final = 64
_ROUNDS: Final = 7
_LEAST_OF_PINNED: Final = 0.9
"""Target: the time of a copy of pinned memory, divided by ours."""

_SHARES: Final = {"tests": 0.25, "copies": 0.25, "stall": 0.5, "load": 0.9}
"""The sections in their order, with the part of the time that is left then which each may take."""

_WRITES: Final = 8
"""Number of times that the state is written, at least: by two contenders of the stall in three passes, and for two
loads. Half of the time is for that."""

Tensors = dict[str, Any]


class Budget:
    """The time that is left for a run. A test passes a simulated clock."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Return seconds; at most 0 when the time is over."""
        return self._end - self.clock()

    def go_on(self, share: float) -> Callable[[], bool]:
        """Return a function for `measure`: whether one more round would end in a share of the time that is left now."""
        start = self.clock()
        end, ended = start + share * self.left(), 2  # the trial, and the warm-up round

        def decide() -> bool:
            nonlocal ended
            ended += 1
            now = self.clock()
            return now + (now - start) / ended <= end

        return decide


@dataclass(frozen=True)
class Bench:
    """The setting of a section.

    Attributes:
        directory: an empty directory for files.
        budget: the time that is left.
        share: the part of it that a section may take.
        nbytes: bytes of the state of the large sections, which fit in the device, the host and the disk.
        environment: variables for processes that import the checkout.
    """

    directory: Path
    budget: Budget
    share: float
    nbytes: int
    environment: Mapping[str, str]

    def rows(self, case: Case, share: float) -> Sequence[Row]:
        """Measure a case. Leave out contenders that fail, and say so; the others are measured."""
        working, go_on = [], self.budget.go_on(share)
        for contender in case.contenders:
            try:
                contender.prepare()
                contender.after(contender.run())
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001  # no peer may cost other rows; DCP's errors are no Exceptions
                say(f"{case.name}, {contender.name}: left out: {type(error).__name__}: {error}")
            else:
                working.append(contender)
        if not working or working[0] is not case.contenders[0]:
            raise RuntimeError(f"{case.name}: {case.contenders[0].name} failed")
        case = replace(case, contenders=working)
        return timed_rows(case, measure(case, _ROUNDS, go_on=go_on))


def say(message: str) -> None:
    """Print a remark that is no row."""
    print(f"gpu: {message}", file=sys.stderr, flush=True)


def tests(bench: Bench) -> Iterator[Row]:
    """Run the tests that wait for a device, in a process."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        say("the tests are left out: pytest or hypothesis is not installed")
        return
    # The libraries of the device's machine may warn, and have plugins for pytest.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *TESTS]
    seconds = max(1.0, bench.budget.left() * bench.share)
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=bench.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"the tests are left out: not done after {seconds:.0f} s")
        return
    summary = (ended.stdout.strip().splitlines() or [ended.stderr[-300:]])[-1].strip("= ")
    passed = re.search(r"(\d+) passed", summary)
    reached = ended.returncode == 0 and passed is not None and "skipped" not in summary
    if not reached:
        say(ended.stdout[-4000:] + ended.stderr[-2000:])
    count = int(passed[1]) if passed else 0
    case = "tests that wait for a device"
    yield Row(case, "passed", count, "tests", target="all", reached=reached, note=summary)


def copies(bench: Bench) -> Iterator[Row]:
    """Copy an array each way."""
    nbytes = min(_COPY_BYTES, bench.nbytes // 4)
    for name, contenders in copy_contenders(nbytes, _LEAST_OF_PINNED).items():
        yield from bench.rows(Case(name, contenders, nbytes, memory=0), bench.share / 2)


def _parameters(nbytes: int) -> Tensors:
    """Return parameters on the device: large ones, and some small ones."""
    import torch

    count = max(1, nbytes // _ARRAY_BYTES)
    sizes = {f"layers.{number}.weight": nbytes // count // 2 for number in range(count)}
    sizes |= {f"layers.{number}.norm": 4096 for number in range(_SMALL_ARRAYS)}
    return {
        name: torch.nn.Parameter(torch.randn(size, dtype=torch.bfloat16, device="cuda"), requires_grad=False)
        for name, size in sizes.items()
    }


def _nbytes(state: Tensors) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def stall(bench: Bench) -> Iterator[Row]:
    """Save the state in the background, with the defaults of both libraries."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save

    import ckptcore

    state = _parameters(bench.nbytes)
    pinned = torch.empty(max(tensor.nbytes for tensor in state.values()), dtype=torch.uint8, pin_memory=True)
    ours, theirs = bench.directory / "ours", bench.directory / "dcp"

    def finish(handle: Any) -> None:
        handle.result()

    def clear() -> None:
        torch.cuda.synchronize()
        for path in (ours, theirs):
            shutil.rmtree(path, ignore_errors=True)

    def copy_all() -> None:
        for tensor in state.values():
            source = tensor.view(torch.uint8)
            pinned[: source.numel()].copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    contenders = [
        Contender("ckptcore.save_async", lambda: ckptcore.save_async(ours, state), clear, finish),
        Contender("pinned.copy_", copy_all, target=_LEAST_OF_PINNED),
        Contender("DCP async_save", lambda: async_save(state, checkpoint_id=theirs, no_dist=True), clear, finish),
    ]
    total = _nbytes(state)
    yield from bench.rows(Case(f"stall: save {total / 1e9:.3g} GB", contenders, total, memory=0), bench.share)
    clear()


def load(bench: Bench) -> Iterator[Row]:
    """Load the state into its parameters, which must have the saved elements afterwards."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import ckptcore

    state = _parameters(bench.nbytes)
    saved = _sums(state)
    ours, theirs = bench.directory / "ours", bench.directory / "dcp"
    ckptcore.save(ours, state, context=ckptcore.Context(durability="none"))
    files = sorted(ours.glob("*.safetensors"))
    dcp_save(state, storage_writer=FileSystemWriter(theirs, sync_files=False), no_dist=True)

    def clear() -> None:
        for tensor in state.values():
            tensor.zero_()
        torch.cuda.synchronize()

    def check(_: object) -> None:
        if _sums(state) != saved:
            raise RuntimeError("the parameters have other elements than those that were saved")

    def loading(name: str, run: Callable[[], object]) -> Contender:
        def finished() -> None:
            run()
            torch.cuda.synchronize()

        return Contender(name, finished, clear, check)

    contenders = [
        loading("ckptcore.load_into", lambda: ckptcore.load_into(ours, state)),
        loading("dcp.load", lambda: dcp_load(dict(state), checkpoint_id=theirs, no_dist=True)),
    ]
    for module, peer in (("safetensors", _safetensors), ("fastsafetensors", _fastsafetensors)):
        if importlib.util.find_spec(module) is None:
            say(f"{module} is left out: it is not installed")
        else:
            contenders.append(loading(f"{module}, then copy_", partial(peer, files, state)))
    total = _nbytes(state)
    yield from bench.rows(Case(f"load {total / 1e9:.3g} GB into parameters", contenders, total, memory=0), bench.share)


def _sums(state: Tensors) -> Mapping[str, int]:
    """Return a checksum of the bits of each tensor, computed on the device."""
    import torch

    return {name: int(tensor.view(torch.int16).sum()) for name, tensor in state.items()}


def _safetensors(files: Sequence[Path], state: Tensors) -> None:
    import safetensors.torch

    for file in files:
        for name, tensor in safetensors.torch.load_file(file, device="cuda").items():
            state[name].copy_(tensor)


def _fastsafetensors(files: Sequence[Path], state: Tensors) -> None:
    import fastsafetensors  # type: ignore[import-not-found]  # not part of the environment
    import torch

    loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cuda:0"), nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    buffer = loader.copy_files_to_device()
    try:
        for name, tensor in state.items():
            tensor.copy_(buffer.get_tensor(name))
    finally:
        buffer.close()
        loader.close()


def fitting_bytes(seconds: float, directory: Path, clock: Callable[[], float]) -> int:
    """Return how many bytes of state fit in the device, the host, the disk, and in the time of the large sections.

    Args:
        seconds: the time of all sections.
        directory: where checkpoints are written.
        clock: times a durable write of a file, on which the time depends.
    """
    import torch

    free_device, _ = torch.cuda.mem_get_info()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        memory = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    probe = directory / "probe"
    data, start = bytes(1 << 20), clock()
    with probe.open("wb") as file:
        for _ in range(_PROBE_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    speed = _PROBE_BYTES / max(1e-3, clock() - start)
    probe.unlink()
    # A load keeps the files of two libraries in memory and on the disk, and fastsafetensors a copy on the device.
    fit = min(free_device / 2.5, memory / 4, shutil.disk_usage(directory).free / 2.5)
    in_time = speed * seconds / 2 / _WRITES
    return int(max(1 << 20, min(_STATE_BYTES, fit, in_time)))


def missing() -> str:
    """Return why nothing can be measured; empty if something can."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch finds no CUDA device"


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Measure, print and write a report. Return 1 if a target was missed or a section failed, 2 without CUDA."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="most time of a run (default: 480)")
    parser.add_argument("--only", nargs="+", choices=_SHARES, default=list(_SHARES), help="run only these sections")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where checkpoints are written")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results-gpu.json", help="the report")
    options = parser.parse_args(arguments)
    budget = Budget(options.seconds, clock)
    added = use_checkout()
    if reason := missing():
        say(f"nothing was measured: {reason}")
        return 2
    import torch

    warnings.filterwarnings("ignore", module="torch")
    gc.collect()
    gc.freeze()  # the collection before each run, which is not timed, need not visit all of PyTorch again
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*added, os.environ.get("PYTHONPATH", "")])}
    sections: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    budgets: dict[str, float] = {}
    failed = 0
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as scratch:
        nbytes = fitting_bytes(options.seconds, Path(scratch), clock)
        setting = Setting(Path(scratch), _ROUNDS, nbytes / _STATE_BYTES)
        print(TABLE_HEAD)
        for name in [name for name in _SHARES if name in options.only]:
            if budget.left() <= 0:
                say(f"{name} is left out: no time is left")
                failed += 1
                continue
            directory = Path(scratch, name)
            directory.mkdir()
            bench = Bench(directory, budget, _SHARES[name], nbytes, environment)
            start, sections[name], budgets[name] = clock(), [], budget.left() * _SHARES[name]
            try:
                for row in _SECTIONS[name](bench):
                    sections[name].append(row)
                    print(row.line(), flush=True)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001  # the other sections still run; DCP's errors are no Exceptions
                say(f"{name} failed: {type(error).__name__}: {error}")
                failed += 1
            seconds[name] = clock() - start
            shutil.rmtree(directory)
            torch.cuda.empty_cache()
            write_report(options.out, setting, sections, seconds, budgets, torch.cuda.get_device_name())
    missed = sum(not row.reached for rows in sections.values() for row in rows)
    print(f"{missed} targets missed, {failed} sections failed or left out, {sum(seconds.values()):.0f} s")
    return 1 if missed or failed else 0


_SECTIONS: Final[Mapping[str, Callable[[Bench], Iterator[Row]]]] = {
    "tests": tests,
    "copies": copies,
    "stall": stall,
    "load": load,
}


if __name__ == "__main__":
    sys.exit(main())
