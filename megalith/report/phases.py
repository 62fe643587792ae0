"""The phases of a run on its report page, and the gradient noise scale."""

from megalith.report import units
from megalith.report.history import History
from megalith.report.style import curves, figure, figures, html_table
from megalith.report.svg import Series
from megalith.spec.noise import absent

HEADS = ("phase", "from sample", "from step", "sequences a step", "tokens a sequence", "weights")


def phase_table(run: History) -> str:
    """Return the data, the first sample and the tokens per step of each phase as HTML; empty for a run of one phase."""
    if not run.phases:
        return ""
    rows = list[tuple[str, ...]]()
    for phase in run.phases:
        mixture = ", ".join(f"{name} {share:g}" for name, share in phase.weights.items()) or "in proportion to tokens"
        numbers = (phase.number + 1, phase.samples, phase.step, phase.global_batch, phase.seq_len)
        rows.append((*(f"{number:,}" for number in numbers), mixture))
    sizes = curves([Series("tokens a step", [(s.step, s.tokens) for s in run.steps], 4)], units.count, from_zero=True)
    return html_table(HEADS, rows) + figures(figure("Global batch (tokens a step)", sizes))


def noise_words(run: History) -> str:
    """Describe the newest gradient noise scale and the tokens of a step, or the reason why there is no noise scale."""
    last = run.steps[-1]
    if "tokens" in last.noise:
        return f"{units.count(last.noise['tokens'])} tokens; a step has {units.count(last.tokens)}"
    why = absent(run.plan, run.microbatches) if run.plan and run.microbatches else "the run's plan is not known"
    return f"none: {why or 'the estimates of gradient signal and noise are not positive yet'}"
