"""Orbax's options, translated to those of ckptcore."""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout

import ckptcore
from ckptcore.context import JobOptions, MemoryOptions
from ckptcore_integrations.orbax_v1.library import v1

_COMPRESSION: Final = "zstd"

_UNLIMITED_BYTES: Final = 1 << 62
"""Orbax's data file size 0 means that files have no maximum size."""


def layout_of(
    context: v1.Context, rules: Mapping[str, ArrayRule], handlers: Mapping[str, str], *, item: str = "state"
) -> OcdbtLayout | Zarr3Layout | ZarrLayout:
    """Return the layout of a save with a Context of Orbax.

    Args:
        context: the Context of Orbax.
        rules: rules for arrays, by name.
        handlers: class names of Orbax's handlers, by name of a checkpointable.
        item: name of the tree, in a checkpoint of one tree.

    Raises:
        NotImplementedError: an option cannot be honoured; names it and gives the reason.
    """
    saving = context.array.saving
    _refuse(_of_saves(context))
    options: dict[str, Any] = {
        "compression": _COMPRESSION if saving.use_compression else None,
        "rules": tuple(rules.values()),
        "handlers": dict(handlers),
        "item": item,
    }
    if saving.storage_options.chunk_byte_size is not None:
        options["chunk_bytes"] = saving.storage_options.chunk_byte_size
    if not saving.use_ocdbt:
        return Zarr3Layout(**options) if saving.use_zarr3 else ZarrLayout(**options)
    if saving.ocdbt_target_data_file_size is not None:
        options["data_file_bytes"] = saving.ocdbt_target_data_file_size or _UNLIMITED_BYTES
    return OcdbtLayout(zarr_format=3 if saving.use_zarr3 else 2, **options)


def context_of(context: v1.Context) -> ckptcore.Context:
    """Return the Context of ckptcore for a Context of Orbax. Equal options share one Context.

    Raises:
        NotImplementedError: an option cannot be honoured.
    """
    _refuse(_of_all(context))
    memory = context.memory
    limits = [limit for limit in (memory.write_concurrent_bytes, memory.transfer_concurrent_bytes) if limit is not None]
    return _context(
        min(limits, default=None), memory.read_concurrent_bytes, context.array.loading.use_load_and_broadcast
    )


@functools.cache
def _context(save_bytes: int | None, load_bytes: int | None, broadcast: bool) -> ckptcore.Context:
    return ckptcore.Context(
        memory=MemoryOptions(save_bytes=save_bytes, load_bytes=load_bytes),
        job=JobOptions(reads="broadcast" if broadcast else "all"),
    )


def matching_of(context: v1.Context) -> ckptcore.Matching:
    """Return the differences that a load with a Context of Orbax allows.

    Raises:
        NotImplementedError: an option cannot be honoured.
    """
    loading = context.array.loading
    if not loading.raise_array_data_missing_error:
        raise NotImplementedError(
            "array.loading.raise_array_data_missing_error=False: ckptcore does not replace missing elements by zeros. "
            "Leave the option True"
        )
    return ckptcore.Matching(
        keys="text",
        cast="truncating",
        shapes=("pad", "truncate") if loading.enable_padding_and_truncation else (),
        unexpected="ignore" if context.pytree.loading.partial_load else "error",
    )


def storage_options(context: v1.Context, tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return Orbax's storage options of each leaf of a tree, by its key path.

    Raises:
        NotImplementedError: `shard_axes` is set.
    """
    saving = context.array.saving
    create: Callable[..., Any] | None = saving.scoped_storage_options_creator
    arguments: dict[tuple[Any, ...], Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        chosen = (create(path, leaf) if create is not None else None) or saving.storage_options
        if chosen.shard_axes or saving.storage_options.shard_axes:
            raise NotImplementedError(
                "StorageOptions(shard_axes=...): ckptcore divides shards along their longest axes. Set chunk_byte_size "
                "only"
            )
        arguments[path] = chosen
    return arguments


def array_rules(context: v1.Context, options: Mapping[tuple[Any, ...], Any]) -> dict[str, ArrayRule]:
    """Return the rules for arrays whose chunk size differs from that of the Context, by name of the array.

    Args:
        context: the Context of Orbax.
        options: storage options of each leaf, by key path.
    """
    usual = context.array.saving.storage_options.chunk_byte_size
    rules: dict[str, ArrayRule] = {}
    for path, chosen in options.items():
        if chosen.chunk_byte_size not in (None, usual):
            array = ".".join(text_of(key) for key in path)
            rules[array] = ArrayRule(pattern=glob.escape(array), chunk_bytes=chosen.chunk_byte_size)
    return rules


def text_of(key: Any) -> str:
    """Return the text of a key of `jax.tree_util`."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _refuse(refused: Mapping[str, tuple[bool, str]]) -> None:
    for option, (is_set, reason) in refused.items():
        if is_set:
            raise NotImplementedError(f"{option}: {reason}")


def _of_all(context: v1.Context) -> dict[str, tuple[bool, str]]:
    """Return the options that saves and loads refuse, each with True if it is set, and the reason to refuse it."""
    job, memory = context.multiprocessing, context.memory
    processes = set(range(jax.process_count()))
    return {
        "multiprocessing.primary_host": (
            job.primary_host != 0,
            "process 0 commits checkpoints. Leave it 0",
        ),
        "multiprocessing.active_processes": (
            job.active_processes not in (None, processes),
            "all processes of the job save and load together. Leave it None",
        ),
        "pathways.checkpointing_impl": (
            context.pathways.checkpointing_impl is not None and v1.multihost.is_pathways_backend(),
            "ckptcore moves data by colocated Python itself. Leave it None",
        ),
        "memory.regulator_options": (
            memory.regulator_options is not None,
            "ckptcore does not regulate memory by measurements. Set write_concurrent_bytes",
        ),
        "memory.is_prioritized_key_fn": (
            memory.is_prioritized_key_fn is not None,
            "ckptcore copies all arrays before a save returns, so that none needs priority. Leave it None",
        ),
        "memory.serialization_status_callback": (
            memory.serialization_status_callback is not None,
            "ckptcore does not report single arrays. Leave it None",
        ),
    }


def _of_saves(context: v1.Context) -> dict[str, tuple[bool, str]]:
    """Return the options that saves refuse, each with True if it is set, and the reason to refuse it."""
    saving = context.array.saving
    layout = context.checkpoint_layout
    return {
        "checkpoint_layout": (
            layout not in (v1.options.CheckpointLayout.ORBAX, v1.options.CheckpointLayout.AUTO),
            f"Orbax does not save as {layout.value}. Use ckptcore.save(layout='safetensors')",
        ),
        "file.path_permission_mode": (
            context.file.path_permission_mode is not None,
            "ckptcore creates files with the permissions of the process. Set its umask",
        ),
        "pytree.saving.pytree_metadata_options": (
            context.pytree.saving.pytree_metadata_options.support_rich_types,
            "the checkpoint has exact types in checkpoint.json, but not in Orbax's _METADATA. Leave it as it is",
        ),
        "array.saving.enable_write_sharding_file": (
            not saving.enable_write_sharding_file,
            "ckptcore always stores shardings. Leave it True",
        ),
        "array.saving.array_metadata_store": (
            saving.array_metadata_store is None,
            "ckptcore always stores the metadata of arrays. Leave it as it is",
        ),
        "array.saving.enable_replica_parallel_separate_folder": (
            saving.enable_replica_parallel_separate_folder,
            "ckptcore writes the data of a process into one directory. Leave it False",
        ),
    }
