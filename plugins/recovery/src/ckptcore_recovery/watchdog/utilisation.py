"""Utilisation of the host's processors and GPUs, and of the training process, over the time of a stall."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

IDLE_PERCENT: Final = 5.0
"""Below it, processors or GPUs count as idle."""

_SAMPLES: Final = 2000
_SECONDS_OF_GPUS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Utilisation over some time, in percent. None: unknown.

    Attributes:
        processors: of all processors of the host.
        process: of the training process; 100 is one processor.
        gpus: the highest utilisation of any GPU of the host that was seen.
    """

    processors: float | None = None
    process: float | None = None
    gpus: float | None = None

    @property
    def idle(self) -> list[str]:
        """The names of what was idle: processors, GPUs."""
        parts = {"processors": self.processors, "GPUs": self.gpus}
        return [name for name, percent in parts.items() if percent is not None and percent < IDLE_PERCENT]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters at one time, in ticks of the processors."""

    now: float
    busy: int
    total: int
    process: int


class UtilisationSampler:
    """Samples the counters of ``/proc``, and asks the GPUs while something takes suspiciously long."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        """Begin without samples.

        Args:
            pid: the training process.
            proc: the mounted proc file system.
        """
        self._pid = pid
        self._proc = proc
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._asking: threading.Thread | None = None
        self._gpus: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def sample(self, now: float) -> None:
        """Read the counters of the processors."""
        try:
            fields = (self._proc / "stat").read_text().partition("\n")[0].split()[1:9]
            own = (self._proc / str(self._pid) / "stat").read_text().rpartition(")")[2].split()
            ticks = [int(field) for field in fields]
            # user, nice, system, idle, iowait, irq, softirq, steal: see proc_stat(5).
            self._samples.append(
                _Sample(now, sum(ticks) - ticks[3] - ticks[4], sum(ticks), int(own[11]) + int(own[12]))
            )
        except (OSError, ValueError, IndexError):
            pass  # the process has ended, or /proc is not that of Linux: without samples, utilisation is unknown

    def ask_gpus(self, now: float) -> None:
        """Ask for the utilisation of the GPUs, on a thread of its own: a driver may hang."""
        if self._nvidia_smi is not None and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._ask_gpus, args=(self._nvidia_smi, now), daemon=True)
            self._asking.start()

    def _ask_gpus(self, program: str, now: float) -> None:
        command = [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_OF_GPUS, check=True)
            self._gpus.append((now, max(float(line) for line in answer.stdout.splitlines() if line.strip())))
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # no driver, or a GPU that does not tell: unknown

    def since(self, began: float) -> Utilisation:
        """Return the utilisation between a time and the last sample.

        Args:
            began: the time, by the clock of the samples.
        """
        samples = [sample for sample in self._samples if sample.now >= began]
        gpus = [percent for now, percent in self._gpus if now >= began]
        highest = max(gpus, default=None)
        if len(samples) < 2 or samples[-1].total == samples[0].total:
            return Utilisation(gpus=highest)
        first, last = samples[0], samples[-1]
        total = last.total - first.total
        return Utilisation(
            processors=100.0 * (last.busy - first.busy) / total,
            process=100.0 * (last.process - first.process) * (os.cpu_count() or 1) / total,
            gpus=highest,
        )
