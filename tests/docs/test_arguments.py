"""Tables of arguments on the pages "Coming from". The names of ckptcore and of other libraries exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import ckptcore
from ckptcore.training.reader import StepReader
from tests.architecture.sources import ROOT

CALLS: Final[list[Any]] = [
    ckptcore.copy,
    ckptcore.load,
    ckptcore.load_into,
    ckptcore.save,
    ckptcore.save_async,
    ckptcore.Checkpointer,
    ckptcore.Checkpointer.load_into,
    ckptcore.Checkpointer.save,
]
OTHERS: Final = {
    "torch.save": ["torch.save", "torch.load"],
    "Module.load_state_dict": ["torch.nn.Module.load_state_dict"],
    "dcp.save": [f"torch.distributed.checkpoint.{name}" for name in ("save", "async_save", "load")],
    "training.Checkpointer": ["orbax.checkpoint.v1.training.Checkpointer"],
    "CheckpointManagerOptions": ["orbax.checkpoint.CheckpointManagerOptions"],
    "save_pretrained": ["transformers.PreTrainedModel.save_pretrained"],
    "TrainingArguments": ["transformers.TrainingArguments"],
    "ModelCheckpoint": ["lightning.pytorch.callbacks.ModelCheckpoint"],
    "from_pretrained": [],  # accepts any keyword argument
}
"""By the first name in the head of a table, the functions that have its arguments."""


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the first name in the head of each table of arguments, with the cells of its rows."""
    for page in sorted((ROOT / "docs/coming-from").glob("*.md")):
        for head, body in re.findall(
            r"^\| argument of (.*) \|\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
        ):
            rows = [re.split(r" \| ", line.strip("| ")) for line in body.splitlines()]
            yield re.findall(r"`([\w.]+)`", head)[0], rows


def resolved(path: str) -> Any:
    """Return the object that a dotted path names."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if (module := _module(".".join(parts[:count]))) is not None:
            return functools.reduce(getattr, parts[count:], module)
    raise AssertionError(path)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def check(code: str) -> None:
    """Check an expression or an argument ``name=value``: its names exist, and calls accept its arguments."""
    tree = ast.parse(f"call({code})" if re.match(r"\w+=", code) else code, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ckptcore."):
            resolved(ast.unparse(node))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            calls: list[Any] = CALLS if name == "call" else [resolved(name)] if name.startswith("ckptcore.") else []
            for keyword in node.keywords:
                assert any(keyword.arg in inspect.signature(call).parameters for call in calls), code
            plain = name.startswith("ckptcore.") and name.removeprefix("ckptcore.") not in ("load", "load_into")
            if plain and node.args + node.keywords and "(function)" not in code:
                eval(ast.unparse(node), {"ckptcore": ckptcore})  # the values must be accepted, too


def test_arguments_of_ckptcore_exist() -> None:
    names = {name for call in CALLS for name in inspect.signature(call).parameters}
    names |= {*dir(ckptcore.Checkpointer), *dir(StepReader)}
    for _, rows in tables():
        for _, ours in rows:
            for code in re.findall(r"`([^`]+)`", ours):
                if re.fullmatch(r"\w+(\(\))?", code) and code != "memory_map()":
                    assert code.removesuffix("()") in names, code
                elif not re.match(r"hf://|ckptcore\[|huggingface_hub|memory_map", code):
                    check(code)


def test_arguments_of_other_libraries_exist() -> None:
    all_tables = list(tables())
    assert {head for head, _ in all_tables} == OTHERS.keys()
    for head, rows in all_tables:
        if not OTHERS[head] or find_spec(OTHERS[head][0].partition(".")[0]) is None:
            continue
        known = set[str]()
        for function in map(resolved, OTHERS[head]):
            known |= {*inspect.signature(function).parameters}
            known |= (
                {field.name for field in dataclasses.fields(function)} if dataclasses.is_dataclass(function) else set()
            )
        for theirs, _ in rows:
            assert {*re.findall(r"`(\w+)`", theirs)} <= known, theirs
