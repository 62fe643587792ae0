"""A campaign across sites: the commands of all sites of a run on this machine, with faults of whole sites and of the links between them.

Each site is a command that a user would type, with its own run folder. A relay joins each pair of sites (`machine.wire`). The
campaign cuts relays, resets their connections or makes them lose packets. `rehearse.site_judge` judges the run.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

from megalith.events import Merge, read_kind
from megalith.fleet.exit_codes import ORDERLY
from megalith.fleet.secure import key
from megalith.machine import parent_watch, wire
from megalith.machine.wire import Conditions, Wire
from megalith.rehearse.campaign import MAX_BY_HAND, POLL_SECONDS
from megalith.rehearse.site_faults import KINDS, LOSS, SiteFault
from megalith.rehearse.supervised_agents import HOST
from megalith.spec.sites import folder_of

LOOK_SECONDS = 0.5  # between looks at the logs
SLOWED = 20
"""While a site does not train, the ranks of the other sites run only once in this many turns of the campaign's loop. Without this slowdown,
the run would end before the absent site is back."""
PORTS = range(20_000, 32_000)
"""Ports on which sites listen. Linux and macOS by default use higher ports for outgoing connections, so a relay's connection does
not take the port of a site that is away."""
LINK = Conditions(megabits=1000, milliseconds=1)
"""The conditions of links between sites, if the run file gives none."""


@dataclass
class SiteFate:
    """Outcome of a fault. Times are in seconds since the epoch; None: not yet. `over`: when the fault ended; `again`: when all
    sites trained again. `left`: sites without which the others continued between the fault and `again`."""

    fault: SiteFault
    came: float | None = None
    over: float | None = None
    again: float | None = None
    left: tuple[int, ...] = ()

    @property
    def handled(self) -> bool:
        """True if the fault was injected and all sites trained again."""
        return self.again is not None


@dataclass(frozen=True)
class SitesRun:
    """Outcome of the run with faults. `by_hand`: the number of times that a site's command ended unexpectedly."""

    folder: Path
    seconds: float
    by_hand: int
    fates: tuple[SiteFate, ...]


@dataclass(frozen=True)
class Membership:
    """The sites that take part in a run's newest merges. `merges`: the number of merges so far. `times`: for each site, the time
    of the newest merge of its own work since it last joined, by its own log. `left`: for each site, the time at which the other sites
    last continued without it."""

    merges: int
    members: frozenset[int]
    times: tuple[float, ...]
    left: tuple[float, ...]


def membership(run_dir: Path, count: int) -> Membership:
    """Read which sites of a run of `count` sites take part in merges, from the logs of all sites: a site's log gets the merges that
    are made while it is away only when it is back, and its last work from before may be in some of them. If a merge was repeated,
    the repetition counts."""
    logs = [_merges(folder_of(run_dir, site)) for site in range(count)]
    everything = sorted((one for log in logs for one in log), key=lambda one: one.time)
    by_number = {one.number: one for one in everything}
    newest = [by_number[number] for number in sorted(by_number) if number <= everything[-1].number]
    members = set(range(count))
    for one in newest:
        members = (members | {*one.merged} | {*one.joined}) - {*one.left}
    back = [max((one.number for one in newest if site in one.joined), default=-1) for site in range(count)]
    work = ([one for one in log if site in one.merged and one.number > back[site]] for site, log in enumerate(logs))
    own = (max((one.time for one in each), default=0.0) for each in work)
    left = (max((one.time for one in newest if site in one.left), default=0.0) for site in range(count))
    return Membership(newest[-1].number + 1 if newest else 0, frozenset(members), tuple(own), tuple(left))


def _merges(folder: Path) -> list[Merge]:
    return read_kind(folder, Merge) if folder.is_dir() else []


@dataclass
class SiteProcess:
    """The command of one site. `away`: the time, in monotonic seconds, at which the command is started again after a kill."""

    begin: Callable[[], "subprocess.Popen[bytes]"]
    process: "subprocess.Popen[bytes]"
    away: float | None = None
    stopped: bool = False
    _ranks: list[int] = field(default_factory=list)

    def kill(self) -> None:
        """Kill all processes of the site with signal 9."""
        import psutil  # which only campaigns need

        self.run(True)
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.process.pid)
            everyone = [command, *command.children(recursive=True)]
            for one in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs([one for one in everyone if one.pid != self.process.pid], timeout=10)
        self.process.wait()

    def find_ranks(self) -> None:
        """Find the processes of this site's ranks."""
        import psutil  # which only campaigns need

        self._ranks = []
        with contextlib.suppress(psutil.Error):
            servers = psutil.Process(self.process.pid).children()
            self._ranks = [rank.pid for server in servers for rank in server.children()]

    def run(self, go: bool) -> None:
        """Resume the site's ranks, or suspend them."""
        if go != self.stopped:
            return
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT if go else signal.SIGSTOP)
        self.stopped = not go


class SiteCampaign:
    """The sites of a run with faults, while they train."""

    def __init__(self, sites: Sequence[SiteProcess], wires: Sequence[tuple[tuple[int, int], Wire]], run_dir: Path) -> None:
        """`wires`: the relays, each with the sites at its ends."""
        self.sites, self._wires, self._run_dir = list(sites), wires, run_dir
        self.by_hand = 0
        self.seen = Membership(0, frozenset(range(len(sites))), (0.0,) * len(sites), (0.0,) * len(sites))
        self._turn, self._looked, self._slow = 0, 0.0, set[int]()
        self._until = 0.0  # monotonic seconds
        self._merges = 0  # from which on the next fault may come, or at which one is over

    def live(self, fates: Sequence[SiteFate]) -> None:
        """Run the sites to their end, and inject the faults one after the other."""
        left = list(fates)
        self._merges = left[0].fault.after if left else 0
        try:
            while self.by_hand <= MAX_BY_HAND and not self._ended():
                if left and self._goes_on(left[0]):
                    left.pop(0)
                    self._merges = self.seen.merges + (left[0].fault.after if left else 0)
                time.sleep(POLL_SECONDS)
        finally:
            for site in self.sites:
                site.run(True)
            if self.by_hand > MAX_BY_HAND:
                for site in self.sites:
                    site.kill()

    def _ended(self) -> bool:
        self._turn += 1
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self.seen = membership(self._run_dir, len(self.sites))
            for site in self.sites:
                if not site.stopped:
                    site.find_ranks()
        ended = []
        for number, site in enumerate(self.sites):
            if site.away is not None:
                if time.monotonic() >= site.away:
                    site.process, site.away = site.begin(), None
                    site.find_ranks()
            elif (code := site.process.poll()) is not None and code not in ORDERLY:
                self.by_hand += 1
                site.process = site.begin()
            ended.append(site.away is None and site.process.poll() is not None)
            site.run(self._turn % self._turns(number) == 0)
        return all(ended)

    def _turns(self, number: int) -> int:
        """Return n if the site's ranks run only in every n-th turn."""
        if len(self.seen.members) < len(self.sites) and number in self.seen.members:
            return SLOWED
        return 2 if number in self._slow else 1

    def _goes_on(self, fate: SiteFate) -> bool:
        """Begin the fault, end it, or wait until all sites train again. Return True once all sites train again."""
        one, now = fate.fault, time.time()
        if fate.came is None:
            if self.seen.merges >= self._merges and len(self.seen.members) == len(self.sites):
                fate.came = now
                self._begin(one)
            return False
        fate.left = tuple(sorted({*fate.left, *(site for site, at in enumerate(self.seen.left) if at >= fate.came)}))
        if fate.over is None:
            if self._is_over(one):
                fate.over = now
                self._end(one)
            return False
        all_back = len(self.seen.members) == len(self.sites) and all(at > fate.over for at in self.seen.times)
        fate.again = max(self.seen.times) if all_back else None
        return all_back

    def _begin(self, one: SiteFault) -> None:
        print(f"fault {one.number}: {one.kind} at site {one.site} after {self.seen.merges} merges", file=sys.stderr, flush=True)
        self._until, self._merges = time.monotonic() + one.seconds, self.seen.merges + KINDS[one.kind].merges
        site = self.sites[one.site]
        if one.kind == "kill":
            site.away = self._until
            site.kill()
        if one.kind == "slow":
            self._slow.add(one.site)
        for link in self._links(one.site):
            if one.kind == "cut":
                link.cut(cut=True)
            elif one.kind == "torn":
                link.tear()
            elif one.kind == "loss":
                link.lose(LOSS)

    def _is_over(self, one: SiteFault) -> bool:
        if one.kind == "kill":
            return self.sites[one.site].away is None
        return time.monotonic() >= self._until and self.seen.merges >= self._merges

    def _end(self, one: SiteFault) -> None:
        self._slow.discard(one.site)
        for link in self._links(one.site):
            link.cut(cut=False)
            link.lose(0.0)

    def _links(self, site: int) -> Iterator[Wire]:
        return (link for ends, link in self._wires if site in ends)


def free_ports(count: int) -> list[int]:
    """Return this many free ports."""
    found = list[int]()
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(
        f"fewer than {count} ports from {PORTS.start} to {PORTS.stop - 1} are free. End processes that listen in this range"
    )


def run(
    command_of: Callable[[int, Sequence[str]], Sequence[str]],
    run_dir: Path,
    faults: Sequence[SiteFault],
    *,
    count: int,
    link: Conditions = LINK,
) -> SitesRun:
    """Run the commands of `count` sites to their end, and inject the faults. `command_of` returns a site's command; its arguments
    include the addresses of the other sites."""
    run_dir.mkdir(parents=True, exist_ok=True)
    fates, begun = [SiteFate(one) for one in faults], time.monotonic()
    ports = free_ports(count)
    environment = os.environ | key.new().variables
    with contextlib.ExitStack() as stack:
        wires = [(ends, stack.enter_context(wire.relay(ports[ends[0]], link))) for ends in combinations(range(count), 2)]
        logs = [stack.enter_context((run_dir.parent / f"{run_dir.name}-{site}.log").open("ab")) for site in range(count)]
        reached = {ends: f"{there.address[0]}:{there.address[1]}" for ends, there in wires if there.address is not None}

        def begin(site: int) -> "subprocess.Popen[bytes]":
            # A site connects to those before it, through a relay.
            addresses = [reached[other, site] if other < site else f"{HOST}:{ports[other]}" for other in range(count)]
            dies = partial(parent_watch.die_with_parent, os.getpid())
            command = command_of(site, addresses)
            return subprocess.Popen(command, stdout=logs[site], stderr=logs[site], env=environment, preexec_fn=dies)

        sites = [SiteProcess(partial(begin, site), begin(site)) for site in range(count)]
        campaign = SiteCampaign(sites, wires, run_dir)
        try:
            campaign.live(fates)
        finally:
            for site in sites:
                if site.process.poll() is None:
                    site.kill()
    return SitesRun(run_dir, time.monotonic() - begun, campaign.by_hand, tuple(fates))
