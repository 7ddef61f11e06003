"""README and the documentation, and their programs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TUTORIAL_CPP = ROOT / "docs" / "tutorial_cpp.md"


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def cpp_programs() -> dict[str, str]:
    """The C++ programs by name. `train` is the tutorial's first, named in its CMakeLists.txt."""
    programs = {
        f"{'_'.join(page.relative_to(ROOT).with_suffix('').parts)}_{number}": block
        for page in PAGES
        for number, block in enumerate(code_blocks(page, "cpp"), start=1)
    }
    programs["train"] = programs.pop("docs_tutorial_cpp_1")
    return programs
