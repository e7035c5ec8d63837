"""Differences that other libraries accept by default. We refuse them, and each option allows only its own."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from flax import serialization
from orbax import checkpoint as v0  # type: ignore[import-untyped]  # it has no types
from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no types
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from transformers.models.bert import BertConfig, BertModel

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Matching
from ckptcore.errors import TreeMismatchError
from ckptcore.matching.options import Casting, Keys, Missing, Sequences, ShapeChange, Unexpected

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

W = np.arange(6, dtype=np.float32).reshape(2, 3) + np.float32(0.7)
STORED: dict[str, Any] = {"w": W, "b": np.ones(3, np.float32), "t": (np.ones(2), np.zeros(2))}

Peer = Callable[[Path, Mapping[str, Any]], tuple[Path, Any]]
"""Saves what is stored, loads into a tree, and gives where it saved and what came."""


def _orbax_1(directory: Path, asked: Mapping[str, Any]) -> tuple[Path, Any]:
    v1.save(directory / "theirs", STORED)
    return directory / "theirs", v1.load(directory / "theirs", dict(asked))


def _orbax_0(directory: Path, asked: Mapping[str, Any]) -> tuple[Path, Any]:
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "theirs", STORED)
        checkpointer.wait_until_finished()
        return directory / "theirs", checkpointer.restore(directory / "theirs", dict(asked))


def _distributed_checkpoint(directory: Path, asked: Mapping[str, Any]) -> tuple[Path, Any]:
    tensors = {name: torch.from_numpy(STORED[name].copy()) for name in ("w", "b")}
    state_dict_saver.save(tensors, checkpoint_id=directory / "theirs", no_dist=True)
    target = {name: torch.from_numpy(array.copy()) for name, array in asked.items() if name != "t"}
    state_dict_loader.load(target, checkpoint_id=directory / "theirs", no_dist=True)
    return directory / "theirs", {name: tensor.numpy() for name, tensor in target.items()}


def _module(directory: Path, asked: Mapping[str, Any]) -> tuple[Path, Any]:
    module = torch.nn.Module()
    for name in ("w", "b"):
        module.register_buffer(name, torch.from_numpy(asked[name].copy()))
    torch.save({name: torch.from_numpy(STORED[name].copy()) for name in ("w", "b")}, directory / "theirs.pt")
    module.load_state_dict(torch.load(directory / "theirs.pt"))
    return directory / "theirs.pt", {name: tensor.numpy() for name, tensor in module.named_buffers()}


def _flax(directory: Path, asked: Mapping[str, Any]) -> tuple[Path, Any]:
    ckptcore.save(directory / "ours", STORED)  # our format, since msgpack cannot tell tuples from lists
    return directory / "ours", serialization.from_bytes(dict(asked), serialization.to_bytes(STORED))


def _is_whole_numbers(made: Any) -> bool:
    return made["w"].dtype == np.int8 and np.array_equal(made["w"], W.astype(np.int8))


def _is_half(made: Any) -> bool:
    return made["w"].dtype == np.float16 and np.array_equal(made["w"], W.astype(np.float16))


def _lacks_b(made: Any) -> bool:
    return "w" in made and "b" not in made


def _has_another_shape(made: Any) -> bool:
    return bool(made["w"].shape == (2, 3))


def _has_a_list(made: Any) -> bool:
    return isinstance(made["t"], list)


WHOLE, HALF = {"w": np.zeros((2, 3), np.int8)}, {"w": np.zeros((2, 3), np.float16)}
OTHER_SHAPE = {"w": np.zeros((4, 2), np.float32)}
LIST = {"t": [np.zeros(2), np.zeros(2)]}

UNASKED: list[tuple[Peer, dict[str, Any], Callable[[Any], bool], str, str]] = [
    # (library, request, check that the library accepted the difference, difference in our error, option that
    # allows it)
    (_orbax_1, WHOLE, _is_whole_numbers, "w: dtype: int8[2, 3] is requested, float32[2, 3] is stored", "cast"),
    (_orbax_0, WHOLE, _is_whole_numbers, "w: dtype: int8[2, 3] is requested, float32[2, 3] is stored", "cast"),
    (_distributed_checkpoint, WHOLE, _is_whole_numbers, "w: dtype: int8[2, 3] is requested", "cast"),
    (_module, WHOLE, _is_whole_numbers, "w: dtype: int8[2, 3] is requested", "cast"),
    (_orbax_1, HALF, _is_half, "w: dtype: float16[2, 3] is requested", "cast"),
    (_orbax_0, HALF, _is_half, "w: dtype: float16[2, 3] is requested", "cast"),
    (_distributed_checkpoint, HALF, _is_half, "w: dtype: float16[2, 3] is requested", "cast"),
    (_module, HALF, _is_half, "w: dtype: float16[2, 3] is requested", "cast"),
    (_orbax_1, OTHER_SHAPE, _has_another_shape, "w: shape: float32[4, 2] is requested", "shapes"),
    (_orbax_0, OTHER_SHAPE, _has_another_shape, "w: shape: float32[4, 2] is requested", "shapes"),
    (_flax, OTHER_SHAPE, _has_another_shape, "w: shape: float32[4, 2] is requested", "shapes"),
    (_distributed_checkpoint, {"b": None}, _lacks_b, "unexpected: b is stored and not requested", "unexpected"),
    (_flax, {"b": None}, _lacks_b, "unexpected: b is stored and not requested", "unexpected"),
    (_flax, LIST, _has_a_list, "t: sequence: a list is requested, a tuple is stored", "sequences"),
]


@pytest.mark.parametrize(
    ("peer", "changed", "did_so", "told", "option"),
    UNASKED,
    ids=[f"{peer.__name__[1:]}-{told.split(' is ')[0]}" for peer, _, _, told, _ in UNASKED],
)
def test_differences_that_other_libraries_accept_are_refused(
    peer: Peer, changed: dict[str, Any], did_so: Callable[[Any], bool], told: str, option: str, tmp_path: Path
) -> None:
    asked = {name: leaf for name, leaf in {**STORED, **changed}.items() if leaf is not None}
    location, made = peer(tmp_path, asked)
    assert did_so(made), "the peer no longer does it: take it from the list"
    held = ckptcore.metadata(location).abstract
    assert isinstance(held, dict)
    asked = {name: leaf for name, leaf in asked.items() if name in held}
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(location, asked)
    (difference,) = caught.value.differences
    assert difference.startswith(told)
    assert f"matching=Matching({option}=" in str(caught.value)


def test_missing_weights_are_not_initialized(tmp_path: Path) -> None:
    """transformers fills them with random numbers and only logs a warning."""
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    lost = state.pop("pooler.dense.weight")
    save_file(state, file, {"format": "pt"})
    filled = BertModel.from_pretrained(tmp_path).state_dict()["pooler.dense.weight"].numpy()
    assert filled.shape == lost.shape and not np.array_equal(filled, lost)
    model = BertModel(config)
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load_into(file, dict(model.state_dict()))
    assert caught.value.differences == ("missing: ['pooler.dense.weight'] is not stored",)
    remedy = 'matching=Matching(missing="keep"): missing leaves keep their present values'
    assert str(caught.value).endswith(f"{remedy}\nWith it, ['pooler.dense.weight'] would start again")


def test_a_missing_chunk_is_an_error_not_zeros(tmp_path: Path) -> None:
    """TensorStore itself reads zeros if the file of a chunk is missing."""
    import tensorstore as ts

    ckptcore.save(tmp_path / "c", {"w": W}, layout="zarr3")
    (array,) = [path.parent for path in (tmp_path / "c").rglob("zarr.json") if '"array"' in path.read_text()]
    for chunk in (array / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    kept = {"driver": "file", "path": str(array)}
    zeros = ts.open({"driver": "zarr3", "kvstore": kept}, open=True).result().read().result()
    assert zeros.shape == W.shape and not zeros.any()
    with pytest.raises(ckptcore.CheckpointError):
        ckptcore.load(tmp_path / "c")


DIFFERENCES: dict[str, dict[str, Any]] = {
    # Keys are options with their choices; values are requests that differ from the stored tree.
    "unexpected=ignore": {"b": None},
    "missing=keep": {"new": np.full(2, 7.0)},
    "missing=placeholder": {"new": AbstractArray((2,), "float32")},
    "cast=safe": {"h": AbstractArray((4,), "float32")},
    "cast=narrowing": {"f": AbstractArray((4,), "float16")},
    "cast=truncating": {"f": AbstractArray((4,), "int8")},
    "shapes=reshape": {"f": AbstractArray((2, 2), "float32")},
    "shapes=truncate": {"f": AbstractArray((3,), "float32")},
    "shapes=pad": {"f": AbstractArray((5,), "float32")},
    "sequences=either": {"t": [1, 2]},
    "keys=text": {"b": AbstractArray((), "int32")},
}

INCLUDED = {
    ("cast=narrowing", "cast=safe"),
    ("cast=truncating", "cast=safe"),
    ("cast=truncating", "cast=narrowing"),
    ("missing=placeholder", "missing=keep"),
    ("keys=text", "sequences=either"),
}
"""Choices that allow what another one does too: what is missing may also be left out where a value could be kept."""


def _choice(text: str) -> Matching:
    option, _, choice = text.partition("=")
    return Matching(values="error", **{option: [choice] if option == "shapes" else choice})  # type: ignore[arg-type]


def test_the_tables_above_cover_every_option() -> None:
    choices = {
        "unexpected": get_args(Unexpected),
        "missing": get_args(Missing),
        "cast": get_args(Casting),
        "shapes": get_args(ShapeChange),
        "sequences": get_args(Sequences),
        "keys": get_args(Keys),
    }
    # `values` has its own tests in test_loop_values.py, because it allows differences by default.
    assert {field.name for field in dataclasses.fields(Matching)} == {*choices, "pad_value", "values"}
    defaults = {getattr(Matching(), option) for option in choices if option != "shapes"}
    expected = {
        f"{option}={choice}"
        for option, option_choices in choices.items()
        for choice in option_choices
        if choice not in defaults
    }
    assert set(DIFFERENCES) == expected
    assert {option for *_, option in UNASKED} | {"missing", "keys"} == {*choices}


@pytest.mark.parametrize("given", DIFFERENCES)
@pytest.mark.parametrize("differing", DIFFERENCES)
def test_an_option_allows_its_own_difference_and_no_other(given: str, differing: str, tmp_path: Path) -> None:
    stored: dict[str, Any] = {"f": np.arange(4, dtype=np.float32), "h": np.ones(4, np.float16), "b": 1, "t": (1, 2)}
    ckptcore.save(tmp_path / "c", stored, context=ckptcore.Context(durability="none"))
    asked = {name: leaf for name, leaf in {**stored, **DIFFERENCES[differing]}.items() if leaf is not None}
    with pytest.raises(TreeMismatchError):
        ckptcore.load(tmp_path / "c", asked, matching=Matching(values="error"))
    if given != differing and (given, differing) not in INCLUDED:
        with pytest.raises(TreeMismatchError) as caught:
            ckptcore.load(tmp_path / "c", asked, matching=_choice(given))
        assert len(caught.value.differences) == 1
        return
    loaded = ckptcore.load(tmp_path / "c", asked, matching=_choice(given))
    assert loaded.keys() == asked.keys()
    if "new" in asked:
        assert loaded["new"] is (PLACEHOLDER if given == "missing=placeholder" else asked["new"])
