"""README and the documentation, and their programs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TUTORIAL_CPP = ROOT / "docs" / "tutorial_cpp.md"


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def cpp_programs() -> dict[str, str]:
    """The C++ programs by name."""
    return {
        f"{'_'.join(page.relative_to(ROOT).with_suffix('').parts)}_{number}": block
        for page in PAGES
        for number, block in enumerate(code_blocks(page, "cpp"), start=1)
    }


def one_program(programs: dict[str, str]) -> str:
    """The source of a program that runs the one its first argument names.

    Each is in a namespace of its own. The includes of the first alone are tested by compiling; the others
    must name the headers of torch and torchium.
    """
    includes: list[str] = []
    namespaces, calls = [], []
    for name, text in programs.items():
        lines = text.splitlines()
        own = [line for line in lines if line.startswith("#include")]
        assert {"#include <torch/torch.h>", "#include <torchium/torchium.h>"} <= set(own), name
        includes += [line for line in own if line not in includes]
        body = "\n".join(line for line in lines if line not in own).rstrip()
        assert body.endswith("}"), f"{name} does not end with main()"
        # Only the main() of a program returns 0 by itself.
        namespaces.append(f"namespace {name} {{\n{body[:-1]}return 0;\n}}\n}}")
        given = "count - 1, arguments + 1" if "int main(int argc, char** argv)" in body else ""
        calls.append(f'  if (name == "{name}") return {name}::main({given});')
    return "\n".join(
        [
            *includes,
            "#include <string_view>",
            *namespaces,
            "int main(int count, char** arguments) {",
            "  const std::string_view name = arguments[1];",
            *calls,
            "  return 2;",
            "}\n",
        ]
    )
