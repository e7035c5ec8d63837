"""Samples of tensors. Ranks compare them to detect differences between arrays that all ranks hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ckptcore_torch.conversions import encoding_of, host_view
from ckptcore_torch.tensors import sampled_on_device

from ckptcore.model import WHOLE_SAMPLE_BYTES, sampled

TENSORS = {
    "float32": torch.arange(200_001.0),
    "strided": torch.arange(300_000.0).reshape(500, 600).t(),
    "channels_last": torch.arange(300_000.0).reshape(5, 3, 100, 200).to(memory_format=torch.channels_last),
    "bfloat16": torch.arange(400_000).to(torch.bfloat16),
    "uint8": torch.arange(300_001).to(torch.uint8),
    "complex128": torch.arange(100_000.0).to(torch.complex128),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_device_returns_the_sample_of_the_host_array(name: str) -> None:
    """One rank may hold a tensor on the CPU, and another rank holds the same tensor on a device."""
    tensor = TENSORS[name]
    encoding = encoding_of(tensor.dtype)
    on_host = sampled(host_view(tensor))
    on_device = [host_view(part) for part in sampled_on_device(tensor, encoding.host.itemsize)]
    assert len(on_host) == len(on_device) == 2
    assert all(np.array_equal(mine, other) for mine, other in zip(on_host, on_device, strict=True))
    assert WHOLE_SAMPLE_BYTES < tensor.nbytes > 10 * sum(part.nbytes for part in on_host)
