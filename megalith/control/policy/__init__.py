"""The recovery policy: a pure function from (state, observation) to commands, without clock, files or processes.

The controller of a real run and the goodput simulator call the same function. The policy's rules in short: restore the newest complete
copy in the fastest tier. If a failure repeats at the same step, restore from a slower tier; the third time, stop with a report. Never
restore damaged copies, and never start over while the run has checkpoints. Replace a broken node by a spare, and do not blame a node for
faults that it did not cause. Wait longer before each further start that made no progress.
"""

from megalith.control.policy.placement import HOUR
from megalith.control.policy.rules import RULES, decide
from megalith.control.policy.state import VACANT, Decision, State, dump, load

__all__ = ["HOUR", "RULES", "VACANT", "Decision", "State", "decide", "dump", "load"]
