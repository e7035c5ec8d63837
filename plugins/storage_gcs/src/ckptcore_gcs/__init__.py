"""Google Cloud Storage for ckptcore. Importing it imports no library of a cloud."""

from __future__ import annotations

__all__: list[str] = []
