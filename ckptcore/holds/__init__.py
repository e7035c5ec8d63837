"""What a living process holds in a directory of steps: the directory itself (ownership), steps (pins), deletions under way.

Everything stands below ``.ckptcore/`` in the directory of steps and loses its force when its holder dies. A storage with
real directories has locks, and the kernel knows who lives. On any other storage a hold is a *lease*: an object that its
holder writes anew every so often; one that nobody wrote for long enough is dead. No two clocks are compared for that.

- `ownership`: one job writes steps into a directory
- `steps`: readers pin steps, garbage collection deletes the others, and why neither harms the other
- `holding`: what every hold can do
- `locked`: holds that are locked directories
- `leases`: holds that are objects; `leased` the many of a directory, `sightings` what tells that one is dead
- `holders`: what a hold says about its holder
- `clocks`: time, so that tests need not wait for it
"""

from ckptcore.holds.clocks import SYSTEM_CLOCK, Clock, Repetition
from ckptcore.holds.holding import ADMINISTRATION, Hold
from ckptcore.holds.ownership import own_directory
from ckptcore.holds.steps import StepHolds

__all__ = ["ADMINISTRATION", "SYSTEM_CLOCK", "Clock", "Hold", "Repetition", "StepHolds", "own_directory"]
