"""The pages are correct: commands parse and run, paths exist, and the reference of keys and exit statuses is complete.

In Markdown a comment before a fenced block controls its test. `<!-- file: NAME -->` writes the block into a folder.
`<!-- runs -->` runs its commands (or its Python) there, page by page in order; a
```text block right after it must equal the output. `<!-- runs, status 2 -->` expects that exit status, and the lines of the text
block among the output.
"""

import contextlib
import io
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from megalith import events
from megalith.cli import app
from megalith.commands.shared.arguments import RunRequest
from megalith.commands.shared.runs import check
from megalith.fleet.exit_codes import MEANINGS
from megalith.spec import files
from megalith.spec.base import Spec
from megalith.spec.cluster import load as load_cluster
from megalith.spec.families import FAMILIES
from megalith.spec.plan import RetainSpec, StateSpec
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from megalith.spec.toml import literal
from megalith.spec.validate import kinds_of
from tests.full import sampled
from tests.report.run_folder import write_run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
CLUSTERS = sorted((ROOT / "clusters").glob("*.toml"))
NEEDS_RANKS = {"train", "resume", "quickstart", "eval", "parity", "generate", "export", "import"}
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block: the comment before it, its language, its text, and the ```text block that directly follows."""

    mark: str
    language: str
    text: str
    printed: str | None

    @property
    def commands(self) -> list[str]:
        """Return the block's command lines, without the prompt, with continuation lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return lines if self.language == "bash" else []


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    for i, one in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        follows = after is not None and after[2] == "text" and not text[one.end() : after.start()].strip()
        yield Block(one[1] or "", one[2], one[3], after[3] if after and follows else None)


def _said(page: Path) -> Iterator[str]:
    """Yield every command line of a page, from blocks and from the first cells of tables."""
    for block in _blocks(page):
        yield from block.commands
    yield from re.findall(r"^\| `(megalith [^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)


def _ours(line: str) -> list[str] | None:
    """Return the arguments of `megalith` in a command line, also under a launcher, or None for other commands."""
    found = re.search(r"(?:^|\s)(?:megalith|-m megalith\.cli)\s+(.*)", line.partition("   #")[0])
    return shlex.split(found[1]) if found else None


SHOWN = [(page, arguments) for page in PAGES for line in _said(page) if (arguments := _ours(line)) is not None]
SHOWN += [
    (recipe, arguments)
    for recipe in RECIPES
    for line in recipe.read_text(encoding="utf-8").splitlines()
    if line.startswith("#   ") and (arguments := _ours(re.split(r"\s{2,}(?=\S)", line[4:])[0])) is not None
]


def _command(arguments: list[str]) -> tuple[Any, list[str]]:
    """Return the command that arguments name, and the remaining arguments."""
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        assert arguments, "a command is missing"
        assert arguments[0] in found.commands, f"no command {arguments[0]!r}; there are {', '.join(found.commands)}"
        found, arguments = found.commands[arguments[0]], arguments[1:]
    return found, arguments


def test_there_is_something_to_check() -> None:
    assert len(PAGES) > 12
    assert len(SHOWN) > 50
    assert {arguments[0] for _, arguments in SHOWN} >= NEEDS_RANKS | {"check", "report", "data", "tokenizer"}


@pytest.mark.parametrize(
    ("page", "arguments"), SHOWN, ids=lambda value: " ".join(value) if isinstance(value, list) else value.name
)
def test_a_command_that_is_shown_parses(page: Path, arguments: list[str]) -> None:
    command, rest = _command(arguments)
    assert command.make_context(command.name, rest).params  # raises for unknown options and values


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_make_target_that_is_shown_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert {*re.findall(r"`make ([a-z-]+)`", text), *re.findall(r"^\$ make ([a-z-]+)", text, re.MULTILINE)} <= targets


def test_the_makefile_states_each_target_once() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(targets) > 10 and sorted(targets) == sorted(set(targets))


def test_files_that_the_makefile_names_exist() -> None:
    named = re.findall(r"\b(?:tests|megalith|benchmarks)/[\w/.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "tests/promises" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_runs_that_are_shown_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every train, parity and check line about a file of this repository has no problems, whatever it sets, except missing
    data."""
    monkeypatch.chdir(ROOT)
    seen = 0
    for page, arguments in SHOWN:
        if arguments[0] not in ("train", "parity", "check") or not Path(arguments[1]).is_file():
            continue
        if any("file:" in argument for argument in arguments):  # a file that the page shows; running the page creates it
            continue
        command, rest = _command(arguments)
        context = command.make_context(command.name, rest)
        request = RunRequest(context.params["run"], context.params["settings"] or ())
        checked = check(request, world=context.params.get("ranks"))
        wrong = [problem for problem in checked.errors if problem.key not in ("data.path", "train.init_from")]
        assert not wrong, (page, arguments, wrong)
        seen += 1
    assert seen > 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, with recipes, clusters and a trained run."""
    for name in ("recipes", "clusters"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    run = write_run(tmp_path / "runs/first")
    lines = (run / events.FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"type":"checkpoint"' not in line]  # there is none, and pages check the run
    (run / events.FILE).write_text("".join(kept), encoding="utf-8")
    files.save(files.load(ROOT / "recipes/quickstart.toml"), run)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.mark for b in _blocks(page))], ids=_name)
def test_blocks_that_are_marked_run(page: Path, folder: Path) -> None:
    for block in _blocks(page):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and block.mark == "runs":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block.text, page.name, "exec"), {"__name__": page.stem})
            assert said.getvalue() == block.printed
        elif block.mark:
            _run(block)


SIMULATED = [
    (shlex.split(found[1]), found[2])
    for page in PAGES
    for found in re.finditer(r"^\| `megalith (simulate [^`]+)` \| ([\d.]+) % \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "goodput"), SIMULATED, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
@sampled(3)
def test_a_simulation_in_a_table_prints_the_goodput_beside_it(arguments: list[str], goodput: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert f"goodput {goodput}% (seeds:" in result.output


def test_simulations_stand_in_tables() -> None:
    assert len(SIMULATED) > 10


def _run(block: Block) -> None:
    kind = re.fullmatch(r"runs(?:, status (\d+))?", block.mark)
    assert kind, f"<!-- {block.mark} --> is no mark known here"
    assert block.commands, block
    output = ""
    for line in block.commands:
        arguments = _ours(line)
        assert arguments is not None, f"{line}: only megalith is run"
        assert arguments[0] not in NEEDS_RANKS, f"{line}: takes too long to be run here"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == int(kind[1] or 0), (line, result.output, result.exception)
        output += result.output
    shown = {" ".join(line.split()) for line in (block.printed or "").splitlines()} - {"..."}
    assert shown <= {" ".join(line.split()) for line in output.splitlines()}, output


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_anywhere_but_for_data_that_is_yet_to_be_made(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = check(RunRequest(recipe))
    assert {problem.key for problem in checked.errors} <= {"data.path"}
    made = re.findall(r"--out (\S+)", recipe.read_text(encoding="utf-8"))
    assert checked.resolved.spec.data.path in [*made, "data/quickstart/tokens"], "a recipe says how its data is made"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_is_read(path: Path) -> None:
    cluster = load_cluster(str(path))
    assert cluster.count >= 1
    assert cluster.accelerator.peak


def _rows(text: str, heading: str) -> dict[str, tuple[str, ...]]:
    """Return the table under a heading: first cell without backticks -> the other cells."""
    section = re.split(r"^#+ ", text.partition(f"{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = ([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    return {first.strip("`"): tuple(rest) for first, *rest in cells}


TABLES: dict[str, type[Spec]] = {"### Top level": RunSpec, "### `[plan.state]`": StateSpec, "### `[plan.retain]`": RetainSpec} | {
    f"### `[{name}]`": kinds[0] for name, field in RunSpec.model_fields.items() if (kinds := kinds_of(field.annotation))
}


@pytest.mark.parametrize("heading", TABLES)
def test_the_reference_of_keys_is_the_specs(heading: str) -> None:
    rows = _rows((ROOT / "docs/guide/training.md").read_text(encoding="utf-8"), heading)
    fields = TABLES[heading].model_fields
    tables = {n for n, field in fields.items() if kinds_of(field.annotation) and type(None) not in get_args(field.annotation)}
    assert set(rows) - {"preset"} == set(fields) - tables
    for name in set(fields) - tables:
        default, meaning = rows[name]
        field = fields[name]
        assert default == ("needed" if field.is_required() else f"`{literal(field.default)}`"), name
        assert meaning, name
        assert meaning.startswith(field.description or ""), name


def test_every_familys_own_keys_are_named() -> None:
    rows = _rows((ROOT / "docs/guide/training.md").read_text(encoding="utf-8"), "### Families of models")
    llama = set(FAMILIES["llama"].model_fields)
    for name, family in FAMILIES.items():
        assert name == "llama" or set(re.findall(r"`(\w+)`", rows[name][1])) == set(family.model_fields) - llama, name


def test_all_presets_are_named() -> None:
    text = (ROOT / "docs/guide/training.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in presets())


def test_the_table_of_exit_statuses_is_the_programs() -> None:
    text = (ROOT / "docs/guide/clusters.md").read_text(encoding="utf-8")
    wanted = [
        f"| {code.value} | `{code.name}` | {means.text} | {'yes' if means.retry else 'no'} |" for code, means in MEANINGS.items()
    ]
    assert re.findall(r"^\| \d+ \| `[A-Z_]+` \|.*$", text, re.MULTILINE) == wanted


def test_the_messages_that_are_explained_are_the_programs() -> None:
    """A row that begins with a message quotes it, with `...` in place of values."""
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "megalith").rglob("*.py"))
    messages = [message for message in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) if message != "CUDA out of memory"]
    assert len(messages) > 15
    for message in messages:
        for piece in message.split("..."):
            assert piece.strip() in source, message


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert "://" not in target, f"{target}: a page needs no network"
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{_name(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", [*PAGES, *RECIPES, *CLUSTERS], ids=_name)
def test_files_that_are_named_exist(page: Path) -> None:
    rooms = "|".join(path.name for path in (ROOT / "megalith").iterdir() if path.is_dir() and (path / "__init__.py").exists())
    text = page.read_text(encoding="utf-8")
    own = re.findall(r"(?<![\w/.])((?:megalith|tests|docs|recipes|benchmarks|clusters)/[\w./-]+\.(?:py|md|toml))", text)
    inside = re.findall(rf"`((?:{rooms})/[\w./-]+\.(?:py|toml))`", text)
    for name in own:
        assert name == "clusters/mine.toml" or (ROOT / name).exists() or (page.parent / name).exists(), name
    for name in inside:
        assert (ROOT / "megalith" / name).exists(), name


@pytest.mark.parametrize("page", [*PAGES, *RECIPES, *CLUSTERS], ids=_name)
def test_no_path_of_a_persons_machine(page: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:work|root|home|tmp|Users|mnt)\b\S*", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_toml_that_is_shown_is_toml(page: Path) -> None:
    for block in _blocks(page):
        if block.language == "toml":
            tomllib.loads(block.text)


def test_every_promise_stands_in_the_list_that_the_readme_links_to() -> None:
    promises = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "tests/promises").glob("test_*.py") if f"tests/promises/{path.name}" not in promises]
    assert not missing
    assert "](docs/promises.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_index_of_decisions_is_complete() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs/decisions").glob("[0-9]*.md"):
        assert f"]({path.name})" in index, path.name
        assert path.read_text(encoding="utf-8").startswith(f"# {path.name[:4]} "), path.name
