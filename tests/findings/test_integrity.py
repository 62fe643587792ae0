"""Part A: faults that changed a run, or its data, without a message."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.findings.product import Running, events, megalith, running, write_verse
from tests.full import sampled


def _texts(folder: Path) -> Path:
    folder.mkdir()
    write_verse(folder / "a.txt")
    return folder


def _prepare(at: Path, *sources: object, out: str = "out") -> tuple[int, str]:
    said = megalith("data", "prepare", *sources, "--tokenizer", "bytes", "--out", out, at=at)
    return said.status, said.words


def test_a4_files_of_a_folder_that_are_left_out_are_named(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "texts")
    (folder / "c.parquet").write_bytes(b"PAR1\0\0 columns \0\0PAR1")
    assert "c.parquet" in _prepare(tmp_path, "texts")[1]


def test_a4_a_parquet_file_alone_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1\xff\xfe columns PAR1")
    status, words = _prepare(tmp_path, "c.parquet")
    assert status != 0
    assert "iconv" not in words
    assert "arquet" in words.replace("c.parquet", "")


def test_a4_a_folder_of_parquet_alone_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "c.parquet").write_bytes(b"PAR1\0\0 columns \0\0PAR1")
    status, words = _prepare(tmp_path, "texts")
    assert status != 0
    assert "extensions=None" not in words
    assert "arquet" in words.replace("c.parquet", "")


@pytest.fixture(scope="module")
def begun(at: Path) -> str:
    """A folder of weights with which a run can begin."""
    _foreign(at / "model")
    assert _imported(at, "model")["rope_theta"] == 10_000.0
    return "out-model"


@sampled(5, together=True)
@pytest.mark.parametrize("value", ["rope_theta=500000.0", "norm_eps=1e-3", "heads=4"])
def test_a3_weights_of_another_model_of_the_same_shapes_are_not_started_from(value: str, begun: str, at: Path) -> None:
    said = megalith("check", "run.toml", "--set", f"train.init_from={begun}", "--set", f"model.{value}", at=at)
    assert said.status != 0
    assert value.partition("=")[0] in said.words


@pytest.fixture(scope="module")
def four(at: Path) -> str:
    """A checkpoint of a model of four layers."""
    short = ["--set", "model.layers=4", "--set", "train.steps=1", "--set", "optimizer.warmup=0"]
    assert megalith("train", "run.toml", "--run-dir", "four", *short, at=at).status == 0
    return "four/checkpoints"


@sampled(5, together=True)
def test_a3_layers_of_the_weights_are_not_dropped(four: str, at: Path) -> None:
    said = megalith("check", "run.toml", "--set", f"train.init_from={four}", "--set", "model.layers=3", at=at)
    assert said.status != 0
    assert "layers" in said.words


@sampled(5, together=True)
def test_a3_weights_are_not_trained_on_the_tokens_of_another_tokenizer(four: str, at: Path) -> None:
    assert megalith("tokenizer", "train", "verse.txt", "--vocab", "264", "--out", "other-tokenizer", at=at).status == 0
    assert megalith("data", "prepare", "verse.txt", "--tokenizer", "other-tokenizer", "--out", "other", at=at).status == 0
    settings = [f"train.init_from={four}", "model.layers=4", "data.path=other"]
    said = megalith("check", "run.toml", *(word for one in settings for word in ("--set", one)), at=at)
    assert said.status != 0
    assert "tokenizer" in said.words


def test_a6_a_smallest_learning_rate_is_not_read_as_a_share_without_a_word(at: Path) -> None:
    """`min_lr = 3e-5` meant 3e-5 of lr."""
    (at / "min_lr.toml").write_text((at / "run.toml").read_text() + "optimizer.min_lr = 3e-5\n")
    said = megalith("check", "min_lr.toml", at=at)
    assert said.status != 0
    assert "min_lr_ratio" in said.words


def test_a8_a_name_stays_in_the_folder_of_runs(at: Path) -> None:
    assert megalith("check", "run.toml", "--set", 'name="../../escaped"', at=at).status != 0


def test_a12_check_says_all_at_once(at: Path) -> None:
    """A value out of range silenced the rule about the vocabulary."""
    said = megalith("check", "run.toml", "--set", "plan.zero=5", "--set", "model.vocab=100", at=at)
    assert said.status != 0
    assert "plan.zero" in said.words
    assert "model.vocab" in said.words


@sampled(5, together=True)
def test_a13_the_gradient_norm_does_not_depend_on_the_plan(at: Path) -> None:
    """On a CPU the error of a sum of squares grew with their number, and a share of a tensor has fewer."""
    norms = []
    for name, plan in (("one", []), ("two", ["--set", "plan.data=2", "--set", "plan.zero=3"])):
        large = ["--set", "model.vocab=131072", "--set", "train.steps=1", "--set", "optimizer.warmup=0"]
        assert megalith("train", "run.toml", "--run-dir", f"norm-{name}", *large, *plan, at=at).status == 0
        norms += [event["grad_norm"] for event in events(at / f"norm-{name}", "step")]
    assert norms[0] == pytest.approx(norms[1], rel=2e-6)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16
}  # fmt: skip


def _foreign(folder: Path, **changes: Any) -> Path:
    """Write a Llama of one block as transformers does."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    dim, hidden, vocab = 32, 48, 264
    block = {
        "input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (dim, dim),
        "self_attn.v_proj": (dim, dim), "self_attn.o_proj": (dim, dim), "mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim, "intermediate_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def _imported(at: Path, name: str) -> dict[str, Any]:
    said = megalith("import", name, "--out", f"out-{name}", "--json", at=at)
    assert said.status == 0, said.words
    manifest = json.loads((at / said.json["folder"] / "manifest.json").read_text())
    return manifest["meta"]["spec"]["model"]


def test_a9_rope_scaling_beside_rope_parameters_is_what_transformers_reads(tmp_path: Path) -> None:
    _foreign(tmp_path / "both", rope_scaling=LLAMA3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    scaling = _imported(tmp_path, "both")["rope_scaling"]
    assert scaling is not None
    assert scaling["factor"] == 8.0


def test_a9_a_tied_model_with_a_head_of_its_own_is_not_taken_without_it(tmp_path: Path) -> None:
    _foreign(tmp_path / "tied", tie_word_embeddings=True)
    said = megalith("import", "tied", "--out", "out", at=tmp_path)
    assert said.status != 0
    assert "lm_head.weight" in said.words


def test_a11_a_file_of_a_folder_with_a_byte_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "texts")
    text = (folder / "a.txt").read_bytes()
    (folder / "b.txt").write_bytes(text + b"\xff\n" + text)
    assert "b.txt" in _prepare(tmp_path, "texts")[1]


@pytest.mark.parametrize("again", ["a.txt", "link.txt"])
def test_a11_a_source_given_twice_is_not_read_twice(tmp_path: Path, again: str) -> None:
    """Otherwise held-out documents would be trained on."""
    write_verse(tmp_path / "a.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert _prepare(tmp_path, "verse=a.txt", out="once")[0] == 0
    status, _ = _prepare(tmp_path, "verse=a.txt", f"verse={again}", out="twice")
    assert status != 0 or _tokens(tmp_path / "twice") == _tokens(tmp_path / "once")


def _tokens(data: Path) -> int:
    return json.loads((data / "manifest.json").read_text())["domains"]["verse"]["train"]["tokens"]


def test_a11_a_line_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"a":' * 100_000)
    status, words = _prepare(tmp_path, "deep.jsonl")
    assert status != 0
    assert "deep.jsonl:1" in words


def test_a11_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    """The command used to wait for ever. The test opens the FIFO at the end, so that the command ends in either tree."""
    os.mkfifo(tmp_path / "pipe")
    with running("data", "prepare", "verse=pipe", "--tokenizer", "bytes", "--out", "out", at=tmp_path) as command:
        opened = _open_when_read(tmp_path / "pipe", command)
        assert not opened, "the command opened the pipe and waits for who writes into it"
    assert "pipe" in command.output


def test_a11_a_pipe_of_the_shell_is_not_said_to_hold_no_text(tmp_path: Path) -> None:
    """`<(...)` gives a command a pipe under a name such as /dev/fd/63."""
    said = megalith(
        "data",
        "prepare",
        "verse=/dev/stdin",
        "--tokenizer",
        "bytes",
        "--out",
        "out",
        at=tmp_path,
        piped="A line of a verse.\n" * 500,
    )
    assert "no text" not in said.words
    assert said.status == 0 or "pipe" in said.words


def _open_when_read(pipe: Path, command: Running) -> bool:
    """Wait until the command has ended or reads the pipe: only then can the pipe be opened for writing without waiting."""
    readers: list[int] = []

    def reads() -> bool:
        try:
            readers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    command.until(reads, or_ended=True)
    for reader in readers:
        os.close(reader)
    return bool(readers)


@sampled(5, together=True)
@pytest.mark.parametrize("damage", ["truncated", "no table"])
def test_a12_a_damaged_import_is_told_by_its_file_and_without_a_traceback(tmp_path: Path, damage: str) -> None:
    folder = _foreign(tmp_path / "model")
    if damage == "truncated":
        os.truncate(folder / "model.safetensors", 1000)
    else:
        (folder / "config.json").write_text("[1, 2]")
    said = megalith("import", "model", "--out", "out", at=tmp_path)
    assert said.status != 0
    assert "Traceback" not in said.stderr
    assert ("model.safetensors" if damage == "truncated" else "config.json") in said.words


def test_a12_a_value_in_config_json_is_told_by_its_file_and_its_own_key(tmp_path: Path) -> None:
    _foreign(tmp_path / "model", num_hidden_layers="one")
    said = megalith("import", "model", "--out", "out", at=tmp_path)
    assert said.status != 0
    assert "config.json" in said.words
    assert "num_hidden_layers" in said.words


def test_a12_import_says_all_at_once(tmp_path: Path) -> None:
    """An unknown kind of rotary scaling hid values that are not numbers."""
    _foreign(tmp_path / "model", rope_scaling={"rope_type": "lama3", "factor": 8.0}, hidden_act="gelu", num_hidden_layers="one")
    said = megalith("import", "model", "--out", "out", at=tmp_path)
    assert said.status != 0
    assert all(name in said.words for name in ("lama3", "hidden_act", "num_hidden_layers"))


def test_a14_a_domain_that_no_file_can_be_named_after_is_told_by_its_name(tmp_path: Path) -> None:
    write_verse(tmp_path / "a.txt")
    status, words = _prepare(tmp_path, f"{'d' * 300}=a.txt")
    assert status != 0
    assert "Errno" not in words
    assert "domain" in words


def test_a14_a_file_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    write_verse(tmp_path / name)
    status, words = _prepare(tmp_path, name)
    assert "surrogates" not in words and "Traceback" not in words
    assert status == 0 or "caf" in words


def test_a14_output_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    write_verse(tmp_path / "a.txt")
    (tmp_path / "taken").touch()
    status, words = _prepare(tmp_path, "a.txt", out="taken/out")
    assert status != 0
    assert str(tmp_path / "taken") in words or "taken/out" in words
    assert "Errno" not in words


def test_a14_invalid_utf_8_is_told_with_its_line_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nth\xffree\n")
    status, words = _prepare(tmp_path, "a.txt")
    assert status != 0
    assert "a.txt:3" in words
    assert "offset 10" in words


@sampled(5, together=True)
@pytest.mark.parametrize("damage", ["gone", "broken", "altered"])
def test_a15_a_checkpoint_whose_manifest_cannot_be_used_is_named(at: Path, damage: str) -> None:
    short = ["train", "run.toml", "--run-dir", f"manifest-{damage}", "--set"]
    assert megalith(*short, "train.steps=20", at=at).status == 0
    manifest = at / f"manifest-{damage}" / "checkpoints" / "step-00000020" / "manifest.json"
    if damage == "gone":
        manifest.unlink()
    elif damage == "broken":
        os.truncate(manifest, 100)
    else:
        content = json.loads(manifest.read_text())
        content["step"] = 21
        manifest.write_text(json.dumps(content))
    said = megalith(*short, "train.steps=30", at=at)
    assert "step-00000020" in said.words
    assert said.status == 0


def test_a8_under_another_launcher_a_folder_has_one_owner_too(at: Path) -> None:
    """The processes start as under torchrun, where nothing locked the folder."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = ["train", "run.toml", "--run-dir", "launched", "--set", "train.steps=100000"]
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_launched(words, at, place)) for _ in range(2))
        first.until(lambda: second.ended or len(events(at / "launched", "step")) > 40, or_ended=True)
        assert first.ended or second.ended, "both train in one folder"
        assert "is in use by process" in first.output + second.output


def _launched(words: list[str], at: Path, place: dict[str, str]) -> contextlib.AbstractContextManager[Running]:
    """Start a command at a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return running(*words, at=at, env=place | {"MASTER_PORT": str(port)})


@sampled(5, together=True)
def test_a7_parity_proves_the_precision_that_was_asked_for(at: Path) -> None:
    """`parity` used fp32 whatever the precision of the run."""
    said = megalith("parity", "run.toml", "--set", "train.precision=bf16", "--json", at=at)
    assert said.status == 0, said.words
    assert said.json.get("precision") == "bf16"


DEEP = """
name = "deep"
data.path = "data"
train = { steps = 3, global_batch = 2, seq_len = 32, precision = "fp32", device = "cpu" }
optimizer = { warmup = 0, lr = 1e-3 }
[model]
preset = "deepseek-tiny"
layers = 2
dim = 32
heads = 2
bias_rate = 0.001
rope_scaling = { factor = 4.0, original_context = 64, mscale = 0.707, mscale_all_dim = 0.707 }
"""


@pytest.fixture(scope="module")
def deep(at: Path) -> Path:
    """Write the run file of a DeepSeek with a router bias and YaRN, and train it in a folder beside the file."""
    (at / "deep.toml").write_text(DEEP)
    said = megalith("train", "deep.toml", "--run-dir", "deep", at=at)
    assert said.status == 0, said.words
    return at / "deep"


@sampled(5, together=True)
def test_a9_yarn_of_one_mscale_is_not_read_otherwise_than_transformers_does(at: Path, deep: Path) -> None:
    said = megalith("export", "deep", "--out", "one-mscale", at=at)
    assert said.status == 0, said.words
    path = at / "one-mscale" / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            assert config[name].pop("mscale", 0.707) == config[name]["mscale_all_dim"] == 0.707
    path.write_text(json.dumps(config))
    said = megalith("import", "one-mscale", "--out", "out-mscale", at=at)
    assert said.status != 0
    assert "mscale" in said.words


def test_a14_an_export_keeps_the_bias_of_a_router_in_fp32(at: Path, deep: Path) -> None:
    """Updates of the bias are smaller than the resolution of bf16."""
    said = megalith("export", "deep", "--dtype", "bf16", "--out", "narrow", at=at)
    assert said.status == 0, said.words
    kinds = {}
    for file in (at / "narrow").glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        kinds |= {name: one["dtype"] for name, one in header.items() if name != "__metadata__"}
    biases = {kind for name, kind in kinds.items() if name.endswith("e_score_correction_bias")}
    assert "BF16" in kinds.values()
    assert biases == {"F32"}


# One run that continues through all of these tests


@pytest.fixture(scope="module")
def run(at: Path) -> Iterator[Running]:
    with running("train", "run.toml", "--run-dir", "run", at=at) as command:
        command.until(lambda: events(at / "run", "checkpoint"))
        yield command


def test_a1_a_second_command_changes_no_byte_of_a_running_folder(at: Path, run: Running) -> None:
    files = [at / "run" / name for name in ("run.toml", "spec.json", "provenance.json")]
    before = [file.read_bytes() for file in files]
    assert megalith("train", "run.toml", "--run-dir", "run", "--set", "train.steps=250", at=at).status != 0
    assert [file.read_bytes() for file in files] == before
    assert not run.ended


def test_a10_a_checkpoint_of_another_run_is_not_taken_as_this_ones(at: Path, run: Running) -> None:
    """Another learning rate is not taken either if only the checkpoints of a run's folder are left (A15)."""
    saved = at / "run" / events(at / "run", "checkpoint")[-1]["path"]
    copied = at / "other" / "checkpoints" / saved.name
    shutil.copytree(saved, copied)
    steps = int(saved.name.rpartition("-")[2])
    other = ["--set", "optimizer.lr=0.05", "--set", f"train.steps={steps}"]
    said = megalith("train", "run.toml", "--run-dir", "other", *other, at=at)
    assert said.status != 0
    assert "optimizer.lr" in said.words


@sampled(5, together=True)
@pytest.mark.parametrize(
    "other", ["model.heads=4", "model.rope_theta=500000.0", "model.init_std=0.1", "optimizer.weight_decay=0.3"]
)
def test_a10_a_checkpoint_of_a_run_with_another_value_of_equal_shapes_is_not_taken(at: Path, run: Running, other: str) -> None:
    saved = at / "run" / events(at / "run", "checkpoint")[-1]["path"]
    folder = f"other-{other.partition('=')[0]}"
    shutil.copytree(saved, at / folder / "checkpoints" / saved.name)
    settings = ["--set", other, "--set", f"train.steps={int(saved.name.rpartition('-')[2])}"]
    said = megalith("train", "run.toml", "--run-dir", folder, *settings, at=at)
    assert said.status != 0
    assert other.partition("=")[0] in said.words


@sampled(5, together=True)
def test_a2_an_edited_spec_is_not_trained_with_after_a_fault(at: Path, run: Running) -> None:
    """This is the last test of the run, which ends here."""
    spec = at / "run" / "spec.json"
    told = json.loads(spec.read_text())
    told["optimizer"]["lr"] *= 30
    spec.write_text(json.dumps(told))
    done = len(events(at / "run", "step"))
    for rank in run.ranks():
        rank.send_signal(signal.SIGKILL)
    run.until(lambda: len(events(at / "run", "run_started")) > 1 and len(events(at / "run", "step")) > done + 2, or_ended=True)
    assert run.ended, "it goes on with what it was never asked to compute"
    assert "spec.json" in run.output


# Disks that are full or read-only


@contextlib.contextmanager
def _mounted(folder: Path, *words: str) -> Iterator[Path]:
    """Mount something at a new folder, or skip the test if that is not allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        # only root may mount; tests of single functions cover this without a mount (tests/data/test_prepare.py, tests/test_disk.py)
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def test_a11_a_full_disk_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    write_verse(tmp_path / "a.txt", lines=50_000)
    with _mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=256k", "tmpfs"):
        status, words = _prepare(tmp_path, "a.txt", out="small/out")
    assert status != 0
    assert "small" in words and re.search(r"\d ?[kKM]i?B", words)


@sampled(5, together=True)
def test_a15_a_report_of_a_folder_that_is_read_only(at: Path, tmp_path: Path) -> None:
    assert megalith("train", "run.toml", "--run-dir", "shown", "--set", "train.steps=10", at=at).status == 0
    with _mounted(tmp_path / "read", "--bind", str(at / "shown")) as folder:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        assert megalith("report", folder, at=tmp_path).status == 0


def test_a15_a_disk_that_was_full_leaves_no_torn_line(at: Path, tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=96m", "tmpfs") as disk:
        run, steps = disk / "run", ["--set", "train.steps=1000000", "--set", "checkpoint.every=1000000"]
        with running("train", "run.toml", "--run-dir", run, *steps, at=at) as command:
            command.until(lambda: len(events(run, "step")) > 20)
            with (disk / "filler").open("wb", buffering=0) as filler:
                for block in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while filler.write(bytes(block)):
                            pass
            size = (run / "events.jsonl").stat().st_size
            command.until(lambda: _full(command, disk, run, size), or_ended=True)
            (disk / "filler").unlink()
            last = len(events(run, "step"))
            command.until(lambda: len(events(run, "step")) > last + 20)
            *lines, _ = (run / "events.jsonl").read_bytes().split(b"\n")
        assert all(line.startswith(b"{") and line.endswith(b"}") for line in lines), [one for one in lines if one[-1:] != b"}"]


def _full(command: Running, disk: Path, run: Path, size: int) -> bool:
    """True once the log has filled the rest of its last page and can no longer grow, while the ranks compute for a second."""
    before = (run / "events.jsonl").stat().st_size
    until = _computed(command) + 1.0
    command.until(lambda: _computed(command) >= until, or_ended=True)
    return os.statvfs(disk).f_bavail == 0 and before == (run / "events.jsonl").stat().st_size >= size


def _computed(command: Running) -> float:
    """Return the seconds of processor time of a command's ranks."""
    total = 0.0
    for rank in command.ranks():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += rank.cpu_times().user
    return total
