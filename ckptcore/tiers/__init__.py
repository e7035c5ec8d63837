"""Tiers: steps that are saved to a fast directory, and uploaded to the directory of the run in the background.

- `near`: the near tier, as the user asks for it
- `far`: the directory of the run, owned and collected
- `backlog`: which of the steps that wait goes next
- `uploader`: uploads them; `sending` copies one, `status` says how far it is
"""

from ckptcore.tiers.near import NearTier
from ckptcore.tiers.status import UploadStatus

__all__ = ["NearTier", "UploadStatus"]
