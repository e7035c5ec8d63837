"""Tiers: steps that are saved to a fast directory, and uploaded to the directory of the run in the background.

- `near`: the near tier, as the user asks for it
- `run_tiers`: the tiers of a run in one of its processes; `owned`: one that this process owns; `host_steps`: what a host has near
- `collector`: deletes what a policy gives up; `run_deleter`: deletes what the user names, from every tier
- `backlog`: which of the steps that wait goes next
- `uploads`: the part of a process in them; `uploader` uploads, `sending` and `host_sending` copy a step, `status` says how far it is
"""

from ckptcore.training.tiers.near import NearTier
from ckptcore.training.tiers.status import UploadStatus

__all__ = ["NearTier", "UploadStatus"]
