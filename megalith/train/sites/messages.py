"""Messages that the leading ranks of sites send each other over `fleet.secure.peers`. The first byte of a message is its kind."""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.spec.sites import HEAD_BYTES, STEP_BYTES, VERDICT_BYTES

LENGTH_BYTES = 8
"""The number of bytes that the transport puts in front of a message."""
LINE_BYTES = MARK_BYTES = 8
FORMAT = 2
"""The version of these messages, and of the rule by which samples are divided (`Deal`), which sites compare when they meet."""
UNKNOWN = 0  # in place of the digest of merged weights
_DIFFERENCE = struct.Struct(f">cB2xIQd{LINE_BYTES}sQ")  # kind, a request to stop, fragment, step, mean loss, line, anchor
_VERDICT = struct.Struct(
    f">cB2xIQQQQQQI{LINE_BYTES}s"
)  # kind, stop, fragment, number, sent, step, three sets of sites, count, line
assert _DIFFERENCE.size + LENGTH_BYTES == HEAD_BYTES
assert _VERDICT.size + LENGTH_BYTES == VERDICT_BYTES


class CheckpointOffer(NamedTuple):
    """A checkpoint from which a run across sites can be resumed. Two sites hold the same checkpoint if all fields are equal."""

    step: int
    mark: str
    """The digest of all merges before this checkpoint."""
    samples: int
    members: tuple[int, ...]
    merges: int = 0
    """The number of earlier merges."""
    ended: bool = False
    """True if this checkpoint is the end of the run, with no sample and no merge left."""

    @property
    def merge_point(self) -> "MergePoint":
        """The next merge after this checkpoint."""
        return MergePoint(self.merges, self.step, self.mark)


class MergePoint(NamedTuple):
    """A merge at which a site waits, without having lost any state. Two sites wait at the same merge if all fields are equal."""

    number: int
    """The number of earlier merges."""
    step: int
    mark: str
    """The digest of all merges before this one."""


def _cut(fields: list[Any]) -> CheckpointOffer:
    step, mark, samples, members, *rest = fields
    return CheckpointOffer(step, mark, samples, tuple(members), *rest)


@dataclass(frozen=True)
class Hello:
    """The state of a site, which it sends to each site to which it connects. `line`: the name of the site's line of merges; empty if it
    takes part in none. `decides`: the decider of this line. `asks`: the site asks to join a line in progress, and its log lacks only merges
    after the newest one whose mark is in `known`. `cuts`: the site's checkpoints. `stand`: if the site takes part in no line, the merge at
    which it waits; else the merge at which its line began, if the line did not begin from a checkpoint. `terms`: what must be equal on all
    sites (`spec.sites.terms`), in the first message after each connection."""

    kind = b"h"
    line: str = ""
    decides: int = -1
    asks: bool = False
    known: tuple[str, ...] = ()
    cuts: tuple[CheckpointOffer, ...] = ()
    stand: MergePoint | None = None
    terms: dict[str, Any] | None = None

    def pack(self) -> bytes:
        return self.kind + json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Hello":
        fields = json.loads(data[1:])
        stand = None if fields["stand"] is None else MergePoint(*fields["stand"])
        return cls(**fields | {"known": tuple(fields["known"]), "cuts": tuple(map(_cut, fields["cuts"])), "stand": stand})


@dataclass(frozen=True)
class Start:
    """A message to all sites to begin, from the checkpoint `cut` or, if this is None, from the initial weights."""

    kind = b"s"
    line: str
    cut: CheckpointOffer | None

    def pack(self) -> bytes:
        return self.kind + json.dumps([self.line, self.cut]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Start":
        line, cut = json.loads(data[1:])
        return cls(line, None if cut is None else _cut(cut))


@dataclass(frozen=True)
class Difference:
    """One site's weight difference for a fragment."""

    kind = b"d"
    fragment: int
    step: int
    stop: bool
    loss: float
    encoded: Tensor
    """The encoded difference, scales and codes: uint8 on the CPU."""
    line: str = ""
    anchor: int = UNKNOWN
    """The digest of the fragment's merged weights (`WholeTensors.digest`) from which the site computed the difference."""

    def pack(self) -> bytes:
        head = _DIFFERENCE.pack(self.kind, self.stop, self.fragment, self.step, self.loss, bytes.fromhex(self.line), self.anchor)
        return head + self.encoded.numpy().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "Difference":
        _, stop, fragment, step, loss, line, anchor = _DIFFERENCE.unpack_from(data)
        encoded = torch.frombuffer(bytearray(data[_DIFFERENCE.size :]), dtype=torch.uint8)
        return cls(fragment, step, bool(stop), loss, encoded, line.hex(), anchor)


@dataclass(frozen=True)
class Verdict:
    """The record of a decided merge; `number` merges were made before it. The sites `merged` took weight differences of `fragment` after
    `sent` steps, and the mean of these differences is merged after `step` steps. From this merge on, the sites `left` no longer train, the
    sites `joined` train, and `count` sites share each step's batch."""

    kind = b"v"
    number: int
    fragment: int
    sent: int
    step: int
    merged: tuple[int, ...]
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    count: int = 1
    stop: bool = False
    """True if all sites stop after this merge."""
    line: str = ""
    steps: tuple[int, ...] = ()
    """For each merged site, the step after which it took the newest weight difference that this merge contains; empty where merges are
    synchronous."""

    def pack(self) -> bytes:
        sets = [sum(1 << site for site in sites) for sites in (self.merged, self.left, self.joined)]
        numbers = (self.fragment, self.number, self.sent, self.step, *sets, self.count)
        steps = struct.pack(f">{len(self.steps)}Q", *self.steps)
        return _VERDICT.pack(self.kind, self.stop, *numbers, bytes.fromhex(self.line)) + steps

    @classmethod
    def unpack(cls, data: bytes) -> "Verdict":
        _, stop, fragment, number, sent, step, *sets, count, line = _VERDICT.unpack_from(data)
        steps = struct.unpack_from(f">{(len(data) - _VERDICT.size) // STEP_BYTES}Q", data, _VERDICT.size)
        merged, left, joined = (tuple(site for site in range(64) if sites >> site & 1) for sites in sets)
        return cls(number, fragment, sent, step, merged, left, joined, count, bool(stop), line.hex(), steps)

    @property
    def newest(self) -> dict[int, int]:
        """For each merged site, the step after which it took the newest weight difference that this merge contains."""
        return dict(zip(self.merged, self.steps or [self.sent] * len(self.merged), strict=True))

    def takes(self, waiting: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
        """Return the site and the step of each merged weight difference, in the order in which they are summed. `waiting`: with
        asynchronous merges, for each site, the steps after which its unmerged differences were taken."""
        return [(site, sent) for site, last in self.newest.items() for sent in waiting.get(site, [last]) if sent <= last]

    def mark(self, before: str) -> str:
        """Return the digest of all merges up to this one. `before`: the digest of the earlier merges."""
        told = asdict(self) | {"stop": False, "line": ""}
        if not self.steps:  # which logs of earlier versions lack
            del told["steps"]
        return hashlib.sha256((before + json.dumps(told)).encode()).hexdigest()[: 2 * MARK_BYTES]


@dataclass(frozen=True)
class JoinReply:
    """The decider's reply to a joining site, without tensors: the number of steps done, the number of merges and their digest, the record
    of how samples are divided (`Deal`), and `sent`: for each fragment, the step after which its unmerged weight differences were taken."""

    kind = b"t"
    line: str
    step: int
    number: int
    mark: str
    sent: tuple[int, ...]
    deal: dict[str, Any]

    def pack(self) -> bytes:
        return self.kind + json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "JoinReply":
        fields = json.loads(data[1:])
        return cls(**fields | {"sent": tuple(fields["sent"])})


@dataclass(frozen=True)
class MergeRecord:
    """The events of the run's merges so far that a joining site lacks, which the decider sends before its reply."""

    kind = b"m"
    line: str
    data: bytes
    """The events as compressed JSON, oldest first."""

    @classmethod
    def of(cls, line: str, merges: Iterable[dict[str, Any]]) -> "MergeRecord":
        """Return the record with these events."""
        return cls(line, zlib.compress(json.dumps([*merges]).encode()))

    @property
    def merges(self) -> list[dict[str, Any]]:
        """The events as JSON, oldest first."""
        return json.loads(zlib.decompress(self.data))

    def pack(self) -> bytes:
        return self.kind + self.line.encode() + b"\n" + self.data

    @classmethod
    def unpack(cls, data: bytes) -> "MergeRecord":
        line, _, events = data[1:].partition(b"\n")
        return cls(line.decode(), events)


@dataclass(frozen=True)
class FragmentValues:
    """The merged weights of a fragment, followed by its velocities, as fp32 bytes of whole tensors."""

    kind = b"w"
    fragment: int
    values: Tensor

    def pack(self) -> bytes:
        return self.kind + struct.pack(">I", self.fragment) + self.values.numpy().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "FragmentValues":
        (fragment,) = struct.unpack_from(">I", data, 1)
        return cls(fragment, torch.frombuffer(bytearray(data[5:]), dtype=torch.float32))


@dataclass(frozen=True)
class Ready:
    """The announcement of a joining site that it has the weights of all merges so far, and can train."""

    kind = b"r"
    line: str

    def pack(self) -> bytes:
        return self.kind + self.line.encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Ready":
        return cls(data[1:].decode())


@dataclass(frozen=True)
class End:
    """The announcement of a site that it has saved the weights of the run's final merge. `mark`: the digest of all merges. `over`: a quorum
    has saved these weights, so every site that has them may exit."""

    kind = b"e"
    line: str
    mark: str
    over: bool = False

    def pack(self) -> bytes:
        return self.kind + json.dumps([self.line, self.mark, self.over]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "End":
        return cls(*json.loads(data[1:]))


Message = Hello | Start | Difference | Verdict | MergeRecord | JoinReply | FragmentValues | Ready | End
_KINDS = {each.kind: each for each in (Hello, Start, Difference, Verdict, MergeRecord, JoinReply, FragmentValues, Ready, End)}


def unpack(data: bytes) -> Message:
    """Decode the message `data` from a site that has the run's key. Raises KeyError for an unknown kind of message."""
    return _KINDS[data[:1]].unpack(data)
