"""The event log with TensorBoard beside it (`log.tensorboard = true`, behind the extra `tensorboard`)."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megalith.events import Event, EventLog, Sample, Step, Validation


class BoardLog(EventLog):
    """Writes each event to the log, and what TensorBoard can draw to `run_dir/tensorboard` too."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, event: Event) -> None:
        super().write(event)
        match event:
            case Step():
                for name, value in _curves(event).items():
                    if value is not None:
                        self._board.add_scalar(f"train/{name}", value, event.step, event.time)
                self._board.add_scalars("seconds", event.breakdown, event.step, event.time)
            case Validation():
                self._board.add_scalar("validation/loss", event.loss, event.step, event.time)
                for domain, loss in event.domains.items():
                    self._board.add_scalar(f"validation/{domain}", loss, event.step, event.time)
            case Sample():
                self._board.add_text("sample", f"{event.prompt}{event.text}", event.step, event.time)

    def close(self) -> None:
        self._board.close()
        super().close()


def _curves(step: Step) -> dict[str, float | None]:
    """The numbers of a step that are drawn, by the name of their curve."""
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
    }
