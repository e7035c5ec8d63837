"""Histories of locations in random runs: the states that may exist, given the results that a client got."""

from __future__ import annotations

from collections.abc import Collection

from ckptcore.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CommitUnknownError

_LONGEST_TEXT = 1500

_FOREIGN = ("hyper::", "reqwest::", "object_store::", "Os {", "Kind:", "Traceback", "0x")
"""Text of the underlying libraries' error dumps; errors for users must not contain it."""


class History:
    """A record of the states that may exist at a location. None is no checkpoint."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.possible: set[int | None] = {None}
        self.told: list[str] = []

    def __str__(self) -> str:
        return f"{self.place}: {', '.join(self.told)}; possible now: {self.possible}"

    def _expect(self, holds: bool, what: str) -> None:
        assert holds, f"{what}. {self}"

    def saved(self, version: int) -> None:
        """Record a successful save."""
        self.told.append(f"saved {version}")
        self.possible = {version}

    def saved_first(self, version: int) -> None:
        """Record a successful save that must not have replaced a checkpoint."""
        self._expect(None in self.possible, f"the first save of {version} replaced a checkpoint")
        self.saved(version)

    def not_saved(self, version: int, error: CheckpointError, *, replacing: bool, misread: bool = False) -> None:
        """Record a failed save. It stored nothing, but the checkpoint that it was to replace may be deleted.

        Args:
            version: the state of the save.
            error: the error of the save.
            replacing: True if it may replace an existing checkpoint.
            misread: True if contents of answers were cut. A save does not replace an unreadable root without
                `overwrite`.
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
        """Record a load of a complete state."""
        self.told.append(f"loaded {version}")
        self._expect(version in self.possible, f"a load gave {version}")

    def not_loaded(self, error: CheckpointError) -> None:
        """Record a failed load. It may report a missing checkpoint only if this is possible."""
        self.told.append(f"did not load: {type(error).__name__}: {error}")
        self._expect_clear(error)
        if isinstance(error, CheckpointNotFoundError):
            self._expect(None in self.possible, "a checkpoint was not found")

    def deleted(self) -> None:
        """Record a successful deletion."""
        self.told.append("deleted")
        self.possible = {None}

    def not_deleted(self, error: CheckpointError) -> None:
        """Record a failed deletion, which may have deleted the checkpoint."""
        self.told.append(f"did not delete: {type(error).__name__}: {error}")
        self._expect_clear(error)
        if isinstance(error, CheckpointNotFoundError):
            self._expect(None in self.possible, "a checkpoint was not found")
        self.possible |= {None}

    def found(self, version: int | None) -> None:
        """Record the state of the location, which was read without faults."""
        self._expect(version in self.possible, f"found {version}")
        self.possible = {version}

    def _expect_clear(self, error: CheckpointError) -> None:
        """Check that an error is useful: it is neither too short nor too long, and contains no dump of a library."""
        text = str(error)
        dumps: Collection[str] = [word for word in _FOREIGN if word in text]
        self._expect(20 < len(text) < _LONGEST_TEXT and not dumps, f"an unclear error ({dumps}): {text}")
