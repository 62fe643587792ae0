import signal
from pathlib import Path

import pytest

from megalith.fleet.causes import Exit, Failure, RankError, conclusive, describe, first, is_secondary, read_error
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.observations import of_failure

LOG = Path("rank-0.log")

GLOO_AND_NCCL = [
    ("RuntimeError", "[../gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41352"),
    ("RuntimeError", "[../gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]: Connection reset by peer"),
    ("RuntimeError", "Gloo connectFullMesh failed with [/pytorch/...]: Connection refused"),
    ("RuntimeError", "[../gloo/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"),
    ("RuntimeError", "Application timeout caused pair closure"),
    ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cuda//..."),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
]
OWN = [
    ("ValueError", "the token 70000 is not below the vocabulary's 32000"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'data/manifest.json'"),
    ("AssertionError", ""),
]


def failure(rank: int, time: float, secondary: bool) -> Failure:
    return Failure(rank, "raised", "E", "", LOG, time, 1, secondary)


def error_of(kind: str, text: str) -> RankError:
    return RankError(kind, text, "Traceback ...", 5.0, "step")


@pytest.mark.parametrize(("kind", "text"), GLOO_AND_NCCL)
def test_errors_of_ranks_that_lost_a_peer_are_secondary(kind, text):
    assert is_secondary(kind, text)


@pytest.mark.parametrize(("kind", "text"), OWN)
def test_errors_of_a_ranks_own_are_not_secondary(kind, text):
    assert not is_secondary(kind, text)


DEVICES = [
    ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"),
    ("torch.AcceleratorError", "CUDA error: uncorrectable NVLink error detected during the execution"),
    ("RuntimeError", "CUDA error: all CUDA-capable devices are busy or unavailable"),
    ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ("torch.distributed.DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:3, unhandled cuda error\nLast error:\n"
     "Cuda failure 'uncorrectable ECC error encountered'"),
    ("pynvml.NVMLError_GpuIsLost", "GPU is lost"),
]  # fmt: skip
PROGRAMS = [
    ("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    ("torch.AcceleratorError", "CUDA error: unspecified launch failure"),
    ("torch.AcceleratorError", "CUDA error: hardware stack error"),
    ("torch.AcceleratorError", "CUDA error: device-side assert triggered"),
    *OWN,
]


@pytest.mark.parametrize(("kind", "text", "hardware"), [(*one, True) for one in DEVICES] + [(*one, False) for one in PROGRAMS])
def test_a_devices_fault_is_distinguished_from_a_programs_mistake_and_is_nobodys_consequence(
    kind: str, text: str, hardware: bool
):
    end = Exit(3, 1, 5.0)
    found = describe(end, error=error_of(kind, text), log=LOG, output="", phase="step", oom_kills=0)
    assert (found.hardware, found.secondary) == (hardware, False)
    observation = of_failure(found, time=6.0, step=4, slot=1, node="b")
    assert (observation.hardware, observation.blamed) == (hardware, hardware)


def test_a_devices_fault_is_read_from_what_a_rank_printed_before_it_was_aborted():
    printed = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: " + DEVICES[0][1]
    aborted = describe(Exit(3, -signal.SIGABRT, 5.0), error=None, log=LOG, output=printed, phase="step", oom_kills=0)
    assert aborted.hardware
    assert not aborted.secondary


def test_the_first_cause_is_the_earliest_that_is_not_a_consequence():
    failures = [failure(0, 1.0, True), failure(1, 3.0, False), failure(2, 2.0, False), failure(3, 0.5, True)]
    found = first(failures)
    assert found is not None
    assert found.rank == 2
    assert conclusive(failures)


def test_the_earliest_consequence_is_the_cause_when_nothing_else_is_known():
    failures = [failure(0, 2.0, True), failure(1, 1.0, True)]
    found = first(failures)
    assert found is not None
    assert found.rank == 1
    assert not conclusive(failures)
    assert first([]) is None


def test_a_python_error_says_more_than_the_exit_status():
    found = describe(Exit(0, 1, 9.0), error=error_of("ValueError", "two\nlines"), log=LOG, output="", phase="failed", oom_kills=0)
    assert (found.error, found.reason) == ("ValueError: two", "raised ValueError in phase `step`")
    assert (found.code, found.time) == (1, 5.0)


def test_an_abort_by_a_communication_thread_is_secondary_and_any_other_is_not():
    died = Exit(0, -signal.SIGABRT, 9.0)
    torn = "terminate called after throwing an instance of 'gloo::IoException'\n  what(): Connection closed by peer"
    assert describe(died, error=None, log=LOG, output=torn, phase="step", oom_kills=0).secondary
    assert not describe(died, error=None, log=LOG, output="free(): invalid pointer", phase="step", oom_kills=0).secondary


@pytest.mark.parametrize(
    ("oom_kills", "said"), [(0, "`kill -9` by another process"), (1, "killer ended 1 process during"), (2, "2 processes")]
)
def test_sigkill_says_whether_memory_ran_out(oom_kills, said):
    found = describe(Exit(0, -signal.SIGKILL, 9.0), error=None, log=LOG, output="", phase="step", oom_kills=oom_kills)
    assert said in found.reason
    assert found.code == ExitCode.LOST
    assert not found.secondary


def test_a_rank_without_an_error_file_has_no_error(tmp_path):
    file = tmp_path / "rank-0.error.json"
    assert read_error(file) is None
    for text in ("", '{"type": "KeyEr', "[]", '{"type": "KeyError"}'):
        file.write_text(text)
        assert read_error(file) is None, "a full disk may cut it off"
