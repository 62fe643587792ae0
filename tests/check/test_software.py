"""Compilers and extras."""

from pathlib import Path

import pytest
import torch

from megalith.check import check
from megalith.check.software import cuda_of_torch
from megalith.spec.alerts import AlertsSpec
from tests.check.runs import errors, spec


@pytest.mark.parametrize("split", ["tensor", "context"])
def test_what_an_older_compiler_computes_wrongly_is_refused_there(split: str, monkeypatch: pytest.MonkeyPatch):
    asked = ("plan.compile=true", f"plan.{split}=2")
    for installed, wrong in (("2.15.0", []), ("2.16.1+cu130", []), ("2.11.0+cu130", ["plan.compile"])):
        monkeypatch.setattr("megalith.check.software.version", lambda package, installed=installed: installed)
        assert [problem.key for problem in errors(*asked)] == wrong
        assert errors("plan.compile=true", "plan.data=2") == []


def test_an_extra_that_is_asked_for_must_be_installed(data: Path, monkeypatch: pytest.MonkeyPatch):
    assert not [p for p in check(spec("log.tensorboard=true")) if p.key == "log.tensorboard"]
    monkeypatch.setattr("megalith.check.software.find_spec", lambda name: None)
    assert [p.key for p in check(spec("log.tensorboard=true")) if p.severity == "error"] == ["log.tensorboard"]


@pytest.mark.parametrize(("cuda", "said"), [((12, 6), False), ((12, 8), True), ((13, 2), True), (None, False)])
def test_a_torch_without_kernels_for_a_v100_is_named(cuda: tuple[int, int] | None, said: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megalith.check.software.cuda_of_torch", lambda: cuda)
    asked = check(spec("cluster=v100-32gb", "train.precision=fp16"), files=False)
    reasons = [problem.reason for problem in asked if problem.key == "cluster"]
    assert bool(reasons) == said and all("only builds for CUDA 12.6 have them" in reason for reason in reasons)
    assert not [p for p in check(spec("cluster=a100-80gb"), files=False) if p.key == "cluster"]


def test_the_cuda_of_torch_is_read_from_disk():
    assert cuda_of_torch() == (None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")[:2])))


def test_alerts_that_could_not_be_sent(monkeypatch: pytest.MonkeyPatch):
    asked = ("alerts.post=ftp://example.org/x", "alerts.run=no-such-program --now")
    found = {p.key: p for p in check(spec(*asked)) if p.key.startswith("alerts")}
    assert found["alerts.post"].severity == "error" and "not an http or https address" in found["alerts.post"].reason
    assert found["alerts.run"].severity == "advice" and "no program no-such-program" in found["alerts.run"].reason
    monkeypatch.delenv("CHAT", raising=False)
    asked = ("alerts.post=env:CHAT", "alerts.run=cat > /dev/null")
    (problem,) = (p for p in check(spec(*asked)) if p.key.startswith("alerts"))
    assert (problem.key, problem.severity) == ("alerts.post", "advice") and "CHAT" in problem.reason
    monkeypatch.setenv("CHAT", "https://example.org/hook")
    assert not [p for p in check(spec(*asked)) if p.key.startswith("alerts")]


@pytest.mark.parametrize(("port", "right"), [("abc", 0), ("99999", 0), ("0", 0), ("8080", 1)])
def test_an_address_for_alerts_has_a_possible_port(port: str, right: int):
    found = [p for p in check(spec(f"alerts.post=https://host:{port}/"), files=False) if p.key == "alerts.post"]
    assert len(found) == 1 - right


@pytest.mark.parametrize(
    "command",
    [
        "~/bin/notify",
        "$HOME/bin/notify --x",
        "cat>>/tmp/a",
        "cat|tee /tmp/q",
        "cat; true",
        "cd /tmp && cat",
        "(cat; echo) >> a",
        "{ cat; } > a",
        ". ./env.sh && cat",
        "exec cat",
        "if true; then cat; fi",
        "read x; cat",
        "A=1 cat",
        "'",
        "\ncat\n",
    ],
)
def test_words_that_the_shell_interprets_are_no_missing_programs(command: str):
    run = spec().model_copy(update={"alerts": AlertsSpec(run=command)})
    assert not [p for p in check(run) if p.key == "alerts.run"]
