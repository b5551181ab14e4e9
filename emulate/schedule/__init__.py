"""Who runs next: schedules with names that repeat a run."""

from emulate.schedule.choice import Choice, Scheduler
from emulate.schedule.explore import Explorer
from emulate.schedule.names import FORMS, Schedule, expand, make, series
from emulate.schedule.picks import Picks, Recorder, decode, encode
from emulate.schedule.policies import Adversarial, Fifo, Pct, Random
from emulate.schedule.shrink import shrink

__all__ = [
    "FORMS",
    "Adversarial",
    "Choice",
    "Explorer",
    "Fifo",
    "Pct",
    "Picks",
    "Random",
    "Recorder",
    "Schedule",
    "Scheduler",
    "decode",
    "encode",
    "expand",
    "make",
    "series",
    "shrink",
]
