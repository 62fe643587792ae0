"""Origin of a run: its host, command and commit, so that people can identify it. The user's name is left out."""

import contextlib
import getpass
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

OURS = ("megalith", "cli.py")
"""Last parts of this program's path: as the installed command, and as `python -m megalith.cli`."""
SECONDS = 5.0  # for git, which may read from a slow disk


def origin() -> dict[str, str]:
    """Return the host's name, the command of this process and the commit in its directory; unknown ones are left out."""
    host = re.sub(rf"\b{re.escape(user)}\b", "USER", socket.gethostname()) if (user := _user()) else socket.gethostname()
    found = {"host": host, "command": without_user(_command()), "commit": _commit()}
    return {name: value for name, value in found.items() if value}


def without_user(words: str) -> str:
    """Return the text with `~` in place of the user's home folder, and with USER in place of the user's name in paths."""
    if (home := str(Path.home())) != "/":
        words = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", words)
    return re.sub(rf"(?<=[/@]){re.escape(user)}(?![\w.-])", "USER", words) if (user := _user()) else words


def _user() -> str:
    with contextlib.suppress(Exception):  # the user of a container may have no name
        return getpass.getuser()
    return ""


def _command() -> str:
    """Return this process's command. For a program other than Megalith, return only its name, because its arguments may be private."""
    program = Path(sys.argv[0]).name
    return shlex.join(["megalith", *sys.argv[1:]]) if program in OURS else program


def _commit() -> str:
    """Return the commit of the git repository in the current directory, with "-dirty" if files differ from it; empty if there is none."""
    asked = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=False).stdout.strip()
    return ""
