"""Tiers: save steps to a fast directory, and upload them to the directory of the run in the background.

near_tier           `NearTier`: options of the fast directory
tiered_steps        the steps of both directories, and which copy of a step is loaded
tiered_run          `TieredDirectory`; both directories while a job owns them: saves, retention, deletion, uploads
uploader            uploads steps on a thread; `status` has its state
hosts               groups of processes that share a near directory, and the steps that all hosts have
host_saves          save strategy that writes to a directory of each host
host_sending        copies one step to the far directory, or the parts of it that are on several hosts
fallback_storage    steps whose missing objects are read from the far directory
"""

from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_run import TieredDirectory

__all__ = ["NearTier", "TieredDirectory", "UploadStatus"]
