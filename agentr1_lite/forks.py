"""A copy for one episode: of what an environment or a tool holds, all that an episode may change.

===========================================================  =================================
lists, dicts, sets, tuples; what says how (``__deepcopy__``)  copied, all the way down
objects of your own classes                                   copied, attribute by attribute
objects of the standard library and of other packages         copied, or shared where they cannot be (locks, clients)
models, tokenizers and indexes; functions and modules         shared
attributes named in ``shared``                                shared
===========================================================  =================================
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable
from types import MethodType, SimpleNamespace
from typing import Any

# Packages whose objects are large and not an episode's own; a tensor or an array says itself how it is copied
_MODELS = frozenset({"torch", "transformers", "tokenizers", "peft", "sentence_transformers", "bm25s", "faiss", "vllm"})
_CONTAINERS = (list, dict, set, deque, bytearray)


def twin_of(thing: Any, base: type, shared: Iterable[str], memo: dict[int, Any]) -> Any:
    """A copy of ``thing`` with attributes of its own, also for the lists, dicts and sets of its classes below ``base``.

    ``memo`` maps ids of objects to what stands for them in the copy.
    """
    twin, state = copy.copy(thing), dict(vars(thing))
    for cls in type(thing).__mro__[: type(thing).__mro__.index(base)]:
        for name, value in vars(cls).items():
            if isinstance(value, _CONTAINERS) and not name.startswith("__"):
                state.setdefault(name, value)
    memo[id(thing)] = twin
    shared = set(shared)
    memo.update((id(value), value) for name, value in state.items() if name in shared)
    vars(twin).update((name, own(value, memo)) for name, value in state.items() if name not in shared)
    return twin


def own(value: Any, memo: dict[int, Any]) -> Any:
    """``value`` for one episode alone, as the table above says."""
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if isinstance(value, (list, dict, deque)):
        twin = memo[id(value)] = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            twin[key] = own(item, memo)
        return twin
    if isinstance(value, tuple):
        items = [own(item, memo) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind._make(items) if hasattr(kind, "_make") else kind(items)
    if isinstance(value, (set, frozenset)):
        twin = kind(own(item, memo) for item in value)
    elif isinstance(value, MethodType):
        twin = MethodType(value.__func__, own(value.__self__, memo))
    elif hasattr(kind, "fork"):
        twin = value.fork()
    elif not hasattr(kind, "__deepcopy__") and any(_package(cls) in _MODELS for cls in kind.__mro__):
        return value
    elif hasattr(kind, "__deepcopy__") or not _is_own(kind):
        try:
            twin = copy.deepcopy(value, memo)
        except Exception:  # it cannot be copied: a lock, a connection, an open file
            return value
    else:
        return _attributes(value, memo)
    memo[id(value)] = twin
    return twin


def _attributes(value: Any, memo: dict[int, Any]) -> Any:
    try:
        twin = copy.copy(value)
    except Exception:
        return value
    memo[id(value)] = twin
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    for name in [*getattr(value, "__dict__", ()), *(s for s in slots if s[:2] != "__" and hasattr(value, s))]:
        object.__setattr__(twin, name, own(getattr(value, name), memo))
    return twin


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _is_own(cls: type) -> bool:
    """Whether a class was written beside the environment rather than installed."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file or _package(cls) in sys.stdlib_module_names
    return cls is SimpleNamespace or not installed
