"""Every optimizer of PyTorch, and some of other libraries, with every wrapper and every kind of file.

After a load, the next steps equal those of the saved run, bit for bit. Otherwise the load is refused, and changes
nothing. `make test` tries some of the combinations, which contain each pair of values of two axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointError, TreeMismatchError, UnsupportedLeafError
from plugins.torch_backend.tests.continued_runs import (
    CONDITIONS,
    FORMS,
    SOURCES,
    Cell,
    Make,
    Run,
    dense,
    embedding,
    job,
    matrices,
    wide,
)


class Case(NamedTuple):
    """An optimizer to test.

    Attributes:
        make: function that creates the optimizer from a model.
        model: function that creates the model.
        library: distribution that contains the optimizer.
        sharded: False if the optimizer cannot make a step with parameters of FSDP2.
        stateable: False if `get_optimizer_state_dict` of PyTorch refuses the state.
        tolerance: absolute tolerance of parameters, for optimizers that multiply matrices. PyTorch keeps the strides
            of a loaded matrix and ckptcore loads a contiguous one, so the products round differently.
    """

    make: Make
    model: Callable[[], torch.nn.Module] = dense
    library: str = "torch"
    sharded: bool = True
    stateable: bool = True
    tolerance: float = 0


def of_torch(name: str, **options: Any) -> Make:
    def make(model: torch.nn.Module) -> Any:
        if not hasattr(torch.optim, name):
            pytest.skip(f"this version of PyTorch has no {name}")
        return getattr(torch.optim, name)(model.parameters(), **options)

    return make


def of(module: str, name: str, **options: Any) -> Make:
    """Return a function that imports a library, which may be slow, and creates an optimizer of it."""

    def make(model: torch.nn.Module) -> Any:
        optimizer = getattr(pytest.importorskip(module), name)(model.parameters(), **options)
        if hasattr(optimizer, "train"):
            optimizer.train()  # optimizers of schedulefree have modes
        return optimizer

    return make


def galore(name: str, **options: Any) -> Make:
    def make(model: torch.nn.Module) -> Any:
        library = pytest.importorskip("galore_torch")
        low_rank = {"rank": 2, "update_proj_gap": 3, "scale": 0.5, "proj_type": "std"}
        groups: list[dict[str, Any]] = [{"params": [held for held in model.parameters() if held.dim() == 2]}, {}]
        groups[0] |= low_rank
        groups[1]["params"] = [held for held in model.parameters() if held.dim() != 2]
        return getattr(library, name)(groups, lr=0.01, **options)

    return make


OPTIMIZERS: Final[dict[str, Case]] = {
    "ASGD": Case(of_torch("ASGD", lr=0.1)),
    "Adadelta": Case(of_torch("Adadelta")),
    "Adafactor": Case(of_torch("Adafactor"), sharded=False),
    "Adagrad": Case(of_torch("Adagrad")),
    "Adagrad(fused=True)": Case(of_torch("Adagrad", fused=True), sharded=False),
    "Adam": Case(of_torch("Adam")),
    "Adam(amsgrad=True, maximize=True)": Case(of_torch("Adam", amsgrad=True, maximize=True)),
    "Adam(fused=True)": Case(of_torch("Adam", fused=True)),
    "Adam(lr=tensor, betas=tensors)": Case(
        lambda model: torch.optim.Adam(
            model.parameters(),
            lr=torch.tensor(0.01),
            betas=(torch.tensor(0.9), torch.tensor(0.99)),
            foreach=False,
        )
    ),
    "AdamW": Case(of_torch("AdamW")),
    "AdamW(foreach=True)": Case(of_torch("AdamW", foreach=True)),
    "Adamax": Case(of_torch("Adamax")),
    "LBFGS": Case(of_torch("LBFGS", lr=0.1, max_iter=3, history_size=2)),
    "Muon": Case(of_torch("Muon"), matrices),
    "NAdam": Case(of_torch("NAdam")),
    "NAdam(decoupled_weight_decay=True)": Case(of_torch("NAdam", decoupled_weight_decay=True, weight_decay=0.1)),
    "RAdam": Case(of_torch("RAdam")),
    "RMSprop(momentum=0.9, centered=True)": Case(of_torch("RMSprop", momentum=0.9, centered=True)),
    "Rprop": Case(of_torch("Rprop"), sharded=False),
    "SGD": Case(of_torch("SGD", lr=0.1)),
    "SGD(momentum=0.9, nesterov=True)": Case(of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True)),
    "SGD(momentum=0.9, fused=True)": Case(of_torch("SGD", lr=0.1, momentum=0.9, fused=True), sharded=False),
    "SparseAdam": Case(of_torch("SparseAdam"), embedding, sharded=False),
    "bitsandbytes.AdamW": Case(of("bitsandbytes.optim", "AdamW"), wide, "bitsandbytes", sharded=False),
    "bitsandbytes.AdamW8bit": Case(of("bitsandbytes.optim", "AdamW8bit"), wide, "bitsandbytes", sharded=False),
    "bitsandbytes.Lion8bit": Case(of("bitsandbytes.optim", "Lion8bit"), wide, "bitsandbytes", sharded=False),
    "bitsandbytes.AdEMAMix8bit": Case(of("bitsandbytes.optim", "AdEMAMix8bit"), wide, "bitsandbytes", sharded=False),
    "GaLoreAdamW": Case(
        galore("GaLoreAdamW", no_deprecation_warning=True),
        dense,
        "galore-torch",
        sharded=False,
        stateable=False,
        tolerance=1e-6,
    ),
    "GaLoreAdafactor": Case(
        galore("GaLoreAdafactor", relative_step=False, scale_parameter=False),
        dense,
        "galore-torch",
        sharded=False,
        stateable=False,
        tolerance=1e-6,
    ),
    "Lion": Case(of("lion_pytorch", "Lion"), dense, "lion-pytorch"),
    "Prodigy": Case(of("prodigyopt", "Prodigy"), dense, "prodigyopt"),
    "AdamWScheduleFree": Case(of("schedulefree", "AdamWScheduleFree"), dense, "schedulefree"),
    "RAdamScheduleFree": Case(of("schedulefree", "RAdamScheduleFree"), dense, "schedulefree"),
    "SGDScheduleFree": Case(of("schedulefree", "SGDScheduleFree", lr=0.1), dense, "schedulefree"),
    "torchao.AdamW8bit": Case(of("torchao.optim", "AdamW8bit"), wide, "torchao"),
    "torchao.AdamW4bit": Case(of("torchao.optim", "AdamW4bit"), wide, "torchao", sharded=False),
    "torchao.AdamWFp8": Case(of("torchao.optim", "AdamWFp8"), wide, "torchao", sharded=False),
}

CELLS: Final = [
    cell
    for cell in (
        Cell(form, named, condition, source)
        for form, named, condition, source in itertools.product(FORMS, (False, True), CONDITIONS, SOURCES)
    )
    # DistributedDataParallel sends the parameters when it is created, and those on meta have no elements.
    if (cell.form, cell.condition) != ("DDP", "on meta")
]


def is_possible(case: Case, cell: Cell) -> bool:
    """Return False if PyTorch or the optimizer cannot train or save in this way."""
    if cell.form == "FSDP2" and not case.sharded:
        return False
    return case.stateable or not cell.named or cell.is_ours


def parameter(name: str, *values: object) -> Any:
    """Return parameters of a test, with the mark that adds the optimizer to the documentation."""
    return pytest.param(name, *values, marks=pytest.mark.brings(f"`{name}`", OPTIMIZERS[name].library, "same"))


def some_cells() -> Iterator[tuple[str, Cell]]:
    """Yield three cells for each optimizer, spread evenly over all cells."""
    number = 0
    for name, case in OPTIMIZERS.items():
        for _ in range(3):
            while not is_possible(case, CELLS[number * 37 % len(CELLS)]):
                number += 1
            yield name, CELLS[number * 37 % len(CELLS)]
            number += 1


def load(target: Run, location: Path, objects: dict[str, Any]) -> None:
    """Load. If the load is refused, assert that it changed nothing."""
    before = target.state()
    try:
        ckptcore.load_into(location, objects)
    except CheckpointError:
        assert target.state() == before
        raise


def loaded(case: Case, cell: Cell, location: Path) -> Run:
    """Load into objects in the condition of the cell. Return their run."""
    target = Run.of(case.model, case.make, cell.form, 1, "meta" if cell.condition == "on meta" else "cpu")
    if cell.condition == "stepped":
        target.train([7])
    objects = target.objects(named=cell.named)
    if cell.condition == "on meta":
        with pytest.raises(TreeMismatchError, match="create the optimizer with its new parameters"):
            load(target, location, objects)
        load(target, location, {**objects, "optimizer": ...})
        target = target.with_new_optimizer()
        objects = {**target.objects(named=cell.named), "model": ...}
    load(target, location, objects)
    return target


def expect_refusal(case: Case, cell: Cell, location: Path) -> None:
    with pytest.raises((TreeMismatchError, UnsupportedLeafError), match="cannot be loaded|parts of|is not stored"):
        loaded(case, cell, location)


def expect_same(run: Run, other: Run, case: Case) -> None:
    if case.tolerance:
        torch.testing.assert_close(other.parameters(), run.parameters(), rtol=0, atol=case.tolerance)
    else:
        assert other.state() == run.state()


def is_refused(case: Case, cell: Cell) -> bool:
    """Return True if PyTorch stores objects that only PyTorch can read: DTensors and tensor subclasses."""
    if case.library == "torchao":
        return not cell.is_ours
    return (cell.form, cell.named, cell.source) == ("FSDP2", False, "torch.save")


@pytest.mark.parametrize(("name", "cell"), [parameter(*values) for values in some_cells()], ids=str)
def test_the_next_steps_are_the_same(name: str, cell: Cell, tmp_path: Path) -> None:
    case = OPTIMIZERS[name]
    with job(cell.form):
        run = Run.of(case.model, case.make, cell.form, 0)
        run.train(range(2))
        location = run.save(tmp_path / "c", cell)
        if is_refused(case, cell):
            expect_refusal(case, cell, location)
            return
        other = loaded(case, cell, location)
        run.train(range(2, 4))
        other.train(range(2, 4))
        expect_same(run, other, case)


@pytest.mark.brings("file of `torch.save` with the state dict of FSDP2", "torch", "refused")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [parameter(name) for name in OPTIMIZERS])
def test_all_ways(name: str, form: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    case = OPTIMIZERS[name]
    cells = [cell for cell in CELLS if cell.form == form and is_possible(case, cell)][:: 1 if full else 5]
    if not cells:
        pytest.skip(f"{name} cannot make a step")
    with job(form):
        run = Run.of(case.model, case.make, form, 0)
        run.train(range(2))
        locations: dict[tuple[bool, str], Path] = {}
        for number, cell in enumerate(cells):
            if (cell.named, cell.source) not in locations:
                locations[cell.named, cell.source] = run.save(tmp_path / str(number), cell)
        run.train(range(2, 4))
        for cell in cells:
            with subtests.test(msg=str(cell)):
                location = locations[cell.named, cell.source]
                if is_refused(case, cell):
                    expect_refusal(case, cell, location)
                    continue
                other = loaded(case, cell, location)
                other.train(range(2, 4))
                expect_same(run, other, case)


def test_every_optimizer_of_torch_is_tried() -> None:
    """If a later PyTorch has a new optimizer, add it to `OPTIMIZERS`."""
    exported = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    known = {kind for kind in exported if issubclass(kind, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    existing = [case for name, case in OPTIMIZERS.items() if hasattr(torch.optim, name.partition("(")[0])]
    tried = {type(case.make(case.model())) for case in existing if case.library == "torch"}
    assert known == tried


def test_each_pair_of_values_occurs_in_a_cell() -> None:
    tried = [astuple(cell) for _, cell in some_cells()]
    every = [astuple(cell) for cell in CELLS]
    for first, second in itertools.combinations(range(4), 2):
        assert {(cell[first], cell[second]) for cell in tried} == {(cell[first], cell[second]) for cell in every}
