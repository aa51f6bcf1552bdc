"""Where an answer differs from what is wanted, and how a value reads on one short line.

An answer may be anything and of any size: lengths are compared before items, and a text is made only as far as it
is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch

SHORT = 90  # characters of a value in a sentence
Equal = Callable[[Any, Any], bool] | None
BRACKETS = {list: "[]", tuple: "()", set: "{}", dict: "{}"}


class Difference(NamedTuple):
    """Two values that differ and their place in the whole; ``form`` says how their types, shapes or keys do."""

    path: tuple[Any, ...]  # indices of items, keys, and a tuple for the index into a tensor
    found: Any
    wanted: Any
    form: str = ""

    @property
    def where(self) -> str:
        if not self.path:
            return ""
        keys = [key if isinstance(key, tuple) else (key,) for key in self.path]
        return " at " + "".join(f"[{', '.join(map(repr, key))}]" for key in keys)


def differences(
    found: Any, wanted: Any, tolerance: float, equal: Equal = None, path: tuple[Any, ...] = ()
) -> Iterator[Difference]:
    """In order: each item of another form, and each of another value (of a tensor, its first element).

    ``tolerance`` is absolute and relative, for floats; ``equal(found, wanted)`` replaces the comparison of items
    that hold no others.
    """
    form = _form(found, wanted)
    if form:
        yield Difference(path, found, wanted, form)
    elif isinstance(wanted, torch.Tensor):
        a, b = found.detach(), wanted.detach()
        near = torch.isclose(a, b, tolerance, tolerance, equal_nan=True) if b.is_floating_point() else a == b
        for at in map(tuple, (~near).nonzero()[:1].tolist()):
            yield Difference((*path, at) if at else path, a[at].item(), b[at].item())
    elif isinstance(wanted, list | tuple | Mapping):
        for key in wanted if isinstance(wanted, Mapping) else range(len(wanted)):
            yield from differences(found[key], wanted[key], tolerance, equal, (*path, key))
    elif not (equal(found, wanted) if equal else _equal(found, wanted, tolerance)):
        yield Difference(path, found, wanted)


def _form(found: Any, wanted: Any) -> str:
    """How type, shape, dtype, length or keys differ; "" where only values can."""
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        if (found.layout, found.device) != (wanted.layout, wanted.device):
            expected = f"{wanted.layout} on {wanted.device}"
            return f"a tensor of layout {found.layout} on device {found.device}, expected {expected}"
        if found.shape != wanted.shape:
            return f"shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        return "" if found.dtype == wanted.dtype else f"dtype {found.dtype}, expected {wanted.dtype}"
    if isinstance(wanted, list | tuple):
        fits = isinstance(found, list | tuple) and len(found) == len(wanted)
        expected = f"a {type(wanted).__name__} of {len(wanted)}"
    elif isinstance(wanted, Mapping):
        fits = isinstance(found, Mapping) and len(found) == len(wanted) and all(key in found for key in wanted)
        expected = f"a dict with the keys {', '.join(map(str, wanted))}"
    elif isinstance(wanted, int | float) and not isinstance(wanted, bool):
        fits, expected = _is_number(found), "a number"
    else:
        fits, expected = isinstance(found, type(wanted)), shown(wanted)
    return "" if fits else f"{shown(found)}, expected {expected}"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.layout == torch.strided and not (value.is_meta or value.is_complex())
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _equal(found: Any, wanted: Any, tolerance: float) -> bool:
    if not isinstance(wanted, float):
        return bool(found == wanted)
    with suppress(OverflowError):  # an int beyond every float is another number
        near = math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
        return near or (math.isnan(found) and math.isnan(wanted))
    return False


def contrast(found: Any, wanted: Any) -> str:
    """Two values that differ: numbers with the digits that tell, long texts from where they part."""
    if isinstance(wanted, str) and max(len(text(found)), len(text(wanted))) > SHORT:
        n = len(commonprefix([found, wanted]))
        around = [f"{'…' * (n > 20)}{t[max(0, n - 20) : n + 20]}{'…' * (len(t) > n + 20)}" for t in (found, wanted)]
        return f"the texts part at character {n + 1}: yours {around[0]!r}, expected {around[1]!r}"
    a, b = shown(found), shown(wanted)
    if isinstance(wanted, float):
        with suppress(OverflowError):  # an int beyond every float stays as shown
            digits = ((f"{float(found):.{n}g}", f"{wanted:.{n}g}") for n in (4, 7, 17))
            a, b = next((pair for pair in digits if pair[0] != pair[1]), (a, b))
    return f"yours is {a}, expected {b}"


def shown(value: Any) -> str:
    """A value on one short line."""
    said = text(value)
    if len(said) <= SHORT:
        return said
    return _shape(value) if isinstance(value, torch.Tensor) else f"{said[: SHORT - 1]}…"


def text(value: Any) -> str:
    """``repr`` with rounded floats and small tensors as lists; it ends soon after `SHORT` characters.

    `reprlib` cuts the middle out of each level; a reader is shown one line from its beginning.
    """
    said = ""
    try:
        for piece in _pieces(value):
            said += piece
            if len(said) > SHORT:
                break
        return said
    except Exception:  # a tensor without data, a repr that raises
        return f"a {type(value).__name__} that cannot be shown"


def _shape(value: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"


def _pieces(value: Any) -> Iterator[str]:
    """The parts of `text`, made one by one, so that the reader can stop."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.numel() > SHORT:
            yield _shape(value)
        else:
            yield "tensor "
            yield from _pieces(value.tolist())
    elif isinstance(value, float):
        yield repr(round(float(value), 4))
    elif kind is int and abs(value) >= 10**SHORT:  # Python writes out no more than 4,300 digits
        yield f"about {'-' * (value < 0)}10**{round(math.log10(abs(value)))}"
    elif kind in (str, bytes):
        yield repr(value[: SHORT + 1])
    elif kind in BRACKETS and value:
        yield BRACKETS[kind][0]
        for n, item in enumerate(value):
            yield ", " * (n > 0)
            yield from _pieces(item)
            if kind is dict:
                yield ": "
                yield from _pieces(value[item])
        yield "," * (kind is tuple and len(value) == 1) + BRACKETS[kind][1]
    else:
        yield " ".join(repr(value).split())
