# The lazy names of `ckptcore` as type checkers see them, by the table of `ckptcore.distributions`. A stub without a
# module, so that no module of the core imports another distribution.

import ckptcore_tiers as tiers
import ckptcore_transforms as transforms
from ckptcore_incremental.partial_checkpoint import partial as partial
from ckptcore_incremental.updates import Update as Update
from ckptcore_tools.comparison import diff as diff
from ckptcore_tools.copies import copy as copy
from ckptcore_tools.copies import copy_steps as copy_steps
from ckptcore_tools.dry_run import plan as plan
from ckptcore_tools.exports import Export as Export
from ckptcore_tools.exports import StepExport as StepExport
from ckptcore_tools.exports import StepExports as StepExports
from ckptcore_tools.exports import WithExports as WithExports

__all__ = [
    "Export",
    "StepExport",
    "StepExports",
    "Update",
    "WithExports",
    "copy",
    "copy_steps",
    "diff",
    "partial",
    "plan",
    "tiers",
    "transforms",
]
