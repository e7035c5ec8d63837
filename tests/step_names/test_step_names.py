"""Names of steps: writing, reading and finding them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.step_names import StepNameFormat, StepNames, numbered

STEPS = st.integers(0, 2**63 - 1) | st.integers(0, 200)

PREFIXES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="/\\.*"), max_size=6
).filter(lambda prefix: not re.search("[0-9]$", prefix))

FORMATS = st.builds(StepNameFormat, PREFIXES, st.none() | st.integers(0, 20))


@pytest.mark.parametrize(
    ("written", "step", "name"),
    [
        (StepNameFormat(), 10, "10"),
        (StepNameFormat(), 0, "0"),
        (StepNameFormat("step_", 8), 10, "step_00000010"),
        (StepNameFormat("step_", 2), 1234, "step_1234"),
        (StepNameFormat("step_", None), 10, "step_10"),
        (StepNameFormat("run 2, step "), np.int64(3), "run 2, step 3"),
        (StepNameFormat(width=4), 2**63 - 1, "9223372036854775807"),
    ],
)
def test_a_format_writes_the_expected_name(written: StepNameFormat, step: int, name: str) -> None:
    assert written.name(step) == name
    assert written.parse(name) == step
    assert StepNames(written).name(step) == name


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (StepNameFormat(), name)
        for name in (
            "", "-1", "+1", " 1", "1 ", "1\n", "1_0", "1.0", "1e3", "0x1", "١", "１", "²", "01", "00", "9" * 20,
            "9" * 5000,
            "9223372036854775808", "10.orbax-checkpoint-tmp", "10.orbax-checkpoint-tmp-17", ".10", "step_1", "tmp10",
        )
    ]
    + [
        (StepNameFormat("step_", 4), name)
        for name in (
            "step_10", "step_010", "step_00010", "step_012345", "step_", "Step_0010", "astep_0010", "0010", "step_-010"
        )
    ]
    + [(StepNameFormat("", None), name) for name in ("", "x", "-1", "0" * 30 + "9" * 20)],
)  # fmt: skip
def test_other_names_are_no_steps(read: StepNameFormat, name: str) -> None:
    assert read.parse(name) is None


def test_without_a_width_any_number_of_zeros_is_read() -> None:
    read = StepNameFormat("step_", None)
    assert [read.parse(name) for name in ("step_7", "step_007", "step_0", "step_000", "step_" + "0" * 5000 + "7")] == [
        7,
        7,
        0,
        0,
        7,
    ]


@given(FORMATS, STEPS)
def test_a_written_name_is_read(written: StepNameFormat, step: int) -> None:
    assert written.parse(written.name(step)) == step
    assert StepNames(written).find([written.name(step)]) == {step: written.name(step)}


@given(st.integers(0, 8), st.from_regex(r"\A[0-9]{1,10}\Z"))
def test_a_format_with_a_width_reads_only_names_that_it_writes(width: int, digits: str) -> None:
    read = StepNameFormat("step_", width)
    expected = int(digits) if read.name(int(digits)) == f"step_{digits}" else None
    assert read.parse(f"step_{digits}") == expected


@given(FORMATS, st.text(max_size=12))
def test_any_text_is_a_valid_name_or_none(read: StepNameFormat, name: str) -> None:
    step = read.parse(name)
    assert step is None or re.fullmatch(re.escape(read.prefix) + f"0*{step}", name, re.ASCII)


@given(FORMATS, STEPS)
def test_a_format_is_derived_from_an_example(written: StepNameFormat, step: int) -> None:
    example = written.name(step)
    known = StepNameFormat.of(example)
    assert known.prefix == written.prefix
    assert known.name(step) == example


def test_examples_have_the_expected_formats() -> None:
    assert StepNameFormat.of("step_00000010") == StepNameFormat("step_", 8)
    assert StepNameFormat.of("step_10") == StepNameFormat("step_", 0)
    assert StepNameFormat.of("0") == StepNameFormat("", 0)
    assert StepNames.of("checkpoint-5").name(12) == "checkpoint-12"
    for example in ("step", "", ".5", "a/5", "10.tmp"):
        with pytest.raises(ValueError, match=r"does not end in the number of a step|StepNameFormat\(prefix="):
            StepNames.of(example)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("10", 10),
        ("00010", 10),
        ("step_10", 10),
        ("step_00000010", 10),
        ("step-10", 10),
        ("checkpoint-10", 10),
        ("checkpoint_10", 10),
        ("global_step10", 10),
        ("global_step_10", 10),
        ("global_step-0010", 10),
        ("global-step-10", 10),
        ("step10", 10),
        ("ckpt-10", 10),
        ("ckpt_00010", 10),
        ("iter-10", 10),
        ("steps10", None),
        ("iter_0000010", 10),
        ("10.orbax-checkpoint-tmp", None),
        ("10.orbax-checkpoint-tmp-1701", None),
        ("step_10.orbax-checkpoint-tmp-1701", None),
        (".10.0123456789abcdef.ckptcore", None),
        (".ckptcore", None),
        ("runs", None),
        ("checkpoint-10.bak", None),
        ("my_step_10", None),
        ("latest", None),
        ("epoch=0-step=10.ckpt", 10),
        ("model-step=000010.ckpt", 10),
        ("step=10.ckpt", 10),
        ("epoch=3.ckpt", None),
        ("last.ckpt", None),
        ("10.ckpt", None),
    ],
)
def test_names_of_other_software_are_read(name: str, step: int | None) -> None:
    assert StepNames().parse(name) == step


def test_the_written_format_is_preferred_then_the_order_of_reading() -> None:
    names = ["010", "10", "0010", "step_10", "checkpoint-10", "step-10"]
    assert StepNames().find(names) == {10: "10"}
    assert StepNames.of("step_0").find(names) == {10: "step_10"}
    assert StepNames(StepNameFormat("x"), [StepNameFormat("step-"), StepNameFormat("step_")]).find(names) == {
        10: "step-10"
    }
    assert StepNames(StepNameFormat("x")).find(["0010", "step_10", "010"]) == {10: "010"}
    assert StepNames(StepNameFormat(width=4)).find(["10", "0010", "12"]) == {10: "0010", 12: "12"}
    assert StepNames(StepNameFormat(width=4), read=()).find(["10", "0010", "12"]) == {10: "0010"}


@given(st.lists(st.tuples(st.sampled_from(["", "step_", "x"]), st.integers(0, 5), st.integers(1, 4))), st.randoms())
def test_found_steps_do_not_depend_on_the_order_of_names(parts: list[tuple[str, int, int]], chooser: object) -> None:
    names = [f"{prefix}{step:0{width}d}" for prefix, step, width in parts]
    steps = StepNames().find(names)
    assert list(steps) == sorted({step for prefix, step, _ in parts if prefix != "x"})
    assert all(StepNames().parse(name) == step for step, name in steps.items())
    chooser.shuffle(names)  # type: ignore[attr-defined]  # the value is a random.Random
    assert StepNames().find(iter(names)) == steps


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 2**63])
def test_a_step_must_be_a_whole_number(step: int) -> None:
    with pytest.raises(ValueError, match=r"a step is a whole number from 0 to 9223372036854775807"):
        StepNames().name(step)


@pytest.mark.parametrize("prefix", ["a/b", "/", ".", ".hidden", "a\\b", "run1", "a\nb", "a\0", "\ud800", 3, None])
def test_errors_name_invalid_prefixes(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"StepNameFormat\(prefix=.*\): give printable text"):
        StepNameFormat(prefix)


@pytest.mark.parametrize("width", [-1, True, 1.0, "8", 65])
def test_errors_name_invalid_widths(width: int) -> None:
    with pytest.raises(ValueError, match=r"StepNameFormat\(width=.*\): give a number of digits"):
        StepNameFormat("step_", width)


def test_a_text_is_refused_as_a_format() -> None:
    wrong: Any = ({"write": "step_{}"}, {"read": ["step_{}"]}, {"read": "step_{}"}, {"read": 3})
    for arguments in wrong:
        with pytest.raises(TypeError, match=r"StepNames\((read|write)=.*\): give a (list of )?StepNameFormat"):
            StepNames(**arguments)


def test_names_equal_those_of_orbax() -> None:
    paths = pytest.importorskip("orbax.checkpoint.experimental.v1").path
    if not hasattr(paths, "step"):
        pytest.skip("an older version of Orbax")
    step_lib = paths.step
    for prefix, width in ((None, None), (None, 4), ("step", None), ("step", 8)):
        theirs = step_lib.standard_name_format(step_prefix=prefix, step_format_fixed_length=width)
        ours = StepNameFormat("" if prefix is None else f"{prefix}_", width or 0)
        for step in (0, 7, 1234, 12345):
            assert theirs.build_name(step) == ours.name(step)
            assert StepNames().parse(theirs.build_name(step)) == step


@pytest.mark.parametrize(
    ("example", "known", "others"),
    [
        ("ckpt_1000.pt", StepNameFormat("ckpt_", 0, ".pt"), {"ckpt_5.pt": 5, "ckpt_5.pth": None, "ckpt_5": None}),
        ("model.05.weights.h5", StepNameFormat("model.", 2, ".weights.h5"), {"model.12.weights.h5": 12}),
        ("10.keras", StepNameFormat("", 0, ".keras"), {"7.keras": 7, "x7": None}),
        (
            "epoch=1-step=10.ckpt",
            StepNameFormat("epoch=*-step=", 0, ".ckpt"),
            {"epoch=12-step=7.ckpt": 7, "epoch=12-step=7.ckpt.bak": None, "epoch=1-step=.ckpt": None},
        ),
        (
            "epoch=01-val_loss=0.32.ckpt",
            StepNameFormat("epoch=", 2, "-val_loss=*.ckpt"),
            {"epoch=14-val_loss=1.05.ckpt": 14, "epoch=14.ckpt": None},
        ),
        ("epoch=3-step=7-v1.ckpt", StepNameFormat("epoch=*-step=", 0, "-v1.ckpt"), {"epoch=4-step=8-v1.ckpt": 8}),
    ],
)
def test_examples_of_files_have_the_expected_formats(
    example: str, known: StepNameFormat, others: Mapping[str, int | None]
) -> None:
    assert StepNameFormat.of(example) == known
    names = StepNames(read=[known])
    for name, step in {example: known.parse(example), **others}.items():
        assert (known.parse(name), names.parse(name)) == (step, step)
    assert known.parse(example) is not None
    with pytest.raises(ValueError, match="does not end in the number of a step"):
        StepNames(known)


def test_formats_with_a_wildcard_write_no_names() -> None:
    assert StepNameFormat("ckpt_", 4, ".pt").name(7) == "ckpt_0007.pt"
    with pytest.raises(ValueError, match="matches any text"):
        StepNameFormat("epoch=*-step=").name(7)
    for example in ("02-2.36.keras", "model.safetensors", "last.ckpt"):
        with pytest.raises(ValueError, match="does not end in the number of a step"):
            StepNameFormat.of(example)
    for arguments in ({"prefix": "a*"}, {"suffix": "*.ckpt"}, {"suffix": "1.ckpt"}, {"suffix": "a/b"}, {"suffix": 1}):
        with pytest.raises(ValueError, match="give printable text"):
            StepNameFormat(**arguments)


def test_names_are_grouped_by_their_text() -> None:
    assert numbered(["a_2", "a_10", "a_002", "b3", "4", "none", "5.txt", "a_" + "9" * 30]) == {
        "": {4: "4"},
        "a_": {2: "a_2", 10: "a_10"},
        "b": {3: "b3"},
    }
