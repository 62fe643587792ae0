"""Decision about a fault: one pure function from (state, observation) to commands. No clock, no files, no processes.

The supervisor of a real run and the goodput simulator obey the same function, so similar observations have similar consequences. The
rules, in
short: recover from the newest whole copy in the fastest tier; the same failure again at one step falls back a tier, and the third
time stops with a report; damaged copies are never used, and the run never starts over while it has checkpoints; a broken node's
place goes to a spare; faults that a node did not cause are not blamed on it; starts without progress come at growing intervals.
"""

from megalith.control.policy.placement import HOUR
from megalith.control.policy.rules import RULES, decide
from megalith.control.policy.state import VACANT, Decision, State, dump, load

__all__ = ["HOUR", "RULES", "VACANT", "Decision", "State", "decide", "dump", "load"]
