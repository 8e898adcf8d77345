"""ARCHITECTURE.md lists the folders that are there, and all of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
NOT_OURS = re.compile(r"runs|build|dist|.*\.egg-info|__pycache__|\.(?!ci$).*")
"""What git ignores: runs, environments, caches."""


def tree() -> tuple[set[str], set[str]]:
    """(top-level folders, entries of moerl/) as the page has them; a folder ends with a slash."""
    block = re.search(r"```tree\n(.*?)```", PAGE, re.DOTALL)
    lines = block.group(1).splitlines()
    top = {line.split()[0] for line in lines if line[:1].strip()}
    inner = {line.split()[0] for line in lines if re.match(r"  \S", line)}
    return top, inner


def entries(folder: Path, *, with_files: bool) -> set[str]:
    """Folders that hold a file, and python files."""
    found = set()
    for path in folder.iterdir():
        if path.is_dir() and not NOT_OURS.fullmatch(path.name) and any(item.is_file() for item in path.rglob("*")):
            found.add(f"{path.name}/")
        elif with_files and path.suffix == ".py" and path.name != "__init__.py":
            found.add(path.name)
    return found


def test_the_page_lists_every_top_level_folder():
    assert tree()[0] == entries(ROOT, with_files=False)


def test_the_page_lists_every_room_and_file_of_the_package():
    assert tree()[1] == entries(ROOT / "moerl", with_files=True)


def test_every_file_that_the_page_names_is_there():
    planned = PAGE.index("## 13. Planned")
    for name in re.findall(
        r"`((?:moerl|config|algorithms|data|rewards|mcore|telemetry|tests|tools)/[\w/.]+\.py)`", PAGE[:planned]
    ):
        assert (ROOT / name).is_file() or (ROOT / "moerl" / name).is_file(), name


def test_the_layers_of_the_page_are_those_of_the_contracts():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "levels")
    named = {name.strip() for layer in layers for name in re.split(r"[:|]", layer)}
    assert named == {entry.removesuffix("/").removesuffix(".py") for entry in tree()[1]}
