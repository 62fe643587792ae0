"""Summary of a run in numbers: the values of tables and of `--json`."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from megalith.control import ledger
from megalith.events import Merge, of_kind
from megalith.report.history import History, bits_a_byte, history, tokens_a_byte

LAST = 10
"""Number of newest steps over which the training loss is averaged."""


@dataclass(frozen=True)
class Incident:
    """One failure. `detection_seconds` last until the failure was detected, `recovery_seconds` from then until training continued
    (None: not yet)."""

    step: int
    reason: str
    detection_seconds: float
    recovery_seconds: float | None


@dataclass(frozen=True)
class Merges:
    """Merges of a run with sites, as the first site logged them. `waited`: seconds that the first site's ranks waited for other
    sites. `used`: fraction of the time in steps and merges (including repeated ones) in which the first site's ranks did not
    wait. `norm`, `spread`: values of the newest merge."""

    count: int
    sites: int
    bytes_sent: int
    waited: float
    used: float
    norm: float
    spread: float


@dataclass(frozen=True)
class Summary:
    """A run in numbers. A value is None if no event contains it yet; MFU is also None if the device's peak is unknown.

    Times are seconds, sizes bytes, rates per second. Losses are in nats per token. `tokens_per_second` and `mfu` are medians over
    steps.
    """

    state: str
    model: str | None
    parameters: int | None
    ranks: int | None
    device: str | None
    plan: dict[str, object] | None
    step: int
    steps: int | None
    loss: float | None
    loss_steps: int
    """Number of steps over which `loss` is averaged."""
    validation_step: int | None
    validation_loss: float | None
    validation_domains: dict[str, float]
    bits_per_byte: float | None
    """`validation_loss` in bits per byte of text; None if the manifest of the data cannot be read."""
    tokens: int
    tokens_per_second: float | None
    mfu: float | None
    peak_flops: float | None
    seconds_in_steps: float
    repeated_steps: int
    repeated_seconds: float
    checkpoint_step: int | None
    checkpoint_bytes: int | None
    checkpoint: str | None
    goodput: float | None
    """Fraction of the time that was useful; None before the first incident."""
    lost_seconds: dict[str, float]
    """Seconds of the time that was not useful, by cause."""
    incidents: tuple[Incident, ...]
    merges: Merges | None
    """Totals of the merges across sites; None in a run without sites, and before the first merge."""
    skipped_lines: int
    """Number of lines in the log that hold no event."""


def of_folder(run_dir: Path) -> Summary:
    """Return the summary of the run in a folder."""
    return summarize(history(run_dir))


def summarize(run: History) -> Summary:
    """Return the summary of a run's events."""
    start, plan = run.start, run.plan
    recent = run.steps[-LAST:]
    newest = run.validations[-1] if run.validations else None
    saved = run.checkpoints[-1] if run.checkpoints else None
    found = ledger.post_mortems(run.events)
    account = ledger.goodput(run.events) if found else None
    rates = tokens_a_byte(run.spec)
    return Summary(
        state=run.state,
        model=run.spec.get("model", {}).get("name"),
        parameters=start.parameters if start else None,
        ranks=start.world if start else None,
        device=start.device if start else None,
        plan=plan.model_dump(mode="json") if plan else None,
        step=run.steps[-1].step if run.steps else 0,
        steps=run.total_steps,
        loss=mean(step.loss for step in recent) if recent else None,
        loss_steps=len(recent),
        validation_step=newest.step if newest else None,
        validation_loss=newest.loss if newest else None,
        validation_domains=dict(newest.domains) if newest else {},
        bits_per_byte=bits_a_byte(newest.loss, rates[""]) if newest and "" in rates else None,
        tokens=run.steps[-1].tokens_seen if run.steps else 0,
        tokens_per_second=run.usual(lambda step: step.tokens_per_second),
        mfu=run.usual(lambda step: step.mfu),
        peak_flops=start.peak_flops if start else None,
        seconds_in_steps=sum(step.seconds for step in run.steps),
        repeated_steps=len(run.repeated),
        repeated_seconds=sum(step.seconds for step in run.repeated),
        checkpoint_step=saved.step if saved else None,
        checkpoint_bytes=saved.bytes if saved else None,
        checkpoint=saved.path if saved else None,
        goodput=account.share if account else None,
        lost_seconds={cause: seconds for cause, seconds, _, _ in account.rows() if cause != "useful"} if account else {},
        incidents=tuple(Incident(one.step, one.reason, one.detection, one.recovery) for one in found),
        merges=merges_of(run),
        skipped_lines=run.skipped,
    )


def merges_of(run: History) -> Merges | None:
    """Add up the merges of a run across sites; None if there are none."""
    made = list(of_kind(run.events, Merge))
    if not made:
        return None
    waited = sum(one.waited for one in made)
    whole = sum(step.seconds for step in (*run.steps, *run.repeated))
    if (run.spec.get("sites") or {}).get("method") != "data-parallel":  # gradients are exchanged within a step, weights after it
        whole += sum(one.seconds for one in made)
    sent, last = sum(one.bytes_sent for one in made), made[-1]
    return Merges(len(made), last.all_sites, sent, waited, 1 - waited / whole if whole else 1.0, last.norm, last.spread)
