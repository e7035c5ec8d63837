"""What needs a process of its own: the cost of importing, the peak of memory, and leaves of JAX."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["process_cases"]

_IMPORT = "import numpy, time; start = time.perf_counter(); import ckptcore; print(time.perf_counter() - start)"

_PEAK = """
import sys, pathlib, threading, time
import torch, ckptcore
sys.path.insert(0, {root!r})
from benchmarks.states import large_state
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
def reset():
    open("/proc/self/clear_refs", "w").write("5")
location = {location!r}
state = large_state({gigabytes})
size = sum(tensor.nbytes for tensor in state.values())
ckptcore.save(location + "-warm", {{"w": torch.zeros(4)}})
ckptcore.load(location + "-warm", {{"w": torch.zeros(4, device="meta")}})
reset(); before = peak()
ckptcore.save(location, state)
print(peak() - before)
abstract = {{name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}}
del state
reset(); before = peak()
loaded = ckptcore.load(location, abstract)
print(peak() - before - size)
"""

_JAX = """
import os, sys, statistics, time
import jax, jax.numpy as jnp, numpy as np, ckptcore
state = {{str(n): jnp.full((16,), float(n)) for n in range(1000)}}
jax.block_until_ready(state)
context = ckptcore.Context(durability="none")
times = []
for number in range(15):
    start = time.perf_counter()
    handle = ckptcore.save_async({location!r}, state, overwrite=True, context=context)
    times.append(time.perf_counter() - start)
    handle.result()
print(statistics.median(times[3:]) / len(state) * 1e6)
"""


def process_cases(scratch: Path, gigabytes: float) -> Iterator[tuple[str, bool]]:
    """Rows to print, and whether each reached its target."""
    root = str(Path(__file__).parents[1])
    _run(_IMPORT)
    seconds = statistics.median(float(_run(_IMPORT)[0]) for _ in range(11))
    yield _row("import ckptcore after numpy", f"{seconds * 1e3:.1f} ms", "under 100 ms", seconds < 0.1)
    saved, loaded = map(int, _run(_PEAK.format(root=root, location=str(scratch / "peak"), gigabytes=gigabytes)))
    limit = 128 << 20
    yield _row("peak memory of save above the state", f"{saved / 2**20:.0f} MiB", "128 MiB", saved <= limit)
    yield _row("peak memory of load above the state", f"{loaded / 2**20:.0f} MiB", "128 MiB", loaded <= limit)
    micros = float(_run(_JAX.format(location=str(scratch / "jax")))[0])
    yield _row("save_async blocks, jax.Arrays, per leaf", f"{micros:.1f} us", "20 us", micros <= 20)


def _run(program: str) -> list[str]:
    # With compiled modules kept, as an installed package has them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.split()


def _row(name: str, value: str, target: str, ok: bool) -> tuple[str, bool]:
    return f"{name:79} {value:>10}          {target} {'reached' if ok else 'MISSED'}", ok
