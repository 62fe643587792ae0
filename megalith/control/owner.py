"""Ownership of a run folder: only one command at a time writes to it. A second command fails with an error that names the owner.

On a local file system the owner holds a lock, which ends with its process. On a file system that machines share, a lock may not
exclude other machines, so the owner renews a lease. Owners create numbered claims in `ranks/owners/`, each atomically:

    00000003.json   the claim: which process, on which host, since when, its epoch, and how long its lease is
    00000003.beat   changes with each renewal
    00000003.left   the owner has ended, and so have its ranks

Clocks of two machines are never compared: a process that wants to own the folder waits for a whole lease without a renewal. An owner
that cannot renew its lease stops its ranks long before the lease ends. See docs/decisions/0015-one-owner.md.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megalith import disk, epochs
from megalith.fleet.exit_codes import ExitCode

LEASE_SECONDS = 60.0  # that an owner without a sign of life is believed in
RENEWALS = 12  # within a lease
STOP, END = (
    0.5,
    0.75,
)  # of its lease after which an owner that could not renew it stops its ranks, and its process if that takes too long
POLL_SECONDS = 0.2

LOCAL = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "jfs",
        "nilfs2",
        "reiserfs",
        "tmpfs",
        "ramfs",
        "overlay",
        "aufs",
    }
    | {"rootfs", "vfat", "exfat", "ntfs", "ntfs3", "apfs", "hfs", "ufs"}
)
"""Names of local file systems, on which flock excludes every process that can access a file."""


class InUseError(RuntimeError):
    """Another command owns the run folder."""


class LeaseError(RuntimeError):
    """The run folder's lease could not be renewed in time."""

    exit_code = ExitCode.LOST


class TakenError(LeaseError):
    """Another command owns the run folder now, or another folder is at its path."""


@dataclass(frozen=True)
class Claim:
    """An owner's claim. `born`: the start time of the owner's process, because a later process may have the same id. `place`: the
    machine's boot, and the namespace of process ids. `lease`: seconds; 0: the owner holds a lock instead. `wide`: the owner's
    ranks are on several machines."""

    number: int
    epoch: int
    process: int
    born: str
    place: str
    host: str
    since: float
    lease: float
    wide: bool

    @property
    def who(self) -> str:
        """The owner's process, host and start time as text."""
        return f"{self.process} on {self.host} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


class Owner:
    """This process, as the owner of a run folder."""

    def __init__(self, run_dir: Path, claim: Claim) -> None:
        self.run_dir = run_dir
        self._claim, self._claims = claim, _Claims(run_dir)
        self._place = disk.Place(run_dir, existed=True)
        self._renewed = time.monotonic()
        self._taken = self._trouble = ""
        self._idle = False  # no rank runs

    @property
    def epoch(self) -> int:
        """The epoch in the names of this owner's files (`megalith.epochs`)."""
        return self._claim.epoch

    @contextlib.contextmanager
    def renewing(self, *, watched: bool = True) -> Iterator[None]:
        """Renew the lease while the block runs. With `watched`, if the lease cannot be renewed for too long, or another folder is at the
        run folder's path, and `check` has not ended the ranks by then, end this process and with it all ranks."""
        done = threading.Event()
        loops = [self._keep_renewing] if self._claim.lease else []
        loops += [self._watch if self._claim.lease else self._watch_folder] if watched else []
        threads = [threading.Thread(target=loop, args=(done,), daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:  # because callers fork; with a limit, because a thread may wait for a store that is away
                thread.join(LEASE_SECONDS / RENEWALS)

    def check(self) -> None:
        """Raise TakenError if another process owns the folder now, or another folder is at its path, or LeaseError if the lease could
        not be renewed for too long. After either error, the caller must stop all ranks."""
        self._compare_folder()
        if self._taken:
            raise TakenError(self._taken)
        silence = time.monotonic() - self._renewed
        if self._claim.lease and silence > STOP * self._claim.lease:
            raise LeaseError(
                f"the lease of {self.run_dir} could not be renewed for {silence:.0f} s{self._trouble}: the ranks were "
                f"stopped, because another command may own the folder after {self._claim.lease:.0f} s"
            )

    def checked(self, turn: Callable[[], None] | None) -> Callable[[], None]:
        """Return a function that calls `check` and then `turn`, for the loop that supervises ranks."""

        def both() -> None:
            self.check()
            if turn is not None:
                turn()

        return both

    def regain(self, *, seconds: float) -> None:
        """Wait until the lease can be renewed; no rank may run during the wait. Raises TakenError if another process owns the
        folder after the wait, and LeaseError after `seconds` of waiting."""
        if self._taken:
            raise TakenError(self._taken)
        until, self._idle = time.monotonic() + seconds, True
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                self._renew()
                self._renewed, self._idle = began, False
                return
            except OSError:
                time.sleep(self._claim.lease / RENEWALS)
        raise LeaseError(f"the lease of {self.run_dir} could not be renewed for {seconds:.0f} s{self._trouble}")

    def leave(self) -> None:
        """Record that this owner and its ranks have ended. Nothing is recorded if storage is unavailable; the next owner must
        then wait for a whole lease. Nothing is recorded in another owner's folder either."""
        with contextlib.suppress(OSError):
            if not self._place.away():
                self._claims.leave(self._claim)

    def _compare_folder(self) -> None:
        """Note whether another folder is at the run folder's path. The lock is on this owner's folder, so it keeps nobody out of that
        one. A lease needs no look: its owner finds the claim of another."""
        if not self._claim.lease and self._place.away() == disk.REPLACED:
            self._taken = (
                f"{self.run_dir} is another folder now: this run's own folder was moved or removed while the run went on, and another "
                "one was made in its place. This run stops, because it would write among the files there. Move its own folder back, if "
                "it exists, and start the same command again"
            )

    def _watch_folder(self, done: threading.Event) -> None:
        while not done.wait(LEASE_SECONDS / RENEWALS):
            self._compare_folder()
            if self._taken and not done.wait((END - STOP) * LEASE_SECONDS):
                print(f"{self._taken}: this process ends", file=sys.stderr, flush=True)
                os._exit(ExitCode.LOST)

    def _renew(self) -> None:
        newest = self._claims.newest()
        if newest is None:  # somebody has cleared them away
            self._claims.make(self._claim)
            newest = self._claims.newest()
        if newest is not None and newest != self._claim:
            self._taken = f"{self.run_dir} is now owned by process {newest.who}, because this process could not renew its lease"
            raise TakenError(self._taken)
        self._claims.beat(self._claim)

    def _keep_renewing(self, done: threading.Event) -> None:
        while not done.wait(self._claim.lease / RENEWALS):
            began = time.monotonic()
            try:
                self._renew()
                self._renewed, self._trouble = began, ""
            except TakenError:
                return
            except OSError as error:
                self._trouble = f" ({error.strerror})"

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(self._claim.lease / RENEWALS / 2):
            if not self._idle and time.monotonic() - self._renewed > END * self._claim.lease:
                why = self._taken or f"the lease of {self.run_dir} could not be renewed{self._trouble}"
                print(f"{why}: this process ends", file=sys.stderr, flush=True)
                os._exit(ExitCode.LOST)


@contextlib.contextmanager
def hold(run_dir: Path, *, wide: bool = False) -> Iterator[Owner]:
    """Own a run folder while the block runs. The caller must not write to the folder before the block. `wide`: the ranks will be on
    several machines.

    Raises InUseError, with the owner's process, host and time, if another process owns the folder; the folder is then unchanged. If the
    last owner may still run on another machine, the call watches for signs of it, at most for as long as its lease. Raises OSError if the
    folder cannot be made, or its file system is not mounted.
    """
    disk.check_mounted(run_dir)
    folder = run_dir.resolve() / "ranks"
    disk.make_folder(folder)
    claims = _Claims(run_dir)
    with contextlib.ExitStack() as stack:
        locked = flock_serves(folder)
        if locked:
            stack.enter_context(_lock(run_dir))
        before = claims.newest()
        # without claims, as in a copy, an owner writes what readers read
        epoch = epochs.last(run_dir) if before is None else _epoch_after(before, claims, run_dir, locked=locked)
        claim = Claim(
            number=1 if before is None else before.number + 1, epoch=epoch, process=os.getpid(), born=_born(os.getpid()),
            place=place(), host=socket.gethostname(), since=time.time(), lease=0.0 if locked else LEASE_SECONDS, wide=wide,
        )  # fmt: skip
        if not claims.make(claim):
            newest = claims.newest()
            raise InUseError(_in_use(run_dir, newest.who if newest else "(unknown)"))
        owner = Owner(run_dir, claim)
        stack.callback(owner.leave)
        if epoch:
            with owner.renewing(
                watched=False
            ):  # no rank runs yet, and a long log takes longer to copy than an owner may be silent
                epochs.begin(run_dir, epoch)
        yield owner


def owned(run_dir: Path, owner: Owner | None) -> contextlib.AbstractContextManager[Owner]:
    """Return a context that yields `owner`, or, if it is None, owns the folder while the block runs (`hold`)."""
    return hold(run_dir) if owner is None else contextlib.nullcontext(owner)


def flock_serves(folder: Path) -> bool:
    """True if a folder is on a local file system, so that a lock excludes every process that can access it."""
    path = folder.resolve()
    mounted = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    nearest = next((mounted[parent] for parent in (path, *path.parents) if parent in mounted), "")
    return nearest in LOCAL


def place() -> str:
    """Identify the scope in which this process's id is unique: the machine, its boot, and the PID namespace (a container has its
    own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not on Linux
        return socket.gethostname()


def _epoch_after(before: Claim, claims: "_Claims", run_dir: Path, *, locked: bool) -> int:
    """Return the epoch of the next owner: a new epoch if the last owner may still run, or may have left running ranks on other
    machines. `locked`: this process holds the lock.

    Raises InUseError if the last owner still runs, or if it may hold a lock on another machine, which cannot be checked here.
    """
    if claims.left(before):
        return before.epoch
    if before.place == place() and _born(before.process) == before.born:
        # Stopped or not, its copies in this machine's memory are in use; and a lock that somebody removed keeps nobody out.
        raise InUseError(_in_use(run_dir, before.who))
    if locked and not before.lease:  # its lock went with its process
        return before.epoch
    if before.place == place():
        return before.epoch + before.wide
    if not before.lease:
        way_out = f"if the owner's process has ended, start the command on that process's host, or remove {claims.folder}"
        raise InUseError(
            f"{_in_use(run_dir, before.who)}. The run folder's owner holds a lock that this machine cannot check: {way_out}"
        )
    print(
        f"{run_dir} was last owned by process {before.who}: checking for up to {before.lease:.0f} s whether that process still owns it",
        file=sys.stderr,
    )
    last, until = claims.last_beat(before), time.monotonic() + before.lease
    while True:
        over = time.monotonic() >= until
        if claims.left(before):
            return before.epoch
        if claims.last_beat(before) != last:
            raise InUseError(_in_use(run_dir, before.who))
        if over:
            return before.epoch + 1
        time.sleep(POLL_SECONDS)


class _Claims:
    """The claims to a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.resolve()
        self.folder = self._run_dir / "ranks" / "owners"

    def newest(self) -> Claim | None:
        """The newest claim; None if there is no claim. If the claim is damaged, its owner is returned as unknown."""
        found: list[Path] = []
        with contextlib.suppress(FileNotFoundError):  # only this: `glob` may take a folder that cannot be read for empty
            found = sorted(path for path in self.folder.iterdir() if path.suffix == ".json" and path.stem.isdecimal())
        if not found:
            return None
        try:
            return Claim(**json.loads(found[-1].read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            renewed = disk.is_there(found[-1].with_suffix(".beat"))
            return Claim(
                number=int(found[-1].stem), epoch=epochs.last(self._run_dir), process=0, born="?", place="?", host="(unknown)",
                since=found[-1].stat().st_mtime, lease=LEASE_SECONDS if renewed else 0.0, wide=True,
            )  # fmt: skip

    def make(self, claim: Claim) -> bool:
        """Make a claim and remove older ones. Return False, without making it, if a claim with the same or a higher number
        exists."""
        self.folder.mkdir(exist_ok=True)
        path = self._path(claim)
        if not disk.make_new(path, json.dumps(asdict(claim))):
            return False
        if self.newest() != claim:
            path.unlink()
            return False
        for old in self.folder.iterdir():
            if old.stem < path.stem and old.suffix != ".tmp":
                old.unlink(missing_ok=True)
        return True

    def beat(self, claim: Claim) -> None:
        disk.write_whole(self._path(claim, "beat"), secrets.token_hex(8))

    def last_beat(self, claim: Claim) -> str:
        try:
            return self._path(claim, "beat").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def leave(self, claim: Claim) -> None:
        self._path(claim, "left").touch()

    def left(self, claim: Claim) -> bool:
        return disk.is_there(self._path(claim, "left"))

    def _path(self, claim: Claim, ending: str = "json") -> Path:
        return self.folder / f"{claim.number:08d}.{ending}"


@contextlib.contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Lock the run folder and a file in it. The folder's lock excludes a second owner even if the file and the claims are
    deleted."""
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context((run_dir.resolve() / "ranks" / "lock").open("a+", encoding="utf-8"))
        folder = os.open(run_dir.resolve(), os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        try:
            for descriptor in (lock.fileno(), folder):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(_in_use(run_dir, _locked_by(run_dir, lock.name))) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _locked_by(run_dir: Path, lock: str) -> str:
    text = Path(lock).read_text(encoding="utf-8", errors="replace").strip()
    process = text if text.isascii() and text.isprintable() else ""  # somebody may have damaged the file
    newest = _Claims(run_dir).newest()
    return newest.who if newest is not None and process in ("", str(newest.process)) else process or "(unknown)"


def _in_use(run_dir: Path, who: str) -> str:
    return f"{run_dir.resolve()} is in use by process {who}. Wait for it, stop it, or use another run folder"


def _born(process: int) -> str:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return "there" if sys.platform != "linux" and psutil.pid_exists(process) else ""
