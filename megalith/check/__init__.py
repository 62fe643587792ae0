"""Rules over a run's description: errors that stop the run, and advice from common practice. All problems are reported at once; no check
needs torch.

A rule is a function from a Case to the problems that it finds. Each subject has a module of rules, and RULES has a row for each rule.
`check.here` separately reports resources that one machine lacks for a run.
"""

from megalith.check.case import Case
from megalith.check.here import all_ranks, check_here, node_ranks
from megalith.check.resume import MAY_CHANGE, check_resume
from megalith.check.rules import RULES, Rule, check
from megalith.spec.plan import PARTS
from megalith.spec.problem import Problem

__all__ = [
    "MAY_CHANGE",
    "PARTS",
    "RULES",
    "Case",
    "Problem",
    "Rule",
    "all_ranks",
    "check",
    "check_here",
    "check_resume",
    "node_ranks",
]
