"""Links from a single controller to its workers. Each link calls one worker with colocated Python.

A message is a scalar array of NumPy's variable-length string dtype. JAX itself uses this dtype to
send the specifications of a colocated function's results. The bytes of a message are
base64-encoded, because NumPy strings are text.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ckptcore.errors import PluginError, RankFailedError
from ckptcore.model import HostArray, dtype_from_name
from ckptcore_jax.array_creation import cast_elements

Cuts: TypeAlias = Sequence[Sequence[tuple[int, tuple[slice, ...]]]]
"""Boxes of each leaf of a write stage: for each box, the number of the array that contains it, and the slices."""

ReadSpecs: TypeAlias = Sequence[tuple[Sequence[tuple[int, ...]], str]]
"""For each leaf of a read stage, the shapes of its boxes, and their dtype."""

_CACHED_CALLS: Final = 64
"""Maximum number of different loads whose compiled calls are cached."""


class WorkerLink:
    """Calls functions on the host of a worker's devices. Thread-safe.

    Attributes:
        name: name of the worker.
        lead: CPU device of the worker's host, for messages and arrays.
    """

    def __init__(self, name: str, lead: Any) -> None:
        """Create the link. Compiles nothing.

        Raises:
            PluginError: if colocated Python is unavailable.
        """
        self.name = name
        self.lead = lead
        self._sharding = SingleDeviceSharding(lead)
        if not hasattr(np.dtypes, "StringDType"):
            raise PluginError(
                f"colocated Python needs NumPy 2, found {np.__version__}: install 'ckptcore-jax[colocated]'"
            )
        try:
            # JAX would import it in the first call, and its error is less helpful.
            import cloudpickle  # type: ignore[import-untyped]  # noqa: F401  # it has no types
            from jax.experimental import colocated_python
        except ImportError as error:
            raise PluginError(f"colocated Python is unavailable: {error}; install 'ckptcore-jax[colocated]'") from error
        self._text = jax.ShapeDtypeStruct((), np.dtypes.StringDType(), sharding=self._sharding)  # type: ignore[no-untyped-call]
        text = self._text
        self._write: Any = colocated_python.colocated_python(_run_write_stage).specialize(
            out_specs_fn=lambda message, *arrays: text
        )
        self._python = colocated_python
        self._lock = threading.Lock()
        self._reads: dict[tuple[Any, ...], Any] = {}

    def take(self, arrays: Sequence[jax.Array], *, may_alias: bool) -> Sequence[jax.Array]:
        """Begin to copy arrays on devices of the worker to the memory of its host.

        Args:
            arrays: arrays on one device each.
            may_alias: True to use arrays that are already in host memory without a copy.
        """
        taken: Sequence[jax.Array] = jax.device_put(list(arrays), self._sharding, may_alias=may_alias)
        return taken

    def write(self, stage: object, arrays: Sequence[jax.Array], cuts: Cuts) -> bytes:
        """Run a stage on copied arrays. Return its report.

        Raises:
            RankFailedError: if the worker failed.
        """
        message = pickle.dumps((stage, cuts))
        try:
            return _decode_message(self._write(_encode_message(message, self.lead), *arrays))
        except Exception as error:
            raise self._worker_error(error) from error

    def read(self, stage: object, specs: ReadSpecs) -> tuple[bytes, Sequence[jax.Array]]:
        """Run a read stage. Return its report, and the boxes in the memory of the worker's host.

        Raises:
            RankFailedError: if the worker failed.
        """
        message = pickle.dumps((stage, specs))
        try:
            report, *arrays = self._read_call(specs)(_encode_message(message, self.lead))
            return _decode_message(report), arrays
        except Exception as error:
            raise self._worker_error(error) from error

    def _read_call(self, specs: ReadSpecs) -> Any:
        # JAX keeps compiled functions forever, so repeated loads must reuse them.
        key = tuple([(tuple(shapes), dtype) for shapes, dtype in specs])
        call = self._reads.get(key)
        if call is None:
            boxes = [(shape, dtype_from_name(dtype)) for shapes, dtype in specs for shape in shapes]
            abstract: Any = jax.ShapeDtypeStruct
            results = [self._text, *[abstract(shape, dtype, sharding=self._sharding) for shape, dtype in boxes]]
            call = self._python.colocated_python(_run_read_stage).specialize(out_specs_fn=lambda message: results)
            with self._lock:
                if len(self._reads) >= _CACHED_CALLS:
                    del self._reads[next(iter(self._reads))]
                self._reads[key] = call
        return call

    def _worker_error(self, error: Exception) -> RankFailedError:
        return RankFailedError(f"the worker {self.name} failed: {type(error).__name__}: {error}")


def _run_write_stage(message: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Run a write stage on the elements of arrays, and return its report. Runs on a worker."""
    stage, cuts = pickle.loads(_decode_message(message))
    elements = [np.asarray(array) for array in arrays]
    report = stage([[elements[number][slices] for number, slices in boxes] for boxes in cuts])
    return _encode_message(report, _device_of(message))


def _run_read_stage(message: jax.Array) -> list[jax.Array]:
    """Run a read stage. Return its report and the boxes as arrays. Runs on a worker.

    If the stage fails, the boxes are filled with zeros, because colocated Python fixes the number
    and shapes of the results before the call.
    """
    stage, specs = pickle.loads(_decode_message(message))
    report, read = stage()
    elements: list[HostArray] = []
    for number, (shapes, name) in enumerate(specs):
        dtype = dtype_from_name(name)
        if number < len(read):
            elements += [part if part.dtype == dtype else cast_elements(part, dtype) for part in read[number]]
        else:
            elements += [np.zeros(shape, dtype) for shape in shapes]
    device = _device_of(message)
    with jax.enable_x64(True):  # the controller chose the dtypes, so ignore this process's setting
        arrays = jax.device_put(elements, device)
    return [_encode_message(report, device), *arrays]


def _device_of(message: jax.Array) -> Any:
    (device,) = message.sharding.device_set
    return device


def _encode_message(data: bytes, device: Any) -> jax.Array:
    text = np.array(base64.b64encode(data).decode("ascii"), dtype=np.dtypes.StringDType())
    message: jax.Array = jax.device_put(text, device)
    return message


def _decode_message(message: jax.Array) -> bytes:
    return base64.b64decode(np.asarray(message).item())
