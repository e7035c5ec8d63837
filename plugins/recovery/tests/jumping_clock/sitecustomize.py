"""Makes the wall clock of a process jump by up to three years at each call, if this directory is on its path."""

import random
import time

_SECONDS = 1e8

_time = time.time


def _jump() -> float:
    return max(0.0, _time() + random.uniform(-_SECONDS, _SECONDS))


time.time = _jump
time.time_ns = lambda: int(_jump() * 1e9)
