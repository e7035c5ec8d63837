"""The tree that `inspect` prints, and details of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptcore_tools.cli.treeview import TreeLine, format_lines, tree_lines
from ckptcore_tools.outline import outline_of
from rich.cells import cell_len

from ckptcore.model import JSON, ArrayRecord, ArraySpec, TreeMetadata
from ckptcore.model.tree import LEAF, Node


def text(lines: Sequence[TreeLine], width: int | None) -> list[str]:
    """Return lines as the command prints them."""
    return ["".join(cell if isinstance(cell, str) else cell[0] for cell in line) for line in format_lines(lines, width)]


def details(*notes: Mapping[str, JSON]) -> list[str]:
    """Return the details of arrays with these notes."""
    records = tuple([ArrayRecord(ArraySpec((4,), "int8"), notes=note) for note in notes])
    tree = TreeMetadata(Node("list", tuple(range(len(records))), (LEAF,) * len(records)), records)
    return [line.detail for line in list(tree_lines(tree, outline_of(tree)))[1:]]


def on(device: str) -> dict[str, JSON]:
    return {"sharding": {"type": "SingleDeviceSharding", "device": device}}


MESH: dict[str, JSON] = {"sharding": {"type": "NamedSharding", "mesh": {"data": 2}, "spec": ["data", None]}}
MESH_TEXT = "sharding: NamedSharding mesh=(data=2) spec=(data, -)"


def test_a_single_device_is_not_shown() -> None:
    assert details(on("cpu:0"), MESH, {**on("cpu:0"), "weak_type": True}) == ["", MESH_TEXT, "weak_type: true"]


def test_several_devices_are_shown() -> None:
    assert details(on("cpu:0"), on("cpu:1")) == [
        "sharding: SingleDeviceSharding device=cpu:0",
        "sharding: SingleDeviceSharding device=cpu:1",
    ]


def test_long_lists_are_cut() -> None:
    def devices(count: int) -> Mapping[str, JSON]:
        return {"sharding": {"type": "NamedSharding", "devices": list(range(count, 0, -1))}}

    assert details(devices(6), devices(4096)) == [
        "sharding: NamedSharding devices=(6, 5, 4, 3, 2, 1)",
        "sharding: NamedSharding devices=(4096, 4095, 4094, 4093, … 4,096 in all)",
    ]


def test_a_long_note_is_cut() -> None:
    (text,) = details({"remark": "x" * 10_000})
    assert len(text) == 160 and text.startswith("remark: xxx") and text.endswith("x…")


def test_notes_that_resemble_devices_are_shown() -> None:
    assert details({"at": {"device": "cpu:0"}}, {"at": {"type": "a", "device": 3}}) == [
        "at: device=cpu:0",
        "at: a device=3",
    ]


LINES = [
    TreeLine("", "<root>", "dict", "96 B", "2 arrays, 24 parameters"),
    TreeLine("├─ ", "a_name_of_forty_characters_in_the_model_x", "float32[3, 4]", "48 B", "in 2×2 parts"),
    TreeLine("└─ ", "short", "float32[3, 4]", "48 B", "", (-0.5, 12.0, 5.5, 1e-12, 3e9)),
]


def test_lines_are_as_wide_as_the_terminal() -> None:
    for width in range(1, 160):
        lines = text(LINES, width)
        assert all(cell_len(line) <= width for line in lines), width
    assert text(LINES, 159) == text(LINES, None)


def test_a_long_name_is_shortened_in_the_middle() -> None:
    assert text(LINES, 80)[1:3] == [
        "├─ a_name_of_forty_ch…ers_in_the_model_x  float32[3, 4]       48 B  in 2×2 parts",
        "└─ short                                  float32[3, 4]       48 B",
    ]
    assert text(LINES, 60)[:2] == [
        "<root>                              dict                96 B",
        "├─ a_name_of_forty…_in_the_model_x  float32[3, 4]       48 B",
    ]


def test_a_detail_is_cut_at_the_end() -> None:
    assert text(LINES, 80)[0].endswith("   dict                96 B  2 arrays, 2…")


def test_wide_characters_are_aligned() -> None:
    lines = [TreeLine("├─ ", "層" * 30, "int8[1]", "1 B", ""), TreeLine("└─ ", "é" * 5, "int8[1]", "1 B", "")]
    for width in (None, 50):
        assert len({cell_len(line) for line in text(lines, width)}) == 1
    assert "…" in text(lines, 50)[0]


def test_statistics_are_below_an_array_if_the_terminal_is_narrow() -> None:
    heading, *wide = text(LINES, None)
    assert heading.split() == ["size", "min", "max", "mean", "std", "norm"]
    assert wide[2].split()[-7:] == ["48", "B", "-0.5", "12", "5.5", "1e-12", "3e+09"]
    assert text(LINES, 80)[-1] == "     min -0.5  max 12  mean 5.5  std 1e-12  norm 3e+09"
