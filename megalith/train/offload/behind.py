"""A thread that runs functions behind the computation of a rank: updates of state that is off the device."""

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


class Behind:
    """Runs functions in a thread, one at a time and in order, while the caller computes."""

    def __init__(self, share: Tensor) -> None:
        """`share`: any tensor of the rank. In a dry run it is a fake tensor, and functions run in the caller's thread when they are waited
        for, because only what this thread allocates is counted."""
        self.dry, device = isinstance(share, FakeTensor), share.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update", initializer=partial(_enter, self._stream))
        self._left = deque[tuple[int, Callable[[], object]]]()
        self._failed = list[BaseException]()
        self.started = 0
        """Number of functions started so far, which is the number of the last one."""
        weakref.finalize(self, self._thread.shutdown)

    def start(self, function: Callable[[], object]) -> None:
        """Run a function once all earlier ones have ended, and once the device has done what was asked of it until now."""
        self.started += 1
        ready = None if self._stream is None else torch.cuda.Event()
        if ready is not None:
            ready.record()
        run = partial(_run, function, self._stream, ready, self._failed)
        counted = self.dry or torch._C._len_torch_dispatch_stack() > 0
        self._left.append((self.started, run if counted else self._thread.submit(run).result))

    def synchronize(self) -> None:
        """In a function that runs in the thread, wait until the device has done what the function asked of it."""
        if self._stream is not None:
            self._stream.synchronize()

    def result(self, function: Callable[[], T]) -> Callable[[], T]:
        """Start a function; return a function that waits for its result."""
        found = list[T]()
        self.start(lambda: found.append(function()))
        number = self.started

        def waited() -> T:
            self.wait(number)
            return found[0]

        return waited

    def runs(self, number: int) -> bool:
        """Return True if `wait(number)` was not called yet for this function or a later one."""
        return bool(self._left) and self._left[0][0] <= number

    def wait(self, number: int | None = None) -> None:
        """Wait until function `number` has ended; None: until all have. Raises what a function raised, each time; later functions then do
        nothing."""
        while self._left and (number is None or self._left[0][0] <= number):
            _, ended = self._left.popleft()
            ended()
        if self._failed:
            raise self._failed[0]


def _enter(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:  # copies then wait for the thread's own work only, not for the computation
        torch.cuda.set_stream(stream)


def _run(
    function: Callable[[], object], stream: torch.cuda.Stream | None, ready: torch.cuda.Event | None, failed: list[BaseException]
) -> None:
    if failed:
        return
    try:
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        function()
        if stream is not None:
            stream.synchronize()  # the waiting stream then needs no event, and freed memory is no longer in use
    except BaseException as error:
        failed.append(error)
        raise
