"""How the report page looks, in light and in dark."""

from megalith.report import svg

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
figure.wide{grid-column:1/-1}
figure.wide svg{min-width:720px}
figcaption{font-size:13px;font-weight:600;margin-bottom:9px}
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
