"""The event log with TensorBoard beside it (`log.tensorboard = true`, behind the extra `tensorboard`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megalith.events import Event, EventLog, Problem, Sample, Step, Validation


class BoardLog(EventLog):
    """Writes each event to the log, and what TensorBoard can draw to `run_dir/tensorboard` too, until that fails once."""

    def __init__(self, run_dir: Path, *, epoch: int | None = None) -> None:
        super().__init__(run_dir, epoch=epoch)
        self._board: SummaryWriter | None = None
        with self._unless_it_fails():
            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, event: Event) -> None:
        super().write(event)
        if self._board is not None:
            with self._unless_it_fails():
                _draw(event, self._board)

    def close(self) -> None:
        if self._board is not None:
            with self._unless_it_fails():
                self._board.close()
        super().close()

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Give TensorBoard up, with a warning, when the block raises: its thread raises what it met at a later call, whatever that was."""
        try:
            yield
        except Exception as error:
            self._board = None
            super().write(Problem("warning", f"TensorBoard's files are no longer written: {type(error).__name__}: {error}"))


def _draw(event: Event, board: SummaryWriter) -> None:
    match event:
        case Step():
            for name, value in _curves(event).items():
                if value is not None:
                    board.add_scalar(f"train/{name}", value, event.step, event.time)
            board.add_scalars("seconds", event.breakdown, event.step, event.time)
        case Validation():
            board.add_scalar("validation/loss", event.loss, event.step, event.time)
            for domain, loss in event.domains.items():
                board.add_scalar(f"validation/{domain}", loss, event.step, event.time)
        case Sample():
            board.add_text("sample", f"{event.prompt}{event.text}", event.step, event.time)


def _curves(step: Step) -> dict[str, float | None]:
    """The numbers of a step that are drawn, by the name of their curve."""
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "loss_scale": step.scale,
    }
