"""`megalith key`: make the key with which the machines of a run authenticate each other."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.shared.arguments import Json
from megalith.commands.shared.output import print_json


def command(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run folder, on storage that all machines of the run share.")
    ],
    as_json: Json = False,
) -> int:
    """Create a run's secret key: a file in its run folder that only you can read. Agents on several machines need the key to authenticate
    each other.

    An existing key is kept. MEGALITH_KEY, or the file in MEGALITH_KEY_FILE, takes precedence if it is set.

    Example:  megalith key runs/first
    """
    from megalith.fleet.secure import key

    made = key.make(run_dir)
    path = key.path_in(run_dir)
    if not made:
        key.shared(run_dir, environment={})  # says what is wrong with one that others can read
    if as_json:
        print_json({"ok": True, "path": str(path), "made": made})
    else:
        print(f"{path}: {'made' if made else 'there already'}")
    return 0
