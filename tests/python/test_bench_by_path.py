"""Modules that the bench loads from packages that need not be importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unisono.bench.backends.by_path import folder_of, load


def test_modules_of_a_package_import_each_other_without_its_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "unisono_test_package"
    files = {
        "__init__.py": (needs := "raise ImportError('it needs a library')"),
        "low/__init__.py": needs,
        "high/__init__.py": needs,
        "low/one.py": "VALUE = 3",
        "high/two.py": f"from {package}.low.one import VALUE\nDOUBLE = 2 * VALUE",
    }
    for name, code in files.items():
        path = tmp_path / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert folder_of(package) == tmp_path / package
    made = set(sys.modules)
    try:
        assert load(package, "high.two", ("low",)).DOUBLE == 6
        assert load(package, "high.two", ("low",)).DOUBLE == 6
    finally:
        for name in set(sys.modules) - made:
            del sys.modules[name]


def test_a_package_that_is_missing_has_no_folder() -> None:
    assert folder_of("unisono_no_such_package") is None
