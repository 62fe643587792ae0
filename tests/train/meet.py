"""Program for torchrun in a test: ranks connect, compute together, and lose a rank in the first generation.
`python -m tests.train.meet FOLDER`."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megalith.fleet import environment
from megalith.spec.run import LaunchSpec
from megalith.train.run import join
from tests.patience import PATIENCE


def main() -> None:
    folder = Path(sys.argv[1])
    place = environment.find()
    assert place is not None and place.kind == "torchrun"
    join(place, launch=LaunchSpec(start_timeout=PATIENCE, timeout=PATIENCE), device=torch.device("cpu"))
    total = torch.tensor(place.rank + 1)
    dist.all_reduce(total)
    assert int(total) == place.world * (place.world + 1) // 2
    with (folder / f"lives-{place.rank}").open("a") as file:
        file.write("met\n")
    dist.barrier()
    if place.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    main()
