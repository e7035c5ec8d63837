"""Adapters in the format of PEFT: ckptcore loads files of PEFT bit for bit, and writes equal files.
Models load both.
"""

from __future__ import annotations

import enum
import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from ckptcore_torch.adapters import AdapterLayout, adapter_state, load_adapter, load_adapter_into, save_adapter

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ChecksumError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    NameCollisionError,
    TreeMismatchError,
)

GOLDEN = Path(__file__).parent / "golden_adapters"
NAMES = ["biases_of_its_own", "dora_and_biases", "everything", "tokens"]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}
PREFIX = "base_model.model."


def lora(inputs: int, outputs: int, *adapters: str, bias: bool = False) -> torch.nn.Module:
    """Return a linear layer with adapters, with the names that PEFT uses."""
    layer = torch.nn.Module()
    layer.base_layer = torch.nn.Linear(inputs, outputs)
    layer.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(inputs, 2, bias=False) for name in adapters})
    layer.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(2, outputs, bias=bias) for name in adapters})
    return layer


class Model(torch.nn.Module):
    """A model with two adapters, in the structure of a PEFT model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"query": lora(4, 4, "default", "other")})
        self.embed = torch.nn.Module()
        self.embed.base_layer = torch.nn.Embedding(6, 4)
        self.embed.lora_embedding_A = torch.nn.ParameterDict({"default": torch.randn(2, 6)})
        self.embed.lora_embedding_B = torch.nn.ParameterDict({"default": torch.randn(4, 2)})
        self.head = torch.nn.Module()
        self.head.original_module = torch.nn.Linear(4, 2)
        self.head.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2)})


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model: the wrapper holds it in the attribute that PEFT uses."""
    outer = torch.nn.Module()
    outer.base_model = torch.nn.Module()
    outer.base_model.model = model
    return outer


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model under the name that torch.compile uses. The import of torch.compile itself takes seconds."""
    outer = torch.nn.Module()
    outer._orig_mod = model
    return outer


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


@pytest.mark.parametrize("name", NAMES)
def test_files_of_peft_load_bit_for_bit(name: str) -> None:
    adapter = load_adapter(GOLDEN / name)
    assert adapter.config == json.loads((GOLDEN / name / "adapter_config.json").read_bytes())
    assert adapter.arrays.keys() == header(GOLDEN / name / "adapter_model.safetensors").keys() - {"__metadata__"}
    for number, key in enumerate(sorted(adapter.arrays)):
        array = adapter.arrays[key]
        assert array.dtype.name == ("bfloat16" if name == "everything" else "float32")
        expected = ((np.arange(array.size) + number) % 100).astype(array.dtype).reshape(array.shape)
        assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_second_save_equals_the_files_of_peft(tmp_path: Path, name: str) -> None:
    adapter = load_adapter(GOLDEN / name)
    save_adapter(tmp_path / "a", adapter.arrays, adapter.config)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "checkpoint.json",
    }  # fmt: skip
    for file in ("a/adapter_config.json",):
        assert (tmp_path / file).read_bytes() == (GOLDEN / name / "adapter_config.json").read_bytes()
    ours, theirs = (header(at / "adapter_model.safetensors") for at in (tmp_path / "a", GOLDEN / name))
    assert ours["__metadata__"] == theirs["__metadata__"]
    assert {key: ours[key]["shape"] for key in ours if key[0] != "_"} == {
        key: theirs[key]["shape"] for key in theirs if key[0] != "_"
    }
    again = load_adapter(tmp_path / "a")
    assert again.config == adapter.config
    assert {key: array.tobytes() for key, array in again.arrays.items()} == {
        key: array.tobytes() for key, array in adapter.arrays.items()
    }


@pytest.mark.parametrize("make", [lambda model: model, wrapped, compiled, torch.nn.DataParallel])
def test_the_state_has_the_names_of_peft(make: Any) -> None:
    model = Model()
    state = adapter_state(make(model))
    assert sorted(state) == [
        f"{PREFIX}{name}"
        for name in (
            "embed.lora_embedding_A", "embed.lora_embedding_B", "head.bias", "head.weight", "inner.query.lora_A.weight",
            "inner.query.lora_B.weight",
        )
    ]  # fmt: skip
    held = model.inner["query"].lora_A["default"].weight
    assert state[f"{PREFIX}inner.query.lora_A.weight"].data_ptr() == held.data_ptr()
    assert sorted(adapter_state(make(model), "other")) == [f"{PREFIX}inner.query.lora_{part}.weight" for part in "AB"]


def test_biases_of_the_base_model_are_saved_on_request() -> None:
    model = Model()
    model.plain = torch.nn.Linear(2, 2)
    extra = {
        biases: {name.removeprefix(PREFIX) for name in adapter_state(model, biases=biases)} - {
            name.removeprefix(PREFIX) for name in adapter_state(model)
        }
        for biases in ("lora_only", "all")
    }  # fmt: skip
    assert extra["lora_only"] == {"inner.query.base_layer.bias"}
    assert extra["all"] == {"inner.query.base_layer.bias", "head.original_module.bias", "plain.bias"}


def test_matrices_that_are_parameters_without_adapter_names() -> None:
    model = torch.nn.Module()
    model.query = torch.nn.Module()
    model.query.lora_A = torch.nn.Parameter(torch.ones(2, 5))
    model.query.lora_B = torch.nn.Parameter(torch.ones(3, 2))
    model.query.lora_magnitude_vector = torch.nn.Parameter(torch.ones(3))
    assert list(adapter_state(model)) == [
        f"{PREFIX}query.lora_{part}" for part in ("A.weight", "B.weight", "magnitude_vector")
    ]
    model.query.lora_A = torch.nn.Parameter(torch.ones(5, 2))
    with pytest.raises(
        TreeMismatchError, match=r"PEFT needs lora_A of shape .r, inputs. and lora_B of shape .outputs, r."
    ):
        adapter_state(model)


def test_model_without_the_adapter_is_an_error() -> None:
    with pytest.raises(TreeMismatchError, match=r"no parameters of the adapter 'default'.*set adapter_name="):
        adapter_state(torch.nn.Linear(2, 2))
    model = lora(2, 2, "mine")
    with pytest.raises(
        TreeMismatchError, match="the model has the adapters mine; set adapter_name=, or pass the model"
    ):
        adapter_state(model)
    (by_name, of_another) = adapter_state(model, "mine"), adapter_state(lora(2, 2, "default"))
    assert by_name.keys() == of_another.keys()
    held = [bits(parameter) for parameter in model.parameters()]
    assert all(bits(array) in held for array in by_name.values())


def test_two_parameters_with_one_stored_name_are_refused() -> None:
    model = Model()
    model.head.weight = torch.nn.Parameter(torch.ones(2))
    assert f"{PREFIX}head.weight" in adapter_state(model)  # entries of the base model are omitted
    model.inner["query"].lora_A["weight"] = torch.nn.Linear(4, 2, bias=False)
    model.inner["query"].lora_A.register_parameter("bias", torch.nn.Parameter(torch.ones(1)))
    model.inner["query"].lora_A["default"].bias = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NameCollisionError, match=r"would both be stored as .*lora_A.bias"):
        adapter_state(model)


def test_a_tied_token_adapter_is_stored_once() -> None:
    model = Model()
    for name in ("tokens", "tied"):
        model.add_module(name, torch.nn.Module())
    model.tokens.trainable_tokens_delta = torch.nn.ParameterDict({"default": torch.ones(2, 4)})
    model.tied.trainable_tokens_delta = model.tokens.trainable_tokens_delta
    names = [name for name in adapter_state(model) if "tokens_delta" in name]
    assert names == [f"{PREFIX}tokens.trainable_tokens_delta"]


def test_saved_adapter_loads_into_a_model(tmp_path: Path) -> None:
    saved, loaded = Model(), wrapped(Model())
    save_adapter(tmp_path / "a", saved, CONFIG)
    before = {name: bits(tensor) for name, tensor in loaded.state_dict().items()}
    held = {name: tensor.data_ptr() for name, tensor in loaded.state_dict().items()}
    assert load_adapter_into(tmp_path / "a", loaded) == CONFIG
    ours, theirs = adapter_state(saved), adapter_state(loaded)
    assert all(bits(theirs[name]) == bits(tensor) for name, tensor in ours.items())
    assert {name: tensor.data_ptr() for name, tensor in loaded.state_dict().items()} == held
    after = {name: bits(tensor) for name, tensor in loaded.state_dict().items()}
    assert {name for name in after if after[name] != before[name]} == {
        name for name in after if ("lora_" in name and "other" not in name) or "modules_to_save" in name
    }


def test_adapter_loads_under_another_name_and_to_the_meta_device(tmp_path: Path) -> None:
    saved = lora(4, 3, "default", bias=True)
    save_adapter(tmp_path / "a", saved, CONFIG)
    with torch.device("meta"):
        loaded = lora(4, 3, "first", "second", bias=True)
    load_adapter_into(tmp_path / "a", loaded, adapter_name="second")
    assert all(
        bits(tensor) == bits(adapter_state(loaded, "second")[name]) for name, tensor in adapter_state(saved).items()
    )
    assert loaded.lora_A["first"].weight.is_meta and loaded.base_layer.weight.is_meta
    assert isinstance(loaded.lora_A["second"].weight, torch.nn.Parameter)


def test_saved_biases_load_into_the_base_model(tmp_path: Path) -> None:
    saved, loaded = lora(4, 3, "default"), lora(4, 3, "default")
    save_adapter(tmp_path / "a", saved, {**CONFIG, "bias": "all"})
    load_adapter_into(tmp_path / "a", loaded)
    assert bits(loaded.base_layer.bias) == bits(saved.base_layer.bias)
    assert bits(loaded.base_layer.weight) != bits(saved.base_layer.weight)


@pytest.mark.parametrize("into", [False, True])
def test_loaded_arrays_and_config_come_from_the_same_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: bool
) -> None:
    """A training job replaces the adapter while a server loads it."""
    state = {f"{PREFIX}q.lora_A.weight": torch.zeros(2, 4), f"{PREFIX}q.lora_B.weight": torch.zeros(4, 2)}
    model = torch.nn.Module()
    model.q = lora(4, 4, "default")
    save_adapter(tmp_path / "a", state, CONFIG)

    def replaced_before(load: Any) -> Any:
        def loading(*arguments: Any, **options: Any) -> Any:
            if times:
                scale = times.pop()
                trained = {name: torch.full_like(array, scale) for name, array in state.items()}
                save_adapter(tmp_path / "a", trained, {**CONFIG, "lora_alpha": scale}, overwrite=True)
            return load(*arguments, **options)

        return loading

    times = [8, 6]
    for name in ("load", "load_into"):
        monkeypatch.setattr(ckptcore, name, replaced_before(getattr(ckptcore, name)))
    if into:
        config = load_adapter_into(tmp_path / "a", model)
        assert model.q.lora_B["default"].weight.flatten()[0] == config["lora_alpha"] == 8
        return
    adapter = load_adapter(tmp_path / "a")
    assert adapter.arrays[f"{PREFIX}q.lora_B.weight"].flat[0] == adapter.config["lora_alpha"] == 8


def test_adapter_that_is_replaced_during_each_attempt_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{PREFIX}q.lora_A.weight": torch.zeros(2, 4), f"{PREFIX}q.lora_B.weight": torch.ones(4, 2)}
    save_adapter(tmp_path / "a", state, CONFIG)
    load = ckptcore.load

    def replaced_after(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        save_adapter(tmp_path / "a", state, CONFIG, overwrite=True)
        return loaded

    with monkeypatch.context() as saving:
        saving.setattr(ckptcore, "load", replaced_after)
        with pytest.raises(CorruptCheckpointError, match="a was replaced .*; load it while no job saves to it"):
            load_adapter(tmp_path / "a")
    loaded = load_adapter(tmp_path / "a")
    assert all(np.array_equal(loaded.arrays[name], array) for name, array in state.items())


def test_mismatch_leaves_the_model_unchanged(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", Model(), CONFIG)
    loaded = lora(4, 4, "default")
    before = {name: bits(tensor) for name, tensor in loaded.state_dict().items()}
    with pytest.raises(TreeMismatchError) as raised:
        load_adapter_into(tmp_path / "a", loaded)
    assert "head.weight" in str(raised.value) and f"{PREFIX}*'] is requested" in str(raised.value)
    assert {name: bits(tensor) for name, tensor in loaded.state_dict().items()} == before


def test_arrays_of_numpy_and_jax_are_saved(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    names = [f"{PREFIX}q.lora_{part}.weight" for part in "AB"]
    state = {names[0]: np.arange(8.0).reshape(2, 4), names[1]: jnp.ones((3, 2), jnp.bfloat16)}
    save_adapter(tmp_path / "a", state, CONFIG, metadata={"run": 7})
    theirs = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert all(theirs[name].tobytes() == np.asarray(state[name]).tobytes() for name in names)
    assert ckptcore.metadata(tmp_path / "a").custom["run"] == 7
    assert load_adapter(tmp_path / "a").config == CONFIG


def test_the_commit_covers_the_config(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", Model(), CONFIG)
    assert "adapter_config.json" in ckptcore.metadata(tmp_path / "a").objects
    assert ckptcore.verify(tmp_path / "a").ok
    file = tmp_path / "a" / "adapter_config.json"
    file.write_bytes(file.read_bytes().replace(b"LORA", b"LOHA"))
    assert not ckptcore.verify(tmp_path / "a").ok
    with pytest.raises(CheckpointExistsError):
        save_adapter(tmp_path / "a", Model(), CONFIG)
    save_adapter(tmp_path / "a", Model(), CONFIG, overwrite=True)
    assert ckptcore.verify(tmp_path / "a").ok
    data = bytearray((tmp_path / "a" / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(ChecksumError):
        load_adapter(tmp_path / "a")


def test_a_checkpointer_saves_in_the_adapter_layout(tmp_path: Path) -> None:
    layout = AdapterLayout(config=CONFIG)
    with ckptcore.Checkpointer(tmp_path / "run", layout=layout) as checkpointer:
        checkpointer.save(3, adapter_state(Model()), metadata={"adapter_config": CONFIG})
    assert load_adapter(tmp_path / "run" / "3").config == CONFIG
    assert json.loads((tmp_path / "run" / "3" / "adapter_config.json").read_bytes()) == CONFIG


def test_several_adapters_cannot_be_saved_in_one_checkpoint(tmp_path: Path) -> None:
    states = {name: adapter_state(Model(), name) for name in ("default", "other")}
    with pytest.raises(CompositeCheckpointError, match=r"cannot save default, other together"):
        ckptcore.save_checkpointables(tmp_path / "c", states, layout=AdapterLayout(config=CONFIG))
    assert not (tmp_path / "c").exists()


class _Kind(str, enum.Enum):  # noqa: UP042  # the type in PEFT is also a str
    LORA = "LORA"


def test_a_config_object_of_peft_is_saved_as_json(tmp_path: Path) -> None:
    fields = {
        "peft_type": _Kind.LORA,
        "target_modules": {"b", "a"},
        "r": 2,
        "rank_pattern": {"x": (1, 2)},
        "bias": "none",
    }
    config = SimpleNamespace(to_dict=lambda: fields)
    model = Model()
    model.peft_config = {"default": config}
    save_adapter(tmp_path / "a", model)
    expected = {
        "peft_type": "LORA",
        "target_modules": ["a", "b"],
        "r": 2,
        "rank_pattern": {"x": [1, 2]},
        "bias": "none",
    }
    assert load_adapter(tmp_path / "a").config == expected
    with pytest.raises(TypeError, match="has no config of an adapter 'other'"):
        save_adapter(tmp_path / "b", model, adapter_name="other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": None}, "peft_type is"),
        ({"r": 0}, "r is '0'"),
        ({"r": True}, "r is 'True'"),
        ({"lora_alpha": "x"}, "lora_alpha is"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"target_modules": [1]}, "target_modules is"),
        ({"modules_to_save": "head"}, "modules_to_save is"),
        ({"x": float("nan")}, "JSON cannot represent"),
        ({"x": object()}, "is a object, which JSON cannot represent"),
        ({"x": {1.5: 2}}, "JSON keys must be strings"),
        ({"x": "\ud800"}, "not valid Unicode"),
    ],
)
def test_invalid_config_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        save_adapter(tmp_path / "a", Model(), {**CONFIG, **change})
    assert not (tmp_path / "a").exists()
    if said.endswith("JSON cannot represent") or "JSON" in said or "Unicode" in said:
        return
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "adapter_config.json").write_text(json.dumps({**CONFIG, **change}))
    safetensors.numpy.save_file({"w": np.ones(1)}, tmp_path / "c" / "adapter_model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=said):
        load_adapter(tmp_path / "c")


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ({"q.lora_A.weight": np.ones(1)}, TreeMismatchError, "expected 'base_model.model.q.lora_A.weight'"),
        ({f"{PREFIX}q.lora_A.default.weight": np.ones(1)}, TreeMismatchError, r"expected .*q.lora_A.weight"),
        ({f"{PREFIX}q": {"lora_A": np.ones(1)}}, TypeError, "is a dict; expected an array"),
        ({}, TypeError, "expected a model or arrays by name"),
        ({1: np.ones(1)}, TypeError, "is not a string"),
    ],
)
def test_names_that_peft_does_not_use_are_refused(
    tmp_path: Path, state: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        save_adapter(tmp_path / "a", state, CONFIG)
    assert not (tmp_path / "a").exists()


def test_arrays_without_a_config_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="config=None"):
        save_adapter(tmp_path / "a", {f"{PREFIX}q.lora_A.weight": np.ones(1)})
    with pytest.raises(ValueError, match="the reserved key 'adapter_config'"):
        save_adapter(tmp_path / "a", Model(), CONFIG, metadata={"adapter_config": 1})
    ckptcore.save(tmp_path / "a", adapter_state(Model()), layout=ckptcore.SafetensorsLayout(stem="adapter_model"))
    with pytest.raises(CheckpointNotFoundError, match=r"no readable adapter_config.json"):
        load_adapter(tmp_path / "a")


def test_adapter_in_the_directory_of_its_base_model(tmp_path: Path) -> None:
    """A directory as a Hugging Face trainer writes it, with the files of the adapter and those of the model."""
    model = Model()
    save_adapter(tmp_path / "a", model, CONFIG)
    (tmp_path / "a" / "checkpoint.json").unlink()
    safetensors.torch.save_file({"base": torch.ones(2)}, tmp_path / "a" / "model.safetensors")
    assert list(ckptcore.load(tmp_path / "a")) == ["base"]
    for location in (tmp_path / "a", str(tmp_path / "a") + "/", tmp_path / "a" / "adapter_model.safetensors"):
        adapter = load_adapter(location)
        assert adapter.config["peft_type"] == "LORA" and set(adapter.arrays) == set(adapter_state(model))
        assert load_adapter_into(location, Model()) == adapter.config


def _peft_models(tmp_path: Path, name: str) -> Any:
    pytest.importorskip("peft")
    import sys

    sys.path.insert(0, str(GOLDEN))
    try:
        import generate
    finally:
        sys.path.remove(str(GOLDEN))
    return generate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_peft_and_ckptcore_load_each_others_saves(tmp_path: Path, name: str) -> None:
    """PEFT loads our save of its model, and our state of the model equals PEFT's own."""
    generate = _peft_models(tmp_path, name)
    peft = pytest.importorskip("peft")
    config = generate.CONFIGS[name]
    model = peft.get_peft_model(generate.Model(), config, adapter_name="mine")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    theirs = peft.get_peft_model_state_dict(model, adapter_name="mine", save_embedding_layers=False)
    ours = adapter_state(model, "mine")
    assert {key: bits(tensor) for key, tensor in ours.items()} == {key: bits(tensor) for key, tensor in theirs.items()}
    save_adapter(tmp_path / "a", model, adapter_name="mine")
    again = peft.PeftModel.from_pretrained(generate.Model(), str(tmp_path / "a"), adapter_name="again")
    loaded = adapter_state(again, "again")
    assert {key: bits(tensor) for key, tensor in ours.items()} == {key: bits(tensor) for key, tensor in loaded.items()}
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    fresh = peft.get_peft_model(generate.Model(), config)
    load_adapter_into(tmp_path / "theirs" / "mine", fresh)
    assert {key: bits(tensor) for key, tensor in adapter_state(fresh).items()} == {
        key: bits(tensor) for key, tensor in ours.items()
    }


def test_remedies_for_a_missing_or_invalid_config(tmp_path: Path) -> None:
    """The errors name three remedies, and each works: pass the config, add its file, or load only the arrays."""
    save_adapter(tmp_path / "sound", Model(), CONFIG)
    arrays = dict(load_adapter(tmp_path / "sound").arrays)
    with pytest.raises(
        TypeError, match=r"config=None: arrays have no config; pass the content of adapter_config\.json"
    ):
        save_adapter(tmp_path / "again", arrays)
    save_adapter(tmp_path / "again", arrays, json.loads((tmp_path / "sound" / "adapter_config.json").read_text()))
    assert load_adapter(tmp_path / "again").config == load_adapter(tmp_path / "sound").config
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "sound" / "adapter_model.safetensors", tmp_path / "bare")
    for content in (None, json.dumps({"r": 2})):
        if content is not None:
            (tmp_path / "bare" / "adapter_config.json").write_text(content)
        with pytest.raises(
            CheckpointError, match=r"repair it, or load only the arrays|wrote, or load only the arrays with"
        ):
            load_adapter(tmp_path / "bare")
        loaded = ckptcore.load(tmp_path / "bare")
        assert loaded.keys() == arrays.keys() and all(np.array_equal(loaded[name], arrays[name]) for name in arrays)
    shutil.copy(tmp_path / "sound" / "adapter_config.json", tmp_path / "bare")
    assert load_adapter(tmp_path / "bare").config["r"] == CONFIG["r"]


def test_metadata_with_the_reserved_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has the reserved key 'adapter_config'; choose another name"):
        save_adapter(tmp_path / "a", Model(), CONFIG, metadata={"adapter_config": 1})
    save_adapter(tmp_path / "a", Model(), CONFIG, metadata={"adapter": 1})
    assert ckptcore.metadata(tmp_path / "a").custom["adapter"] == 1
