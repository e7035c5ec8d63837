"""Hostile checkpoints in which one number can be large. Each function writes a checkpoint for a number `n`.

A reader may load or refuse a sample. The tests measure its work until the result or error.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it has no types
import numpy as np
import torch
from ckptcore_orbax.ocdbt.cursor import encode_varint, encode_varints
from ckptcore_orbax.ocdbt.frame import NODE_MAGIC, encode_frame
from ckptcore_orbax.ocdbt.manifest import Version, encode_manifest
from ckptcore_orbax.ocdbt.node import NodeReference, Statistics
from ckptcore_orbax.ocdbt.paths import DataFile
from ckptcore_testing.hostile_json import sealed
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

Sample = Callable[[Path, int], None]
"""Writes a checkpoint into a new directory, with a number of about `n`."""

SAMPLES: Final[dict[str, Sample]] = {}
"""The samples by name. A name consists of the reader and the number."""

LIMITS: Final[dict[str, int]] = {}
"""For some samples, the largest number that is not refused immediately."""


def _sample(name: str, most: int | None = None) -> Callable[[Sample], Sample]:
    def add(sample: Sample) -> Sample:
        SAMPLES[name] = sample
        if most is not None:
            LIMITS[name] = most
        return sample

    return add


# --- roots of ckptcore ------------------------------------------------------------------------------------------------


def _seal(directory: Path, root: Mapping[str, Any], name: str = "checkpoint.json") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(sealed(root))


def _head(state: str = "committed", role: str = "checkpoint") -> dict[str, Any]:
    return {"format": "ckptcore", "version": 1, "state": state, "role": role, "save_id": "0123456789abcdef"}


_COMMON: Final[dict[str, Any]] = {"created": "2026-01-01T00:00:00.000+00:00", "writer": {"ckptcore": "0.1.0"}}


def _objects(files: Mapping[str, int]) -> dict[str, Any]:
    """Return the table of objects without checksums."""
    return {
        "algorithm": "xxh3_64",
        "block_bytes": 1 << 20,
        "key": list(files),
        "size": list(files.values()),
        "checksums": [""] * len(files),
    }


def _tree(shapes: Sequence[Sequence[int]], **columns: Any) -> dict[str, Any]:
    count = len(shapes)
    return {
        "skeleton": ["dict", [f"w{number}" for number in range(count)], count],
        "count": count,
        "dtypes": ["uint8"],
        "dtype": [0] * count,
        "shape": list(shapes),
        "values": [],
        "extras": {},
        "aliases": [],
    } | columns


def _tree_root(
    directory: Path, tree: Any, layout: Any, files: Mapping[str, int], tables: Any = None, **members: Any
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in files.items():
        (directory / name).write_bytes(bytes(size))
    tables = {"tree": tree, "layout": layout, "objects": _objects(files), "custom": {}} | (tables or {})
    _seal(directory, {**_head(), **_COMMON, "layout": "safetensors", "tables": tables, "parts": {}} | members)


def _whole(count: int, size: int = 1) -> dict[str, Any]:
    """Return the state of contiguous arrays in one file."""
    offsets = [number * size for number in range(count)]
    return {"files": ["a"], "leaf": list(range(count)), "file": [0] * count, "offset": offsets}


@_sample("root: arrays")
def _root_arrays(directory: Path, n: int) -> None:
    _tree_root(directory, _tree([[1]] * n), _whole(n), {"a": n})


@_sample("root: arrays of other dtypes and shapes")
def _root_kinds(directory: Path, n: int) -> None:
    tree = _tree(
        [[1] * (number % 4) for number in range(n)], dtypes=[f"datetime64[{number + 1}s]" for number in range(32)]
    )
    tree["dtype"] = [number % 32 for number in range(n)]
    _tree_root(directory, tree, _whole(n, 8), {"a": 8 * n})


@_sample("root: values")
def _root_values(directory: Path, n: int) -> None:
    tree = _tree([])
    tree |= {"skeleton": ["dict", [f"v{number}" for number in range(n)], n], "count": n}
    tree["values"] = [[number, "int", number] for number in range(n)]
    _tree_root(directory, tree, _whole(0), {})


@_sample("root: a long value")
def _root_long_value(directory: Path, n: int) -> None:
    tree = _tree([], skeleton=["list", None, 1], count=1, values=[[0, "str", "x" * n * 100]])
    _tree_root(directory, tree, _whole(0), {})


@_sample("root: a large int")
def _root_large_int(directory: Path, n: int) -> None:
    tree = _tree([], skeleton=["list", None, 1], count=1, values=[[0, "int", hex((1 << 40 * n) - 1)]])
    _tree_root(directory, tree, _whole(0), {})


@_sample("root: depth", most=128)
def _root_depth(directory: Path, n: int) -> None:
    skeleton: Any = ["list", None, 1]
    for _ in range(n - 1):
        skeleton = ["dict", ["a"], [skeleton]]
    _tree_root(directory, _tree([[1]], skeleton=skeleton), _whole(1), {"a": 1})


@_sample("root: containers")
def _root_containers(directory: Path, n: int) -> None:
    skeleton = ["list", None, [["dict", [], []] for _ in range(n)]]
    _tree_root(directory, _tree([], skeleton=skeleton, count=0), _whole(0), {})


@_sample("root: a long name")
def _root_long_name(directory: Path, n: int) -> None:
    _tree_root(directory, _tree([[1]], skeleton=["dict", ["/." * 50 * n], 1]), _whole(1), {"a": 1})


@_sample("root: axes", most=64)
def _root_axes(directory: Path, n: int) -> None:
    _tree_root(directory, _tree([[1] * n]), _whole(1), {"a": 1})


def _boxes(directory: Path, shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Write an array in boxes of one byte each. The boxes may state more bytes than they have."""
    count = len(boxes)
    layout = {
        "files": ["a"], "leaf": [0] * count, "file": [0] * count, "offset": list(range(count)),
        "box": [number for start, stop in boxes for number in (*start, *stop)],
    }  # fmt: skip
    _tree_root(directory, _tree([list(shape)]), layout, {"a": count})


def _halves(axes: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Return boxes that each take half of the remaining array along the next axis. The last box is the rest."""
    boxes = [([0] * axis + [1] + [0] * (axes - axis - 1), [1] * axis + [2] * (axes - axis)) for axis in range(count)]
    return [*boxes, ([0] * axes, [1] * count + [2] * (axes - count))]


@_sample("root: axes of boxes", most=64)
def _root_box_axes(directory: Path, n: int) -> None:
    _boxes(directory, [2] * n, _halves(n, 12))


@_sample("root: axes of boxes that do not cover", most=64)
def _root_wrong_axes(directory: Path, n: int) -> None:
    boxes = _halves(n, 12)
    _boxes(directory, [2] * n, [*boxes[:-1], *boxes[-2:] * 4])


@_sample("root: boxes")
def _root_boxes(directory: Path, n: int) -> None:
    _boxes(directory, [n], [([number], [number + 1]) for number in range(n)])


@_sample("root: boxes that do not cover")
def _root_wrong_boxes(directory: Path, n: int) -> None:
    rows = [([number, 0], [number + 1, n]) for number in range(n)]
    rows[n // 2] = rows[-1]
    _boxes(directory, [n, n], rows)


@_sample("root: boxes that all overlap")
def _root_overlaps(directory: Path, n: int) -> None:
    _boxes(directory, [n, n], [([0, 0], [n, n - 1]) for number in range(n)])


@_sample("root: boxes of no grid")
def _root_diagonal(directory: Path, n: int) -> None:
    boxes = [([0, number], [number + 1, number + 1]) for number in range(n)]
    boxes += [([number + 1, number], [n + 1, number + 1]) for number in range(n)]
    _boxes(directory, [n + 1, n], boxes)


@_sample("root: aliases")
def _root_aliases(directory: Path, n: int) -> None:
    aliases = [[number, 0] for number in range(1, n)]
    _tree_root(directory, _tree([[1]] * n, aliases=aliases), _whole(1), {"a": 1})


@_sample("root: cuts")
def _root_cuts(directory: Path, n: int) -> None:
    extras = {"0": {"cuts": [list(range(1, n))]}}
    _tree_root(directory, _tree([[n]], extras=extras), _whole(1), {"a": n})


@_sample("root: notes")
def _root_notes(directory: Path, n: int) -> None:
    notes = [{"jax": {"type": "x", "number": number}} for number in range(n)]
    _tree_root(directory, _tree([[1]] * n, notes=notes, note=list(range(n))), _whole(n), {"a": n})


@_sample("root: ranks that hold a leaf")
def _root_held_by(directory: Path, n: int) -> None:
    tree = _tree([[1]] * n, held_by=[[list(range(n)), list(range(n))]])
    _tree_root(directory, tree, _whole(n), {"a": n})


@_sample("root: files")
def _root_files(directory: Path, n: int) -> None:
    layout = {
        "files": [f"f{number}" for number in range(n)],
        "leaf": list(range(n)), "file": list(range(n)), "offset": [0] * n,
    }  # fmt: skip
    _tree_root(directory, _tree([[1]] * n), layout, {f"f{number}": 1 for number in range(n)})


@_sample("root: blocks")
def _root_blocks(directory: Path, n: int) -> None:
    """Write a root with a file of 1 TiB per unit of `n`, but with too few block checksums."""
    _tree_root(directory, _tree([[n << 40]]), _whole(1), {"a": 1}, {"objects": _objects({}) | {
        "key": ["a"], "size": [n << 40], "checksums": [base64.b64encode(bytes(8 * n)).decode()],
    }})  # fmt: skip


@_sample("root: custom metadata")
def _root_custom(directory: Path, n: int) -> None:
    custom = {f"k{number}": [number, {"a": "b"}] for number in range(n)}
    _tree_root(directory, _tree([[1]]), _whole(1), {"a": 1}, {"custom": custom})


@_sample("root: metrics and progress")
def _root_metrics(directory: Path, n: int) -> None:
    numbers = {f"m{number}": number for number in range(n)}
    _tree_root(directory, _tree([[1]]), _whole(1), {"a": 1}, metrics=numbers, progress=numbers)


@_sample("root: timeline")
def _root_timeline(directory: Path, n: int) -> None:
    timeline = {
        "operation": "save", "step": None, "save_id": "0123456789abcdef", "began": 1, "phase": ["write"] * n,
        "rank": list(range(n)), "offset": list(range(n)), "duration": [1] * n, "nbytes": [1] * n, "error": [None] * n,
    }  # fmt: skip
    _tree_root(directory, _tree([[1]]), _whole(1), {"a": 1}, timeline=timeline)


@_sample("root: an odd timeline and a long save id")
def _root_odd_timeline(directory: Path, n: int) -> None:
    columns = {name: [None] * n for name in ("phase", "rank", "offset", "duration", "nbytes", "error")}
    timeline = {"operation": "save", "step": None, "save_id": "x" * 100 * n, "began": 1, **columns}
    _tree_root(directory, _tree([[1]]), _whole(1), {"a": 1}, timeline=timeline)


@_sample("root: bases")
def _root_bases(directory: Path, n: int) -> None:
    bases = [[f"b{number}", "0123456789abcdef"] for number in range(n)]
    numbers = list(range(n))
    references = {"leaf": numbers, "base": numbers, "stored": [0] * n}
    for number in numbers:
        _tree_root(directory.parent / f"b{number}", _tree([[1]]), _whole(1), {"a": 1})
    _tree_root(directory, _tree([[1]] * n), _whole(0), {}, {"references": references}, bases=bases)


def _composite(directory: Path, members: Mapping[str, Any], present: Sequence[str]) -> None:
    tables: dict[str, Any] = {"custom": {}}
    _seal(directory, {**_head(), **_COMMON, "members": members, "tables": tables, "parts": {}})
    for name in present:
        (directory / name).mkdir()
        (directory / name / "a").write_bytes(b"\0")
        tree = {"tree": _tree([[1]]), "layout": _whole(1), "objects": _objects({"a": 1}), "custom": {}}
        root = {**_head(role="member"), **_COMMON, "layout": "safetensors", "tables": tree, "parts": {}}
        _seal(directory / name, root)


@_sample("composite: members")
def _composite_members(directory: Path, n: int) -> None:
    members = {f"m{number}": ["tree", None] for number in range(n)}
    _composite(directory, members, list(members))


@_sample("composite: members that are missing")
def _composite_missing(directory: Path, n: int) -> None:
    _composite(directory, {f"m{number}": ["tree", None] for number in range(n)} | {"a": ["tree", None]}, ["a"])


@_sample("composite: processes")
def _composite_processes(directory: Path, n: int) -> None:
    _composite(directory, {"m": ["tree", n]}, [f"m.rank_{rank}" for rank in range(n)])


@_sample("composite: processes that are missing")
def _composite_claims(directory: Path, n: int) -> None:
    _composite(directory, {"m": ["tree", n << 12], "a": ["tree", None]}, ["a", "m.rank_0"])


@_sample("partial save: sessions")
def _partial_sessions(directory: Path, n: int) -> None:
    save_id = _head()["save_id"]
    sessions = [
        [number, 1, _COMMON["created"], 1, 1, f"checkpoint.{save_id}.session-{number}", 1, "xxh3_64:0"]
        for number in range(n)
    ]
    _seal(directory, {
        **_head("partial"), **_COMMON, "agreed": "", "layout": "safetensors", "ranks": n, "owner": None, "token": "",
        "sessions": sessions,
    })  # fmt: skip


# --- safetensors of other software ------------------------------------------------------------------------------------


def _safetensors(path: Path, header: Mapping[str, Any], nbytes: int) -> None:
    encoded = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(nbytes))


def _tensors(count: int) -> dict[str, Any]:
    return {
        f"w{number}": {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]} for number in range(count)
    }


@_sample("safetensors: tensors")
def _safetensors_tensors(directory: Path, n: int) -> None:
    _safetensors(directory / "model.safetensors", _tensors(n), n)


@_sample("safetensors: axes", most=64)
def _safetensors_axes(directory: Path, n: int) -> None:
    _safetensors(directory / "model.safetensors", {"w": {"dtype": "U8", "shape": [1] * n, "data_offsets": [0, 1]}}, 1)


@_sample("safetensors: metadata")
def _safetensors_metadata(directory: Path, n: int) -> None:
    metadata = {f"k{number}": "v" for number in range(n)}
    _safetensors(directory / "model.safetensors", {"__metadata__": metadata, **_tensors(1)}, 1)


@_sample("safetensors: files")
def _safetensors_files(directory: Path, n: int) -> None:
    names = [f"model-{number + 1:05d}-of-{n:05d}.safetensors" for number in range(n)]
    for number, name in enumerate(names):
        tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        _safetensors(directory / name, {f"w{number}": tensor}, 1)
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# --- torch ------------------------------------------------------------------------------------------------------------


@_sample("torch: tensors")
def _torch_tensors(directory: Path, n: int) -> None:
    directory.mkdir()
    torch.save({f"w{number}": torch.zeros(1) for number in range(n)}, directory / "pytorch_model.bin")


@_sample("torch: views of one storage")
def _torch_views(directory: Path, n: int) -> None:
    directory.mkdir()
    whole = torch.zeros(n)
    torch.save({f"w{number}": whole[number:] for number in range(n)}, directory / "pytorch_model.bin")


@_sample("torch: the format before 1.6")
def _torch_legacy(directory: Path, n: int) -> None:
    directory.mkdir()
    value = {f"w{number}": torch.zeros(1) for number in range(n)}
    torch.save(value, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


@_sample("torch: depth", most=128)
def _torch_depth(directory: Path, n: int) -> None:
    directory.mkdir()
    value: Any = torch.zeros(1)
    for _ in range(n):
        value = [value]
    torch.save(value, directory / "pytorch_model.bin")


@_sample("torch: lists that share lists")
def _torch_shared(directory: Path, n: int) -> None:
    """Write nested lists of which each contains the next one twice, so that one value has many paths."""
    directory.mkdir()
    value: Any = [1]
    for _ in range(n):
        value = [value, value]
    torch.save(value, directory / "pytorch_model.bin")


@_sample("torch: axes", most=64)
def _torch_axes(directory: Path, n: int) -> None:
    directory.mkdir()
    torch.save({"w": torch.zeros([1] * n)}, directory / "pytorch_model.bin")


@_sample("torch: members of the zip")
def _torch_members(directory: Path, n: int) -> None:
    directory.mkdir()
    file = io.BytesIO()
    torch.save({"w": torch.zeros(1)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        for number in range(n):
            archive.writestr(f"archive/other/{number}", b"")
    (directory / "pytorch_model.bin").write_bytes(file.getvalue())


@_sample("torch: a sparse storage")
def _torch_expanded(directory: Path, n: int) -> None:
    """Write a tensor whose many elements share one stored element."""
    directory.mkdir()
    torch.save({"w": torch.zeros(1).expand(n << 20)}, directory / "pytorch_model.bin")


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _dcp(
    directory: Path,
    shapes: Mapping[str, Sequence[int]],
    boxes: Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]],
    planner_data: Any = None,
    files: Sequence[str] = ("__0_0.distcp",),
) -> None:
    """Write a file `.metadata`. The data files have one item, and all entries refer to it."""
    directory.mkdir()
    item = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.uint8), item)
    for file in files:
        (directory / file).write_bytes(item.getvalue())
    properties = dcp.TensorProperties(dtype=torch.uint8)
    tensors: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {
        name: dcp.TensorStorageMetadata(
            properties,
            torch.Size(shape),
            [
                dcp.ChunkStorageMetadata(
                    torch.Size(start), torch.Size([high - low for low, high in zip(start, stop, strict=True)])
                )
                for start, stop in boxes[name]
            ],
        )
        for name, shape in shapes.items()
    }
    locations = {
        dcp.MetadataIndex(name, torch.Size(start)): _StorageInfo(files[number % len(files)], 0, len(item.getvalue()))
        for name in shapes
        for number, (start, _) in enumerate(boxes[name])
    }
    metadata = dcp.Metadata({**tensors}, planner_data, locations)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@_sample("dcp: tensors")
def _dcp_tensors(directory: Path, n: int) -> None:
    names = [f"w{number}" for number in range(n)]
    _dcp(
        directory, dict.fromkeys(names, (1,)), dict.fromkeys(names, (((0,), (1,)),)), {name: (name,) for name in names}
    )


@_sample("dcp: chunks")
def _dcp_chunks(directory: Path, n: int) -> None:
    _dcp(directory, {"w": [n]}, {"w": [([number], [number + 1]) for number in range(n)]})


@_sample("dcp: chunks that do not cover")
def _dcp_wrong_chunks(directory: Path, n: int) -> None:
    boxes = [([number, 0], [number + 1, n]) for number in range(n)]
    boxes[n // 2] = ([n // 2 - 1, 0], [n // 2 + 1, n])
    boxes.pop(3)
    _dcp(directory, {"w": [n, n]}, {"w": [*boxes, ([0, 1], [3, n])]})


@_sample("dcp: axes of chunks", most=64)
def _dcp_axes(directory: Path, n: int) -> None:
    _dcp(directory, {"w": [2] * n}, {"w": _halves(n, 12)})


@_sample("dcp: depth of paths", most=128)
def _dcp_depth(directory: Path, n: int) -> None:
    path = tuple("a" for _ in range(n))
    _dcp(directory, {"w": [1]}, {"w": [([0], [1])]}, {"w": path})


@_sample("dcp: files")
def _dcp_files(directory: Path, n: int) -> None:
    files = [f"__{number}_0.distcp" for number in range(n)]
    _dcp(directory, {"w": [n]}, {"w": [([number], [number + 1]) for number in range(n)]}, files=files)


@_sample("dcp: safetensors in parts")
def _dcp_parts(directory: Path, n: int) -> None:
    for number in range(n):
        info = json.dumps({"w": {"saved_offsets": [number]}})
        header = {"__metadata__": {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}, **_tensors(1)}
        header["w"] = header.pop("w0")
        _safetensors(directory / f"shard-{number:05d}-model-00001-of-00001.safetensors", header, 1)


# --- Orbax ------------------------------------------------------------------------------------------------------------


def _tree_file(names: Sequence[Sequence[str]], **members: Any) -> bytes:
    table = {
        str(tuple(name)): {
            "key_metadata": [{"key": part, "key_type": 2} for part in name],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in names
    }
    document = {
        "tree_metadata": table, "use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
    }  # fmt: skip
    return json.dumps(document | members).encode()


def _zarr3(shape: Sequence[int], chunk: Sequence[int], **members: Any) -> bytes:
    document = {
        "zarr_format": 3, "node_type": "array", "shape": list(shape), "data_type": "uint8", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes"}],
    }  # fmt: skip
    return json.dumps(document | members).encode()


def _put(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@_sample("zarr 3: arrays")
def _zarr_arrays(directory: Path, n: int) -> None:
    names = [f"w{number}" for number in range(n)]
    files = {f"{name}/zarr.json": _zarr3([1], [1]) for name in names} | {f"{name}/c/0": b"\0" for name in names}
    _put(directory, {"_METADATA": _tree_file([[name] for name in names]), **files})


@_sample("zarr 3: axes", most=32)
def _zarr_axes(directory: Path, n: int) -> None:
    chunk = "/".join(["c", *["0"] * n])
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": _zarr3([1] * n, [1] * n), f"w/{chunk}": b"\0"})


@_sample("zarr 3: chunks")
def _zarr_chunks(directory: Path, n: int) -> None:
    chunks = {f"w/c/{number}": b"\0" for number in range(n)}
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": _zarr3([n], [1]), **chunks})


@_sample("zarr 3: chunks that are missing")
def _zarr_missing(directory: Path, n: int) -> None:
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": _zarr3([n << 3], [1]), "w/c/0": b"\0"})


@_sample("zarr 3: chunks that are encoded and missing")
def _zarr_encoded(directory: Path, n: int) -> None:
    codecs = [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]
    document = _zarr3([n << 3], [1], codecs=codecs)
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": document, "w/c/0": b"\0"})


@_sample("zarr 3: chunks that are not stored")
def _zarr_fills(directory: Path, n: int) -> None:
    tree = _tree_file([["w"]], store_array_data_equal_to_fill_value=False)
    _put(directory, {"_METADATA": tree, "w/zarr.json": _zarr3([n << 6], [64]), "w/c/0": bytes(64)})


@_sample("zarr 3: codecs")
def _zarr_codecs(directory: Path, n: int) -> None:
    codecs = [{"name": "transpose", "configuration": {"order": [0]}}] * n + [{"name": "bytes"}]
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": _zarr3([1], [1], codecs=codecs), "w/c/0": b"\0"})


@_sample("zarr 3: chunks of a shard")
def _zarr_shard(directory: Path, n: int) -> None:
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1], "codecs": [{"name": "bytes"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }  # fmt: skip
    index = struct.pack(f"<{2 * n}Q", *[number for chunk in range(n) for number in (chunk, 1)])
    document = _zarr3([n], [n], codecs=[sharding])
    _put(directory, {"_METADATA": _tree_file([["w"]]), "w/zarr.json": document, "w/c/0": bytes(n) + index})


def _zarr2(shape: Sequence[int], chunks: Sequence[int]) -> bytes:
    document = {
        "zarr_format": 2, "shape": list(shape), "chunks": list(chunks), "dtype": "|u1", "compressor": None,
        "filters": None, "fill_value": 0, "order": "C",
    }  # fmt: skip
    return json.dumps(document).encode()


@_sample("zarr 2: arrays")
def _zarr2_arrays(directory: Path, n: int) -> None:
    names = [f"w{number}" for number in range(n)]
    files = {f"{name}/.zarray": _zarr2([1], [1]) for name in names} | {f"{name}/0": b"\0" for name in names}
    _put(directory, {"_METADATA": _tree_file([[name] for name in names], use_zarr3=False), **files})


def _zarr2_array(directory: Path, document: bytes, chunks: Mapping[str, bytes], **members: Any) -> None:
    tree = _tree_file([["w"]], use_zarr3=False, **members)
    files = {f"w/{name}": data for name, data in chunks.items()}
    _put(directory, {"_METADATA": tree, "w/.zarray": document, **files})


@_sample("zarr 2: chunks")
def _zarr2_chunks(directory: Path, n: int) -> None:
    _zarr2_array(directory, _zarr2([n], [1]), {str(number): b"\0" for number in range(n)})


@_sample("zarr 2: chunks that are missing")
def _zarr2_missing(directory: Path, n: int) -> None:
    _zarr2_array(directory, _zarr2([n << 3], [1]), {"0": b"\0"}, store_array_data_equal_to_fill_value=False)


@_sample("zarr 2: a large chunk")
def _zarr2_large(directory: Path, n: int) -> None:
    _zarr2_array(directory, _zarr2([8], [n << 40]), {"0": b"\0"})


@_sample("zarr 2: axes", most=32)
def _zarr2_axes(directory: Path, n: int) -> None:
    _zarr2_array(directory, _zarr2([1] * n, [1] * n), {".".join(["0"] * n): b"\0"})


@_sample("orbax: depth", most=128)
def _orbax_depth(directory: Path, n: int) -> None:
    name = ["a"] * n
    array = ".".join(name)
    _put(directory, {"_METADATA": _tree_file([name]), f"{array}/zarr.json": _zarr3([1], [1]), f"{array}/c/0": b"\0"})


def _put_sharded(directory: Path, sharding: Mapping[str, Any]) -> None:
    name = base64.urlsafe_b64encode(b"w").decode()
    _put(directory, {
        "_METADATA": _tree_file([["w"]]), "_sharding": json.dumps({name: json.dumps(sharding)}).encode(),
        "w/zarr.json": _zarr3([1], [1]), "w/c/0": b"\0",
    })  # fmt: skip


@_sample("orbax: axes of a sharding")
def _orbax_sharding(directory: Path, n: int) -> None:
    axes = [f"x{number}" for number in range(n)]
    sharding = {
        "sharding_type": "NamedSharding", "shape": [1] * n, "axis_names": axes, "partition_spec": [axes],
        "device_mesh": {"mesh": [{"id": 0}]},
    }  # fmt: skip
    _put_sharded(directory, sharding)


@_sample("orbax: large axes of a sharding")
def _orbax_mesh(directory: Path, n: int) -> None:
    sharding = {
        "sharding_type": "NamedSharding", "shape": [(1 << 62) - 1] * n, "axis_names": [f"x{axis}" for axis in range(n)],
        "partition_spec": [],
    }  # fmt: skip
    _put_sharded(directory, sharding)


@_sample("orbax: a msgpack file")
def _orbax_msgpack(directory: Path, n: int) -> None:
    array = msgpack.ExtType(1, msgpack.packb([[1], "uint8", b"\0"]))
    _put(directory, {"checkpoint": msgpack.packb({f"w{number}": array for number in range(n)})})


@_sample("orbax: chunks in a msgpack file")
def _orbax_msgpack_chunks(directory: Path, n: int) -> None:
    part = msgpack.ExtType(1, msgpack.packb([[1], "uint8", b"\0"]))
    chunks = {str(number): part for number in range(n)}
    value = {"__msgpack_chunked_array__": True, "shape": {"0": n}, "chunks": chunks}
    _put(directory, {"checkpoint": msgpack.packb({"w": value})})


def _column(*numbers: int) -> bytes:
    return encode_varints(np.array(numbers, np.uint64))


_NODE_FILE: Final = "d/0123"


def _database(directory: Path, node: bytes, keys: int) -> None:
    frame = encode_frame(node, NODE_MAGIC)
    statistics = Statistics(keys, 0, 0)
    root = NodeReference(DataFile(_NODE_FILE, ""), 0, len(frame), node[0], statistics)
    manifest = encode_manifest(bytes(range(16)), Version(1, root, statistics, 0))
    tree = _tree_file([["w"]], use_ocdbt=True)
    _put(directory, {"_METADATA": tree, "manifest.ocdbt": manifest, _NODE_FILE: frame})


def _leaf(values: Mapping[bytes, bytes], files: bytes) -> bytes:
    """Return the body of a leaf with inline values."""
    keys = sorted(values)
    count = len(keys)
    lengths = _column(*[0] * (count - 1), *map(len, keys)) + b"".join(keys)
    return b"".join((
        b"\0", files, encode_varint(count), lengths, _column(*[len(values[key]) for key in keys]), bytes(count),
        *[values[key] for key in keys],
    ))  # fmt: skip


@_sample("ocdbt: keys")
def _ocdbt_keys(directory: Path, n: int) -> None:
    values = {f"w/c/{number}".encode(): b"\0" for number in range(n)} | {b"w/zarr.json": _zarr3([n], [1])}
    _database(directory, _leaf(values, _column(0)), len(values))


@_sample("ocdbt: files without a name")
def _ocdbt_files(directory: Path, n: int) -> None:
    """Write a database in which many values refer to a table of many files."""
    files = _column(n, *[0] * (n - 1), *[0] * n, *[0] * n)
    keys = [f"{number:08d}".encode() for number in range(n)]
    lengths = _column(*[0] * (n - 1), *map(len, keys)) + b"".join(keys)
    numbers = _column(*[n - 1] * n)
    node = b"".join((b"\0", files, encode_varint(n), lengths, _column(*[1] * n), b"\1" * n, numbers, _column(*[0] * n)))
    _database(directory, node, n)


@_sample("axlearn: an index")
def _axlearn_index(directory: Path, n: int) -> None:
    _put(directory, {"index": json.dumps([["step", 1], *[[f"w{number}", 1] for number in range(n)]]).encode()})
    (directory / "gda").mkdir()
