"""Names that a package loads on first use: torch and transformers take seconds, and ``--help`` needs neither."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of ``package``; ``homes``: module → the names it holds."""
    home = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    class Package(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            # importing the module `rollout` must not hide the function of that name
            if not (name in home and isinstance(value, types.ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
    return load, sorted(home)
