"""Prints the requirements of the given extras of pyproject.toml, one per line.

So that tools (linters, Sphinx) can be installed without building the project, which
`pip install .[lint]` would do. usage: requirements.py EXTRA...
"""

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def main(names: list[str]) -> None:
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    requirements: dict[str, None] = {}
    while names:
        for requirement in extras[names.pop()]:
            own = re.fullmatch(r"torchium\[(.*)\]", requirement)
            if own:
                names += own[1].split(",")
            else:
                requirements[requirement] = None
    print("\n".join(requirements))


if __name__ == "__main__":
    main(sys.argv[1:])
