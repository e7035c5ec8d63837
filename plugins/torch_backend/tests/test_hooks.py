"""The plugin's hooks, and the modules that its import loads."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import ckptcore_torch
import pytest
import torch
from ckptcore_testing import ContainerExample, ContainerHandlerTests, PluginTests
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.optimizers import OptimizerHandler
from ckptcore_torch.stateful import GeneratorHandler, StateDictHandler
from ckptcore_torch.tensors import SubclassHandler, TensorHandler


def test_the_entry_point_is_the_plugin() -> None:
    (entry_point,) = importlib.metadata.entry_points(group="ckptcore", name="torch")
    assert entry_point.load() is ckptcore_torch


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


SEEN = "import sys; print(sorted({'torch', 'ckptcore_torch.tensors'} & set(sys.modules)))"


@pytest.mark.system
def test_importing_the_plugin_imports_no_torch() -> None:
    ask = "ckptcore_torch.ckpt_leaf_handler(dict); ckptcore_torch.ckpt_container_handler(dict)"
    also = "ckptcore_torch.ckpt_checkpointable_handler(dict); ckptcore_torch.ckpt_coordinator()"
    assert _run(f"import ckptcore_torch; {ask}; {also}; {SEEN}") == "[]"


@pytest.mark.system
def test_the_program_that_lists_imports_detects_torch() -> None:
    assert _run(f"import torch, ckptcore_torch; ckptcore_torch.ckpt_leaf_handler(dict); {SEEN}") == (
        "['ckptcore_torch.tensors', 'torch']"
    )


def test_hooks_ignore_a_torch_that_is_still_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert ckptcore_torch.ckpt_leaf_handler(torch.Tensor) is None
    assert ckptcore_torch.ckpt_container_handler(torch.Size) is None
    assert ckptcore_torch.ckpt_checkpointable_handler(torch.nn.Linear) is None
    monkeypatch.setitem(sys.modules, "torch.distributed", type(sys)("torch.distributed"))
    assert ckptcore_torch.ckpt_coordinator() is None


def test_handlers_of_leaves() -> None:
    assert isinstance(ckptcore_torch.ckpt_leaf_handler(torch.Tensor), TensorHandler)
    assert isinstance(ckptcore_torch.ckpt_leaf_handler(torch.nn.UninitializedParameter), SubclassHandler)
    assert ckptcore_torch.ckpt_leaf_handler(int) is None


def test_handlers_of_checkpointables() -> None:
    for value_type, handler in (
        (torch.nn.Linear, ModuleHandler),
        (torch.nn.ParameterDict, ModuleHandler),
        (torch.optim.AdamW, OptimizerHandler),
        (torch.optim.lr_scheduler.CosineAnnealingLR, StateDictHandler),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, StateDictHandler),
        (torch.amp.GradScaler, StateDictHandler),
        (torch.Generator, GeneratorHandler),
    ):
        assert type(ckptcore_torch.ckpt_checkpointable_handler(value_type)) is handler
    assert ckptcore_torch.ckpt_checkpointable_handler(OrderedDict) is None


def test_handlers_of_containers() -> None:
    assert ckptcore_torch.ckpt_container_handler(torch.Size) is not None
    assert ckptcore_torch.ckpt_container_handler(tuple) is None


class TestSizeConforms(ContainerHandlerTests):
    """Conformance tests of torch.Size as a container."""

    handler = ckptcore_torch.ckpt_container_handler(torch.Size)  # type: ignore[assignment]  # not None
    examples = (
        ContainerExample("size", lambda: torch.Size([2, 300000]), list),
        ContainerExample("empty", lambda: torch.Size([]), list),
    )

    def replacement(self, child: object) -> object:
        """Return an int, because a size contains only ints."""
        return 7


class TestPluginConforms(PluginTests):
    """Conformance tests of the plugin."""

    entry_point = "torch"


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    exec("".join(blocks), {"__name__": "readme"})  # noqa: S102  # the code under test is our own
