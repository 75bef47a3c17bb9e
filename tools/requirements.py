"""Prints the requirements in pyproject.toml for each name on the command line.

A name is `run` (for the package), `build` (for its build), or an extra or a dependency group.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Prints one requirement a line, for `pip install -r`."""
    data = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    project = data["project"]
    tables = project["optional-dependencies"] | data["dependency-groups"] | {"run": project["dependencies"]}
    tables["build"] = data["build-system"]["requires"] + tables["build"]
    for name in sys.argv[1:]:
        if name not in tables:
            sys.exit(f"{name} is not in pyproject.toml: it has {', '.join(sorted(tables))}.")
        print("\n".join(tables[name]))


if __name__ == "__main__":
    main()
