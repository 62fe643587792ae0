"""Train two sites over a real slow link, and print their use, waits, the bytes sent and the loss beside the predictions.

    megalith data prepare bundled:austen --tokenizer bytes --validation 0.03 --out data/austen-bytes
    python benchmarks/link.py --data data/austen-bytes                          # what `make sites` shows: quickstart's model
    python benchmarks/link.py --data data/austen-bytes --size 1.5M --rounds 10
    python benchmarks/link.py --data data/austen-bytes --step-seconds 0.8 --rounds 16               # only waits: steps sleep
    python benchmarks/link.py --data data/austen-bytes --only streaming --rounds 16 --out link.jsonl        # for 99 %
    python benchmarks/link.py --data data/austen-bytes --links                  # twelve links: predicted and measured use

If run as root, each site is in a network namespace of its own, and a wire in user space joins them (`megalith.machine.wire`). Otherwise
one reaches the other through an equally slow relay on loopback. Use is compute over the sum of compute and exposed waits, from the first
step to the final merge, which waits for the whole model. Compute is processor time, since two sites that share few processors slow each
other down. With --links and --step-seconds a step sleeps for a fixed time instead, and the rest is the trainer's code. The file of --out
keeps finished cases, as benchmarks/cases.py says.
"""

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import cases
from benchmarks.sites import BATCH, LENGTH, QUICKSTART, SIZES, model_of, parameters
from megalith.cost.across import across
from megalith.fleet.secure import key
from megalith.machine import networks, wire
from megalith.machine.wire import Conditions
from megalith.parallel.groups import group_of
from megalith.prove.worlds import run_ranks
from megalith.spec.run import RunSpec
from megalith.spec.sites import folder_of
from megalith.spec.sizes import model_parameters
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.restore import read_portion
from megalith.train.sites.meet import build
from megalith.train.sites.synchronous import SynchronousSites
from megalith.train.step import train_step
from megalith.train.step_hooks import Attendants
from megalith.train.stream import open_stream
from megalith.train.validate import Validator

NODES = ("site0", "site1")
PORT = 29400
LINK = Conditions(10, 100)
STREAMING = {"fragments": 5, "overlap": 5}
METHODS: dict[str, dict[str, Any]] = {
    "data parallelism": {"method": "data-parallel"},
    "a merge after each step, 32 bits": {"inner_steps": 1, "lr": 1.0, "momentum": 0.0},
    "DiLoCo": {"inner_steps": 30},
    "streaming, 4 bits": {"inner_steps": 30, "bits": 4, **STREAMING},
}
"""The methods by name. A merge after each step sends the bytes of data parallelism."""
LINKS = [
    (Conditions(megabits, milliseconds), {"inner_steps": interval, "bits": bits, **how})
    for megabits, milliseconds, interval, bits, how in (
        (10, 100, 10, 32, {}),
        (10, 100, 30, 32, {}),
        (10, 20, 10, 8, {}),
        (10, 300, 10, 8, {"fragments": 3}),
        (10, 100, 5, 4, {}),
        (10, 100, 10, 32, {"fragments": 3, "overlap": 2}),
        (10, 100, 30, 32, {"fragments": 3, "overlap": 5}),
        (2, 100, 10, 4, {"fragments": 3, "overlap": 3}),
        (2, 100, 30, 8, {"fragments": 3, "overlap": 5}),
        (50, 50, 5, 32, {}),
        (50, 200, 5, 8, {"fragments": 3, "overlap": 1}),
        (100, 300, 10, 32, {"fragments": 3, "overlap": 2}),
    )
]
"""The twelve links, and the methods that are measured on them."""
STEP_SECONDS, LINKS_SIZE = 0.25, "0.1M"


class Ran(NamedTuple):
    """Result of a site's training. `seconds`, `processor`: wall and processor time of all steps and merges; `waited`: the part of
    `seconds` spent waiting for the other site; `merges`: their number."""

    seconds: float
    processor: float
    waited: float
    merges: int
    sent: int
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", choices=SIZES, default=QUICKSTART)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--links", action="store_true", help="compare predicted with measured use on twelve links")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="let each step sleep for so long instead of training")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--out", type=Path, default=None, help="where finished cases are kept; default: nowhere")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("no wire between namespaces: it " + reason if (reason := wire.missing()) else "a wire between two namespaces")
    _links(given) if given.links else _methods(given)


def _methods(given: argparse.Namespace) -> None:
    """Print the table of methods on one link."""
    names = [name for name in METHODS if given.only in name]
    wanted = [("method", name, given.size, given.rounds, given.step_seconds) for name in names]
    rows = {tuple(row["case"]): row for row in cases.finish(given.out, wanted, partial(measured_method, given.data))}
    exact = parameters(run_of(given.data, given.size, 1, {}))
    print(
        f"{given.size}: {exact:,} parameters, two sites, {LINK.megabits:g} Mbit/s, {LINK.milliseconds:g} ms, {given.rounds} rounds"
    )
    print(f"{'':34s} steps   use of both  predicted  waited a round  MB a round  crossed  fewer than gradients  loss")
    for at in wanted:
        row = rows[at]
        loss = "" if given.step_seconds else f"{row['loss']:.4f}"
        print(
            f"{at[1]:34s} {row['steps']:5d}  {_uses(row):>12s}  {row['predicted']:9.1%}  "
            f"{row['waited'] / given.rounds:12.2f} s  {row['sent'] / given.rounds / 1e6:10.2f}  {row['crossed'] / 1e6:7.2f}  "
            f"{row['gradients'] / row['sent']:18.0f} x  {loss}"
        )


def measured_method(data: str, at: tuple[str, str, str, int, float]) -> dict[str, Any]:
    """Train a method over LINK; return the use of both sites beside the prediction, and the first site's waits and bytes."""
    _, name, size, rounds, step_seconds = at
    steps = rounds * METHODS[name].get("inner_steps", 1)
    spec = run_of(data, size, steps, METHODS[name])
    both, crossed = measured(spec, LINK, step_seconds=step_seconds)
    computed = [one.seconds - one.waited if step_seconds else one.processor for one in both]
    return {
        "steps": steps,
        "use": [each / (each + one.waited) for each, one in zip(computed, both, strict=True)],
        "predicted": predicted(spec, LINK, max(computed) / steps),
        "waited": both[0].waited,
        "sent": both[0].sent,
        "crossed": crossed,
        "gradients": 4 * steps * parameters(spec),
        "loss": both[0].loss,
    }


def _uses(row: Mapping[str, Any]) -> str:
    """Return the use of each site as text."""
    return ", ".join(f"{use:.1%}" for use in row["use"])


def _links(given: argparse.Namespace) -> None:
    """Print predicted and measured use for each of LINKS."""
    wanted = [("link", number, given.rounds) for number in range(len(LINKS))]
    rows = {tuple(row["case"]): row for row in cases.finish(given.out, wanted, partial(measured_link, given.data))}
    print(f"{LINKS_SIZE} parameters, steps of {STEP_SECONDS} s, {given.rounds} rounds")
    print("link            H  bits  fragments  overlap   predicted  measured, both     off")
    gaps = []
    for at, (conditions, method) in zip(wanted, LINKS, strict=True):
        use, expected = statistics.mean(rows[at]["use"]), rows[at]["predicted"]
        gaps.append(abs(expected / use - 1))
        print(
            f"{conditions.megabits:3g} Mbit/s {conditions.milliseconds:3g} ms {method['inner_steps']:2d} {method['bits']:4d} "
            f"{method.get('fragments', 1):9d} {method.get('overlap', 0):8d} {expected:12.1%} {_uses(rows[at]):>15s} "
            f"{expected / use - 1:+7.1%}"
        )
    print(f"the prediction is off by {statistics.median(gaps):.1%} in the median, by {max(gaps):.1%} at most")


def measured_link(data: str, at: tuple[str, int, int]) -> dict[str, Any]:
    """Train the method of one of LINKS over it; return the use of both sites beside the prediction."""
    _, number, rounds = at
    conditions, method = LINKS[number]
    steps = rounds * method["inner_steps"]
    spec = run_of(data, LINKS_SIZE, steps, method)
    both, _ = measured(spec, conditions, step_seconds=STEP_SECONDS)
    computed = max(one.seconds - one.waited for one in both) / steps
    return {"use": [1 - one.waited / one.seconds for one in both], "predicted": predicted(spec, conditions, computed)}


def run_of(data: str, size: str, steps: int, method: dict[str, Any]) -> RunSpec:
    """A small Llama on two sites."""
    model = model_of(size)
    return RunSpec.model_validate(
        {
            "model": model,
            "data": {"path": data},
            "train": {"steps": steps, "global_batch": BATCH, "seq_len": LENGTH, "precision": "fp32"},
            "optimizer": {"lr": 1e-3, "warmup": max(1, steps // 10)},
            "validation": {"every": steps, "samples": 64},
            "sites": {"count": 2, "grace": 600.0, **method, "fragments": min(method.get("fragments", 1), model["layers"] + 2)},
        }
    )


def predicted(spec: RunSpec, conditions: Conditions, step: float) -> float:
    """Return the use that `megalith plan` predicts for the run over this link."""
    assert spec.sites is not None
    link = {"megabits": conditions.megabits, "milliseconds": conditions.milliseconds}
    sites = type(spec.sites).model_validate(spec.sites.model_dump() | {"link": link})
    shapes = {name: each.shape for name, each in model_parameters(spec.model.build()).items()}
    found = across(shapes, sites, step, steps=spec.train.steps, packet=wire.MTU)
    assert found is not None
    return found.use


def measured(spec: RunSpec, conditions: Conditions | None, step_seconds: float = 0.0) -> tuple[list[Ran], int]:
    """Train both sites over a link (None: plain loopback). Return each site's result, and the bytes of the first that crossed the link."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses, there = stack.enter_context(_reached(conditions))
        train_ = partial(train, spec=spec, folder=folder, secret=key.new().text, addresses=addresses, step_seconds=step_seconds)
        family = there.network.family if there is not None and there.network is not None else ""
        found: list[Ran] = run_ranks(partial(_in_its_network, family, train_), 2, timeout=cases.LONGEST_SECONDS)
        return found, there.crossed[0 if there.network is not None else 1] if there is not None else 0


@contextlib.contextmanager
def _reached(conditions: Conditions | None) -> Iterator[tuple[list[list[str]], wire.Wire | None]]:
    """Yield the sites' addresses as seen by each site, and the wire between them."""
    if conditions is not None and wire.missing() is None:
        with wire.between(NODES, conditions) as there:
            assert there.network is not None
            addresses = [f"{there.network.address(number)}:{PORT}" for number in range(2)]
            yield [addresses, addresses], there
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = [f"127.0.0.1:{port}", "127.0.0.1:1"]  # the first site listens, and the second connects to it
    if conditions is None:
        yield [own, own], None
        return
    with wire.relay(port, conditions) as there:
        assert there.address is not None
        yield [own, [f"{there.address[0]}:{there.address[1]}", own[1]]], there


def _in_its_network(family: str, work: Any, rank: int) -> Ran:
    if family:
        os.environ[networks.VARIABLE] = family
        networks.enter(NODES[rank])
    return work(rank)


def train(rank: int, spec: RunSpec, folder: str, secret: str, addresses: Sequence[Sequence[str]], step_seconds: float) -> Ran:
    """Train as the only rank of a site. `step_seconds`: seconds for which each step sleeps instead of training."""
    os.environ[key.VARIABLE] = secret
    assert dist.group.WORLD is not None and spec.sites is not None
    spec = spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": rank, "addresses": tuple(addresses[rank])})})
    device, inner = torch.device("cpu"), group_of(dist.group.WORLD, [rank])
    trainer = assemble(spec, groups=mesh_groups(spec, device, inner), device=device)
    own = folder_of(Path(folder), rank)
    own.mkdir(exist_ok=True)
    stream, sites = open_stream(spec, "train"), build(trainer, own, beat=lambda: None)
    sites.state.begin()
    sites.begin([])
    merges, step = [], 0
    began, processor = time.perf_counter(), time.process_time()
    while sites.left:
        end = time.perf_counter() + step_seconds
        turn = sites.deal(step)
        assert turn.share is not None
        if not step_seconds:
            microbatches = read_portion(stream, spec, turn.share, 0)
            sites.note(train_step(trainer, microbatches, step=step, attendants=Attendants(sites.step_hooks)).loss)
        time.sleep(max(0.0, end - time.perf_counter()))
        if step_seconds and isinstance(sites, SynchronousSites):
            sites.exchange({}, step, 0.0)  # gradients of zeros
        step += 1
        merges += sites.after_step(step, stop=False).made
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    sites.close()
    loss, _ = Validator(trainer, open_stream(spec, "validation")).run()
    waited, sent = sum(one.waited for one in merges), sum(one.bytes_sent for one in merges)
    return Ran(seconds, processor, waited, len(merges), sent, loss)


if __name__ == "__main__":
    main()
