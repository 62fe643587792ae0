"""The other sites of a run whose sites are all on this machine. A separate command trains
each of these other sites, in a folder inside the run folder; this command trains the first site."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from megalith import disk, epochs
from megalith.commands.shared.arguments import RunRequest
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.secure import key
from megalith.machine import parent_watch
from megalith.spec.files import FILE
from megalith.spec.run import RunSpec
from megalith.spec.sites import folder_of, usual_name

LOG = "train.log"
"""File in another site's folder for the output of its command."""
LEAVE_SECONDS = 60.0  # that a site may take to save and end once it is asked to stop


class SiteEndedError(RuntimeError):
    """The command of another site has failed, and the remaining sites form no quorum for merges."""

    def __init__(self, message: str, status: int) -> None:
        """`status`: exit status of the other site's command; negative (minus the signal's number) if the command was killed."""
        super().__init__(message)
        self.exit_code = status if status > 0 else ExitCode.LOST


class Siblings:
    """The commands of all sites except the first."""

    def __init__(
        self,
        request: RunRequest,
        run_dir: Path,
        sites: Sequence[int],
        quorum: Callable[[Collection[int]], bool],
        more: Sequence[str],
        named: Callable[[int], str] = usual_name,
    ) -> None:
        """`quorum`: returns True if the given sites may merge without the other sites. `more`: further arguments of each command.
        `named`: returns a site's name."""
        self._sites, self._quorum, self._named = tuple(sites), quorum, named
        self._folders = [folder_of(run_dir, site) for site in sites]
        self._processes = [_start(request, folder, site, more) for site, folder in zip(sites, self._folders, strict=True)]

    def poll(self) -> None:
        """Raise SiteEndedError once too few sites are left for a quorum. A site whose command has failed is not restarted."""
        ended = {site: process.poll() for site, process in zip(self._sites, self._processes, strict=True)}
        failed = [site for site, status in ended.items() if status is not None and status not in ORDERLY]
        if failed and not self._quorum({0, *self._sites} - set(failed)):
            folders = dict(zip(self._sites, self._folders, strict=True))
            each = "; ".join(f"{self._named(site)} ended with status {ended[site]}: see {folders[site] / LOG}" for site in failed)
            text = (
                f"{each}. The remaining sites form no quorum, so the run ends. Run the same command again once the cause of "
                f"the failure is removed"
            )
            raise SiteEndedError(text, ended[failed[0]] or 0)

    def finish(self, code: int, *, patience: float) -> list[str]:
        """Wait for the other sites after the first site has ended with status `code`. If `code` is 0, the other sites should end by
        themselves within `patience` seconds; otherwise they are asked to stop. Returns a sentence for each site that ended with a status
        other than `code`."""
        found = []
        for site, process, folder in zip(self._sites, self._processes, self._folders, strict=True):
            if code or not _ends(process, patience):
                process.terminate()
                if not _ends(process, LEAVE_SECONDS):
                    process.kill()
            if (other := process.wait()) != code:
                found.append(f"{self._named(site)} ended with status {other}: see {folder / LOG}")
        return found


@contextlib.contextmanager
def running(request: RunRequest, spec: RunSpec, run_dir: Path, *, more: Sequence[str] = ()) -> Iterator[Siblings]:
    """Train all other sites while the block trains the first. Starts no site if `sites.site` is set: each site then has its own command."""
    sites = range(1, spec.sites.count) if spec.sites is not None and spec.sites.site is None else ()
    if sites:
        os.environ.update(key.of_run(run_dir).variables)  # all of them have the first one's
    quorum = spec.sites.quorum if spec.sites is not None else bool
    siblings = Siblings(request, run_dir, sites, quorum, more, usual_name if spec.sites is None else spec.sites.named)
    try:
        yield siblings
    except BaseException:
        siblings.finish(1, patience=0.0)
        raise


def _start(request: RunRequest, folder: Path, site: int, more: Sequence[str]) -> "subprocess.Popen[bytes]":
    folder.mkdir(parents=True, exist_ok=True)
    settings = [word for each in (*request.overrides, f"sites.site={site}") for word in ("--set", each)]
    begun = request.saved and disk.is_file(epochs.newest(folder, FILE))
    which = ["resume", str(folder)] if begun else ["train", str(request.file), "--run-dir", str(folder)]
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "megalith.cli", *which, *settings, *more],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(parent_watch.die_with_parent, os.getpid()),
        )


def _ends(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None
