# Finds the package, or fetches it from the address in pyproject.toml.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

FAST = os.environ.get("FAST", "0") not in ("", "0")  # FAST=1: smaller numbers, as the tests run it
here = Path.cwd()
places = [here, *here.parents, here / "agentr1_lite"]
clone = next((place for place in places if (place / "agentr1_lite" / "mdp.py").is_file()), None)
fetch = clone is None and importlib.util.find_spec("agentr1_lite") is None
if fetch:
    clone = here / "agentr1_lite"
    if subprocess.run(["git", "clone", "-q", "--depth", "1", "REPOSITORY", str(clone)]).returncode:
        raise ImportError("REPOSITORY cannot be cloned from here: clone it by hand and open its notebooks/ folder")
if clone is not None and str(clone) not in sys.path:
    sys.path.insert(0, str(clone))

needed = ("torch", "transformers", "trl", "peft", "bm25s", "matplotlib")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing and clone is not None and (fetch or "google.colab" in sys.modules):  # a torch that is there is kept
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", f"{clone}[lab]"], check=True)
elif missing:
    raise ImportError(f"{', '.join(missing)} missing in this Python: run `make setup`, then choose the kernel of .venv")
source = "installed in this Python" if clone is None else "cloned here" if fetch else "the clone around this notebook"
print(f"agentr1_lite: {source}{'; installed ' + ', '.join(missing) if missing else ''}{'; FAST' if FAST else ''}")
