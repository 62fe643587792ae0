"""Text generation with a trained run's newest checkpoint and its tokenizer, on one device."""

from pathlib import Path

import torch

from megalith import epochs
from megalith.checkpoint import folder, read
from megalith.data.manifest import TOKENIZER_FILE
from megalith.data.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer
from megalith.data.tokenizer import load as load_tokenizer
from megalith.events import EventLog, Sample
from megalith.models import generate as writer
from megalith.models.stage import Stage
from megalith.spec import families, parts
from megalith.train.run import choose_device


def load_model(path: Path, *, device: torch.device) -> Stage:
    """Return the whole model of the checkpoint `path`, which `folder.find` has verified, in fp32. Raises own.OwnPartError for a user's
    own parts that were not imported."""
    sizes = families.read(folder.read_manifest(path).meta["spec"]["model"])
    parts.need(sizes)
    spec = sizes.build()
    with torch.device("meta"):
        model = Stage(spec)
    model.to_empty(device=device)
    model.tie()
    held = model.parameters_by_name() | model.lasting_buffers()
    weights = read.read_full(path, [f"weights.{name}" for name in held], check=False)
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[f"weights.{name}"])
    return model


def find_tokenizer(run_dir: Path, data: str | None) -> Tokenizer:
    """Return the tokenizer of a run from the run folder or, if it is not there, from the folder `data`. Raises FileNotFoundError with the
    paths that were tried."""
    places = [epochs.newest(run_dir, TOKENIZER_FILE), *([Path(data) / TOKENIZER_FILE] if data else [])]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"no tokenizer: looked for {' and '.join(map(str, places))}. Copy the run's {TOKENIZER_FILE} to one of these paths."
        )
    return load_tokenizer(found, config=epochs.newest(run_dir, TOKENIZER_CONFIG_FILE) if found == places[0] else None)


def generate(
    run_dir: Path,
    prompt: str,
    *,
    tokens: int,
    step: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Generate text after `prompt`, up to `tokens` tokens or the end of the text; in a run folder, also add it to the events.

    With an empty prompt, the text begins a new document. Raises ValueError if the prompt plus `tokens` new tokens exceed the model's
    context.
    """
    checkpoint = folder.find(run_dir if step is None else folder.of_run(run_dir) / folder.name(step))
    manifest = folder.read_manifest(checkpoint)
    tokenizer = find_tokenizer(run_dir, manifest.meta["spec"].get("data", {}).get("path"))
    model = load_model(checkpoint, device=choose_device("auto", 0, 1))
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    written = list(
        writer.generate(
            model,
            ids,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tokenizer.end_of_text,
        )
    )
    text = tokenizer.decode(written[:-1] if written and written[-1] == tokenizer.end_of_text else written)
    if epochs.newest(run_dir, "spec.json").is_file():
        log = EventLog(run_dir)
        log.write(Sample(step=manifest.step, prompt=prompt, text=text))
        log.close()
    return text
