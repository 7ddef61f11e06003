"""Checks that the Python modules of the package, and those of the benchmarks, import in no circle.

Imports for type checkers count, because they show who knows whom; those inside of functions do not.
usage: check_imports.py [ROOT]
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# (folder, where imports of it start), each a set of modules of its own.
FOLDERS = (("python/torchium", "python"), ("benchmarks", "benchmarks"))


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module, package: list[str]) -> set[str]:
    """Modules, and names in modules, that are imported outside of functions."""
    found: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return found


def circle(folder: Path, start: Path) -> list[str]:
    """The modules of one circle, the first one again at the end; empty if there is none."""
    paths = {name_of(path.relative_to(start)): path for path in sorted(folder.rglob("*.py"))}
    graph = {}
    for name, path in paths.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        known = (imported(ast.parse(path.read_text()), package) & paths.keys()) - {name}
        # The packages that hold a module import it, and are imported before it all the same.
        own = {".".join(package[:depth]) for depth in range(1, len(package) + 1)}
        graph[name] = known - own
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main(root: Path) -> int:
    circles = [circle(root / folder, root / start) for folder, start in FOLDERS]
    for names in filter(None, circles):
        print("imports go in a circle: " + " -> ".join(reversed(names)))
    return any(circles)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
