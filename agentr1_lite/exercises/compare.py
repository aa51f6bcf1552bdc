"""Whether an answer equals what is wanted, where the two part, and how a value reads on one short line.

An answer may be anything and of any size: lengths are compared before items, the
first difference ends the search, and a text is made only as far as it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

SHORT = 90  # characters of a value in a sentence
BRACKETS = {list: "[]", tuple: "()", set: "{}", dict: "{}"}


def form_difference(found: Any, wanted: Any, what: str = "It returns") -> str | None:
    """How type, shape or dtype differ, as a sentence; None where only values can."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{what} {shown(found)}, expected {shown(wanted)}."
        if (found.layout, found.device) != (wanted.layout, wanted.device):
            expected = f"{wanted.layout} on {wanted.device}"
            return f"{what} a tensor of layout {found.layout} on device {found.device}, expected {expected}."
        if found.shape != wanted.shape:
            return f"{what} shape {tuple(found.shape)}, expected {tuple(wanted.shape)}."
        return None if found.dtype == wanted.dtype else f"{what} dtype {found.dtype}, expected {wanted.dtype}."
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        scalar = isinstance(found, torch.Tensor) and found.ndim == 0 and found.layout == torch.strided
        scalar = scalar and not found.is_meta and not found.is_complex()
        number = isinstance(found, int | float | np.integer | np.floating) and not isinstance(found, bool)
        return None if scalar or number else f"{what} {shown(found)}, expected a number."
    if isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(wanted):
            return f"{what} {shown(found)}, expected a {type(wanted).__name__} of {len(wanted)}."
        pairs = ((f"Item {n} is", a, b) for n, (a, b) in enumerate(zip(found, wanted, strict=True)))
    elif isinstance(wanted, Mapping):
        if not isinstance(found, Mapping) or len(found) != len(wanted) or any(key not in found for key in wanted):
            return f"{what} {shown(found)}, expected a dict with the keys {', '.join(map(str, wanted))}."
        pairs = ((f"Entry {key!r} is", found[key], wanted[key]) for key in wanted)
    else:
        return None if isinstance(found, type(wanted)) else f"{what} {shown(found)}, expected {shown(wanted)}."
    return next((said for item, a, b in pairs if (said := form_difference(a, b, item))), None)


def close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Equal values, where the form is already known to agree; ``tolerance`` is absolute and relative."""
    if isinstance(wanted, torch.Tensor):
        return bool(_near(found, wanted, tolerance).all())
    if isinstance(wanted, float):
        try:
            a, b = float(found), float(wanted)
        except OverflowError:  # an int beyond every float
            return False
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    if isinstance(wanted, list | tuple):
        return all(close(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, Mapping):
        return all(close(found[key], wanted[key], tolerance) for key in wanted)
    return bool(found == wanted)


def _near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Which elements are equal."""
    if not wanted.is_floating_point():
        return found == wanted
    return torch.isclose(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)


def differing_place(
    found: Any, wanted: Any, tolerance: float, equal: Callable[[Any, Any], bool] | None = None
) -> tuple[list[Any], Any, Any]:
    """The first index, item or key at which the values differ, as a path, and both values there."""
    if isinstance(wanted, torch.Tensor):
        differs = (~_near(found, wanted, tolerance)).nonzero().tolist()
        if differs:
            at = tuple(differs[0])
            return [at] if at else [], found[at].item(), wanted[at].item()
    keys = range(len(wanted)) if isinstance(wanted, list | tuple) else wanted if isinstance(wanted, Mapping) else ()
    for key in keys:
        if equal is not None:  # it compares the whole, so put the item into the right answer
            mixed = dict(wanted) if isinstance(wanted, Mapping) else list(wanted)
            mixed[key] = found[key]
            same = equal(tuple(mixed) if isinstance(wanted, tuple) else mixed, wanted)
        else:
            same = close(found[key], wanted[key], tolerance)
        if not same:
            path, a, b = differing_place(found[key], wanted[key], tolerance)
            return [key, *path], a, b
    return [], found, wanted


def contrast(found: Any, wanted: Any) -> str:
    """Two values that differ: numbers with the digits that tell, long texts from where they part."""
    if isinstance(wanted, str) and max(len(text(found)), len(text(wanted))) > SHORT:
        n = next((i for i, (x, y) in enumerate(zip(found, wanted, strict=False)) if x != y), -1)
        n = min(len(found), len(wanted)) if n < 0 else n
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
    """``repr`` with rounded floats and small tensors as lists; it ends soon after `SHORT` characters."""
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
