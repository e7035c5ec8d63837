"""The demo: a Hugging Face checkpoint is loaded into NumPy, PyTorch and JAX, and saved again."""

# mypy: allow-untyped-calls

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from ckptcore_transforms import describe, inverse
from ckptcore_transforms.maps import bert_to_scanned

import ckptcore
from examples.minilm import network_jax, network_numpy, network_scanned, network_torch
from examples.minilm.interrupted import kill_save_halfway, leftovers
from examples.minilm.pretrained import Sizes, model_directory
from examples.minilm.report import Report
from examples.minilm.tokens import tokenise

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Somebody makes music with a stringed instrument.",
    "The training job was stopped and resumed from its last checkpoint.",
    "After the crash the model continued where it had been saved.",
    "Bread needs flour, water, salt and time.",
]


def main() -> int:
    """Run the demo. Return the exit code: 1 if a claim is false."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="ckptcore-demo-") as scratch:
        run_steps(report, model_directory(), Path(scratch))
    return report.finish()


def run_steps(report: Report, pretrained: Path, scratch: Path) -> None:
    """Run all steps with the weights of a Hugging Face directory, in a scratch directory."""
    source = pretrained / "model.safetensors"
    sizes = Sizes.of(pretrained)
    tokens = tokenise(SENTENCES, pretrained)

    report.step("Read a Hugging Face checkpoint into NumPy, PyTorch and JAX")
    in_numpy: dict[str, npt.NDArray[Any]] = ckptcore.load(source)
    report.say(
        f"{len(in_numpy)} arrays, {sum(array.nbytes for array in in_numpy.values()) / 1e6:.1f} MB: {source.name}"
    )

    in_torch = network_torch.SentenceEncoder(sizes)
    ckptcore.load_into(source, in_torch)
    report.claim("the module of PyTorch has the bits of the file", same_bits(in_torch.state_dict(), in_numpy))

    four = network_jax.mesh_over(jax.devices())
    in_jax = ckptcore.load(source, abstract_weights(in_numpy, four))
    report.claim("the arrays of JAX have the bits of the file", same_bits(in_jax, in_numpy))
    split = [name for name, array in in_jax.items() if is_split(array)]
    report.claim(f"{len(split)} of them are sharded over {four.size} devices", four.size == 4 and len(split) == 61)

    report.step("Embed the same sentences with each")
    from_numpy = network_numpy.embed(in_numpy, tokens, sizes)
    from_torch = network_torch.embed(in_torch, tokens).numpy()
    from_jax = np.asarray(network_jax.embed(in_jax, tokens, sizes))
    for row, sentence in zip(from_torch @ from_torch.T, SENTENCES, strict=True):
        report.say("  ".join(f"{similarity:5.2f}" for similarity in row) + f"   {sentence}")
    report.claim(f"PyTorch and JAX agree: {agreement(from_torch, from_jax)}", agree(from_torch, from_jax))
    report.claim(f"PyTorch and NumPy agree: {agreement(from_torch, from_numpy)}", agree(from_torch, from_numpy))
    report.claim(
        "the two sentences about music are close, and so are those about checkpoints; bread is not",
        bool((from_torch @ from_torch.T)[[0, 2], [1, 3]].min() > 0.4 > (from_torch @ from_torch.T)[4, :4].max()),
    )

    report.step("Save from JAX, load into PyTorch")
    location = scratch / "from_jax"
    ckptcore.save(location, in_jax, metadata={"model": "all-MiniLM-L6-v2"})
    fresh_torch = network_torch.SentenceEncoder(sizes)
    ckptcore.load_into(location, fresh_torch)
    report.claim("every array is bit-equal", same_bits(fresh_torch.state_dict(), in_numpy))
    again = network_torch.embed(fresh_torch, tokens).numpy()
    report.claim("the embeddings are bit-equal", np.array_equal(again, from_torch))

    report.step("Save from PyTorch, load into JAX on half of the devices")
    ckptcore.save(scratch / "from_torch", fresh_torch)
    two = network_jax.mesh_over(jax.devices()[:2])
    back_in_jax = ckptcore.load(scratch / "from_torch", abstract_weights(in_numpy, two))
    report.claim("every array is bit-equal", same_bits(back_in_jax, in_numpy))
    again = np.asarray(network_jax.embed(back_in_jax, tokens, sizes))
    report.claim(f"the embeddings agree: {agreement(again, from_torch)}", agree(again, from_torch))

    change_the_tree(report, source, scratch, in_numpy, from_torch)

    report.step("Inspect it on the command line")
    run(report, "inspect", str(location), "--objects")
    run(report, "verify", str(location))
    run(report, "diff", str(source), str(location))

    report.step("Kill a save")
    left = kill_save_halfway(location, lambda: ckptcore.save(location, in_jax, overwrite=True))
    report.say(f"a process that saved a larger state to the same location was killed; it left\n{left}")
    report.claim("the earlier checkpoint still loads", same_bits(ckptcore.load(location), in_numpy))
    report.claim("and it is valid", ckptcore.verify(location).ok)
    report.claim("the files of the killed save still exist", len(leftovers(location)) == 1)
    ckptcore.save(location, fresh_torch, overwrite=True)
    report.claim("the next save succeeds", same_bits(ckptcore.load(location), in_numpy))
    report.claim("and removes the files of the killed save", leftovers(location) == [])


def change_the_tree(
    report: Report,
    source: Path,
    scratch: Path,
    in_numpy: Mapping[str, npt.NDArray[Any]],
    expected: npt.NDArray[np.float32],
) -> None:
    """Load the weights with the names and stacks of another program, and map them back."""
    report.step("Load it as a tree for jax.lax.scan, save it for Orbax, and map it back")
    pretrained = source.parent
    sizes, tokens = Sizes.of(pretrained), tokenise(SENTENCES, pretrained)
    scanned = bert_to_scanned()
    report.say("\n".join([*describe(scanned).splitlines()[:3], f"... and {len(scanned) - 3} more"]))
    mesh = network_jax.mesh_over(jax.devices())
    stored = ckptcore.metadata(source, transforms=scanned).abstract
    abstract = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=network_scanned.sharding(mesh, tuple(key.key for key in path))
            )
            if leaf.dtype == np.float32
            else leaf
        ),
        stored,
        is_leaf=lambda node: isinstance(node, ckptcore.AbstractArray),
    )
    tree = ckptcore.load(source, abstract, transforms=scanned)
    kernel = tree["encoder"]["layers"]["intermediate"]["kernel"]
    report.say(f"encoder/layers/intermediate/kernel: {kernel.dtype}{list(kernel.shape)}, {kernel.sharding.spec}")
    report.claim("each device has its part of the stacked kernels", is_split(kernel) and len(kernel.shape) == 3)
    weights = {name: part for name, part in tree.items() if name != "embeddings"}
    weights["embeddings"] = {name: part for name, part in tree["embeddings"].items() if name != "position_ids"}
    again = np.asarray(network_scanned.embed(weights, tokens, sizes))
    report.claim(f"the embeddings agree: {agreement(again, expected)}", agree(again, expected))
    ckptcore.save(scratch / "scanned", tree, layout="ocdbt")
    ckptcore.copy(scratch / "scanned", scratch / "named", layout="safetensors", transforms=inverse(scanned))
    report.claim("mapped back, every array is bit-equal", same_bits(ckptcore.load(scratch / "named"), in_numpy))


def abstract_weights(arrays: Mapping[str, npt.NDArray[Any]], mesh: jax.sharding.Mesh) -> dict[str, object]:
    """Return the abstract tree: weights as JAX arrays on a mesh, and position_ids in NumPy.

    position_ids are 64-bit integers, which JAX lacks without ``jax_enable_x64``. A tree may mix frameworks.
    """
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=network_jax.sharding(mesh, name))
        if array.dtype == np.float32
        else ckptcore.AbstractArray(array.shape, array.dtype)
        for name, array in arrays.items()
    }


def same_bits(restored: Mapping[str, Any], expected: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Return True if two dicts have the same names, dtypes, shapes and bits."""
    if restored.keys() != expected.keys():
        return False
    for name, array in expected.items():
        other = np.asarray(restored[name])
        if (other.dtype, other.shape) != (array.dtype, array.shape) or other.tobytes() != array.tobytes():
            return False
    return True


def is_split(array: object) -> bool:
    """Return True if each device has a part of the array."""
    return isinstance(array, jax.Array) and not array.sharding.is_fully_replicated


def agree(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Return True if vectors of length 1 have the same direction."""
    return bool((a * b).sum(-1).min() > 0.99999)


def agreement(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> str:
    """Return how close vectors of length 1 are, as text."""
    return f"cosine at least {(a * b).sum(-1).min():.7f}, largest difference {np.abs(a - b).max():.1e}"


def run(report: Report, *arguments: str) -> None:
    """Run a command of ``ckptcore`` and print its output, shortened."""
    report.say(f"$ ckptcore {' '.join(arguments)}")
    finished = subprocess.run(
        [sys.executable, "-m", "ckptcore", *arguments], capture_output=True, text=True, check=False
    )
    lines = (finished.stdout + finished.stderr).splitlines()
    if len(lines) > 24:
        lines = [*lines[:16], f"... {len(lines) - 22} more lines ...", *lines[-6:]]
    report.say("\n".join(lines))
    report.claim(f"`ckptcore {arguments[0]}` succeeds", finished.returncode == 0)
