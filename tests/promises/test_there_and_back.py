"""A model trained here computes the same in transformers, and an imported one can be trained further."""

from pathlib import Path

import pytest
import torch

from megalith.checkpoint.huggingface import import_
from megalith.commands.export import export
from megalith.data.prepare import prepare
from megalith.data.tokenizer import load
from megalith.events import Step, of_kind, read
from megalith.models.batch import Batch
from megalith.spec.run import RunSpec
from megalith.train.generate import generate, load_model
from tests.full import sampled
from tests.runs import final_state, train
from tests.specs import tiny_run

END = "<|stop|>"
PLANS = {"tiny": {"data": 2, "zero": 3}, "deepseek-tiny": {"data": 2, "zero": 1, "expert": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare text whose end-of-text token has an unusual name."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"On day {i} the ship sailed {7 * i} miles and nobody spoke." for i in range(400)))
    definition = load("bytes").save(folder / "plain").read_text().replace("<|endoftext|>", END)
    tokenizer = folder / "named" / "tokenizer.json"
    tokenizer.parent.mkdir()
    tokenizer.write_text(definition)
    prepare([str(text)], tokenizer=load(tokenizer, end_of_text=END), out=folder / "data")
    return folder / "data"


def _spec(preset: str, data: Path, **choices: object) -> RunSpec:
    return tiny_run(
        model={"preset": preset, "vocab": 264},
        plan=PLANS[preset],
        data={"path": str(data)},
        train={"steps": 3, "global_batch": 4, "seq_len": 32, "precision": "fp32"} | choices,
        optimizer={"lr": 1e-2},
    )


@sampled(1)
@pytest.mark.parametrize("preset", PLANS)
def test_a_trained_model_goes_to_transformers_and_what_comes_back_trains_on(preset: str, data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (it is a dependency of the tests only)"
    )
    spec = _spec(preset, data)
    train(spec, tmp_path / "run")
    run, there, back = tmp_path / "run", tmp_path / "there", tmp_path / "back"
    ours = load_model(next((run / "checkpoints").iterdir()), device=torch.device("cpu"))
    held = ours.parameters_by_name() | ours.lasting_buffers()
    trained = final_state(run)
    assert {f"weights.{name}" for name in held} == {name for name in trained if name.startswith("weights.")}
    assert all(torch.equal(tensor.detach(), trained[f"weights.{name}"]) for name, tensor in held.items())

    export(run, out=there)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(there).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(there)
    assert tokenizer.eos_token == END
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    prompt = "On day 7"
    tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, Batch(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
        written = theirs.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
    assert generate(run, prompt, tokens=12, temperature=0.0) == tokenizer.decode(written, skip_special_tokens=True)

    import_(there, back)
    train(_spec(preset, data, steps=1, init_from=str(back)), tmp_path / "on")
    train(_spec(preset, data, steps=1, init_from=str(run)), tmp_path / "again")
    first = [next(event.loss for event in of_kind(read(tmp_path / name), Step)) for name in ("on", "again")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
