"""The frame of a report page: markup and style, light, dark and on paper."""

from __future__ import annotations

from agentr1_lite.plots import css_colors

_LIGHT = "--paper:#fbfaf6;--card:#fff;--ink:#1d2430;--muted:#5c6675;--rule:#e4e0d7;--tint:#f3f0e8;--bad:#b3261e;"
_DARK = "--paper:#14171c;--card:#1b1f26;--ink:#e9e7e2;--muted:#9ba5b4;--rule:#2d333d;--tint:#232831;--bad:#ff8a80;"

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 80px}
h1{font-size:1.05rem;font-weight:600;margin:0;color:var(--muted);letter-spacing:.01em}
h2{font-size:1.3rem;margin:0 0 4px;letter-spacing:-.01em}
h3{font-size:.95rem;margin:0 0 6px}
h3 small{display:block;font-weight:400;color:var(--muted)}
section{margin-top:52px}
.note{color:var(--muted);font-size:.9rem;margin:0 0 14px}
.hero{display:flex;align-items:baseline;flex-wrap:wrap;gap:0 14px;margin:10px 0 2px;font-size:3.4rem;
font-weight:650;letter-spacing:-.03em;line-height:1.15;font-variant-numeric:tabular-nums}
.hero .from,.hero .arrow{color:var(--muted);font-weight:450}
.hero .to{color:var(--online)}
.hero small{font-size:1rem;font-weight:400;letter-spacing:0;color:var(--muted)}
svg{display:block;width:100%;height:auto;overflow:visible;font-family:inherit}
svg text{font-size:12px;fill:var(--muted);font-variant-numeric:tabular-nums}
svg .label{font-size:14px;fill:var(--ink)}
svg .value{font-size:13px;fill:var(--ink)}
svg .heading{font-size:12px;font-weight:600}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .border{stroke:var(--muted);stroke-width:1;stroke-dasharray:2 4}
svg .stem{stroke-width:1.5;opacity:.35}
svg .whisker{stroke-width:6;opacity:.4;stroke-linecap:round}
svg .dot{stroke:var(--card);stroke-width:1.5}
svg .raw{fill:none;stroke-width:1;opacity:.35}
svg .line{fill:none;stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}
svg .area{stroke:var(--card);stroke-width:.8;opacity:.82}
.wide,figure,.episode{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.wide{padding:20px 28px;max-width:860px;margin-bottom:18px;overflow-x:auto}.wide svg{min-width:450px}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(310px,1fr));gap:16px}
figure{margin:0;padding:16px 18px 12px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;font-size:.8rem;color:var(--muted)}
.legend i{opacity:.82;display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--muted);font-size:.82rem}
th,td{padding:7px 18px 7px 0;border-bottom:1px solid var(--rule);vertical-align:baseline}
.numbers td{white-space:nowrap}
td small{color:var(--muted)}
.heat{display:inline-block;padding:0 7px;border-radius:5px;
background:color-mix(in srgb,var(--online) calc(var(--share)*.45),transparent)}
.episode{padding:18px 22px;margin:0 0 16px}
.episode header{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline;margin-bottom:10px}
.episode header .note{margin:0}
.episode footer{margin:12px 0 0 82px}
.turn{display:grid;grid-template-columns:68px minmax(0,1fr);gap:14px;margin:8px 0;align-items:start}
.turn>i{font-style:normal;font-size:.8rem;color:var(--muted);text-align:right;padding-top:9px}
.turn>p,.turn>div{margin:0;padding:7px 13px;border-radius:9px;white-space:pre-wrap;overflow-wrap:anywhere;
unicode-bidi:isolate;font-size:.92rem}
.turn p{margin:0;unicode-bidi:isolate}
.question>p{font-weight:600}
.agent>div{background:color-mix(in srgb,var(--online) 11%,transparent)}
.reply>p{background:var(--tint)}
code,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:.86em}
.turn code{display:block;white-space:pre-wrap}
pre{background:var(--tint);padding:14px 16px;border-radius:9px;overflow-x:auto;margin:6px 0 18px;line-height:1.5}
details{margin:10px 0}summary{cursor:pointer;font-weight:600;font-size:.95rem;padding:4px 0}
.right{color:var(--imitation)}.wrong,.bad,.fail{color:var(--bad)}.warn{color:var(--offline)}
.episode footer b,.episode footer .note{unicode-bidi:isolate}
@media(max-width:600px){main{padding:24px 14px 60px}.wide{padding:12px}.turn{grid-template-columns:1fr;gap:0}
.turn>i{text-align:left}.episode footer{margin-left:0}.hero{font-size:2.5rem}}
@media print{html{font-size:12px}body{background:#fff}main{max-width:none;padding:0}section{margin-top:28px}
figure,.wide,.episode,tr{break-inside:avoid}h2,h3{break-after:avoid}.grid-of{grid-template-columns:1fr 1fr}
pre{white-space:pre-wrap}.scroll,.wide{overflow:visible}
.numbers{font-size:.75rem}.numbers th,.numbers td{padding-right:9px}
.numbers small{display:block}details::details-content{content-visibility:visible;block-size:auto}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def page(title: str, lead: str, body: str) -> str:
    """A whole document around HTML; ``title`` is escaped already."""
    light, dark = _LIGHT + css_colors(0), _DARK + css_colors(1)
    colors = f":root{{color-scheme:light dark;{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{colors}{_STYLE}</style></head>\n"
        f"<body><main><h1>{title}</h1>{lead}{body}</main></body></html>\n"
    )
