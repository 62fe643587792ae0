"""Sites find each other when a run starts: which ranks make up a site, and the connections between those that lead one."""

import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from megalith.checkpoint.party import Party
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.peers import Peers
from megalith.parallel.groups import another, group_of
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, fragments
from megalith.train.assemble import Trainer
from megalith.train.sites.merge import Sites
from megalith.train.sites.state import OuterState
from megalith.train.sites.whole import Wholes

LOOPBACK = "127.0.0.1"


def site_of(spec: RunSpec, world: dist.ProcessGroup) -> tuple[int, dist.ProcessGroup]:
    """Return the number of this rank's site, and the group of its ranks; 0 and `world` for a run without sites. Sites are runs of
    neighbouring ranks, as many as the plan has. Raises ValueError for another number of ranks."""
    if spec.sites is None:
        return 0, world
    if world.size() != spec.ranks:
        raise ValueError(
            f"{spec.sites.count} sites of {spec.plan.ranks} ranks need {spec.ranks} ranks, {world.size()} were started"
        )
    site, size = world.rank() // spec.plan.ranks, spec.plan.ranks
    return site, group_of(world, range(site * size, (site + 1) * size))


def meet(trainer: Trainer, *, world: dist.ProcessGroup, savers: dist.ProcessGroup) -> Sites:
    """Build this rank's part in the merges. All ranks of all sites call it together. `savers`: gloo, of all of them.

    Raises NoKey on every rank where the ranks that lead sites know no key, and PeerGone where they cannot reach each other.
    """
    spec = trainer.run.sites
    assert spec is not None
    lanes = another(trainer.groups.world, timeout=timedelta(seconds=trainer.run.launch.timeout))
    tensors = {name.removeprefix("weights."): tensor for name, tensor in trainer.state.tensors("weights").items()}
    wholes = Wholes(tensors, lanes)
    cut = fragments({name: wholes.shapes[name] for name in sorted(wholes.shapes)}, spec)
    leads = trainer.groups.rank == 0
    state = OuterState(trainer.state, cut, spec, site=trainer.site, leads=leads)
    wire = _connect(spec, trainer.site, Party(savers), leads=leads, seconds=trainer.run.launch.start_timeout)
    return Sites(spec, cut, state, wholes, site=trainer.site, wire=wire, patience=trainer.run.launch.timeout)


def _connect(spec: SitesSpec, site: int, everyone: Party, *, leads: bool, seconds: float) -> Peers | None:
    """Connect the ranks that lead sites; None on others, and where there is one site."""
    if spec.count == 1:
        return None
    peers, wrong = None, ""
    start = everyone.tell(secrets.token_bytes(32))
    if leads:
        try:
            peers = _listen(spec, site, start)
        except (NoKey, OSError) as error:  # the others are on their way to the exchange below
            wrong = str(error)
    address = peers.address if peers is not None else ("", 0)
    told = everyone.gather_all((wrong, address, socket.gethostname()) if leads else None)
    led = [one for one in told if one is not None]
    if any(why for why, _, _ in led):
        raise NoKey("; ".join(sorted({why for why, _, _ in led if why})))
    if not spec.addresses and len({host for _, _, host in led}) > 1:
        raise ValueError(
            f"sites are led from {', '.join(sorted({host for _, _, host in led}))}, and sites.addresses names no address by which they "
            "reach each other. Give one for each site"
        )
    if peers is not None:
        peers.meet([address for _, address, _ in led], seconds=seconds)
    return peers


def _listen(spec: SitesSpec, site: int, start: bytes) -> Peers:
    """Raises NoKey, and OSError where nothing can listen at the site's address."""
    if (secret := key.given()) is None:
        names = f"{key.VARIABLE} or {key.FILE_VARIABLE}"
        raise NoKey(f"sites know each other by the run's key, and this rank was given none. Set {names}: megalith key makes one")
    return Peers(site, spec.count, secret, start=start, host=spec.addresses[site] if spec.addresses else LOOPBACK)
