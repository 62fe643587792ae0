"""Common parts of report pages: style for the light and the dark theme, script, figures and tables."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from megalith.report import svg

HALF, WIDE = 550.0, 1150.0
"""Widths of pictures that need no scaling on a wide page: HALF for two pictures in a row, WIDE for one."""

PAGE = (
    svg.STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 28px 60px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:6px 14px;margin-bottom:22px}
h1{font-size:27px;line-height:1.2;letter-spacing:-.015em;margin:0}
h2{font-size:18px;letter-spacing:-.01em;margin:38px 0 14px}
header p{flex-basis:100%;margin:0;color:var(--muted);font-size:14px}
.state{font-size:12.5px;font-weight:600;padding:2px 11px;border-radius:99px;background:var(--soft);color:var(--muted)}
.state.good{background:color-mix(in srgb,var(--c2) 16%,transparent);color:var(--c2)}
.state.bad{background:color-mix(in srgb,var(--c1) 16%,transparent);color:var(--c1)}
.cards{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:12px}
.card{border:1px solid var(--line);border-radius:11px;padding:13px 15px;background:var(--panel)}
.card.wide{grid-column:span 2}
.card b{display:block;font-size:12.5px;font-weight:500;color:var(--muted)}
.card strong{display:block;font-size:23px;line-height:1.3;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.card small{display:block;color:var(--muted);font-size:11.5px;line-height:1.4;margin-top:2px}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
figure{margin:0;border:1px solid var(--line);border-radius:11px;padding:13px 15px 9px;background:var(--panel);overflow-x:auto}
figure.wide,.figures>figure:last-child:nth-child(odd):has(svg[data-frame]){grid-column:1/-1}
figure svg[data-frame]{touch-action:pan-y}
svg .dashes{stroke-dasharray:7 5}
svg .drag{fill:var(--c0);fill-opacity:.16}
figcaption{font-size:13px;font-weight:600;margin-bottom:9px}
figcaption button{font:inherit;font-size:12px;font-weight:500;float:right;margin-left:10px;color:var(--muted);background:var(--panel);
border:1px solid var(--line);border-radius:7px;padding:0 9px;cursor:pointer}
figcaption button[aria-pressed=true]{background:var(--ink);color:var(--panel)}
header code{font-size:12.5px;overflow-wrap:anywhere}
.note{color:var(--muted);font-size:12.5px;margin:10px 0 0}
@media (max-width:820px){.cards{grid-template-columns:repeat(2,minmax(0,1fr))}
.figures{grid-template-columns:minmax(0,1fr)}main{padding:22px 14px}}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:11px;background:var(--panel)}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px;border-top:1px solid var(--grid);vertical-align:top;overflow-wrap:anywhere}
th{border-top:0;color:var(--muted);font-weight:500;white-space:nowrap}
td:first-child,th:first-child{white-space:nowrap}
details{margin-top:12px}
summary{cursor:pointer;color:var(--muted);font-size:14px;margin-bottom:8px}
pre{overflow-x:auto;background:var(--soft);border-radius:9px;padding:14px 16px;font-size:12.5px;line-height:1.5}
blockquote{margin:0 0 12px;padding:12px 18px;border-left:3px solid var(--c0);border-radius:0 9px 9px 0;background:var(--soft)}
blockquote p{margin:2px 0 0;white-space:pre-wrap;font-family:Georgia,"Iowan Old Style","DejaVu Serif",serif;font-size:15.5px}
blockquote small,footer,.none{color:var(--muted)}
.problems{list-style:none;padding:0;margin:0 0 22px}
.problems li{display:flex;gap:12px;padding:9px 15px;border-radius:9px;margin-bottom:6px;background:var(--soft);font-size:14px}
.problems b{color:var(--muted);min-width:62px}
.problems .error{background:color-mix(in srgb,var(--c1) 13%,transparent)}.problems .error b{color:var(--c1)}
.problems .warning{background:color-mix(in srgb,var(--c4) 13%,transparent)}.problems .warning b{color:var(--c4)}
.problems small{color:var(--muted);margin-left:6px}
.problems span{white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin-top:44px;font-size:12.5px}
"""
)

HINT = '<p class="note hint" hidden>Drag over a curve to zoom in; double-click or press r for all of it, l for log axes.</p>'
"""A hint about zooming, hidden until the page's script shows it."""

_SCRIPT = (Path(__file__).parent / "curves.js").read_text(encoding="utf-8").strip()
_ALLOWED = f"'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a page with this content and additional `style`. The page refers to no other file. Its content policy allows only
    the page's own script, so text from a run cannot run as a script."""
    policy = f"default-src 'none'; script-src {_ALLOWED}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    )
    inside = f"<main>{body}{HINT if 'data-frame' in body else ''}</main><script>{_SCRIPT}</script>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{PAGE}{style}</style></head><body>{inside}</body></html>\n'


def curves(
    series: Sequence[svg.Series],
    form: Callable[[float], str],
    *,
    x_label: str = "step",
    unit: str = "",
    log: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw curves that the page's script can zoom into. `form` formats the labels of the y axis as drawn; `unit` follows the
    numbers that the script draws after a zoom."""
    return svg.line_chart(series, x_label=x_label, y_format=form, from_zero=from_zero, zoom=svg.Zoom(unit, log), width=HALF)


def figure(caption: str, picture: str, *, wide: bool = False) -> str:
    """Return a picture with its caption. A picture that the script cannot redraw for a narrow page keeps its size, and scrolls."""
    if "data-frame" not in picture and 'style="' not in picture.partition(">")[0]:
        size = picture.partition('viewBox="0 0 ')[2].partition(" ")[0]
        picture = picture.replace("<svg", f'<svg style="min-width:{size}px"', 1)
    return f"<figure{' class=wide' if wide else ''}><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def figures(*found: str) -> str:
    """Return figures in rows of two; empty if there is none."""
    return f'<div class="figures">{"".join(found)}</div>' if any(found) else ""


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text; if it is too wide for the page, it scrolls sideways."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
