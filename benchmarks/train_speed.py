"""Measure tokens per second of training, also as a share of this machine's matrix products, and compare with a plain
Hugging Face loop.

    python benchmarks/train_speed.py --layers 12 --dim 768 --heads 12 --ffn 2048 --vocab 32000 --seq 1024 --batch 4 \
        --precision bf16 --ranks 1 --json
    python benchmarks/train_speed.py --peer              # ours and the plain loop in turn, in the same minutes
    python benchmarks/train_speed.py --peer --compile
    python benchmarks/train_speed.py --device cuda --preset llama-1b --seq 4096 --batch 4 --compile
    python benchmarks/train_speed.py --device cuda --preset llama3.1-8b --set model.layers=8 --seq 8192 --batch 2 --compile \
        --precision fp8 --set precision.granularity=tensor --set precision.multiply=codes

Ours is the trainer's own step (fp32 master weights, moments and reductions; bf16 compute; clipping; checked gradients) on random
tokens. The peer is `transformers.LlamaForCausalLM` and `torch.optim.AdamW` as in a tutorial, in two forms: `autocast`
(fp32 weights, bf16 compute: the same numerics as ours) and `bf16` (weights and moments in bf16: less work and less precision).
`--batch` is the number of sequences in one step on all ranks together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="sizes of a preset instead of --layers to --vocab")
    for name, value in {"layers": 12, "dim": 768, "heads": 12, "ffn": 2048, "vocab": 32000, "seq": 1024, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--microbatch", type=int, help="sequences a rank computes at once; default: all it has")
    parser.add_argument("--precision", choices=("bf16", "fp32", "fp8"), default="bf16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another key of our run file, as TOML")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero", type=int, default=None, help="default: 3 with several ranks")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after --warmup ones")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="with --peer: how often each side is run, in turn")
    parser.add_argument("--peer", action="store_true", help="measure the plain loop too")
    parser.add_argument("--profile", action="store_true", help="print where our time goes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    found = parser.parse_args()
    each, rest = divmod(found.batch, found.ranks)
    if rest or each % (found.microbatch or each):
        parser.error(
            f"--batch {found.batch} is not --ranks {found.ranks} x whole microbatches of --microbatch {found.microbatch or each}"
        )
    return found


def spec_of(a: argparse.Namespace) -> Any:
    """Return the run that is timed."""
    from megalith.spec import files

    if a.preset:
        model = {"preset": a.preset}
    else:
        model = {"layers": a.layers, "dim": a.dim, "heads": a.heads, "ffn": a.ffn, "vocab": a.vocab, "kv_heads": a.kv_heads}
    each = a.batch // a.ranks
    zero = a.zero if a.zero is not None else (3 if a.ranks > 1 else 1)
    given = {
        "model": {key: value for key, value in model.items() if value is not None} | {"context": a.seq},
        "plan": {
            "data": a.ranks,
            "zero": zero,
            "compile": a.compile,
            "microbatch": a.microbatch or each,
            "recompute": a.recompute,
        },
        "data": {"path": "random tokens", "document_mask": False},
        "train": {"steps": 10_000, "global_batch": a.batch, "seq_len": a.seq, "precision": a.precision, "device": a.device},
    }
    return files.resolve([files.Layer(given, "benchmark"), *map(files.read_setting, a.set)]).spec


def wide(a: argparse.Namespace) -> str:
    """The format of weights and activations; products in fp8 have it too, apart from their factors."""
    return "fp32" if a.precision == "fp32" else "bf16"


def ours(arguments: dict[str, Any]) -> None:
    """Run one rank of our trainer. The first rank writes the seconds of each step."""
    import numpy as np
    import torch

    from megalith.data.stream import Batch
    from megalith.fleet import environment
    from megalith.fleet.heartbeat import Heartbeat
    from megalith.machine.resident import keep_memory
    from megalith.models.flops import flops_per_token
    from megalith.train.assemble import assemble, mesh_groups
    from megalith.train.run import choose_device, join
    from megalith.train.step import train_step

    a = argparse.Namespace(**arguments)
    spec, place, beat = spec_of(a), environment.find(), Heartbeat.find()
    assert place is not None
    keep_memory()
    device = choose_device(spec.train.device, place.local_rank, place.local_world)
    join(place, launch=spec.launch, device=device)
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    beat.beat("ready")
    random = np.random.default_rng(place.rank)
    seconds, breakdown = [], []

    def step(number: int) -> None:
        beat.beat("step", number)
        batches = []
        for _ in range(spec.microbatches):
            ids = random.integers(0, spec.model.vocab, (spec.plan.microbatch, a.seq + 1))
            positions = np.broadcast_to(np.arange(a.seq), (spec.plan.microbatch, a.seq))
            numbers = tuple(range(spec.plan.microbatch))
            batches.append(Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, ((a.seq,),) * len(ids), (), numbers))
        start = time.perf_counter()
        done = train_step(trainer, batches, step=number)
        seconds.append(time.perf_counter() - start)
        breakdown.append(done.breakdown)

    for number in range(a.warmup + a.steps):
        step(number)
    if a.profile and place.rank == 0:
        with torch.profiler.profile() as profiler:
            step(a.warmup + a.steps)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
    if place.rank == 0:
        timed = [{name: round(value, 4) for name, value in parts.items()} for parts in breakdown[a.warmup :]]
        peak = torch.cuda.max_memory_allocated() if a.device == "cuda" else None
        result = {
            "seconds": seconds[a.warmup :],
            "breakdown": timed[-1],
            "flops_per_token": flops_per_token(trainer.model, a.seq),
        }
        Path(a.out).write_text(json.dumps(result | {"cuda_peak_bytes": peak}))


def run_ours(a: argparse.Namespace) -> dict[str, Any]:
    """Measure our trainer, started by the launcher of ordinary runs."""
    from megalith.control.supervisor import Job, run

    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "result.json"
        preload = ("torch", "torch._dynamo", "torch.distributed.fsdp", "megalith.train.step")
        entry = Job("benchmarks.train_speed:ours", {"arguments": vars(a) | {"out": str(out)}}, a.ranks, Path(name), preload)
        outcome = run(entry)
        if outcome.code:
            raise RuntimeError(outcome.message())
        if a.profile:
            print((Path(name) / "ranks/rank-0.log").read_text())
        return json.loads(out.read_text())


def run_peer(a: argparse.Namespace) -> dict[str, Any]:
    """Measure the plain loop in this process (one rank uses all cores)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = spec_of(a).model
    config = LlamaConfig(
        hidden_size=model.dim, intermediate_size=model.ffn, num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads, vocab_size=model.vocab, max_position_embeddings=a.seq, use_cache=False,
    )  # fmt: skip
    autocast = a.side == "autocast"
    dtype = torch.bfloat16 if wide(a) == "bf16" and not autocast else torch.float32
    network = LlamaForCausalLM(config).to(a.device, dtype)
    network.train()
    forward = torch.compile(network) if a.compile else network
    adam = torch.optim.AdamW(network.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    seconds = []
    for number in range(a.warmup + a.steps):
        ids = torch.randint(0, model.vocab, (a.batch, a.seq), device=a.device)
        start = time.perf_counter()
        with torch.autocast(a.device, torch.bfloat16, enabled=autocast and wide(a) == "bf16"):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        loss.item()
        if number >= a.warmup:
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def matmul_peak(a: argparse.Namespace) -> float:
    """FLOP/s of large matrix products in this precision, on all cores or the GPU."""
    import torch

    from megalith.train.measure.peak import matmul_rate

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[wide(a)]
    return matmul_rate(dtype, torch.device(a.device), seconds=3.0, size=2048 if a.device == "cpu" else 8192)


def side(a: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the result of one side, measured in a fresh process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    if a.profile and name == "ours":
        print(done.stdout[: done.stdout.rindex("{")] if not a.json else "", file=sys.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    a = arguments()
    if a.side:
        result = run_ours(a) if a.side == "ours" else matmul_peak(a) if a.side == "peak" else run_peer(a)
        print(json.dumps(result))
        return
    names = ["ours", *(("autocast", "bf16") if wide(a) == "bf16" else ("fp32",))] if a.peer else ["ours"]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    peaks = []
    for _ in range(a.rounds if a.peer else 1):
        for name in names:
            results[name].append(side(a, name))
        peaks.append(side(a, "peak"))
    tokens, peak = a.batch * a.seq, max(peaks)
    flops = results["ours"][0]["flops_per_token"]
    table = {}
    for name, runs in results.items():
        seconds = statistics.median(second for run in runs for second in run["seconds"])
        rate = tokens / seconds
        table[name] = {"seconds": seconds, "tokens_per_second": rate, "flops": flops * rate, "share_of_peak": flops * rate / peak}
    report = {
        "shapes": {k: v for k, v in vars(a).items() if k not in ("side", "json", "profile")},
        "matmul_peak_flops": peak,
        "flops_per_token": flops,
        "breakdown": results["ours"][-1]["breakdown"],
        "results": table,
        "ratio": {name: table["ours"]["tokens_per_second"] / row["tokens_per_second"] for name, row in table.items()},
    }
    if a.json:
        print(json.dumps(report))
        return
    print(f"matrix products: {peak / 1e12:.3f} TFLOP/s ({wide(a)}, measured); {flops / 1e6:.0f} MFLOP a token")
    for name, row in table.items():
        print(
            f"{name:9} {row['seconds']:8.3f} s a step  {row['tokens_per_second']:9.0f} tokens/s  "
            f"{row['share_of_peak']:6.1%} of the peak  ours is {report['ratio'][name]:.2f}x"
        )
    print("ours, by part:", report["breakdown"])


if __name__ == "__main__":
    main()
