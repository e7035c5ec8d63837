"""Steps in the ``output_dir`` of a Trainer of Transformers: finding the newest sound step, and deleting old steps.

A step is sound, damaged, or unknown. Only a step that is certainly damaged is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckptcore.events import logger_named
from ckptcore_integrations.added_files import MISSING_FILE, check_files, is_checkpoint, open_file

logger = logger_named("ckptcore.integrations.transformers")

_STATE = "trainer_state.json"
_ASIDE = ".replaced"
_STEP = re.compile(r"checkpoint-(\d+)")
_WHOLE_WEIGHTS = re.compile(r"(model|pytorch_model)(?!_fsdp)[\w.-]*\.(safetensors|bin)|pytorch_model_fsdp(_\d+)?\.bin")
_ADAPTER_WEIGHTS = re.compile(r"adapter_model\.(safetensors|bin)")
_SHARDED_WEIGHTS = re.compile(r"pytorch_model_fsdp_\d+")
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)")
_SHARDED_OPTIMIZER = re.compile(r"optimizer_\d+")
_OF_RANK = re.compile(r"(?P<kind>pytorch_model_fsdp(_\d+)?|optimizer_\d+)_rank(?P<rank>\d+)\.bin")
_RANDOM = re.compile(r"rng_state(_(?P<rank>\d+))?\.pth")
_OTHER_STATES = re.compile(r"scheduler\.pt|scaler\.pt|training_args\.bin")
_ZERO = re.compile(
    r"(\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)(_sp_rank_\d+)?_(?P<kind>model|optim)_states\.pt"
)
_DESCRIPTIONS = (".json", ".jinja", ".md", ".model", ".py", ".txt")
"""Suffixes of files of a step that contain no state."""

_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError, *MISSING_FILE)
"""Errors that prove that a step is damaged. Other errors only show that it could not be read."""

_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,  # the archive needs a password, or a compression that Python lacks
    ValueError,
)
"""Errors of `zipfile` for damaged archives."""


class _UnknownError(Exception):
    """A step has files that this module does not know."""


def steps_of(directory: str | os.PathLike[str]) -> dict[int, str]:
    """Return the paths of the steps in a directory by their numbers, lowest first. Times of files are ignored."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = {int(match[1]): os.path.join(directory, name) for name in names if (match := _STEP.fullmatch(name))}
    return dict(sorted(steps.items()))


def delete_old_steps(
    saved: str, limit: int | None, *, kept: Iterable[str | None], before: Callable[[], None] = lambda: None
) -> None:
    """Delete the lowest steps beyond a limit, but only below the step that was just saved.

    Higher steps are from before the run went back to an earlier step. One of them may be the newest sound step, and the
    run will replace or pass them.

    Args:
        saved: the step that was just saved.
        limit: number of steps to keep. None, or a number below one, keeps all steps.
        kept: other steps that are never deleted, such as the best one.
        before: called before a step is deleted, for example to wait for its upload.
    """
    if limit is None or limit <= 0:
        return
    steps = steps_of(os.path.dirname(saved))
    number = int(_STEP.fullmatch(os.path.basename(saved))[1])  # type: ignore[index]  # the name of a step
    protected = {os.path.realpath(path) for path in kept if path is not None}
    old = [path for step, path in steps.items() if step < number and os.path.realpath(path) not in protected]
    for path in old[: max(len(steps) - limit, 0)]:
        before()
        shutil.rmtree(path, ignore_errors=True)


def set_aside(step: str) -> None:
    """Rename the step of a plain Trainer that a save replaces.

    If the save does not commit, `bring_back` undoes this.
    """
    aside = step + _ASIDE
    if os.path.isdir(aside):
        shutil.rmtree(aside)
    os.rename(step, aside)


def delete_set_aside(step: str) -> None:
    """Delete the step that was set aside, after the commit."""
    shutil.rmtree(step + _ASIDE, ignore_errors=True)


def bring_back(directory: Path) -> None:
    """Undo `set_aside` for steps whose save did not commit."""
    for name in os.listdir(directory) if directory.is_dir() else []:
        step = directory / name.removesuffix(_ASIDE)
        if name.endswith(_ASIDE) and not step.exists():
            os.rename(directory / name, step)


def newest_sound_step(directory: Path) -> str | None:
    """Return the path of the newest sound step, or None if there is none. See `newest_sound`.

    Raises:
        CheckpointError: the state of a step is unknown.
    """
    bring_back(directory)
    for step, path in reversed(steps_of(directory).items()):
        try:
            _judge(Path(path), step)
        except _DAMAGE as error:
            logger.warning("%s is skipped: %s", path, error)
        except (_UnknownError, CheckpointError, OSError) as error:
            raise CheckpointError(
                f"{path}: cannot tell whether this step is complete: {error}. It is not skipped, because a run that "
                "begins at an older step would replace it. To resume from it, pass "
                f"resume_from_checkpoint={path!r}. To resume from an older step, move the directory away"
            ) from error
        else:
            return path
    return None


def _judge(path: Path, step: int) -> None:
    """Return normally if a step is sound.

    Raises:
        _UnknownError, CheckpointError, OSError: one of `_DAMAGE` if the step is damaged; another error if the state is
            unknown.
    """
    if is_checkpoint(path):
        check_files(path)
        report = ckptcore.verify(path)
        if not report.ok:
            raise CorruptCheckpointError(report.problems[0].message)
        return
    if _document(path / _STATE).get("global_step") != step:
        raise CorruptCheckpointError(f"{_STATE} is not of step {step}")
    _TrainerStep(path).check()


class _TrainerStep:
    """The files of a step that a plain Trainer wrote: alone, with PEFT, FSDP or DeepSpeed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = sorted(os.listdir(path))
        self._adapters = [
            path,
            *(path / name for name in self._names if (path / name / "adapter_config.json").is_file()),
        ]
        self._ranks: dict[str, set[int]] = {}
        for name in self._names:
            if (match := _OF_RANK.fullmatch(name)) or ((match := _RANDOM.fullmatch(name)) and match["rank"]):
                kind = match.groupdict().get("kind", "rng_state")
                self._ranks.setdefault(kind, set()).add(int(match["rank"]))

    def check(self) -> None:
        """Check the existing files, and then that none is missing."""
        has_weights = self._check_weights() | self._check_adapters() | self._check_deepspeed()
        self._check_ranks()
        for name in self._names:
            if _SHARDED_WEIGHTS.fullmatch(name) or _SHARDED_OPTIMIZER.fullmatch(name):
                _check_sharded(self._path / name)
            elif self._is_archive(name):
                _check_archive(self._path / name)
        if not has_weights:
            self._lacks("weights are missing")
        by_deepspeed = "latest" in self._names
        states = {
            "the optimizer": by_deepspeed or self._has(_OPTIMIZER, _SHARDED_OPTIMIZER, _OF_RANK, kind="optimizer"),
            "the scheduler": by_deepspeed or "scheduler.pt" in self._names,
            "the random generators": self._has(_RANDOM),
        }
        lacking = [name for name, state in states.items() if not state]
        if lacking and any(states.values()):
            self._lacks(f"the state of {' and of '.join(lacking)} is missing")

    def _has(self, *patterns: re.Pattern[str], kind: str = "") -> bool:
        matches = [match for name in self._names for pattern in patterns if (match := pattern.fullmatch(name))]
        return any(match[0].startswith(kind) for match in matches)

    def _is_archive(self, name: str) -> bool:
        patterns = (_WHOLE_WEIGHTS, _OPTIMIZER, _OF_RANK, _RANDOM, _OTHER_STATES)
        return any(pattern.fullmatch(name) for pattern in patterns)

    def _check_weights(self) -> bool:
        indexes = [name for name in self._names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
        for index in indexes:
            if missing := sorted(_shards(self._path / index) - set(self._names)):
                raise CorruptCheckpointError(f"weights are missing: {missing[0]}, which {index} names")
        return self._has(_WHOLE_WEIGHTS) or self._has(_SHARDED_WEIGHTS, _OF_RANK, kind="pytorch_model")

    def _check_adapters(self) -> bool:
        differs = False
        for directory in self._adapters:
            weights = [name for name in os.listdir(directory) if _ADAPTER_WEIGHTS.fullmatch(name)]
            config = directory / "adapter_config.json"
            if weights or config.is_file():
                if not weights:
                    self._lacks(f"weights of the adapter in {directory.name} are missing")
                _document(config)
                for name in weights:
                    _check_archive(directory / name)
                differs = True
        return differs

    def _check_deepspeed(self) -> bool:
        tags = [name for name in self._names if name.startswith("global_step")]
        if "latest" not in self._names:
            if tags:
                raise CorruptCheckpointError(f"the file 'latest' is missing, which names {tags[0]}")
            return False
        with open_file(self._path / "latest") as file:
            tag = file.read(256).decode(errors="replace").strip()
        if tag not in self._names:
            raise CorruptCheckpointError(f"the directory {tag!r} is missing, which 'latest' names")
        names = os.listdir(self._path / tag)
        archives = [name for name in names if name.endswith("_states.pt")]
        if not archives:
            _unknown(f"{tag} has no file *_states.pt of DeepSpeed")
        by_kind: dict[tuple[str, str], set[int]] = {}
        for match in filter(None, map(_ZERO.fullmatch, archives)):
            by_kind.setdefault((match["kind"], match["model"]), set()).add(int(match["rank"]))
        models = {model for _, model in by_kind}
        for (kind, model), ranks in by_kind.items():
            self._ranks[f"{tag}, mp_rank_{model}, {kind}_states"] = {
                len(models) * rank + place for rank in ranks for place in range(len(models))
            }
        if not any(name.endswith("model_states.pt") for name in archives):
            raise CorruptCheckpointError(f"{tag} has no *_model_states.pt")
        for name in archives:
            _check_archive(self._path / tag / name)
        return True

    def _check_ranks(self) -> None:
        """Check that each kind of files has the files of all ranks."""
        size = max((max(ranks) + 1 for ranks in self._ranks.values()), default=0)
        for kind, ranks in self._ranks.items():
            if missing := sorted(set(range(size)) - ranks):
                raise CorruptCheckpointError(f"of {size} ranks, {kind} of rank {missing[0]} is missing")

    def _lacks(self, problem: str) -> NoReturn:
        """Raise CorruptCheckpointError for a missing part, or _UnknownError if an unknown file may contain it."""
        known = {"latest", _STATE, *(path.name for path in self._adapters)}
        patterns = (_SHARDED_WEIGHTS, _SHARDED_OPTIMIZER, _ADAPTER_WEIGHTS)
        others = [
            name
            for name in self._names
            if name not in known
            and not self._is_archive(name)
            and not any(pattern.fullmatch(name) for pattern in patterns)
            and (not name.endswith(_DESCRIPTIONS) or (self._path / name).is_dir())
            and not name.startswith("global_step")
        ]
        if others:
            _unknown(f"{problem}, unless they are in {', '.join(others[:5])}")
        raise CorruptCheckpointError(problem)


def _unknown(problem: str) -> NoReturn:
    raise _UnknownError(problem)


def _check_sharded(directory: Path) -> None:
    """Check a directory that FSDP wrote with torch.distributed.checkpoint."""
    if not (directory / ".metadata").exists():
        raise CorruptCheckpointError(f"{directory.name}/.metadata is missing")
    report = ckptcore.verify(directory)
    if not report.ok:
        raise CorruptCheckpointError(report.problems[0].message)


def _check_archive(path: Path) -> None:
    """Check a file of safetensors or of torch.save."""
    if path.name.endswith(".safetensors"):
        ckptcore.metadata(path)  # checks that the header describes all bytes
        return
    with open_file(path) as file:
        if file.read(1) == b"\x80":
            _unknown(f"{path.name} is a pickle without checksums: the old format of torch.save")
    check_zip(path)


def check_zip(path: Path) -> None:
    """Raise CorruptCheckpointError unless all members of an archive have valid checksums.

    Reads at most as many bytes as the file has: refuses compressed members, and members that are together longer than
    the file.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CorruptCheckpointError(f"{path.name} has compressed members, which torch.save does not write")
            if sum([member.file_size for member in members]) > os.fstat(file.fileno()).st_size:
                raise CorruptCheckpointError(f"{path.name} has members that are together longer than the file")
            broken = archive.testzip()
    except _ZIP_ERRORS as error:
        raise CorruptCheckpointError(f"{path.name} is not an intact zip archive: {error!r}") from error
    if broken is not None:
        raise CorruptCheckpointError(f"{path.name} is damaged in {broken}")


def _shards(index: Path) -> set[str]:
    """Return the names of the files in an index of weights."""
    names: Mapping[str, Any] | None = _document(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CorruptCheckpointError(f"{index.name} does not name the files of the weights")
    return set(names.values())


def _document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        with open_file(path) as file:
            document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{path.name} is not a JSON object")
    return document
