"""Golden checkpoints of Orbax, Flax and AXLearn load with their saved values."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckptcore

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}


def location_of(name):
    return GOLDEN / name / EXPECTED[name].get("directory", EXPECTED[name].get("file", ""))


def built(expected):
    """Return the saved value that a JSON value describes (see `golden/generate.py`)."""
    if isinstance(expected, dict) and len(expected) == 1 and next(iter(expected)).startswith("$"):
        ((tag, content),) = expected.items()
        match tag:
            case "$array":
                name, shape, start = content
                dtype = np.dtype(getattr(ml_dtypes, name, name))
                return ((np.arange(math.prod(shape)) + start) % 100).astype(dtype).reshape(shape)
            case "$key":
                return np.asarray(content[1], np.uint32)
            case "$tuple":
                return tuple([built(child) for child in content])
            case "$scalar":
                return np.dtype(content[0]).type(content[1])
            case "$complex":
                return complex(*content)
            case "$bytes":
                return bytes.fromhex(content)
    if isinstance(expected, dict):
        return {key: built(child) for key, child in expected.items()}
    return [built(child) for child in expected] if isinstance(expected, list) else expected


def assert_same(actual, expected, where=""):
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert sorted(actual) == sorted(expected), where
        for key, child in expected.items():
            assert_same(actual[key], child, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected), where
        assert len(actual) == len(expected), where
        for number, child in enumerate(expected):
            assert_same(actual[number], child, f"{where}/{number}")
    else:
        assert type(actual) is type(expected), where
        if isinstance(expected, np.ndarray | np.generic):
            assert actual.dtype == expected.dtype, where
            assert actual.shape == expected.shape, where
            assert actual.tobytes() == expected.tobytes(), where
        else:
            assert actual == expected, where


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_checkpoint_loads_with_its_saved_values(name):
    assert_same(ckptcore.load(location_of(name)), built(EXPECTED[name]["tree"]))


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if "checkpointables" in expected])
def test_golden_checkpointables_load_with_their_saved_values(name):
    assert_same(ckptcore.load_checkpointables(location_of(name)), built(EXPECTED[name]["checkpointables"]))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_checkpoint_loads_into_its_own_metadata(name):
    metadata = ckptcore.metadata(location_of(name))
    assert metadata.custom == EXPECTED[name].get("custom", {})
    assert dict(metadata.metrics or {}) == EXPECTED[name].get("metrics", {})
    if "checkpointables" not in EXPECTED[name]:
        assert_same(ckptcore.load(location_of(name), metadata.abstract), built(EXPECTED[name]["tree"]))
