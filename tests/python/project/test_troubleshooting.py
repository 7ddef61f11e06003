"""The messages in docs/troubleshooting.md must be in the sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PATTERNS = ("python/**/*.py", "src/**/*.cpp", "src/**/*.h", "include/**/*.h", "cmake/*", "setup.py")


def messages() -> list[str]:
    """The code at the start of each row, in tables whose first column holds messages."""
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n?)+)", PAGE, flags=re.MULTILINE)
    rows = "".join(tables).splitlines()
    return [found[1] for row in rows if (found := re.match(r"\| `([^`]+)`(?: \(\w+\))? \|", row))]


@pytest.fixture(scope="module")
def sources() -> str:
    """All sources, with adjacent string literals joined."""
    files = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file())
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s+f?"', "", text)


def test_tables_are_found() -> None:
    assert len(messages()) > 20


@pytest.mark.parametrize("message", messages())
def test_message_is_in_the_sources(message: str, sources: str) -> None:
    missing = [part for part in message.split("…") if part.strip() not in sources]
    assert not missing
