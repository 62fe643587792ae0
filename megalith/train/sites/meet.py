"""Builds a site's part in a run across sites: its connections to the other sites, and the checkpoints that it offers them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalith import disk, epochs
from megalith.checkpoint.folder import DamagedCheckpointError, committed, read_manifest
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.peers import Address, Peers
from megalith.fleet.secure.tls import Tls
from megalith.parallel.groups import another
from megalith.spec.sites import HEAD_BYTES, Fragment, SitesSpec, folder_of, fragments
from megalith.spec.sites.terms import terms
from megalith.train.assemble import Trainer
from megalith.train.sites.council import Council
from megalith.train.sites.merge import Sites
from megalith.train.sites.messages import FORMAT, CheckpointOffer
from megalith.train.sites.progress import Progress
from megalith.train.sites.record import ReplayedCouncil, recorded
from megalith.train.sites.state import OuterState
from megalith.train.sites.synchronous import AllSitesCouncil, SynchronousSites
from megalith.train.sites.whole_tensors import WholeTensors

LOOPBACK = "127.0.0.1"
SLOW_ROUNDS = 4  # whose differences may wait for a link before the site behind it is cut off, so that memory stays bounded
SPARE_BYTES = 1 << 20  # for verdicts and other short messages
ADDRESS_FILE = "site.address"
"""File in a site's folder with the address at which its leading rank listens, for other sites on the same machine."""


class NoCertificate(RuntimeError):  # noqa: N818  # it says what is missing
    """The files named by `sites.tls` cannot be read, or do not match."""


def build(
    trainer: Trainer,
    folder: Path,
    *,
    beat: Callable[[], object],
    asked: Callable[[], bool] = lambda: False,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Sites:
    """Build this rank's part in the merges. All ranks of a site call this together.

    `folder`: the site's own folder. `beat` is called several times a second while the rank waits for other sites. `asked` returns True once
    this rank is asked to stop. `data`: the fingerprint of the training samples, which must be equal on all sites.
    Raises NoKey if the rank has no key, NoCertificate, and OSError if it cannot listen at the site's address.
    """
    run, spec = trainer.run, trainer.run.sites
    assert spec is not None
    lanes = another(trainer.groups.world, timeout=timedelta(seconds=run.launch.timeout))
    tensors = {name.removeprefix("weights."): tensor for name, tensor in trainer.state.laid("weights").items()}
    wholes = WholeTensors(tensors, lanes)
    cut = fragments({name: wholes.shapes[name] for name in sorted(wholes.shapes)}, spec)
    leads = trainer.groups.rank == 0
    state = OuterState(trainer.state, cut, spec, leads=leads)
    site = spec.site or 0
    peers = _listen(spec, site, folder, most_waiting=_most_waiting(cut, spec.staleness)) if leads and spec.count > 1 else None
    council = None
    if leads:
        patience, start = run.launch.timeout, run.launch.start_timeout
        usual = partial(AllSitesCouncil, every=run.checkpoint.every) if spec.exchanges_gradients else Council
        kind = partial(ReplayedCouncil, record=recorded([Path(folder) for folder in spec.replay])) if spec.replay else usual
        common = terms(run, data, version=FORMAT)
        council = kind(spec, site, peers, patience=patience, start=start, limit=run.fleet.wait_limit, beat=beat, terms=common)
    kind_of_merge = SynchronousSites if spec.exchanges_gradients else Sites
    return kind_of_merge(run, cut, state, wholes, site=site, folder=folder, council=council, beat=beat, asked=asked)


def _most_waiting(cut: Sequence[Fragment], staleness: int) -> int:
    """Return the maximum number of bytes that may wait to be sent to a site: weights and velocities, and the weight differences of
    SLOW_ROUNDS rounds plus the rounds by which the site may be late."""
    whole = sum(8 * piece.numel for fragment in cut for piece in fragment.pieces)
    return whole + (SLOW_ROUNDS + staleness) * sum(HEAD_BYTES + fragment.bytes for fragment in cut) + SPARE_BYTES


def _listen(spec: SitesSpec, site: int, folder: Path, *, most_waiting: int) -> Peers:
    if (secret := key.given()) is None:
        names = f"{key.VARIABLE} or {key.FILE_VARIABLE}"
        raise NoKey(
            f"sites authenticate each other by the run's key, but this rank has none. Set {names}; `megalith key` creates a key"
        )
    run_dir = folder if site == 0 else folder.parent

    def address_of(other: int) -> Address | None:
        if spec.addresses:
            return parsed(spec.addresses[other])
        return announced(folder_of(run_dir, other))

    host, port = parsed(spec.addresses[site]) if spec.addresses else (LOOPBACK, 0)
    tls = _tls(spec)
    peers = Peers(site, spec.count, secret, address_of=address_of, host=host, port=port, most_waiting=most_waiting, tls=tls)
    if not spec.addresses:
        announce(folder, peers.address, epoch=epochs.mine())
    peers.open()
    return peers


def announce(folder: Path, address: Address, *, epoch: int) -> None:
    """Write a site's address to its folder, for the other sites. `epoch`: the number in the file names of the folder's owner."""
    disk.write_whole(folder / epochs.name(ADDRESS_FILE, epoch), f"{address[0]}:{address[1]}")


def announced(folder: Path) -> Address | None:
    """Return the address that a site's newest owner announced; None if none did."""
    path = epochs.newest(folder, ADDRESS_FILE)
    return parsed(path.read_text(encoding="ascii")) if path.is_file() else None


def _tls(spec: SitesSpec) -> Tls | None:
    if (files := spec.tls) is None:
        return None
    try:
        return Tls.of(files.certificate, files.key, files.authority)
    except OSError as error:
        named = ", ".join(map(str, (files.certificate, files.key, files.authority)))
        reason = error.strerror or error
        raise NoCertificate(
            f"sites.tls names {named}: {reason}. docs/guide/sites.md has the commands that create these files"
        ) from error


def parsed(address: str) -> Address:
    """Return the host and the port of "HOST:PORT". Raises ValueError for any other text."""
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not an address of a site. Write HOST:PORT")
    return host.strip("[]"), int(port)


def cuts_in(folder: Path, *, at_most: int | None, total: int) -> list[CheckpointOffer]:
    """Return the checkpoints in a folder from which a run of `total` samples across sites can be resumed, up to step `at_most`."""
    found = []
    for path in committed(folder):
        try:
            meta = read_manifest(path).meta
        except (OSError, DamagedCheckpointError):  # the code that loads it reports it
            continue
        step = meta["position"]["step"]
        if "sites" in meta and (at_most is None or step <= at_most):
            found.append(Progress.of(meta["sites"]).cut(step, total))
    return found
