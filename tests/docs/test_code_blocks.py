"""Every code block of README.md and of the documentation runs, page by page, in the order of the page.

The ```` ```python ```` blocks of a page share one namespace and one empty working directory. The lines of a
```` ```console ```` block that start with ``$ ckptcore`` run there, too. If output is shown below a command, it is
compared with the printed output; ``...`` matches anything.
"""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

from ckptcore.commit.leases import Clock
from tests.architecture.sources import ROOT
from tests.docs.pages import CodeBlock, code_blocks, documentation_pages
from tests.docs.running import page_module, run_program, run_python

SHOWN_ONLY = {"bash", "json", "makefile", "text", "toml", "yaml"}
"""Languages of blocks that are shown and not run."""

DIRECTIVES = re.compile(r"^\{[a-z:-]+\}$")
"""Languages of blocks that are MyST directives."""

NOT_RUN = ("git ", "make", "pip ", "pytest", "python -m venv", "source ", "ls", "cat ")
"""Commands of console blocks that set up an environment or look at files. They are not run."""

PEERS = {
    "accelerate": "accelerate",
    "ckptcore_integrations.ray_train": "pyarrow",
    "ckptcore_integrations.torchtitan": "torchtitan",
    "ckptcore_integrations.transformers": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "ray.train": "pyarrow",
    "ray.train.torch": "pyarrow",
    "wandb": "wandb",
}
"""By imported module, a library that the development group does not install. Such blocks run only if it is."""

PAGES = [page for page in documentation_pages() if code_blocks(page.read_text(encoding="utf-8"))]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lacks_peer(block: CodeBlock) -> bool:
    """Return True if a block imports a library that is not installed."""
    imported = re.findall(r"^(?:import|from) ([\w.]+)", block.code, re.MULTILINE)
    return any(find_spec(PEERS[module]) is None for module in imported if module in PEERS)


def commands(block: CodeBlock) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the output shown for it."""
    command, shown = "", ""
    for line in block.code.splitlines(keepends=True):
        if command.endswith("\\\n"):
            command = command[:-2] + line
        elif line.startswith("$ "):
            if command:
                yield command.strip(), shown
            command, shown = line[2:], ""
        else:
            shown += line
    if command:
        yield command.strip(), shown


class _ImpatientClock(Clock):
    """A clock with short timeouts, for blocks whose processes see different directories."""

    def attempts(self, seconds: float, *, first: float = 0.01, last: float = 2.0) -> Iterator[None]:
        """Yield attempts for a fiftieth of the time."""
        return super().attempts(seconds / 50, first=first, last=last)


def run_console(block: CodeBlock, page: Path) -> None:
    """Run the `ckptcore` commands of a block, and compare their output.

    They run in this process, because starting one takes half a second.
    `plugins/tools/tests/cli/test_process.py` starts some.
    """
    for command, shown in commands(block):
        if command.startswith(NOT_RUN):
            continue
        assert command.startswith("ckptcore "), f"{page}:{block.line}: unknown command {command!r}"
        result = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
            application, shlex.split(command, comments=True)[1:], prog_name="ckptcore", catch_exceptions=False
        )
        printed = "\n".join(line.rstrip() for line in (result.stdout + result.stderr).splitlines()) + "\n"
        if shown:
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(shown, printed, options)
            assert same, f"{page}:{block.line}: $ {command}\nshown:\n{shown}\nprinted:\n{printed}"
        else:
            assert result.exit_code == 0, f"{page}:{block.line}: $ {command}\nprinted:\n{printed}"


def starts_ray(page: Path) -> bool:
    return any("\nimport ray\n" in block.code for block in code_blocks(page.read_text(encoding="utf-8")))


@pytest.mark.slow  # each starts a cluster, as the demo of tests/examples does in every run
@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in PAGES if starts_ray(page)], ids=page_name)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    blocks = code_blocks(page.read_text(encoding="utf-8"))
    run_program([block for block in blocks if block.language == "python"], tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if not starts_ray(page)], ids=page_name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ckptcore.job.visibility.SYSTEM_CLOCK", _ImpatientClock())
    blocks = code_blocks(page.read_text(encoding="utf-8"))
    module = page_module(page, "blocks")
    for block in blocks:
        if block.language == "python" and not lacks_peer(block):
            run_python(block, page, module)
        elif block.language == "console":
            run_console(block, page)


def test_no_block_is_skipped_by_its_language() -> None:
    """Code that a reader may copy is marked ``python`` or ``console``, so that it runs in these tests."""
    known = SHOWN_ONLY | {"python", "console"}
    blocks = [(page, block) for page in PAGES for block in code_blocks(page.read_text(encoding="utf-8"))]
    unknown = [
        f"{page}:{block.line}: the language {block.language!r} is neither run nor in SHOWN_ONLY"
        for page, block in blocks
        if block.language not in known and not DIRECTIVES.match(block.language)
    ]
    assert not unknown, unknown


def test_the_front_page_has_an_example_of_each_framework() -> None:
    blocks = code_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    code = "\n".join(block.code for block in blocks if block.language == "python")
    assert {"import jax", "import numpy", "import torch"} <= {
        line.split(" as ")[0].split(".")[0] for line in code.splitlines() if line.startswith("import ")
    }


def test_a_broken_block_is_detected(tmp_path: Path) -> None:
    """Show that the tests above can fail, and that the error names the line."""
    text = "# Page\n\n- in a list\n\n  ```python\n  x = 1\n  ```\n\n```python\nassert x == 2\n```\n"
    blocks = code_blocks(text)
    assert [(block.language, block.line) for block in blocks] == [("python", 6), ("python", 10)]
    page = tmp_path / "page.md"
    module = page_module(page, "blocks")
    run_python(blocks[0], page, module)
    with pytest.raises(AssertionError):
        run_python(blocks[1], page, module)


def test_a_failing_program_is_reported_with_its_line(tmp_path: Path) -> None:
    page = "# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError, match=r"line 8, in <module>"):
        run_program(code_blocks(page), tmp_path)


def test_commands_are_found_with_their_output() -> None:
    block = CodeBlock("console", "$ ckptcore ls a \\\n    --json\nx\n\ny\n$ make test\n", 1)
    assert list(commands(block)) == [("ckptcore ls a     --json", "x\n\ny\n"), ("make test", "")]


@pytest.mark.parametrize("shown", ["what it does not print\n", "builtin ... what it does not print\n"])
def test_different_output_is_detected(shown: str, tmp_path: Path) -> None:
    run_console(CodeBlock("console", "$ ckptcore plugins\n...builtin ...\n", 1), tmp_path / "page.md")
    with pytest.raises(AssertionError, match="does not print"):
        run_console(CodeBlock("console", f"$ ckptcore plugins\n{shown}", 1), tmp_path / "page.md")
    with pytest.raises(AssertionError, match="unknown command"):
        run_console(CodeBlock("console", "$ rm -r x\n", 1), tmp_path / "page.md")
    with pytest.raises(AssertionError, match="nowhere"):
        run_console(CodeBlock("console", "$ ckptcore verify nowhere\n", 1), tmp_path / "page.md")
