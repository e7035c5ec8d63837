"""Remedies in the errors of replacements and references. Each test follows an error, and must load the saved values."""

from __future__ import annotations

import base64
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as original
from ckptcore_integrations import orbax_v1, torch_dcp
from ckptcore_integrations import safetensors as plain
from ckptcore_integrations.orbax_v1.library import PartialSaveReplacementError
from ckptcore_integrations.references import Reference
from ckptcore_integrations.safetensors import numpy as with_numpy
from ckptcore_integrations.safetensors import torch as with_torch
from ckptcore_testing.cases import refused
from orbax.checkpoint import v1
from orbax.checkpoint._src.serialization.memory_regulator import MemoryProfiler
from safetensors import SafetensorError

import ckptcore
from ckptcore import Context
from ckptcore.errors import CorruptCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


# --- Orbax ------------------------------------------------------------------------------------------------------------


def options(option: str, value: Any) -> Any:
    """Return a Context of Orbax with one option."""
    context = holder = orbax_v1.Context()
    *groups, name = option.split(".")
    for group in groups:
        holder = getattr(holder, group)
    setattr(holder, name, value)
    return context


class Profiler(MemoryProfiler):
    """A memory profiler that measures nothing."""

    def profiler_start(self) -> None:
        """Start nothing."""

    def profiler_end(self) -> None:
        """Stop nothing."""


REGULATOR = v1.options.MemoryOptions.RegulatorOptions(max_memory_limit_gib=20, profiler=Profiler())


@pytest.mark.parametrize(
    ("option", "value", "advice", "instead", "other"),
    [
        ("multiprocessing.primary_host", None, "Leave it 0", "multiprocessing.primary_host", 0),
        ("multiprocessing.active_processes", {7}, "Leave it None", "multiprocessing.active_processes", None),
        ("memory.regulator_options", REGULATOR, "Set write_concurrent_bytes", "memory.write_concurrent_bytes", 1 << 20),
        ("memory.is_prioritized_key_fn", bool, "Leave it None", "memory.is_prioritized_key_fn", None),
        ("memory.serialization_status_callback", bool, "Leave it None", "memory.serialization_status_callback", None),
        (
            "array.saving.enable_write_sharding_file",
            False,
            "Leave it True",
            "array.saving.enable_write_sharding_file",
            True,
        ),
        (
            "array.saving.storage_options.shard_axes",
            (0,),
            "Set chunk_byte_size only",
            "array.saving.storage_options.chunk_byte_size",
            64,
        ),
    ],
)
def test_options_of_orbax(tmp_path: Path, option: str, value: Any, advice: str, instead: str, other: Any) -> None:
    state = {"w": jnp.arange(64.0)}
    with options(option, value):
        refused(lambda: orbax_v1.save(tmp_path / "c", state), advice, error=NotImplementedError)
    with options(instead, other):
        orbax_v1.save(tmp_path / "c", state)
    assert np.array_equal(v1.load(tmp_path / "c")["w"], state["w"])


def test_a_layout_that_orbax_does_not_write(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0)}
    with options("checkpoint_layout", v1.options.CheckpointLayout.SAFETENSORS):
        refused(
            lambda: orbax_v1.save(tmp_path / "c", state),
            "Use ckptcore.save(layout='safetensors')",
            error=NotImplementedError,
        )
        ckptcore.save(tmp_path / "c", state, layout="safetensors")
        assert np.array_equal(orbax_v1.load(tmp_path / "c")["w"], state["w"])


def test_permissions_are_those_of_the_umask(tmp_path: Path) -> None:
    with options("file.path_permission_mode", 0o750):
        refused(lambda: orbax_v1.save(tmp_path / "c", {"w": jnp.ones(2)}), "Set its umask", error=NotImplementedError)
    before = os.umask(0o027)
    try:
        orbax_v1.save(tmp_path / "c", {"w": jnp.ones(2)})
    finally:
        os.umask(before)
    for path in (tmp_path / "c").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


def test_chunks_of_parts(tmp_path: Path) -> None:
    small = v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=64)
    parts = {"a": jnp.arange(64.0)}, {"b": jnp.ones(64)}
    with options("array.saving.scoped_storage_options_creator", lambda key, value: small):
        refused(
            lambda: orbax_v1.partial.save(tmp_path / "c", parts[0]),
            "Set array.saving.storage_options.chunk_byte_size instead",
            error=NotImplementedError,
        )
    with options("array.saving.storage_options.chunk_byte_size", 64):
        for part in parts:
            orbax_v1.partial.save(tmp_path / "c", part)
        orbax_v1.partial.finalize(tmp_path / "c")
    assert v1.metadata(tmp_path / "c").metadata["a"].storage_metadata.chunk_shape == (16,)
    assert np.array_equal(v1.load(tmp_path / "c")["a"], parts[0]["a"])


def test_a_leaf_of_an_earlier_part(tmp_path: Path) -> None:
    orbax_v1.partial.save(tmp_path / "c", {"a": np.ones(3)})
    refused(
        lambda: orbax_v1.partial.save(tmp_path / "c", {"a": np.zeros(3), "b": np.ones(2)}),
        "An earlier part has ['a']: leave it out of this part",
        error=PartialSaveReplacementError,
    )
    orbax_v1.partial.save(tmp_path / "c", {"b": np.ones(2)})
    orbax_v1.partial.finalize(tmp_path / "c")
    assert {name: array.tolist() for name, array in v1.load(tmp_path / "c").items()} == {"a": [1] * 3, "b": [1] * 2}


def test_the_file_next_to_parts_is_damaged(tmp_path: Path) -> None:
    """The file is damaged, but the saved parts can be kept."""
    orbax_v1.partial.save(tmp_path / "c", {"a": np.ones(3)}, custom_metadata={"step": 1})
    (file,) = tmp_path.glob("c*partial_save*")
    file.write_text("{")
    for call in (partial(orbax_v1.partial.save, tmp_path / "c", {"b": np.ones(2)}), partial(_finalize, tmp_path / "c")):
        text = refused(call, "Delete it, and pass custom_metadata again", error=CorruptCheckpointError)
        assert text.startswith(f"{file} is damaged")
    file.unlink()
    orbax_v1.partial.save(tmp_path / "c", {"b": np.ones(2)}, custom_metadata={"step": 1})
    orbax_v1.partial.finalize(tmp_path / "c")
    assert {name: array.tolist() for name, array in v1.load(tmp_path / "c").items()} == {"a": [1] * 3, "b": [1] * 2}
    assert v1.metadata(tmp_path / "c").custom_metadata == {"step": 1}


def _finalize(path: Path) -> None:
    orbax_v1.partial.finalize(path)


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    for tensor in (whole.T, whole[:, 1:]):
        with pytest.raises(ValueError, match=r"slice it after the load, or call `.contiguous\(\)` first"):
            with_torch.save_file({"w": tensor}, tmp_path / "a")
        with_torch.save_file({"w": tensor.contiguous()}, tmp_path / "a")
        assert torch.equal(with_torch.load_file(tmp_path / "a")["w"], tensor)
    with_torch.save_file({"w": whole}, tmp_path / "a")
    assert torch.equal(with_torch.load_file(tmp_path / "a")["w"][:, 1:], whole[:, 1:])


def test_models_with_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    model.weight.data = torch.arange(6.0).reshape(3, 2).T
    with pytest.raises(ValueError, match=r"use save_model\(..., force_contiguous=True\)"):
        with_torch.save_model(model, tmp_path / "a", force_contiguous=False)
    with_torch.save_model(model, tmp_path / "a", force_contiguous=True)
    assert torch.equal(with_torch.load_file(tmp_path / "a")["weight"], model.weight)


def test_dtypes_that_the_format_does_not_support(tmp_path: Path) -> None:
    """The error lists the dtypes that the format supports."""
    of_torch = {"w": torch.ones(2, dtype=torch.complex128)}
    of_numpy = {"w": np.ones(2, "complex128")}
    first = refused(lambda: with_torch.save_file(of_torch, tmp_path / "a"), "Supported dtypes: ", error=SafetensorError)
    other = refused(lambda: with_numpy.save_file(of_numpy, tmp_path / "a"), "Supported dtypes: ", error=SafetensorError)
    names = first.partition("Supported dtypes: ")[2].split(", ")
    assert other.endswith(f"Supported dtypes: {', '.join(names)}")
    for name in names:
        with_torch.save_file({"w": torch.ones(2).to(getattr(torch, name))}, tmp_path / "a")
        assert with_torch.load_file(tmp_path / "a")["w"].dtype == getattr(torch, name)
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        with_numpy.save_file({"w": np.ones(2).astype(dtype)}, tmp_path / "a")
        assert plain.numpy.load_file(tmp_path / "a")["w"].dtype == dtype


def test_paths_of_files(tmp_path: Path) -> None:
    with_numpy.save_file({"w": np.ones(2)}, tmp_path / "a")
    path = os.fspath(tmp_path / "a")
    refused(
        lambda: with_numpy.load_file(os.fsencode(path)), "expected a path as str or os.PathLike[str]", error=TypeError
    )  # type: ignore[arg-type]
    assert with_numpy.load_file(path)["w"].tolist() == with_numpy.load_file(tmp_path / "a")["w"].tolist() == [1, 1]
    refused(lambda: with_numpy.load_file(f"{path}b"), f"No such file or directory: {path}b", error=FileNotFoundError)
    text = refused(lambda: with_numpy.load_file(f"{path}/b"), "Not a directory", error=FileNotFoundError)
    assert text == f"Not a directory: {path}/b"


def test_frameworks(tmp_path: Path) -> None:
    with_numpy.save_file({"w": np.arange(6)}, tmp_path / "a")
    refused(
        lambda: plain.safe_open(tmp_path / "a", "tf"),
        "only 'pt', 'np' and 'flax'. Use safetensors.safe_open, which reads the same files",
        error=SafetensorError,
    )
    for framework in ("pt", "np", "flax"):
        with plain.safe_open(tmp_path / "a", framework) as file:
            assert file.get_tensor("w").tolist() == list(range(6))
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        assert file.get_tensor("w").tolist() == list(range(6))


def test_negative_bounds_of_slices(tmp_path: Path) -> None:
    with_numpy.save_file({"w": np.arange(6)}, tmp_path / "a")
    with plain.safe_open(tmp_path / "a", "np") as file:
        part = file.get_slice("w")
        refused(lambda: part[-2:], "use positions from the start of the axis", error=OverflowError)
        assert part[4:].tolist() == [4, 5]


# --- PyTorch's distributed checkpoints --------------------------------------------------------------------------------


class Trusted:
    """An object of a class of the program."""

    value = 3


def test_classes_that_pytorch_does_not_trust(tmp_path: Path) -> None:
    """The error omits those parts of PyTorch's advice that do not apply."""
    original.save({"w": torch.ones(2), "known": Trusted()}, checkpoint_id=tmp_path / "c")
    loaded: dict[str, Any] = {"known": None}
    text = refused(
        lambda: torch_dcp.load(loaded, checkpoint_id=tmp_path / "c"),
        "allow the class with torch.serialization.add_safe_globals: Unsupported global: ",
        error=original.CheckpointException,
    )
    assert "Trusted" in text
    assert "weights_only" not in text.partition("add_safe_globals: ")[2]
    with torch.serialization.safe_globals([]):  # restores the list of trusted classes at the end
        torch.serialization.add_safe_globals([Trusted])
        torch_dcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert loaded["known"].value == 3


def test_ranks_that_do_not_communicate(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    writer = torch_dcp.Writer(tmp_path / "x")
    call = partial(torch_dcp.save, state, storage_writer=writer)
    text = refused(lambda: call(use_collectives=False), "Remove the argument, or pass", error=ValueError)
    call()
    code = text.partition("storage_writer=")[2].replace("path", "name")
    name = tmp_path / "y"
    assert eval(code, {"torch": torch, "name": name}).path == name
    torch_dcp.save(state, storage_writer=original.FileSystemWriter(name), use_collectives=False)
    for path in (tmp_path / "x", name):
        loaded = {"w": torch.zeros(2)}
        original.load(loaded, checkpoint_id=path)
        assert loaded["w"].tolist() == [1, 1]


# --- references of trackers -------------------------------------------------------------------------------------------


class Guarded(SimpleHTTPRequestHandler):
    """An HTTP handler that serves a directory to clients with the password."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Basic {base64.b64encode(b'me:word').decode()}":
            self.send_error(401)
        else:
            super().do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def guarded(directory: Path) -> Iterator[str]:
    """Serve a directory, and yield the host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=os.fspath(directory))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_secrets_in_references(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(2)})
    login = {"Authorization": f"Basic {base64.b64encode(b'me:word').decode()}"}
    with guarded(tmp_path) as host:
        text = refused(
            lambda: Reference.to(f"http://me:word@{host}/c", None, upload=False),
            "leave it out, and pass context=Context(storage={scheme: options})",
            error=ValueError,
        )
        assert "word" not in text
        context = Context(storage={"http": {"client_kwargs": {"headers": login}}})
        reference = Reference.to(f"http://{host}/c", context, upload=False)
        assert "word" not in str(reference)
        assert ckptcore.load(reference.check(reference.location, context), context=context)["w"].tolist() == [1, 1]
