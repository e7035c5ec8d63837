"""Tiers: save steps to a fast directory, and upload them to the directory of the run in the background.

near_tier           options of the fast directory
tiered_directory    the two directories as the user describes them: `TieredDirectory`
tiered_steps        the steps of both: which copy is loaded
tiered_run          the directories while a job owns them: targets of saves, retention, deletion
uploads             the part of a process in the uploads of a run
uploader            uploads steps on a thread; `status` holds its state, `sending` copies a step
host_groups         the processes of a job by the directory that they see
host_saves          the strategy of a save into a directory of each host
hosts               near directories of single hosts: which processes share one, which steps are on all
host_sending        uploads of steps that are on several hosts
backed_places       steps of which missing objects are read from the far copy
"""

from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_directory import TieredDirectory

__all__ = ["NearTier", "TieredDirectory", "UploadStatus"]
