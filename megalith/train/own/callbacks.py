"""A user's own callbacks: called after every step, on every rank."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from megalith import own
from megalith.exchange import ObjectCollectives

CALLBACKS = "callbacks"
"""The key under which checkpoints, and copies of the state in memory, contain the callbacks' states."""
ROOM = 4096
"""The maximum size in bytes of one callback's state as JSON."""


class Done(NamedTuple):
    """The result of a finished step, equal on all ranks of a site except for `rank`. A run without sites counts as one site."""

    step: int
    """The step's number; the first is 1."""
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    """Tokens that the run has read by the end of this step."""
    skipped: str
    """Why the step's update was skipped; empty if the update was made."""
    rank: int
    """This rank's number in its site. A callback that writes or sends data should do so only on rank 0."""
    site: int = 0
    """The number of this rank's site. The loss differs between sites; the gradient norm also does, unless the sites train with data
    parallelism."""


class Callback(Protocol):
    """The interface of a callback: a class without constructor arguments, or an instance. Each rank has its own instance, and calls it
    after each step, in the order of the steps, once the step's outcome is known.

    All ranks of a site pass the same numbers to the callback, so its state is the same on all of them; ranks compare the states at each
    checkpoint. A callback that keeps state from step to step must also have `state` and `load`; if it lacks them and its attributes change
    in the first step, the run ends. A callback has no access to weights or gradients, and `megalith parity` does not call it. An exception
    in a callback is an error of the rank: the ranks restart, and the third same exception at one step ends the run.
    """

    def after_step(self, done: Done) -> bool | None:
        """Handle a finished step. To make the run save its state and stop after the next step, return True; with sites, this stops only
        this site, like a signal."""
        ...

    def state(self) -> Any:
        """Return the state to save, as values that take at most 4,096 bytes as JSON. Every checkpoint, and every copy of the run's state in
        memory, contains the callback's state."""
        ...

    def load(self, state: Any) -> None:
        """Restore the state that `state` returned when the run was saved."""
        ...


class Callbacks:
    """The callbacks of one rank."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names`: each is `module:object`. Raises own.OwnPartError for an object that is not a callback."""
        self._all = {name: _made(name) for name in names}
        self._stateful = {name for name, one in self._all.items() if hasattr(one, "state") and hasattr(one, "load")}
        self._tried = False

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def room(self) -> int:
        """The maximum bytes of all callbacks' states."""
        return (ROOM + 256) * len(self._all)

    def after_step(self, done: Done) -> bool:
        """Call each callback; return True if one asks the run to stop. Raises own.OwnPartError if a callback without `state` and `load`
        changed its attributes in the first call."""
        asked = False
        for name, one in self._all.items():
            watched = not self._tried and name not in self._stateful
            before = deepcopy(vars(one)) if watched and hasattr(one, "__dict__") else None
            asked |= bool(one.after_step(done))
            if before is not None and before != vars(one):
                changed = [key for key, value in vars(one).items() if key not in before or before[key] != value]
                raise own.OwnPartError(
                    f"{name} keeps {', '.join(changed)} from step to step but has no state() and load(), so a resumed run would not have "
                    "these values. Add the methods state() and load(), or keep no values from step to step"
                )
        self._tried = True
        return asked

    def dump(self) -> dict[str, Any]:
        """Return the states by name. Raises own.OwnPartError for a state that is not JSON, or too long."""
        found = {name: self._all[name].state() for name in sorted(self._stateful)}
        for name, state in found.items():
            try:
                size = len(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise own.OwnPartError(f"the state of {name} cannot be stored as JSON: {error}") from error
            if size > ROOM:
                raise own.OwnPartError(
                    f"the state of {name} takes {size:,} bytes as JSON, but at most {ROOM:,} bytes are allowed"
                )
        return found

    def add_to(self, told: str) -> str:
        """Add the callbacks' states to `told`, the JSON text of a copy in memory."""
        states = self.dump()
        return json.dumps(json.loads(told) | {CALLBACKS: states}, separators=(",", ":")) if states else told

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore the saved states. A callback without a saved state keeps its initial state."""
        for name in self._stateful & states.keys():
            self._all[name].load(states[name])


def same_on_all(callbacks: Callbacks, *, group: dist.ProcessGroup) -> dict[str, Any]:
    """Compare the callbacks' states on all ranks of `group`, and return them. Raises own.OwnPartError, on every rank, if any state
    differs."""
    if not callbacks:
        return {}
    mine = callbacks.dump()
    everyone = ObjectCollectives(group).all_gather(mine, Any)
    for name in mine:
        odd = [rank for rank, other in enumerate(everyone) if other[name] != everyone[0][name]]
        if odd:
            raise own.OwnPartError(
                f"the state of {name} differs between rank 0 and ranks {odd}. Compute this state only from values that are equal on all "
                "ranks"
            )
    return mine


def _made(name: str) -> Any:
    found = own.load(name)
    made = found() if isinstance(found, type) else found
    if not callable(getattr(made, "after_step", None)):
        raise own.OwnPartError(f"{name} has no method after_step")
    if hasattr(made, "state") != hasattr(made, "load"):
        raise own.OwnPartError(f"{name} has one of state() and load(), but needs both or neither")
    return made
