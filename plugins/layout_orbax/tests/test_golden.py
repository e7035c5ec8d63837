"""Every golden checkpoint of Orbax, Flax and AXLearn loads as it was saved."""

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
    """Return the value for a JSON value of a golden (see `golden/generate.py`)."""
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


def assert_same(found, expected, where=""):
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert sorted(found) == sorted(expected), where
        for key, child in expected.items():
            assert_same(found[key], child, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for number, child in enumerate(expected):
            assert_same(found[number], child, f"{where}/{number}")
    else:
        assert type(found) is type(expected), where
        if isinstance(expected, np.ndarray | np.generic):
            assert found.dtype == expected.dtype, where
            assert found.shape == expected.shape, where
            assert found.tobytes() == expected.tobytes(), where
        else:
            assert found == expected, where


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_loads_as_what_was_saved(name):
    assert_same(ckptcore.load(location_of(name)), built(EXPECTED[name]["tree"]))


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if "checkpointables" in expected])
def test_the_checkpointables_of_a_golden_load_as_what_was_saved(name):
    assert_same(ckptcore.load_checkpointables(location_of(name)), built(EXPECTED[name]["checkpointables"]))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_metadata_of_a_golden_is_what_loads_it(name):
    metadata = ckptcore.metadata(location_of(name))
    assert metadata.custom == EXPECTED[name].get("custom", {})
    assert dict(metadata.metrics or {}) == EXPECTED[name].get("metrics", {})
    if "checkpointables" not in EXPECTED[name]:
        assert_same(ckptcore.load(location_of(name), metadata.abstract), built(EXPECTED[name]["tree"]))
