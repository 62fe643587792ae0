"""Settings of the alerts that a person gets about a run."""

from collections.abc import Mapping
from typing import Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megalith.spec.base import Spec

Sign = Literal["ended", "silent", "loss", "slow", "memory", "experts", "disk", "finished"]
"""A kind of alert: something is wrong with a run, or the run has ended."""

ENVIRONMENT = "env:"

SIGNS: tuple[Sign, ...] = get_args(Sign)


class AlertsSpec(Spec):
    """Kinds of alert that are sent to a person, and their limits. The live page uses the same limits."""

    run: str | None = Field(default=None, description="shell command; it gets the alert as a JSON object on its standard input")
    post: str | None = Field(
        default=None, description="address that gets the alert as JSON by HTTP; `env:NAME` takes it from an environment variable"
    )
    on: tuple[Sign, ...] = Field(
        default=("ended", "silent", "loss", "slow", "memory", "experts", "disk"), description="kinds of alert that are sent"
    )
    silent: NonNegativeFloat = Field(
        default=0.0,
        description="seconds without an event in the log before an alert is sent; 0: 20 times the usual time between steps, "
        "10 s at least",
    )
    slower: NonNegativeFloat = Field(
        default=0.8, lt=1.0, description="share of the usual tokens per second below which a run is slow"
    )
    predicted: float = Field(default=1.25, gt=1.0, description="times the predicted step time above which a run is slow")
    memory: PositiveFloat = Field(
        default=0.95, le=1.0, description="share of the device's memory above which a memory peak is reported"
    )
    experts: NonNegativeFloat = Field(
        default=0.5,
        lt=1.0,
        description="evenness of the load of a layer's experts (1: all loads are equal) below which an alert reports "
        "collapsed routing",
    )
    disk: NonNegativeFloat = Field(
        default=2.0, description="an alert is sent if the run folder's disk has room for fewer further checkpoints than this"
    )
    again: NonNegativeFloat = Field(
        default=3600.0,
        description="seconds before the same alert can be sent again; its cause must also have been absent for a minute",
    )


def address_of(target: str, environment: Mapping[str, str]) -> str:
    """Return the address that `alerts.post` names. Raises ValueError if it is not an http or https address with a possible port. The
    error does not quote the address, because anyone who knows it may post messages to it."""
    address, what = target, "alerts.post"
    if target.startswith(ENVIRONMENT):
        name = target.removeprefix(ENVIRONMENT)
        address, what = environment.get(name, ""), f"the environment variable {name}, which alerts.post names,"
        if not address:
            raise ValueError(f"{what} is not set")
    if not _is_right(address):
        raise ValueError(f"{what} is not an http or https address")
    return address


def _is_right(address: str) -> bool:
    """Return True if messages can be posted to such an address."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or above 65535
        return False
