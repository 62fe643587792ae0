"""The novels shipped inside the package, whose provenance is in README.md in the same folder."""

import hashlib
import lzma
from functools import cache
from importlib.resources import files

from megalith.data.errors import DataError

AUSTEN = "bundled:austen"


@cache
def austen() -> str:
    """Six novels by Jane Austen (4.03 MB). Raises DataError if the shipped file is missing or was changed."""
    return _unpack("austen.txt")


def _unpack(name: str) -> str:
    folder = files(__name__)
    mend = "Install Megalith again, because the file is part of the package."
    try:
        packed = (folder / f"{name}.xz").read_bytes()
        sums = (folder / "SHA256SUMS").read_text().split()
        expected = dict(zip(sums[1::2], sums[::2], strict=True))[name]
    except (FileNotFoundError, KeyError) as error:
        raise DataError(f"The bundled text {name}.xz or its SHA256SUMS is missing from the package ({error}). {mend}") from error
    try:
        content = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise DataError(f"The bundled text {name}.xz ({len(packed)} bytes) does not unpack: {error}. {mend}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(f"The bundled text {name} has sha256 {found}, but {expected} was shipped. {mend}")
    return content.decode()
