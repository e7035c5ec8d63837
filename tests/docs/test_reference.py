"""The documentation names every hook with its signature, every public name, and nothing that is not there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ckptcore
from ckptcore.hookspecs import HookSpecs
from tests.architecture.sources import ROOT
from tests.docs.pages import documentation_pages

HOOKS = [name for name in vars(HookSpecs) if name.startswith("ckpt_")]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def written_signature(name: str) -> str:
    """A hook as a plugin author would write it: ``name(argument: type) -> result``, without ``self``."""
    signature = inspect.signature(getattr(HookSpecs, name))
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    return f"{name}{signature.replace(parameters=parameters)}".replace("'", "")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_stands_in_the_documentation_with_its_signature(hook: str) -> None:
    assert written_signature(hook) in (ROOT / "docs/how-to/write-a-plugin.md").read_text(encoding="utf-8").splitlines()


def test_the_documentation_names_no_hook_that_is_not_there() -> None:
    for page in documentation_pages():
        named = set(re.findall(r"\bckpt_[a-z_]+", page.read_text(encoding="utf-8")))
        assert named <= set(HOOKS), page


@pytest.mark.parametrize("name", ckptcore._HOMES)
def test_every_public_name_stands_in_the_reference(name: str) -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert re.search(rf"\bckptcore\.{name}\b", page)


@pytest.mark.parametrize("page", documentation_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page} links to {target}, which is not there"


def test_a_signature_is_written_as_expected() -> None:
    assert written_signature("ckpt_coordinator") == "ckpt_coordinator() -> Coordinator | None"
