"""The lint of words: its findings, text that it accepts, and its exceptions, which must be few and in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.words import EXCEPTIONS, check_markdown, check_python, main

PYTHON = Path("made_up.py")


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ('"""Files beside the root."""\n', 1, "beside"),
        ("x = 1\n# Nobody reads it.\n", 2, "Nobody"),
        ("raise ValueError(f'{x} is told of it')\n", 1, "is told"),
        ('def f():\n    """Whether it holds."""\n', 2, "Whether"),
        ("class Crew:\n    pass\n", 1, "Crew"),
        ("def _made():\n    pass\n", 1, "_made"),
        ('"""A module.\n\nThe header lies in the file."""\n', 3, "lies in"),
    ],
)
def test_a_word_in_python_is_found(source: str, line: int, text: str) -> None:
    [finding] = check_python(PYTHON, source)
    assert (finding.line, finding.text) == (line, text)


def test_identifiers_and_plain_prose_are_accepted() -> None:
    source = '"""Return the chunks of an array."""\n\nbeside = 1\nwhatever = beside  # is used twice\n'
    assert not list(check_python(PYTHON, source))


def test_in_tests_only_comments_and_docstrings_are_read() -> None:
    source = '"""Files beside it."""\nLOCATION = "nobody"\n\n\ndef made():\n    return LOCATION  # beside\n'
    findings = list(check_python(Path("tests/test_x.py"), source))
    assert [(finding.line, finding.text) for finding in findings] == [(1, "beside"), (6, "beside")]


def test_a_word_in_the_name_of_a_module_is_found() -> None:
    [finding] = check_python(Path("somewhere/utils.py"), "")
    assert finding.text == "utils"


def test_only_the_text_of_a_page_is_read() -> None:
    page = "# Title\n\n```python\nbeside = 1\n```\n\nThe `beside` option.\nFiles beside others.\n"
    [finding] = check_markdown(Path("page.md"), page)
    assert (finding.line, finding.text) == (8, "beside")


def test_the_command_fails_after_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.md").write_text("Plain words.\n")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "bad.md").write_text("It is told.\n")
    assert main([str(tmp_path)]) == 1
    assert "bad.md:1: 'is told'" in capsys.readouterr().out


def test_exceptions_are_few_and_in_use() -> None:
    assert len(EXCEPTIONS) <= 20
    for place in EXCEPTIONS:
        path = Path(place.split(":")[0])
        findings = (check_python if path.suffix == ".py" else check_markdown)(path, path.read_text(encoding="utf-8"))
        assert place in {f"{path}: {finding.text}" for finding in findings}
