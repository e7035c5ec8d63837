"""The documentation names every hook with its signature, every public name, and nothing that is not there."""

from __future__ import annotations

import inspect
import re

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


def test_every_hook_stands_in_the_documentation_with_its_signature() -> None:
    lines = (ROOT / "docs/how-to/write-a-plugin.md").read_text(encoding="utf-8").splitlines()
    missing = [hook for hook in HOOKS if written_signature(hook) not in lines]
    assert not missing, missing


def test_the_documentation_names_no_hook_that_is_not_there() -> None:
    for page in documentation_pages():
        named = set(re.findall(r"\bckpt_[a-z_]+", page.read_text(encoding="utf-8")))
        assert named <= set(HOOKS), page


def test_every_public_name_stands_in_the_reference() -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    names = [*ckptcore._HOMES, *[f"results.{name}" for name in ckptcore.results._HOMES]]
    missing = [name for name in names if not re.search(rf"\bckptcore\.{name}\b", page)]
    assert not missing, missing


def test_links_to_files_lead_somewhere() -> None:
    broken = [
        f"{page} links to {target}, which is not there"
        for page in documentation_pages()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert not broken, broken


def test_a_signature_is_written_as_expected() -> None:
    assert written_signature("ckpt_coordinator") == "ckpt_coordinator() -> Coordinator | None"
