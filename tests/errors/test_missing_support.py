"""Errors about types, URL schemes, layouts and files that no installed plugin handles name the remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptcore_dcp.plugin
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_testing.plugins import hide_distributions
from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no type stubs
from torch.distributed.checkpoint import state_dict_saver

import ckptcore
from ckptcore.distributions import DISTRIBUTIONS, install_hint
from ckptcore.errors import CheckpointNotFoundError, UnknownPluginError, UnsupportedLeafError


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> ckptcore.Context:
    """Return a Context of a program that has installed only the core of this project."""
    hide_distributions(monkeypatch, {})
    return ckptcore.Context()


class Model(torch.nn.Module):
    """A class of a user that derives from a class of a framework."""


@pytest.mark.parametrize(
    ("value", "extra"),
    [(torch.ones(2), "torch"), (torch.float32, "torch"), (Model(), "torch"), (jnp.ones(2), "jax")],
    ids=["tensor", "dtype", "module", "array"],
)
def test_the_error_for_a_type_of_a_framework_names_its_distribution(
    value: object, extra: str, core_alone: ckptcore.Context
) -> None:
    expected = rf"pip install 'ckptcore\[{extra}\]'"
    if isinstance(value, Model):  # has state_dict and load_state_dict, so the core saves its state
        value.register_buffer("w", torch.ones(1))
    with pytest.raises(UnsupportedLeafError, match=expected):
        ckptcore.save("memory://missing/state", {"model": value}, context=core_alone)


@pytest.mark.parametrize(
    ("scheme", "extra"),
    [(scheme, distribution.extra) for distribution in DISTRIBUTIONS for scheme in distribution.schemes],
)
def test_error_for_url_scheme_names_only_distribution(scheme: str, extra: str, core_alone: ckptcore.Context) -> None:
    with pytest.raises(UnknownPluginError) as caught:
        ckptcore.load(f"{scheme}://bucket/state", context=core_alone)
    assert str(caught.value).count("pip install") == 1
    assert f"pip install 'ckptcore[{extra}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [(layout, distribution.extra) for distribution in DISTRIBUTIONS for layout in distribution.layouts],
)
def test_the_error_for_a_layout_names_its_distribution(
    layout: str, extra: str, core_alone: ckptcore.Context, tmp_path: Path
) -> None:
    with pytest.raises(UnknownPluginError, match=rf"pip install 'ckptcore\[{extra}\]'"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, layout=layout, context=core_alone)


def _torch_file(directory: Path) -> Path:
    torch.save({"w": torch.ones(2)}, directory / "weights.pt")
    return directory / "weights.pt"


def _dcp(directory: Path) -> Path:
    state_dict_saver.save({"w": torch.ones(2)}, checkpoint_id=directory / "c", no_dist=True)
    return directory / "c"


def _orbax(directory: Path) -> Path:
    v1.save(directory / "c", {"w": jnp.ones(2)})
    return directory / "c"


def _deepspeed(directory: Path) -> Path:
    (directory / "c").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"w": torch.ones(2)}, directory / "c" / name)
    return directory / "c"


def _pickle(directory: Path) -> Path:
    (directory / "params").write_bytes(pickle.dumps({"w": np.ones(2)}))
    return directory / "params"


def _numpy(directory: Path) -> Path:
    np.savez(directory / "state.npz", w=np.ones(2))
    return (directory / "state.npz").rename(directory / "state")


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
@pytest.mark.parametrize(
    ("write", "extra"),
    [
        (_torch_file, "dcp"),
        (_dcp, "dcp"),
        (_orbax, "orbax"),
        (_deepspeed, "formats"),
        (_pickle, "formats"),
        (_numpy, "formats"),
    ],
    ids=["torch.save", "dcp", "orbax", "deepspeed", "pickle", "numpy"],
)
def test_errors_for_files_of_other_software_name_a_distribution(
    write: Callable[[Path], Path], extra: str, core_alone: ckptcore.Context, tmp_path: Path
) -> None:
    path = write(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=rf"pip install 'ckptcore\[{extra}\]'"):
        ckptcore.load(path, context=core_alone)


def test_the_error_for_deepspeed_names_two_distributions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_distributions(monkeypatch, {"dcp": ckptcore_dcp.plugin}, {"ckptcore_dcp"})
    with pytest.raises(CheckpointNotFoundError, match=r"with `pip install 'ckptcore\[formats\]'`"):
        ckptcore.load(_deepspeed(tmp_path), context=ckptcore.Context())


def test_an_installed_distribution_is_not_recommended() -> None:
    assert install_hint(value_type=torch.Tensor) == install_hint(scheme="s3") == install_hint(files=["a.pt"]) == ""


class _OnlyGives:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}


class _NeedsArguments:
    def get_state(self, flags: int) -> int:
        return flags

    def set_state(self, state: int) -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (slice(2), "builtins.slice, which no installed plugin handles: save [value.start, value.stop, value.step]"),
        (lambda: 1, "builtins.function, which no installed plugin handles: code is not saved, remove it"),
        (int, "builtins.type, which no installed plugin handles: code is not saved, remove it"),
        (object(), "convert it to arrays, numbers, text or containers, give its class state_dict and load_state_dict"),
        (_OnlyGives(), "which has state_dict but not load_state_dict: add load_state_dict to its class"),
        (_NeedsArguments(), "whose get_state and set_state cannot be called as get_state()"),
    ],
    ids=["slice", "function", "class", "object", "state_dict", "get_state"],
)
def test_each_value_without_a_handler_has_its_own_remedy(value: Any, expected: str) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        ckptcore.save("memory://missing/state", {"x": value})
    assert expected in str(caught.value) and str(caught.value).startswith("x is a ")
    assert "pip install" not in str(caught.value) and "framework" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "meant"),
    [("safetensor", "safetensors"), ("zarr2", "zarr"), ("OCDBT", None), ("orbax", "ocdbt"), ("distcp", "dcp")],
)
def test_the_error_for_a_misspelled_layout_suggests_a_layout(layout: str, meant: str | None) -> None:
    with pytest.raises(UnknownPluginError) as caught:
        ckptcore.save("memory://missing/state", {}, layout=layout)
    assert (f"did you mean {meant!r}?" in str(caught.value)) == (meant is not None)
    assert "Installed: " in str(caught.value) and "safetensors" in str(caught.value)


@pytest.mark.parametrize(("scheme", "meant"), [("s3a", "s3"), ("memry", "memory"), ("gss", "gs")])
def test_error_for_a_misspelled_scheme_suggests_a_scheme(scheme: str, meant: str, core_alone: ckptcore.Context) -> None:
    with pytest.raises(UnknownPluginError, match=rf"did you mean '{meant}'\?") as caught:
        ckptcore.load(f"{scheme}://bucket/state", context=core_alone)
    assert "`pip install 'ckptcore[fsspec]'` adds the schemes of fsspec" in str(caught.value)


def test_the_error_for_a_misspelled_leaf_suggests_a_leaf() -> None:
    ckptcore.save("memory://missing/leaves", {"layers": [{"kernel": np.ones(2)}, {"bias": np.ones(2)}]})
    with ckptcore.open("memory://missing/leaves") as checkpoint:
        with pytest.raises(KeyError, match="did you mean 'layers/0/kernel'"):
            checkpoint["layers/0/kernl"]
        with pytest.raises(KeyError, match="did you mean '1/bias'"):
            checkpoint["layers"]["1/bia"]
        with pytest.raises(KeyError, match="did you mean 'layers'"):
            checkpoint["layer"]


def test_a_state_in_place_of_the_location_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckptcore.errors.InvalidLocationError, match="dict; the location is the first argument"):
        ckptcore.save({"w": np.ones(3)}, tmp_path / "c")  # type: ignore[arg-type]  # the order of other libraries
