"""Decision about a fault: one pure function from (state, observation) to commands. The function uses no clock, files or processes.

The supervisor of a real run and the goodput simulator use the same function, so equal observations have equal consequences. The rules,
in short: recover from the newest complete copy in the fastest tier. If a failure repeats at the same step, use a slower tier; the third
time, stop with a report. Never use damaged copies, and never start over while the run has checkpoints. Give a broken node's place to a
spare, and do not blame a node for faults that it did not cause. Wait longer before each further start without progress.
"""

from megalith.control.policy.placement import HOUR
from megalith.control.policy.rules import RULES, decide
from megalith.control.policy.state import VACANT, Decision, State, dump, load

__all__ = ["HOUR", "RULES", "VACANT", "Decision", "State", "decide", "dump", "load"]
