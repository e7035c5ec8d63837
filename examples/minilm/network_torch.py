"""The sentence encoder in PyTorch. Its state dict has the names of Hugging Face."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.minilm.pretrained import Sizes
from examples.minilm.tokens import Tokens


class Embeddings(nn.Module):
    """The vectors of tokens: the sum of the vectors of the word, of the position and of the type."""

    position_ids: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.hidden)
        self.token_type_embeddings = nn.Embedding(sizes.token_types, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)
        self.register_buffer("position_ids", torch.arange(sizes.positions)[None])

    def forward(self, numbers: Tensor) -> Tensor:
        places = self.position_ids[:, : numbers.shape[1]]
        words = self.word_embeddings(numbers) + self.token_type_embeddings.weight[0]
        normed: Tensor = self.LayerNorm(words + self.position_embeddings(places))
        return normed


class SelfAttention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.hidden, sizes.hidden)
        self.key = nn.Linear(sizes.hidden, sizes.hidden)
        self.value = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A projection to the hidden size, the residual connection and the layer norm."""

    def __init__(self, inputs: int, sizes: Sizes) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(inner) + residual)
        return normed


class Layer(nn.Module):
    """One transformer layer: attention, then the feed-forward part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(sizes), "output": Output(sizes.hidden, sizes)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(sizes.hidden, sizes.intermediate)})
        self.output = Output(sizes.intermediate, sizes)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, allowed), hidden)
        expanded = functional.gelu(self.intermediate["dense"](hidden))
        result: Tensor = self.output(expanded, hidden)
        return result


class SentenceEncoder(nn.Module):
    """BERT. The vector of a sentence is the mean of its token vectors, normalised to length 1."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))})
        # Sentence embeddings do not use the pooler. It exists so that the module has every array of the checkpoint.
        self.pooler = nn.ModuleDict({"dense": nn.Linear(sizes.hidden, sizes.hidden)})

    def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embeddings(numbers)
        allowed = mask[:, None, None, :].bool()
        for layer in self.encoder["layer"]:  # type: ignore[attr-defined]  # a ModuleList: ModuleDict types it as Module
            hidden = layer(hidden, allowed)
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return functional.normalize(mean, dim=-1)


@torch.no_grad()
def embed(encoder: SentenceEncoder, tokens: Tokens) -> Tensor:
    """Return the vector of each sentence, ``[sentences, hidden]``, of length 1."""
    vectors: Tensor = encoder(torch.from_numpy(tokens.numbers), torch.from_numpy(tokens.mask))
    return vectors
