"""States that may exist at a location after the answers that a client got: checks of random runs."""

from __future__ import annotations

from collections.abc import Collection

from ckptcore.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CommitUnknownError

_LONGEST_TEXT = 1500

_FOREIGN = ("hyper::", "reqwest::", "object_store::", "Os {", "Kind:", "Traceback", "0x")
"""Text of the underlying libraries' error dumps; errors for users must not contain it."""


class History:
    """One place: which states may be there. None is no checkpoint."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.possible: set[int | None] = {None}
        self.told: list[str] = []

    def __str__(self) -> str:
        return f"{self.place}: {', '.join(self.told)}; possible now: {self.possible}"

    def _expect(self, holds: bool, what: str) -> None:
        assert holds, f"{what}. {self}"

    def saved(self, version: int) -> None:
        """A save was reported committed."""
        self.told.append(f"saved {version}")
        self.possible = {version}

    def saved_first(self, version: int) -> None:
        """A save that replaces nothing was reported committed."""
        self._expect(None in self.possible, f"the first save of {version} replaced a checkpoint")
        self.saved(version)

    def not_saved(self, version: int, error: CheckpointError, *, replacing: bool, misread: bool = False) -> None:
        """A save failed: nothing of it is there, and without an atomic exchange what it was to replace may be gone.

        Args:
            version: the state it was to save.
            error: why.
            replacing: True if it may replace an existing checkpoint.
            misread: whether answers had their content cut. A root that cannot be read is not replaced unless that is
                asked for.
        """
        self.told.append(f"did not save {version}: {type(error).__name__}: {error}")
        self._expect_clear(error)
        if isinstance(error, CheckpointExistsError):
            refused = not replacing and (misread or self.possible != {None})
            self._expect(refused, "there was nothing that could be replaced")
            if self.possible == {None}:
                return
            self.possible.discard(None)
            return
        if isinstance(error, CommitUnknownError):
            self.possible |= {version}
        if replacing:
            self.possible |= {None}

    def loaded(self, version: int) -> None:
        """A load gave a state, whole."""
        self.told.append(f"loaded {version}")
        self._expect(version in self.possible, f"a load gave {version}")

    def not_loaded(self, error: CheckpointError) -> None:
        """A load failed. It may only report that there is no checkpoint if that is possible."""
        self.told.append(f"did not load: {type(error).__name__}: {error}")
        self._expect_clear(error)
        if isinstance(error, CheckpointNotFoundError):
            self._expect(None in self.possible, "a checkpoint was not found")

    def deleted(self) -> None:
        """A deletion was reported done."""
        self.told.append("deleted")
        self.possible = {None}

    def not_deleted(self, error: CheckpointError) -> None:
        """A deletion failed, perhaps after the checkpoint was gone."""
        self.told.append(f"did not delete: {type(error).__name__}: {error}")
        self._expect_clear(error)
        if isinstance(error, CheckpointNotFoundError):
            self._expect(None in self.possible, "a checkpoint was not found")
        self.possible |= {None}

    def found(self, version: int | None) -> None:
        """Return the state of the location, read without faults."""
        self._expect(version in self.possible, f"found {version}")
        self.possible = {version}

    def _expect_clear(self, error: CheckpointError) -> None:
        """An error that a user can act on: one that names what was done, and has no dump of a library in it."""
        text = str(error)
        dumps: Collection[str] = [word for word in _FOREIGN if word in text]
        self._expect(20 < len(text) < _LONGEST_TEXT and not dumps, f"an unclear error ({dumps}): {text}")
