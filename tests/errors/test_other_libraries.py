"""Names of other checkpointing libraries. Their use raises an error that gives the name in ckptcore."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import policies
from ckptcore.io.background import LoadHandle
from ckptcore.on_demand.checkpoints import StoredTree
from ckptcore.other_libraries import ARGUMENTS, ATTRIBUTES, LAYOUTS, ExplainsAttributes, explains_arguments
from ckptcore.results import SaveHandle
from ckptcore.training.reader import StepReader

OWNERS: dict[str, Any] = {
    "ckptcore": ckptcore,
    "StepReader": StepReader,
    "Checkpointer": ckptcore.Checkpointer,
    "SaveHandle": SaveHandle,
    "LoadHandle": LoadHandle,
    "StoredTree": StoredTree,
}

EXPLAINED: list[Any] = [
    ckptcore.abstract,
    ckptcore.delete,
    ckptcore.load,
    ckptcore.load_async,
    ckptcore.load_checkpointables,
    ckptcore.load_into,
    ckptcore.metadata,
    ckptcore.open,
    ckptcore.save,
    ckptcore.save_async,
    ckptcore.save_checkpointables,
    ckptcore.save_checkpointables_async,
    ckptcore.verify,
    ckptcore.Checkpointer.__init__,
    ckptcore.Checkpointer.load,
    ckptcore.Checkpointer.load_checkpointables,
    ckptcore.Checkpointer.load_into,
    ckptcore.Checkpointer.save,
    ckptcore.Checkpointer.save_blocking,
    ckptcore.Checkpointer.save_checkpointables,
    ckptcore.CheckpointReader.__init__,
]


def test_the_table_has_no_name_of_ckptcore() -> None:
    assert ATTRIBUTES.keys() == OWNERS.keys()
    for name, owner in OWNERS.items():
        assert not [attribute for attribute in ATTRIBUTES[name] if hasattr(owner, attribute)]
        assert inspect.ismodule(owner) or issubclass(owner, ExplainsAttributes)


def test_recommended_names_exist() -> None:
    """Each ``ckptcore.x.y`` exists, and so does each method or parameter that is recommended by name."""
    for hints in (*ATTRIBUTES.values(), ARGUMENTS):
        for hint in hints.values():
            for dotted in re.findall(r"\bckptcore((?:\.\w+)+)", hint):
                value: Any = ckptcore
                for part in dotted[1:].split("."):
                    value = getattr(value, part)
    for owner in ("StepReader", "Checkpointer", "SaveHandle", "LoadHandle", "StoredTree"):
        for hint in ATTRIBUTES[owner].values():
            first = re.match(r"(\w+)(?=\(|$|, which)", hint)
            assert first is None or hasattr(OWNERS[owner], first[1]), hint
    parameters = {name for function in EXPLAINED for name in inspect.signature(function).parameters}
    for hint in ARGUMENTS.values():
        for given in re.findall(r"^(\w+)(?==|, the|:|$)", hint):
            assert given in parameters or given == "nothing", hint
    assert set(LAYOUTS.values()) <= {"safetensors", "ocdbt", "dcp", "torch"}


@pytest.mark.parametrize("function", EXPLAINED, ids=lambda function: str(function.__qualname__))
def test_a_known_argument_is_never_in_the_table_of_unknown_ones(function: Any) -> None:
    """`target` is a parameter of one function, and unknown to others. Only unknown arguments are explained."""
    known = inspect.signature(function).parameters
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    with pytest.raises(TypeError) as caught:
        function(max_to_keep=3)
    assert "max_to_keep" in str(caught.value) and "policies.LatestN" in str(caught.value)


def test_the_error_for_an_unknown_argument_has_the_name_in_ckptcore(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        ckptcore.save(tmp_path / "c", {}, custom_metadata={})  # type: ignore[call-arg]  # a name of Orbax
    message = "save() got an unexpected keyword argument 'custom_metadata'; use metadata"
    assert str(caught.value) == message
    with pytest.raises(TypeError, match=r"'overwrit'; did you mean 'overwrite'\?"):
        ckptcore.save(tmp_path / "c", {}, overwrit=True)  # type: ignore[call-arg]  # misspelled on purpose
    with pytest.raises(TypeError, match=r"'map_location'; use abstract"):
        ckptcore.load(tmp_path / "c", map_location="cpu")  # type: ignore[call-arg]  # a name of torch.load
    with pytest.raises(TypeError, match=r"'options'; use save_policy and preservation_policy"):
        ckptcore.Checkpointer(tmp_path / "run", options=None)  # type: ignore[call-arg]  # a name of Orbax
    assert list(tmp_path.iterdir()) == []


def test_other_type_errors_are_unchanged(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^save\(\) missing 1 required positional argument: 'state'$"):
        ckptcore.save(tmp_path / "c")  # type: ignore[call-arg]  # an argument is missing

    def fails(value: int, *, other: int = 0) -> int:
        def inner() -> None: ...

        inner(max_to_keep=value)  # type: ignore[call-arg]  # the wrong call is inside
        return other

    with pytest.raises(TypeError) as caught:
        explains_arguments(fails)(3)
    assert "use " not in str(caught.value)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        explains_arguments(fails)(3, zzz=1)  # type: ignore[call-arg]  # an unknown name
    assert inspect.signature(explains_arguments(fails)) == inspect.signature(fails)


def test_the_error_for_an_attribute_of_the_module_has_the_name_in_ckptcore() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'CheckpointManager'; use ckptcore\.Checkpointer\("):
        ckptcore.CheckpointManager  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"use ckptcore\.load\(path, abstract\)"):
        ckptcore.restore  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(ckptcore, "restore")
    assert getattr(ckptcore, "wait_until_finished", None) is None
    with pytest.raises(ImportError, match=r"cannot import name 'restore' from 'ckptcore'; use ckptcore\.load\("):
        exec("from ckptcore import restore")  # noqa: S102  # the statement of a program
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from ckptcore import nonsense")  # noqa: S102


def test_errors_for_attributes_of_objects_have_the_name_in_ckptcore(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path, preservation_policy=policies.LatestN(2)) as checkpointer:
        handle = checkpointer.save(1, {"w": np.ones(3)})
        assert handle is not None
        with pytest.raises(AttributeError, match=r"'SaveHandle' object has no attribute 'wait'; use result\(\)"):
            handle.wait()  # type: ignore[attr-defined]  # a name of PyTorch
        with pytest.raises(AttributeError, match=r"'Checkpointer' .* 'wait_until_finished'; use wait\(\)"):
            checkpointer.wait_until_finished()  # type: ignore[attr-defined]  # a name of Orbax
        with pytest.raises(AttributeError, match=r"'latest_step'; use latest"):
            checkpointer.latest_step()  # type: ignore[attr-defined]  # a name of Orbax
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
            checkpointer.nonsense  # type: ignore[attr-defined]  # noqa: B018
    with ckptcore.open(tmp_path / "1") as checkpoint:
        assert not hasattr(checkpoint, "get_tensor")
        with pytest.raises(AttributeError, match=r"'OpenCheckpoint' .*; use checkpoint\['name'\]\[\(\)\]"):
            checkpoint.get_tensor("w")  # type: ignore[attr-defined]  # a name of safetensors


def test_the_error_of_a_property_is_not_hidden() -> None:
    class Owner(ExplainsAttributes):
        @property
        def broken(self) -> int:
            return self.inner.value  # type: ignore[attr-defined,no-any-return]  # fails

    with pytest.raises(AttributeError, match="no attribute 'inner'"):
        Owner().broken  # noqa: B018
