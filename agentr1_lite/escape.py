"""Text that models, tools and data sets wrote, made safe to show: in HTML and in a terminal."""

from __future__ import annotations

import re
from html import escape
from typing import Any

# control characters (all but tab and newline), half surrogate pairs, what changes the direction of the text around it,
# and what shows as nothing at all; the joiners that emoji and Indic scripts are written with stay
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: Any) -> str:
    """Any text with invisible characters by their numbers (``⟨202E⟩``, ``⟨001B⟩``): no terminal obeys it."""
    return _ODD.sub(lambda m: f"⟨{ord(m[0]):04X}⟩", str(text))


def esc(text: Any) -> str:
    """Any text as HTML shows it, attribute values and SVG included: `visible`, and escaped."""
    return escape(visible(text))
