"""Combinations with sites are proven round by round, and faults planted in a site or in its merges are found."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megalith.parallel.data import Weight
from megalith.prove.axes import AXES, ParityCase, run_of
from megalith.prove.prove import ParityResult, prove
from megalith.train.sites import outer, pieces
from megalith.train.sites.state import OuterState
from megalith.train.sites.whole_tensors import WholeTensors
from tests.full import only_full, sampled

pytestmark = pytest.mark.slow
torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent has used more than one thread

MERGED, BEFORE = "weights after merges, elements with other bits", "weights before merges, in learning rates"


def _proved(**chosen: str) -> ParityResult:
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    choices = tuple((plain | chosen).items())
    return prove(ParityCase(choices, run_of(choices)), references={})


@pytest.mark.parametrize(
    "chosen",
    [
        {"sites": "two", "dp_shard": "2", "zero": "3"},
        {"sites": "one that merges", "tensor": "2"},
        {"sites": "two, fragments of 4 bits", "model": "latent attention, experts, MTP", "expert": "2", "dp_shard": "2"},
        {"sites": "two, eager, the largest", "pipeline": "1f1b", "retain": "on the host"},
        {"sites": "two, asynchronous", "tensor": "2", "phases": "a larger batch, then shorter sequences"},
        {"sites": "three, at each step", "context": "ring of 2", "optimizer": "muon"},
    ],
    ids=lambda chosen: "; ".join(chosen.values()),
)
@sampled(2)
def test_sites_train_like_one_process_each_and_merge_as_in_numpy(chosen: dict[str, str]) -> None:
    proof = _proved(**chosen)
    assert proof.outcome == "equal", proof.error or proof.rows
    assert {row.quantity for row in proof.rows} >= {MERGED, BEFORE}


@contextmanager
def wrong_sign() -> Iterator[None]:
    """Plant: a site's difference has the wrong sign."""
    found = outer.difference
    with mock.patch.object(outer, "difference", lambda anchor, weight, *rest: found(weight, anchor, *rest)):
        yield


@contextmanager
def wrong_share() -> Iterator[None]:
    """Plant: ranks take another part of the merged tensors."""
    share = WholeTensors.share
    with mock.patch.object(WholeTensors, "share", lambda self, name, whole: share(self, name, whole.roll(1, 0))):
        yield


@contextmanager
def lost_feedback() -> Iterator[None]:
    """Plant: what rounding left out is forgotten."""
    with mock.patch.object(OuterState, "left_out", return_value=None):
        yield


@contextmanager
def other_rounding() -> Iterator[None]:
    """Plant: codes are those of slightly larger values."""
    encode = pieces.encode
    with mock.patch.object(pieces, "encode", lambda values, piece: encode(values * 1.001, piece)):
        yield


@contextmanager
def wrong_gradient() -> Iterator[None]:
    """Plant: gradients are 2 % too large."""
    add = Weight.add
    with mock.patch.object(Weight, "add", lambda self, share: add(self, share * 1.02)):
        yield


@pytest.mark.parametrize(
    ("plant", "chosen", "found_in"),
    [
        (wrong_sign, {"sites": "two"}, MERGED),
        pytest.param(wrong_share, {"sites": "one that merges", "dp_shard": "2", "zero": "3"}, MERGED, marks=only_full),
        pytest.param(lost_feedback, {"sites": "two, fragments of 4 bits"}, MERGED, marks=only_full),
        pytest.param(other_rounding, {"sites": "two, eager, the largest"}, MERGED, marks=only_full),
        (wrong_gradient, {"sites": "two, asynchronous"}, "gradients, of the tensor's largest"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_found_where_it_is(
    plant: Callable[[], AbstractContextManager[Any]], chosen: dict[str, str], found_in: str
) -> None:
    """A wrong merge is no fault of the steps, which continue from the trainer's merged weights."""
    with plant():
        proof = _proved(**chosen)
    assert proof.outcome == "NOT equal", proof.error
    gaps = {row.quantity for row in proof.gaps}
    assert found_in in gaps and (found_in != MERGED or gaps == {MERGED}), proof.gaps
