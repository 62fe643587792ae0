"""The phases of a run on its report page, and the gradient noise scale."""

from html import escape

from megalith.report import units
from megalith.report.history import History
from megalith.report.svg import Series, line_chart
from megalith.spec.noise import absent

HEADS = ("phase", "from sample", "from step", "sequences a step", "tokens a sequence", "weights")


def phase_table(run: History) -> str:
    """Return the data, the first sample and the tokens per step of each phase as HTML; empty for a run of one phase."""
    if not run.phases:
        return ""
    rows = ""
    for phase in run.phases:
        mixture = ", ".join(f"{name} {share:g}" for name, share in phase.weights.items()) or "in proportion to tokens"
        numbers = (phase.number + 1, phase.samples, phase.step, phase.global_batch, phase.seq_len)
        rows += f"<tr>{''.join(f'<td>{number:,}</td>' for number in numbers)}<td>{escape(mixture)}</td></tr>"
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    sizes = line_chart([Series("tokens a step", [(s.step, s.tokens) for s in run.steps], 4)], x_label="step", from_zero=True)
    figure = f"<figure><figcaption>Global batch (tokens a step)</figcaption>{sizes}</figure>"
    return f'<table><tr>{heads}</tr>{rows}</table><div class="figures">{figure}</div>'


def noise_words(run: History) -> str:
    """Return the newest gradient noise scale beside the tokens of a step, or why there is none."""
    last = run.steps[-1]
    if "tokens" in last.noise:
        return f"{units.count(last.noise['tokens'])} tokens, at {units.count(last.tokens)} a step"
    why = absent(run.plan, run.microbatches) if run.plan and run.microbatches else "the plan is not known"
    return f"none: {why or 'its estimates are not positive yet'}"
