"""The picture of the README: a dry run of rank 8,000 of 16,384. `make readme-picture` takes it."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.watch.browser import Browser

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "guide" / "pictures"
DRY_RUN = ("dryrun", str(ROOT / "recipes" / "llama3.1-405b-16k.toml"), "--world", "16384", "--rank", "8000")


def main() -> None:
    """Take the picture, which takes a minute."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run([sys.executable, "-m", "megalith.cli", *DRY_RUN, "--draw", "dryrun.html"], cwd=folder, check=True)
        browser = Browser(folder / "profile")
        browser.open((folder / "dryrun.html").as_uri(), width=1200)
        browser.picture(OUT / "dryrun.png", height=1000)
        browser.close()


if __name__ == "__main__":
    main()
