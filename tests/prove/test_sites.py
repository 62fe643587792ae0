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
from megalith.train.sites.synchronous import SynchronousSites
from megalith.train.sites.whole_tensors import WholeTensors
from tests.full import only_full, sampled

pytestmark = pytest.mark.slow
torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent has used more than one thread

MERGED, BEFORE = (
    "weights after merges, numbers with other bits",
    "weights before merges, |difference| over the sum of learning rates",
)
ALIKE = "weights of sites, numbers with other bits"


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
        {"sites": "two, unequal", "tensor": "2", "phases": "a larger batch, then shorter sequences"},
        {"sites": "two, unequal", "model": "latent attention, experts, MTP", "expert": "2", "dp_shard": "2"},
        {"sites": "two, unequal", "precision": "bf16", "dp_shard": "2", "zero": "3"},
        {"sites": "one that merges", "precision": "fp8", "tensor": "2"},
        {"sites": "two, fragments of 4 bits", "precision": "mxfp8", "dp_shard": "2", "zero": "2"},
        {"sites": "two", "precision": "bf16, also gradients", "pipeline": "1f1b"},
    ],
    ids=lambda chosen: "; ".join(chosen.values()),
)
@sampled(2)
def test_sites_train_like_one_process_each_and_merge_as_in_numpy(chosen: dict[str, str]) -> None:
    proof = _proved(**chosen)
    assert proof.outcome == "equal", proof.error or proof.rows
    assert {row.quantity for row in proof.rows} >= {MERGED, BEFORE}


@pytest.mark.parametrize(
    "chosen",
    [
        {"dp_shard": "2", "zero": "3", "optimizer": "muon"},
        {"tensor": "2", "clipping": "each gradient", "phases": "a larger batch, then shorter sequences"},
        {"pipeline": "1f1b", "retain": "on the host", "state": "on disk"},
        {"precision": "bf16", "context": "ring of 2"},
        {"precision": "fp8, a scale for each tensor", "dp_shard": "2", "zero": "1"},
    ],
    ids=lambda chosen: "; ".join(chosen.values()),
)
@sampled(1)
def test_sites_that_exchange_gradients_train_like_one_process_with_the_samples_of_all(chosen: dict[str, str]) -> None:
    proof = _proved(sites="two, data parallel", **chosen)
    assert proof.outcome == "equal", proof.error or proof.gaps
    assert ALIKE in {row.quantity for row in proof.rows}


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


@contextmanager
def equal_shares() -> Iterator[None]:
    """Plant: a merge counts a site of twice the samples once."""
    mean = outer.mean
    with mock.patch.object(outer, "mean", lambda differences, shares: mean(differences, [1] * len(shares))):
        yield


@contextmanager
def own_gradients() -> Iterator[None]:
    """Plant: the second site keeps its own gradients of the first block's norms."""
    update = SynchronousSites._update

    def kept(self: SynchronousSites, name: str, *rest: Any) -> None:
        if self.site == 0 or not name.startswith("blocks.0.") or "norm" not in name:
            update(self, name, *rest)

    with mock.patch.object(SynchronousSites, "_update", kept):
        yield


@contextmanager
def summed_gradients() -> Iterator[None]:
    """Plant: sites take the sum of their gradients for the mean."""
    mean = outer.mean
    with mock.patch.object(outer, "mean", lambda differences, shares: mean(differences, shares) * len(shares)):
        yield


@pytest.mark.parametrize(
    ("plant", "chosen", "found_in"),
    [
        (wrong_sign, {"sites": "two"}, MERGED),
        pytest.param(wrong_share, {"sites": "one that merges", "dp_shard": "2", "zero": "3"}, MERGED, marks=only_full),
        pytest.param(lost_feedback, {"sites": "two, fragments of 4 bits"}, MERGED, marks=only_full),
        pytest.param(other_rounding, {"sites": "two, eager, the largest"}, MERGED, marks=only_full),
        (wrong_gradient, {"sites": "two, asynchronous"}, "gradients, of the tensor's largest"),
        pytest.param(equal_shares, {"sites": "two, unequal"}, MERGED, marks=only_full),
        pytest.param(wrong_sign, {"sites": "two", "precision": "bf16"}, MERGED, marks=only_full),
        pytest.param(
            wrong_gradient,
            {"sites": "two", "precision": "bf16", "dp_shard": "2"},
            "gradients' length, |factor - 1| beyond chance",
            marks=only_full,
        ),
        (summed_gradients, {"sites": "two, data parallel"}, "gradient norm, relative"),
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


@only_full
def test_sites_whose_weights_differ_end() -> None:
    with own_gradients():
        proof = _proved(sites="two, data parallel")
    assert proof.outcome == "failed" and "the merged weights of fragment 0 from which sites trained" in proof.error
