"""Prints the project's dependencies for an image: never the project itself, never what the base has.

python requirements.py pyproject.toml --extras train,report --without torch,transformers
"""

import argparse
import re
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


def requirements(pyproject: Path, *, extras: list[str], without: list[str]) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return sorted({line for line in wanted if name_of(line) not in {*without, project["name"]}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--extras", default="")
    parser.add_argument("--without", default="")
    options = parser.parse_args()
    lists = {name: [n for n in getattr(options, name).split(",") if n] for name in ("extras", "without")}
    print("\n".join(requirements(options.pyproject, **lists)))


if __name__ == "__main__":
    main()
