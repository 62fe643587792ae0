"""Acts are drawn from a seed and done to a run one after the other. The module tests whether the law holds, and which acts
suffice to break it.

The law: a run ends with the bits of an undisturbed run, or stops with a cause that names the file, port or command concerned. In the
second case the same command ends with these bits once the change is undone. There is never another result, a traceback, or a silent wait.
"""

import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from megalith.events import Step, of_kind, read
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.files import load
from tests.promises.careless.kinds import KINDS, Done
from tests.promises.careless.scene import RUN, BrokenError, Scene
from tests.runs import assert_same_bits, final_state, position, train

LAST = 3
"""The number of undisturbed steps that a run does after the last act, up to its end."""


@dataclass(frozen=True)
class Act:
    """An act of a kind, done after this many steps. Its random choices follow from `seed`."""

    kind: str
    after: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.after}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "Act":
        """Parse an act from its string form."""
        kind, after, seed = text.rsplit(":", 2)
        return cls(kind.strip(), int(after), int(seed))


def draw(seed: int, runs: Sequence[bool], *, acts: int) -> list[list[Act]]:
    """Draw acts for several runs, with or without agents. Every kind that applies comes once before any comes twice."""
    random, dealt = Random(seed), Counter[str]()
    drawn = []
    for agents in runs:
        mine = []
        for _ in range(acts):
            there = [name for name, kind in KINDS.items() if kind.only in ("", "agents" if agents else "one machine")]
            kind = min(there, key=lambda name: (dealt[name], random.random()))
            dealt[kind] += 1
            mine.append(Act(kind, random.randrange(1, 6), random.randrange(1 << 32)))
        drawn.append(mine)
    return drawn


@dataclass
class Hurt:
    """An act that was done. `went_on`: the run then did steps, and did not stop because of the act."""

    act: Act
    done: Done
    went_on: bool = False

    @property
    def may_stop(self) -> bool:
        """True if the run may stop because of it."""
        return KINDS[self.act.kind].must == "may stop"


class Reference:
    """The same run without disturbance, at any number of steps."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder, self._data = folder, data
        self._at = self._begun = 0
        folder.mkdir()

    def at(self, steps: int) -> Path:
        """Return a run folder whose newest checkpoint is that after `steps` steps."""
        if steps < self._at:  # the run cannot go back
            self._at, self._begun = 0, self._begun + 1
        run, file = self._folder / f"run-{self._begun}", self._folder / "run.toml"
        if steps > self._at:
            file.write_text(RUN.format(data=self._data, steps=steps))
            train(load(file, overrides=("checkpoint.every=10_000", "fleet.recover=false")).spec, run)
            self._at = steps
        return run


class Play:
    """Does acts to one run."""

    def __init__(self, scene: Scene, reference: Reference) -> None:
        self._scene, self._reference = scene, reference
        self.hurts: list[Hurt] = []
        self._pending: list[Hurt] = []  # acts since the last command was typed
        self._back: list[Done] = []

    def play(self, acts: Iterable[Act]) -> None:
        """Do the acts, stop the run gracefully and let it end. Raises BrokenError if the law does not hold."""
        scene = self._scene
        scene.type()
        for act in acts:
            self._await(act.after)
            done = KINDS[act.kind].do(scene, Random(act.seed))
            if done is not None:
                hurt = Hurt(act, done)
                self.hurts.append(hurt)
                self._pending.append(hurt)
                self._back.append(done)
        self._await(2 * LAST)
        self._finish()

    def _await(self, steps: int) -> None:
        """Wait for steps. If the command ends before, either an act allows this or the law is broken; then the command
        is typed again."""
        while not self._scene.goes_on(steps):
            self._judge()
            self._scene.type()
        for hurt in self._pending:
            hurt.went_on = True

    def _judge(self) -> None:
        status, said = self._scene.end(), self._said()
        blamed = [hurt for hurt in self._pending if hurt.may_stop and any(_has(said, name) for name in hurt.done.names)]
        if not blamed:
            last = "\n".join(said.splitlines()[-12:])
            raise BrokenError(f"the command ended with status {status} and names nothing for which it may stop:\n{last}")
        signals = [hurt for hurt in blamed if hurt.act.kind == "signal to the command"]
        for hurt in signals[-1:] or blamed:
            hurt.went_on = False
        self._put_back()

    def _said(self) -> str:
        said = self._scene.output()
        if "Traceback (most recent call last)" in said:
            raise BrokenError(f"a traceback:\n{said[said.index('Traceback') :][:3000]}")
        return said

    def _put_back(self) -> None:
        for done in reversed(self._back):
            done.back()
        self._back.clear()
        self._pending.clear()

    def _finish(self) -> None:
        scene = self._scene
        scene.command.send_signal(signal.SIGTERM)
        status, said = scene.end(), self._said()
        if status not in (ExitCode.STOPPED, ExitCode.TERMINATED, ExitCode.LOST):
            raise BrokenError(f"asked to stop, it ended with status {status}:\n{said[-1500:]}")
        self._put_back()
        last = max(scene.steps) + LAST
        scene.type(steps=last)
        status, said = scene.end(), self._said()
        if status != ExitCode.FINISHED:
            raise BrokenError(f"the same command ended with status {status}:\n{said[-1500:]}")
        self._compare(last)

    def _compare(self, last: int) -> None:
        """Compare the final state, and each step that was ever in the log, bit by bit."""
        scene, unhurt = self._scene, self._reference.at(last)
        known = {event.step: (event.loss, event.grad_norm, event.tokens) for event in of_kind(read(unhurt), Step)}
        other = {step: seen for step, seen in scene.steps.items() if step in known and seen != {known[step]}}
        if other:
            first = min(other)
            raise BrokenError(f"another result from step {first} on: {other[first]} where {known[first]} is right")
        try:
            assert position(scene.run) == position(unhurt)
            assert_same_bits(final_state(unhurt), final_state(scene.run))
        except AssertionError as error:
            raise BrokenError(f"another end: {error}") from error


def _has(said: str, name: str) -> bool:
    """True if a name was printed. Lines may be broken anywhere."""
    return "".join(name.split()) in "".join(said.split())


def play(acts: Sequence[Act], folder: Path, data: Path, reference: Reference, *, agents: bool) -> tuple[list[Hurt], str]:
    """Do acts to a run in `folder`. Return those that were done, and how the law was broken, or "" if it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    with Scene(folder, data, agents=agents) as scene:
        one = Play(scene, reference)
        try:
            one.play(acts)
        except BrokenError as error:
            done = "\n".join(f"  {hurt.act}  ({hurt.done.what})" for hurt in one.hurts)
            return one.hurts, f"{error}\nafter\n{done}\n--- said\n{scene.output()[-3000:]}"
    return one.hurts, ""


def shrink(acts: Sequence[Act], breaks: Callable[[Sequence[Act]], bool]) -> list[Act]:
    """Find fewer acts that also break the law (Zeller and Hildebrandt 2002, delta debugging): halves are tried first, then smaller parts,
    then each act is left out alone. If the law breaks only by chance, more acts than necessary may remain, never fewer."""
    left, parts = list(acts), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        cuts = [left[begin : begin + size] for begin in range(0, len(left), size)]
        rests = [left[:begin] + left[begin + size :] for begin in range(0, len(left), size)]
        smaller = next((some for some in (*cuts, *(rests if parts > 2 else ())) if some and breaks(some)), None)
        if smaller is not None:
            parts = 2 if smaller in cuts else max(2, parts - 1)
            left = smaller
        elif parts >= len(left):
            break
        else:
            parts = min(len(left), 2 * parts)
    return left


def unproven(hurts: Sequence[Hurt]) -> set[str]:
    """Return the kinds of acts after which a run must continue, but none did a step."""
    ended = {hurt.act.kind for hurt in hurts if not hurt.may_stop}
    return ended - {hurt.act.kind for hurt in hurts if hurt.went_on}


def shares(hurts: Iterable[Hurt]) -> Iterator[str]:
    """Return for each kind of act their number, and the share after which the run continued."""
    hurts = list(hurts)
    for name, kind in KINDS.items():
        mine = [hurt.went_on for hurt in hurts if hurt.act.kind == name]
        went_on = f"{sum(mine) / len(mine):4.0%} went on" if mine else "-"
        yield f"{name:<26} {kind.must:<9} {len(mine):4}  {went_on}"
