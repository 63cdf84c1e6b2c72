"""Import the scripts of an experiment, which import each other by bare names, without leaving those names to other tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scripts_of(*folders: Path) -> Iterator[None]:
    """Inside, `import train` finds `train.py` in these folders; afterwards neither the folders nor the modules are known.

    A test worker runs many files: names like `target` or `loss` must not stay first on its path.
    """
    names = {path.stem for folder in folders for path in folder.glob("*.py")}
    paths, kept = list(sys.path), {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = paths
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
