"""What a run ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

STACK = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "trl",
    "accelerate",
    "datasets",
    "bm25s",
    "numpy",
    "pandas",
    "matplotlib",
    "jupyterlab",
    "ipywidgets",
)


def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of Python and the stack, the machine, and the threads torch uses."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "agentr1_lite": package_version("agentr1_lite"),
        "python": platform.python_version(),
        **{name: package_version(name) for name in STACK},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
    }
