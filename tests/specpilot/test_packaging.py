"""The package as users get it: wheel and editable install, with the folders that are symbolic links here.

The environments are bare: they see the libraries of the one that runs the tests, but not our own checkout.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("agents", "costmodel", "memory", "engines", "kernels", "deployments")
CHECK = """
import importlib, pathlib, sys
import specpilot, specpilot.costmodel, specpilot.agents, specpilot.memory, specpilot.kernels, specpilot.deployments
from specpilot.deployment import find_deployment, load_deployment
from specpilot.engine_tree import load_engine_spec
home = pathlib.Path(specpilot.__file__).resolve().parent
d = load_deployment(find_deployment("cpu_c1_smollm2-135m_dflash"))
tree = d.engine_tree()
assert load_engine_spec(tree).name == "slim"
for path in [tree / "slim_engine/server.py", tree / "tunables.toml", *d.prompt_files("tuning"), *d.prompt_files("hidden")]:
    assert path.is_file(), path
from specpilot.models import _CONVERTER
assert _CONVERTER.is_file(), _CONVERTER
from specpilot.costmodel import sheet_names
assert "h200" in sheet_names()
assert not {"torch"} & set(sys.modules)
print(home)
"""


def bare_environment(folder: Path) -> Path:
    """A venv that borrows installed libraries by path; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    borrowed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # A path file adds folders without reading *their* path files, so our own editable install is not seen.
    (site / "borrowed.pth").write_text("\n".join(dict.fromkeys(borrowed)) + "\n")
    return python


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "specpilot"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*_cache")
    for name in ("specpilot", *LINKS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    out = checkout.parent / "dist"
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        checkout,
        cwd=checkout.parent,
    )
    return next(out.glob("specpilot-*.whl"))


def test_links_are_links() -> None:
    for name in LINKS:
        assert (ROOT / "specpilot" / name).is_symlink()
        assert (ROOT / "specpilot" / name).readlink() == Path("..") / name


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "env")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path
    )
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    assert Path(run(python, "-c", CHECK, cwd=tmp_path).strip()) == (site / "specpilot").resolve()
    names = {path.name for path in site.iterdir()} - {"borrowed.pth"}
    assert {name for name in names if not name.startswith("specpilot")} == set(), "only our own name in site-packages"
    assert not any(path.is_symlink() for path in (site / "specpilot").rglob("*"))
    assert not list((site / "specpilot").rglob("*.so"))
    assert "optimize" in run(tmp_path / "env/bin/specpilot", "--help", cwd=tmp_path)
    license_text = next(site.glob("specpilot-*.dist-info")).joinpath("licenses/LICENSE").read_text()
    assert "Apache License" in license_text


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "env")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--no-build-isolation",
        "-e", checkout, cwd=tmp_path,
    )  # fmt: skip
    assert Path(run(python, "-c", CHECK, cwd=tmp_path).strip()) == (checkout / "specpilot").resolve()
    (checkout / "costmodel/fresh_module.py").write_text("x = 1\n")
    try:
        run(python, "-c", "import specpilot.costmodel.fresh_module", cwd=tmp_path)
    finally:
        (checkout / "costmodel/fresh_module.py").unlink()
    for name in ("agents", "kernels", "memory", "engines"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        run(python, "-c", code, cwd=tmp_path)


def test_every_dependency_is_pinned_and_explained() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["engine"], *extras["dev"]]:
        assert re.fullmatch(r"([A-Za-z0-9_.-]+=|triton~)=[0-9][A-Za-z0-9.]*", requirement), requirement
        assert re.search(rf'"{re.escape(requirement)}",\s+# \w', text) or requirement.startswith("types-"), requirement
    assert not any(r.startswith("torch") for r in project["dependencies"]), "the control plane has no torch"


def test_the_control_plane_never_imports_torch() -> None:
    for folder in ("specpilot", "agents", "costmodel", "memory"):
        for path in (ROOT / folder).rglob("*.py"):
            if any(part in LINKS for part in path.relative_to(ROOT / folder).parts[:1]):
                continue
            assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("kind", ["missing", "folder", "old"])
def test_make_says_what_to_do_without_a_usable_python(tmp_path: Path, kind: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    python = tmp_path / "python-x"
    if kind == "folder":
        python.mkdir()
    elif kind == "old":
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={python}", f"VENV={tmp_path / 'v'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    why = "is not Python 3.11 or newer" if kind == "old" else "is not a program"
    assert done.returncode != 0 and done.stderr.startswith(f"error: {python} {why}; give another")
