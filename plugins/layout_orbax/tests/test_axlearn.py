"""Steps that AXLearn saved: the index, the states of iterators, and entries that only TensorFlow can read."""

import json
import shutil
from pathlib import Path

import msgpack
import pytest
from ckptcore_orbax.orbax.axlearn import find_axlearn
from ckptcore_testing.hostile_json import tampered
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UncommittedCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec, TreeMetadata, unreadable_error

GOLDEN = Path(__file__).parent / "golden" / "axlearn" / "step_00000004"
ITERATOR = "<class 'some.Iterator'>"


@pytest.fixture
def step(tmp_path):
    return shutil.copytree(GOLDEN, tmp_path / "step_00000004")


def leaves_of(path):
    tree = find_axlearn(DirectoryReadStore(path)).tree
    paths = TreeMetadata(tree.skeleton, (None,) * len(tree.leaves)).paths
    return dict(zip(paths, tree.leaves, strict=True))


def problem_of(path, name):
    """Return the error of a leaf that cannot be loaded."""
    return unreadable_error(leaves_of(path)[name,].value)


def write_index(path, *entries):
    (path / "index").write_text(json.dumps([["step", 4], *entries]))


def test_arrays_have_the_dtypes_and_shapes_of_the_index(step):
    leaves = leaves_of(step)
    leaf = leaves["model", "decoder", "norm", "scale"]
    assert (leaf.name, leaf.spec) == ("gda/model/decoder/norm/scale", ArraySpec((4,), "bfloat16"))
    assert leaves["learner", "count"].spec == ArraySpec((), "int32")
    assert leaves["step",].value.value == 4
    assert leaves["input_iter", "position"].value.value == 17


@pytest.mark.parametrize(
    ("text", "shape"), [("()", ()), ("(3,)", (3,)), ("(8, 8)", (8, 8)), ("(0, 2, 3)", (0, 2, 3))], ids=str
)
def test_shapes_are_parsed_in_the_form_of_python(step, text, shape):
    write_index(step, ["a", {"dtype": "float32", "shape": text}])
    assert leaves_of(step)["a",].spec == ArraySpec(shape, "float32")


@pytest.mark.parametrize(
    "text", ["", "8", "(8", "(8, )8", "(-1,)", "(8,, 8)", "(" + "9" * 30 + ",)", "(1_0,)"], ids=str
)
def test_invalid_shapes_are_refused(step, text):
    write_index(step, ["a", {"dtype": "float32", "shape": text}])
    with pytest.raises(CorruptCheckpointError, match="shape"):
        leaves_of(step)


def test_the_error_of_an_unknown_dtype_names_it(step):
    write_index(step, ["a", {"dtype": "key<fry>", "shape": "()"}])
    error = problem_of(step, "a")
    assert isinstance(error, UnsupportedLeafError) and "key<fry>" in str(error)


def test_values_in_the_index_are_leaves(step):
    write_index(step, ["a/flag", True], ["a/note", "text"], ["a/none", None], ["sizes", [1, 2.5]])
    leaves = leaves_of(step)
    assert leaves["a", "flag"].value.value is True
    assert leaves["a", "none"].value.kind == "none"
    assert leaves["sizes", 1].value.value == 2.5


def test_a_leaf_named_step_replaces_the_step_of_the_index(step):
    write_index(step, ["step", {"dtype": "int32", "shape": "()"}])
    assert leaves_of(step)["step",].name == "gda/step"


def test_states_of_several_processes_are_separate_leaves(step):
    (step / "python_1").mkdir()
    (step / "python_1" / "input_iter").write_bytes(msgpack.packb({"position": 18}))
    leaves = leaves_of(step)
    assert leaves["input_iter", 0, "position"].value.value == 17
    assert leaves["input_iter", 1, "position"].value.value == 18


def test_states_of_grain_in_json_are_read(step):
    shutil.rmtree(step / "python_0")
    (step / "grain_0" / "data").mkdir(parents=True)
    (step / "grain_0" / "data" / "iter").write_text('{"next": 3}')
    write_index(step, ["data/iter", ITERATOR])
    assert leaves_of(step)["data", "iter", "next"].value.value == 3


def test_entries_that_only_tensorflow_reads_are_listed_and_the_rest_is_read(step):
    (step / "tf_0").mkdir()
    (step / "tf_0" / "old_iter.index").write_bytes(b"?")
    index = json.loads((step / "index").read_text())
    (step / "index").write_text(json.dumps([*index, ["old_iter", "<class 'tensorflow.Iterator'>"]]))
    checkpoint = find_axlearn(DirectoryReadStore(step))
    assert checkpoint.custom == {"not_readable": {"old_iter": "<class 'tensorflow.Iterator'>"}}
    assert "old_iter" in checkpoint.writer
    assert "TensorFlow" in checkpoint.writer
    assert ("model", "decoder", "emb", "weight") in leaves_of(step)


def test_the_error_of_a_msgpack_extension_names_its_type_and_file(step):
    (step / "python_0" / "input_iter").write_bytes(msgpack.packb({"x": msgpack.ExtType(7, b"")}))
    error = problem_of(step, "input_iter")
    assert isinstance(error, CorruptCheckpointError) and "extension type 7" in str(error)
    assert error.key == "python_0/input_iter"


def test_the_error_of_a_truncated_state_names_its_file(step):
    data = (step / "python_0" / "input_iter").read_bytes()
    (step / "python_0" / "input_iter").write_bytes(data[:-3])
    error = problem_of(step, "input_iter")
    assert isinstance(error, CorruptCheckpointError) and "python_0/input_iter" in str(error)


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_truncated_index_is_reported_as_damaged(step, length):
    (step / "index").write_bytes((step / "index").read_bytes()[:length])
    with pytest.raises(CorruptCheckpointError, match=r"index.*damaged or incomplete"):
        leaves_of(step)


def test_a_step_without_an_index_is_uncommitted(step):
    (step / "index").unlink()
    with pytest.raises(UncommittedCheckpointError, match="index"):
        leaves_of(step)


def test_paths_that_do_not_form_a_tree_are_refused(step):
    array = {"dtype": "float32", "shape": "()"}
    for entries in ([["a", array], ["a/b", array]], [["a/b", array], ["a", array]], [["a", array], ["a", array]]):
        write_index(step, *entries)
        with pytest.raises(CorruptCheckpointError, match="one leaf"):
            leaves_of(step)


def test_a_hostile_index_raises_only_checkpoint_errors(step):
    refused = 0
    for document in tampered(json.loads((step / "index").read_text()), 300):
        (step / "index").write_text(json.dumps(document))
        try:
            leaves_of(step)
        except CheckpointError as error:
            refused += 1
            assert str(error)
    assert refused > 100
