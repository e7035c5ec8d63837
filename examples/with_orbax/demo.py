"""The demo: each library loads checkpoints of the other, on other devices or in another framework, bit for bit."""

# mypy: allow-untyped-calls

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from ckptcore_orbax import OcdbtLayout
from orbax.checkpoint import v1 as ocp  # type: ignore[import-untyped]  # it has no types

import ckptcore
from examples.minilm import network_jax, network_torch
from examples.minilm.demo import abstract_weights, agree, agreement, same_bits
from examples.minilm.pretrained import Sizes, model_directory
from examples.minilm.report import Report
from examples.minilm.tokens import tokenise

SENTENCES = ["A man is playing a guitar on stage.", "Bread needs flour, water, salt and time."]


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
    original: dict[str, npt.NDArray[Any]] = ckptcore.load(source)
    four = network_jax.mesh_over(jax.devices())
    weights = ckptcore.load(source, abstract_weights(original, four))
    vectors = np.asarray(network_jax.embed(weights, tokens, sizes))

    report.step("Save with ckptcore, load with Orbax")
    ours = scratch / "ours"
    layout = OcdbtLayout(chunk_bytes=4 << 20)
    ckptcore.save(ours, weights, layout=layout, metadata={"model": "all-MiniLM-L6-v2"})
    report.say(f"{len(weights)} arrays on {four.size} devices, {megabytes(ours)} in {len(files(ours))} files")
    loaded = ocp.load(ours, abstract_for_orbax(weights))
    report.claim("the arrays of Orbax have the bits that were saved", same_bits(loaded, original))
    report.claim(
        "on the same devices", all(loaded[name].sharding == weights[name].sharding for name in arrays_of(weights))
    )
    again = np.asarray(network_jax.embed(loaded, tokens, sizes))
    report.claim("the network returns the same vectors, bit for bit", np.array_equal(again, vectors))
    said = ocp.metadata(ours).custom_metadata
    report.claim(f"and Orbax reads the metadata: {said}", said == {"model": "all-MiniLM-L6-v2"})

    report.step("Save with Orbax, load with ckptcore on half of the devices, and into PyTorch")
    theirs = scratch / "theirs"
    ocp.save(theirs, weights)
    report.say(f"{megabytes(theirs)} in {len(files(theirs))} files, compressed")
    two = network_jax.mesh_over(jax.devices()[:2])
    halved = ckptcore.load(theirs, abstract_weights(original, two))
    report.claim("every array is bit-equal", same_bits(halved, original))
    again = np.asarray(network_jax.embed(halved, tokens, sizes))
    report.claim(f"on {two.size} devices the vectors agree: {agreement(again, vectors)}", agree(again, vectors))
    module = network_torch.SentenceEncoder(sizes)
    ckptcore.load_into(theirs, module)
    again = network_torch.embed(module, tokens).numpy()
    report.claim(f"and in PyTorch: {agreement(again, vectors)}", agree(again, vectors))

    report.step("Convert the checkpoint of Orbax to safetensors")
    published = scratch / "published"
    ckptcore.copy(theirs, published, layout="safetensors")
    tensors = safetensors.numpy.load_file(published / "model.safetensors")
    report.claim("the safetensors library reads the bits of the original file", same_bits(tensors, original))

    report.step("Continue a run of Orbax")
    run = scratch / "run"
    with ocp.training.Checkpointer(run) as theirs_run:
        theirs_run.save(1, weights)
    with ckptcore.Checkpointer(run, layout=layout) as ours_run:
        report.claim("the Checkpointer of ckptcore finds step 1", ours_run.steps == (1,))
        ours_run.save(2, ours_run.load(1, abstract_weights(original, four)), metrics={"loss": 0.5})
    with ocp.training.Checkpointer(run) as theirs_run:
        latest = theirs_run.latest
        report.claim(
            "and that of Orbax finds step 2, with its metrics",
            latest is not None and (latest.step, latest.metrics) == (2, {"loss": 0.5}),
        )
        report.claim("and loads it", same_bits(theirs_run.load(2, abstract_for_orbax(weights)), original))

    report.step("Flip one bit of the elements")
    flip_a_bit(ours)
    damaged = damaged_array(ours, report)
    report.claim(f"ckptcore names the damaged array: {damaged}", damaged in weights)
    report.claim("Orbax notices it too, by the CRC32C after each chunk", refused_by_orbax(ours, weights, str(damaged)))


def abstract_for_orbax(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the abstract tree with which Orbax loads arrays with their shardings."""
    make: Any = jax.ShapeDtypeStruct  # its constructor has no types
    return {
        name: make(array.shape, array.dtype, sharding=array.sharding) if isinstance(array, jax.Array) else array
        for name, array in weights.items()
    }


def arrays_of(weights: Mapping[str, Any]) -> list[str]:
    """Return the names of the JAX arrays."""
    return [name for name, array in weights.items() if isinstance(array, jax.Array)]


def files(directory: Path) -> list[Path]:
    """Return the files below a directory."""
    return [path for path in directory.rglob("*") if path.is_file()]


def megabytes(directory: Path) -> str:
    """Return the total size of the files below a directory, as text in megabytes."""
    return f"{sum(path.stat().st_size for path in files(directory)) / 1e6:.1f} MB"


def flip_a_bit(checkpoint: Path) -> None:
    """Flip one bit in the middle of the largest file."""
    path = max(files(checkpoint), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def damaged_array(checkpoint: Path, report: Report) -> str | None:
    """Return the array that ckptcore reports as damaged; None if the checkpoint loads."""
    try:
        ckptcore.load(checkpoint)
    except ckptcore.errors.ChecksumError as error:
        report.say(str(error).partition(": ")[2].partition(";")[0])
        return str(error).rpartition("['")[2].partition("'")[0]
    return None


def refused_by_orbax(checkpoint: Path, weights: Mapping[str, Any], damaged: str) -> bool:
    """Return True if Orbax raises an error about a checksum when it loads this array into NumPy."""
    abstract = {name: np.asarray(array) if name == damaged else ... for name, array in weights.items()}
    try:
        ocp.load(checkpoint, abstract)
    except Exception as error:  # noqa: BLE001  # Orbax has no class of its own for it
        return "Digest mismatch" in str(error)
    return False
