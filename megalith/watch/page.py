"""The live page: one HTML file that includes its style and script, and sends requests only to its own server. The script inserts all text
of a run as text, never as HTML. The content security policy allows only this script and style, by their digests.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any


@cache
def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8").strip()


@cache
def _digest(name: str) -> str:
    return base64.b64encode(hashlib.sha256(_part(name).encode()).digest()).decode()


def policy(*, live: bool) -> str:
    """Return the page's content security policy: it allows only the page's own script and style, and requests to its own server if the page
    is `live`."""
    own = f"script-src 'sha256-{_digest('page.js')}'; style-src 'sha256-{_digest('page.css')}'"
    asks = "connect-src 'self'; frame-ancestors 'none'; " if live else ""
    return f"default-src 'none'; {own}; {asks}img-src data:; base-uri 'none'; form-action 'none'"


def live(names: Sequence[str], data: Sequence[dict[str, Any]], *, acts: bool) -> str:
    """Return the page for a server. The page shows `data` at once, and requests more data later."""
    return _whole(names, {"live": True, "acts": acts, "names": list(names), "data": list(data)})


def standing(names: Sequence[str], data: Sequence[dict[str, Any]]) -> str:
    """Return the page as a self-contained file with its data."""
    meta = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(live=False))}">'
    return _whole(names, {"live": False, "acts": False, "names": list(names), "data": list(data)}, meta)


def _whole(names: Sequence[str], data: dict[str, Any], meta: str = "") -> str:
    inside = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    title = escape(", ".join(names) or "no run")
    head = f'<meta charset="utf-8">{meta}<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<link rel="icon" href="data:,"><title>{title}</title><style>{_part("page.css")}</style>'
    body = (
        f'<main id="page"></main><script type="application/json" id="data">{inside}</script><script>{_part("page.js")}</script>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
