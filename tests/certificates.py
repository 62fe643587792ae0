"""Certificates for tests, made with the commands in docs/guide/sites.md."""

import subprocess
from pathlib import Path

_NEW = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "365"]


def authority(folder: Path, name: str = "authority") -> None:
    """Make `name`.pem and `name`.key, which sign certificates."""
    _run([*_NEW, "-subj", "/CN=run", "-keyout", f"{name}.key", "-out", f"{name}.pem"], folder)


def site(folder: Path, name: str, *, address: str = "127.0.0.1", signed_by: str = "authority") -> dict[str, str]:
    """Make a certificate that names an IP address, and return the table `sites.tls` of a site that has it."""
    _run(
        [
            *_NEW,
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=CA:FALSE"),
            *("-CA", f"{signed_by}.pem", "-CAkey", f"{signed_by}.key", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
        ],
        folder,
    )
    files = {"certificate": f"{name}.pem", "key": f"{name}.key", "authority": "authority.pem"}
    return {key: str(folder / file) for key, file in files.items()}


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
