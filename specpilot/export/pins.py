"""requirements.txt of an exported engine: what its code imports, pinned to what the run used.

Imports are read from the source, never executed; versions are asked from the interpreter that ran the engine.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from specpilot.errors import EnvironmentProblem

QUERY_TIMEOUT_S = 120
_QUERY = """
import importlib.metadata as metadata, json, re, sys
known = metadata.packages_distributions()
def closure(name, found):
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    found[key] = dist.version
    for requirement in dist.requires or []:
        if "extra ==" not in requirement:
            closure(re.match(r"[A-Za-z0-9._-]+", requirement).group(), found)
direct, every = {}, {}
for module in json.load(sys.stdin):
    for name in known.get(module, []):
        closure(name, every)
        direct[re.sub(r"[-_.]+", "-", name).lower()] = metadata.version(name)
print(json.dumps({"direct": direct, "every": every, "python": sys.version.split()[0]}))
"""


def third_party_imports(folders: Iterable[Path]) -> list[str]:
    """Top-level modules that the Python files under `folders` import and that are neither theirs nor the standard library's."""
    imported: set[str] = set()
    own: set[str] = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            own.add(path.stem)
            own.update(path.relative_to(folder).parts[:-1])
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue  # a file that cannot run imports nothing
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    imported.update(alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    imported.add(node.module.split(".")[0])
    return sorted(imported - own - set(sys.stdlib_module_names))


def requirements(folders: Iterable[Path], python: str) -> tuple[str, dict[str, str]]:
    """(text of requirements.txt, name -> exact version of everything it leads to) as installed in `python`.

    Direct requirements come first. A local build label (`2.13.0+cpu`) is left out: the installer's own index decides
    the build. Raises `EnvironmentProblem` when `python` cannot be asked.
    """
    modules = third_party_imports(folders)
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUERY],
            input=json.dumps(modules),
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EnvironmentProblem(
            f"cannot ask {python} for its packages: {error}",
            "the interpreter that ran this engine must still be there.",
        ) from error
    direct, every = found["direct"], found["every"]
    lines = [f"# Versions of the run, Python {found['python']}. Imported by the engine and its tools:"]
    lines += [f"{name}=={_public(version)}" for name, version in sorted(direct.items())]
    lines.append("# What these need in turn:")
    lines += [f"{name}=={_public(version)}" for name, version in sorted(every.items()) if name not in direct]
    return "\n".join(lines) + "\n", every


def _public(version: str) -> str:
    return version.split("+")[0]
