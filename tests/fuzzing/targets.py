"""Targets: one for each kind of file, with the places in which it is fuzzed and the calls that read it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import joblib  # type: ignore[import-untyped]
import numpy as np
import torch
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing.fixed_saves import fixed_saves
from ckptcore_view.documents import BadRequestError
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.protocols import Layout
from tests.fuzzing import reads
from tests.fuzzing.mutations import MutatorName
from tests.fuzzing.places import (
    Files,
    Place,
    database_node_place,
    files_below,
    manifest_place,
    part_place,
    place,
    root_place,
    safetensors_place,
    session_place,
    shard_place,
    zip_place,
)
from tests.fuzzing.reads import Read

_REPOSITORY: Final = Path(__file__).parents[2]
_OURS: Final = _REPOSITORY / "tests/golden/checkpoints"
_ORBAX: Final = _REPOSITORY / "plugins/layout_orbax/tests/golden"
_DCP: Final = _REPOSITORY / "plugins/layout_dcp/tests/golden"
_FORMATS: Final = _REPOSITORY / "plugins/formats/tests/golden"


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of file.

    Attributes:
        places: a function that returns the places in which such a file is fuzzed.
        reads: the calls that read the location. Each may raise the expected errors.
        expected: the errors that the calls document.
        writes: True if the calls change the directory.
    """

    places: Callable[[], Sequence[Place]]
    reads: Sequence[Read]
    expected: tuple[type[BaseException], ...] = (CheckpointError,)
    writes: bool = False


_STATE: Final[dict[str, Any]] = {
    "w": np.arange(48, dtype=np.float32).reshape(6, 8),
    "b": [np.ones(3, np.int64), ("text", 3, 2.5, None, 1j, b"bytes", True)],
    "long": "x" * 100,
}


def _saved(save: Callable[[Path], object]) -> Files:
    """Return the files of a small checkpoint ``c``, with fixed ids and times."""
    with tempfile.TemporaryDirectory() as directory, fixed_saves():
        save(Path(directory))
        return files_below(Path(directory) / "c")


_ARRAYS: Final[dict[str, Any]] = {"w": np.arange(48, dtype=np.float32).reshape(6, 8), "n": 1}
"""Fewer leaves, because each takes time."""


def _layout(layout: str | Layout, state: object = _STATE) -> Files:
    return _saved(lambda at: ckptcore.save(at / "c", state, layout=layout, context=reads.CONTEXT))


def _foreign(layout: str | Layout) -> Files:
    """Return the files of a small checkpoint without our root, as other software sees them."""
    return {key: data for key, data in _layout(layout, _ARRAYS).items() if not key.startswith("checkpoint.")}


def _golden(*parts: str) -> Files:
    """Return the files of one of our golden checkpoints, without large arrays."""
    return files_below(_OURS.joinpath(*parts))


def _roots() -> Sequence[Place]:
    composite = _golden("composite")
    several = ckptcore.SafetensorsLayout(max_file_bytes=100)
    return [
        root_place(_layout("safetensors")),
        root_place(_layout(several)),
        root_place(_layout("dcp")),
        root_place(_layout(ZarrLayout(compression="zstd"))),
        root_place(_layout(Zarr3Layout(chunk_bytes=64))),
        root_place(_layout(OcdbtLayout(chunk_bytes=64))),
        root_place(_golden("sharded")),
        root_place(_golden("finalized")),
        root_place(_golden("export")),
        root_place(_golden("export"), "weights/checkpoint.json", "weights"),
        root_place(composite),
        root_place(composite, "files.rank_0/checkpoint.json"),
        root_place(composite, "data.rank_0/checkpoint.json"),
    ]


def _parts() -> Sequence[Place]:
    return [part_place(_layout("safetensors"), table) for table in ("tree", "layout", "objects", "custom")]


def _updates() -> Sequence[Place]:
    def save(at: Path) -> None:
        ckptcore.save(at / "c/1", {"a": np.ones((2, 3)), "b": np.arange(4), "n": 1}, context=reads.CONTEXT)
        ckptcore.save(at / "c/2", {"b": np.zeros(2)}, strategy=ckptcore.Update(at / "c/1"), context=reads.CONTEXT)

    files = _saved(save)
    return [root_place(files, "2/checkpoint.json", "2"), root_place(files, "1/checkpoint.json", "2")]


def _hosts() -> Sequence[Place]:
    merged = {**_golden("hosts", "host-0", "1"), **_golden("hosts", "host-1", "1")}
    copies = "checkpoint.copies/1"
    return [
        root_place(merged),
        root_place(_golden("hosts", "host-1", "1")),
        root_place(merged, f"{copies}/checkpoint.json", copies),
        safetensors_place(merged, f"{copies}/model.safetensors"),
    ]


def _sessions() -> Sequence[Place]:
    files = _golden("partial")
    root = ".c.partial.ckptcore/checkpoint.partial.json"
    return [root_place(files, root, "c"), session_place(files, root, "c")]


def _claims() -> Sequence[Place]:
    return [root_place(_golden("claim"))]


def _leases() -> Sequence[Place]:
    record = {
        "format": "ckptcore hold", "version": 1, "hold_id": "0123456789abcdef", "host": "a", "pid": 7,
        "since": "2026-01-02T03:04:05+00:00", "lease_seconds": 30.0, "renewals": 1, "released": False,
    }  # fmt: skip
    return [place({"lease": json.dumps(record).encode()}, "lease", "json")]


def _timelines() -> Sequence[Place]:
    timeline = {
        "operation": "save", "step": 3, "save_id": "0123456789abcdef", "began": 5, "phase": ["claim", "copy"],
        "rank": [0, 1], "offset": [0, 7], "duration": [4, 5], "nbytes": [None, 8], "error": [None, "OSError: no"],
    }  # fmt: skip
    return [place({"timeline": json.dumps(timeline).encode()}, "timeline", "json")]


def _viewed_roots() -> Sequence[Place]:
    return [root_place(_golden("step", "3")), root_place(_golden("sharded")), root_place(_golden("composite"))]


def _safetensors() -> Sequence[Place]:
    saved = _foreign("safetensors")
    shard = "renamed.safetensors"  # renamed, because a file with this name and slices is refused
    sharded = {shard: _golden("sharded")["shard-00001-model-00001-of-00001.safetensors"]}
    return [
        safetensors_place(saved, "model.safetensors"),
        safetensors_place(saved, "model.safetensors", "model.safetensors"),
        safetensors_place(sharded, shard, shard),
        place(saved, "model.safetensors"),
    ]


def _indexes() -> Sequence[Place]:
    files = {key: data for key, data in _golden("finalized").items() if key != "checkpoint.json"}
    index = "model.safetensors.index.json"
    return [place(files, index, "json"), place(files, index, "json", index)]


def _shards() -> Sequence[Place]:
    files = files_below(_DCP / "hugging_face_shards")
    return [safetensors_place(files, key) for key in files if key.endswith(".safetensors")] + [
        place(files, key, "json") for key in files if key.endswith(".json")
    ]


def _dcp_metadata() -> Sequence[Place]:
    files = [_foreign("dcp"), *[files_below(_DCP / name) for name in ("two_processes", "nested", "zstd")]]
    apart = files_below(_DCP / "two_processes_apart")
    return [*[place(checkpoint, ".metadata", "pickle") for checkpoint in files], place(apart, "__0.metadata", "pickle")]


def _dcp_items() -> Sequence[Place]:
    files = [_foreign("dcp"), *[files_below(_DCP / name) for name in ("two_processes", "zstd")]]
    return [place(checkpoint, "__0_0.distcp") for checkpoint in files]


def _torch_zips() -> Sequence[Place]:
    files = files_below(_DCP / "torch_files")
    several = files_below(_DCP / "step_of_several")
    return [
        place(files, "zip.pt", location="zip.pt"),
        zip_place(files, "zip.pt", "zip.pt"),
        place(several, "scheduler.pt"),
        zip_place(several, "scheduler.pt", "."),
    ]


def _made(write: Callable[[io.BytesIO], object]) -> bytes:
    """Return the bytes that a function writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


_TENSORS: Final[dict[str, Any]] = {"t": torch.arange(6.0).reshape(2, 3), **_STATE}


def _numpy_files() -> Sequence[Place]:
    records = np.array([(1, 2.0)], [("a", "<i2"), ("b", ">f8")])
    arrays: dict[str, Any] = {"w": _ARRAYS["w"], "f": np.asfortranarray(_ARRAYS["w"]), "r": records}
    files = {
        "a.npy": _made(lambda file: np.save(file, records)),
        "o.npy": _made(lambda file: np.save(file, np.array([{"w": np.arange(3)}, "x"], object))),
        "a.npz": _made(lambda file: np.savez(file, **arrays)),
        "c.npz": _made(lambda file: np.savez_compressed(file, **arrays)),
    }
    return [place(files, name, "bytes", name) for name in files]


def _pickles() -> Sequence[Place]:
    files = {
        **{f"p{protocol}.pkl": pickle.dumps(_STATE, protocol) for protocol in range(6)},
        "t.pkl": pickle.dumps(_TENSORS),
        "j.joblib": _made(lambda file: joblib.dump({**_ARRAYS, "o": np.array([None, 1], object)}, file)),
        # This file is long enough to be read in windows.
        "long.pkl": pickle.dumps({"x": np.zeros(1 << 15), **_TENSORS, "m": np.ma.array([1, 2], mask=[False, True])}),
    }
    places = [place(files, name, mutator, name) for name in files for mutator in ("pickle", "bytes")]
    return [fuzzed for fuzzed in places if not (fuzzed.location.startswith("j") and fuzzed.mutator == "pickle")]


def _archives() -> Sequence[Place]:
    inner = _made(lambda file: torch.save(_TENSORS, file))

    def tar(file: io.BytesIO, mode: Any) -> None:
        with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as archive:
            for name in ("policy.pth", "long" * 40):
                member = tarfile.TarInfo(name)
                member.size = len(inner)
                archive.addfile(member, io.BytesIO(inner))

    def zipped(file: io.BytesIO, compression: int) -> None:
        with zipfile.ZipFile(file, "w", compression) as archive:
            archive.writestr(zipfile.ZipInfo("data"), b"{}")
            archive.writestr(zipfile.ZipInfo("policy.pth"), inner, compression)

    files = {
        "s.zip": _made(lambda file: zipped(file, 0)),
        "d.zip": _made(lambda file: zipped(file, 8)),
        "a.tar": _made(lambda file: tar(file, "w")),
        "a.tar.bz2": _made(lambda file: tar(file, "w:bz2")),
    }
    return [place(files, name, "bytes", f"{name}!/policy.pth") for name in files]


def _torch_legacy() -> Sequence[Place]:
    files = files_below(_DCP / "torch_files")
    return [place(files, "legacy.pt", mutator, "legacy.pt") for mutator in ("pickle", "bytes")]


def _deepspeed() -> Sequence[Place]:
    flat, sliced = (files_below(_FORMATS / f"deepspeed/{name}/global_step2") for name in ("zero2_bf16", "zero3_bf16"))
    universal = files_below(_FORMATS / "deepspeed/universal_zero3/global_step2_universal")
    universal = {key: data for key, data in universal.items() if "zero/" not in key or "zero/out" in key}
    optim, model = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    return [
        zip_place(flat, "mp_rank_00_model_states.pt", "."),
        zip_place(flat, f"bf16_{optim.format(0)}", "."),
        zip_place(flat, f"bf16_{optim.format(1)}", "."),
        zip_place(sliced, model.format(0), "."),
        zip_place(sliced, f"bf16_{optim.format(0)}", "."),
        zip_place(universal, "zero/out.weight/fp32.pt", "."),
    ]


def _rank_files() -> Sequence[Place]:
    mesh, sharded = files_below(_FORMATS / "ranks/mesh"), files_below(_FORMATS / "ranks/sharded")
    return [
        zip_place(mesh, "state-rank1.bin", "."),
        zip_place(sharded, "pytorch_model_fsdp_rank1.bin", "."),
        zip_place(mesh, "state-rank1.bin", "state-rank1.bin"),
    ]


def _megatron() -> Sequence[Place]:
    files = files_below(_FORMATS / "megatron/torch_dist")
    return [zip_place(files, "common.pt", "."), place(files, "metadata.json", "json"), place(files, "common.pt")]


def _manifests() -> Sequence[Place]:
    numbered = files_below(_ORBAX / "numbered_manifest")
    newest = max(key for key in numbered if "state/manifest.0" in key)
    return [
        manifest_place(files_below(_ORBAX / "v1_default"), "state/manifest.ocdbt"),
        manifest_place(files_below(_ORBAX / "v1_processes"), "state/manifest.ocdbt"),
        manifest_place(numbered, "state/manifest.ocdbt"),
        manifest_place(numbered, newest),
        place(files_below(_ORBAX / "v1_default"), "state/manifest.ocdbt"),
    ]


def _nodes() -> Sequence[Place]:
    return [
        database_node_place(files_below(_ORBAX / "v1_default"), "state"),
        database_node_place(files_below(_ORBAX / "v1_processes"), "state"),
        database_node_place(files_below(_ORBAX / "v1_zarr2"), "state"),
        database_node_place(_foreign(OcdbtLayout(chunk_bytes=64)), "state"),
        database_node_place(_foreign(OcdbtLayout(chunk_bytes=64, compression="zstd")), "state"),
    ]


def _zarr2() -> Sequence[Place]:
    plain, legacy = _foreign("zarr"), files_below(_ORBAX / "v0_pytree_plain")
    packed = [_foreign(ZarrLayout(compression=name)) for name in ("blosc", "zstd", "gzip")]
    foreign = [place(legacy, key, "json") for key in sorted(legacy) if key.endswith((".zarray", ".zattrs"))][:3]
    chunks = [place(files, "state/w/0.0") for files in packed]
    return [place(plain, "state/w/.zarray", "json"), place(packed[0], "state/w/.zarray", "json"), *foreign, *chunks]


def _zarr3() -> Sequence[Place]:
    plain, sharded = _foreign(Zarr3Layout(compression="zstd")), _foreign(Zarr3Layout(chunk_bytes=64))
    foreign, kernel = files_below(_ORBAX / "v1_zarr3_plain"), "state/params.dense.kernel"
    return [
        place(plain, "state/w/zarr.json", "json"),
        place(plain, "state/w/c/0/0"),
        place(sharded, "state/w/zarr.json", "json"),
        shard_place(sharded, "state/w/c/0/0", 3),
        place(foreign, f"{kernel}/zarr.json", "json"),
        shard_place(foreign, f"{kernel}/c/0/0", 1),
        place(foreign, "state/step/zarr.json", "json"),
    ]


_ORBAX_FILES: Final = [
    ("v0_zarr3", "_METADATA", "."),
    ("v1_sharded", "state/_METADATA", "."),
    ("v1_sharded", "state/_sharding", "."),
    ("v1_leaves", "state/_strings.json", "."),
    ("v1_sharded", "state/array_metadatas/process_0", "."),
    ("v1_default", "_CHECKPOINT_METADATA", "."),
    ("v0_rich_types", "_METADATA", "."),
    ("v0_items", "config/metadata", "."),
    ("v0_items", "rng/jax_random_key_metadata/metadata", "."),
    ("manager", "7/metrics/metrics", "7"),
]


def _orbax() -> Sequence[Place]:
    return [place(files_below(_ORBAX / name), key, "json", at) for name, key, at in _ORBAX_FILES]


def _aggregates() -> Sequence[Place]:
    files = [
        ("legacy_msgpack", "checkpoint", "."),
        ("flax_msgpack", "checkpoint", "."),
        ("flax_processes", "checkpoint_10", "checkpoint_10"),
        ("flax_file", "checkpoint_10", "checkpoint_10"),
    ]
    mutators: Sequence[MutatorName] = ("msgpack", "bytes")
    return [place(files_below(_ORBAX / name), key, mutator, at) for name, key, at in files for mutator in mutators]


def _axlearn() -> Sequence[Place]:
    files = files_below(_ORBAX / "axlearn/step_00000004")
    iterator = "python_0/input_iter"
    zarray = "gda/model/decoder/emb/weight/.zarray"
    return [place(files, "index", "json"), place(files, iterator, "msgpack"), place(files, zarray, "json")]


def _requests() -> Sequence[Place]:
    run = {f"viewed/{key}": data for key, data in _golden("step").items()}
    tree = {f"viewed/{key}": data for key, data in _layout("safetensors").items()}
    other = {f"other/{key}": data for key, data in _layout("zarr3").items()}
    requests: list[tuple[Files, str, Mapping[str, str]]] = [
        (tree, "view", {}),
        (tree, "checkpoint", {"at": "//other"}),
        (tree, "tree", {"at": ""}),
        (tree, "array", {"at": "", "leaf": "0", "version": ""}),
        (tree, "elements", {"at": "", "leaf": "0", "index": "0:2, ::3"}),
        (tree, "statistics", {"at": "//other", "of": "", "leaf": "0"}),
        (tree, "differences", {"at": "", "other": "//other"}),
        (tree, "difference", {"at": "", "other": "//other", "leaf": "0"}),
        (run, "run", {"last": "5", "policy": "latest_n=3, every_n_steps=5"}),
        (run, "tree", {"at": "3"}),
    ]
    return [
        place({**files, **other, "request": json.dumps([name, parameters]).encode()}, "request", "json")
        for files, name, parameters in requests
    ]


def _step_names() -> Sequence[Place]:
    names = ["3", "step_00000004", "checkpoint-5", "global_step6", "iter_0000007", ".8", "9.orbax-checkpoint-tmp-1"]
    return [place({"names": json.dumps(names).encode()}, "names", "json")]


def _copied() -> Sequence[Place]:
    composite = _golden("composite")
    return [
        root_place(_layout("safetensors")),
        root_place(composite),
        root_place(composite, "files.rank_0/checkpoint.json"),
        place(files_below(_ORBAX / "v1_zarr3_plain"), "_CHECKPOINT_METADATA", "json"),
        place(files_below(_DCP / "nested"), ".metadata", "pickle"),
    ]


def _directories() -> Sequence[Place]:
    key = ".ckptcore/metadata.json"
    files = {**_golden("step"), key: b'{"name":"a run","tags":["x",1]}'}
    return [place(files, key, "json"), root_place(files, "3/checkpoint.json")]


def _replaced_safetensors() -> Sequence[Place]:
    files = {key: data for key, data in _layout("safetensors", _ARRAYS).items() if key != "checkpoint.json"}
    return [safetensors_place(files, "model.safetensors"), place(files, "model.safetensors")]


def _replaced_dcp() -> Sequence[Place]:
    files = _foreign("dcp")
    return [place(files, ".metadata", "pickle"), place(files, "__0_0.distcp"), root_place(_layout("dcp", _ARRAYS))]


def _trainer() -> Sequence[Place]:
    weights = _foreign("safetensors")["model.safetensors"]
    state = io.BytesIO()
    torch.save({"step": 1}, state)
    index = {"metadata": {"total_size": 192}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    files = {
        "checkpoint-3/trainer_state.json": b'{"global_step":3,"epoch":1.0,"log_history":[{"loss":0.5}]}',
        "checkpoint-3/model-00001-of-00001.safetensors": weights,
        "checkpoint-3/model.safetensors.index.json": json.dumps(index).encode(),
        **{f"checkpoint-3/{name}": state.getvalue() for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")},
    }
    ours = {f"checkpoint-3/{key}": data for key, data in _with_digests().items()}
    return [
        place(files, "checkpoint-3/trainer_state.json", "json"),
        place(files, "checkpoint-3/model.safetensors.index.json", "json"),
        place(files, "checkpoint-3/optimizer.pt"),
        safetensors_place(files, "checkpoint-3/model-00001-of-00001.safetensors"),
        root_place(ours, "checkpoint-3/checkpoint.json"),
    ]


def _with_digests() -> Files:
    """Return the files of a checkpoint with digests of files, as the adapter of the Trainer writes them."""
    metadata = {"files": {"trainer_state.json": hashlib.sha256(b"{}").hexdigest()}}
    files = _saved(lambda at: ckptcore.save(at / "c", _ARRAYS, metadata=metadata, context=reads.CONTEXT))
    return {**files, "trainer_state.json": b"{}"}


TARGETS: Final[Mapping[str, Target]] = {
    "root": Target(_roots, reads.READS),
    "root-part": Target(_parts, reads.READS),
    "update": Target(_updates, (*reads.READS, reads.save_update), writes=True),
    "host": Target(_hosts, reads.READS),
    "session": Target(
        _sessions, (reads.look, reads.save_session, reads.finalize, reads.verify, reads.delete), writes=True
    ),
    "claim": Target(_claims, (reads.look, reads.verify, reads.save_over, reads.delete), writes=True),
    "lease": Target(_leases, (reads.describe_lease,)),
    "timeline": Target(_timelines, (reads.read_timeline,)),
    "viewed-root": Target(_viewed_roots, (reads.view,)),
    "directory": Target(_directories, (reads.read_run,)),
    "safetensors": Target(_safetensors, reads.READS),
    "safetensors-index": Target(_indexes, reads.READS),
    "hugging-face-shards": Target(_shards, reads.READS),
    "dcp-metadata": Target(_dcp_metadata, reads.READS),
    "dcp-items": Target(_dcp_items, reads.READS),
    "torch-zip": Target(_torch_zips, reads.READS),
    "torch-legacy": Target(_torch_legacy, reads.READS),
    "deepspeed": Target(_deepspeed, reads.READS),
    "rank-files": Target(_rank_files, reads.READS),
    "megatron": Target(_megatron, reads.READS),
    "numpy": Target(_numpy_files, reads.READS),
    "pickle": Target(_pickles, reads.READS),
    "archive": Target(_archives, [reads.with_own_temporary_files(read) for read in reads.READS]),
    "ocdbt-manifest": Target(_manifests, reads.READS),
    "ocdbt-node": Target(_nodes, reads.READS),
    "zarr2": Target(_zarr2, reads.READS),
    "zarr3": Target(_zarr3, reads.READS),
    "orbax": Target(_orbax, reads.READS),
    "aggregate": Target(_aggregates, reads.READS),
    "axlearn": Target(_axlearn, reads.READS),
    "viewer": Target(_requests, (reads.view_with_parameters,), (CheckpointError, BadRequestError)),
    "step-names": Target(_step_names, (reads.read_step_names,)),
    "safetensors-replacement": Target(
        _replaced_safetensors, (reads.load_safetensors, reads.slice_safetensors), (CheckpointError, SafetensorError)
    ),
    "dcp-replacement": Target(_replaced_dcp, (reads.load_dcp,), (CheckpointError, CheckpointException)),
    "trainer": Target(_trainer, (reads.find_sound,), (CheckpointError,)),
    "copy": Target(_copied, (reads.list_manifest, reads.copy, reads.convert), writes=True),
}
"""By name, every kind of file."""
