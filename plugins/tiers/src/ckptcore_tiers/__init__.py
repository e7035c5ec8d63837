"""Tiers: save steps to a fast directory, and upload them to the directory of the run in the background.

near_tier           `NearTier`: options of the fast directory
tiered_directory    `TieredDirectory`: the two directories, as the user describes them
tiered_steps        the steps of both directories, and which copy of a step is loaded
tiered_run          the directories while a job owns them: targets of saves, retention, deletion
uploads             the role of one process in the uploads of a run
uploader            uploads steps on a thread; `status` has its state, `sending` copies one step
hosts               groups of processes that share a near directory, and the steps that all hosts have
host_saves          save strategy that writes to a directory of each host
host_sending        uploads of steps that are spread over several hosts
fallback_storage    steps whose missing objects are read from the far directory
"""

from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_run import TieredDirectory

__all__ = ["NearTier", "TieredDirectory", "UploadStatus"]
