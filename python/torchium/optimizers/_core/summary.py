"""Messages about many parameters, of bounded length."""

from __future__ import annotations

_KINDS = 5
_NAMES = 2  # of one kind
_KIND_LENGTH = 60
_NAME_LENGTH = 40


def summary(names: dict[str, list[str]]) -> str:
    """How many there are of each kind, the largest kinds first, and a few names of each.

    As ``"2 (Embedding: words.weight, positions.weight)"``, in less than 900 characters.
    """
    kinds = sorted(names.items(), key=lambda item: -len(item[1]))
    parts = []
    for kind, of_kind in kinds[:_KINDS]:
        shown = [_shortened(name, _NAME_LENGTH) for name in of_kind[:_NAMES]]
        more = [f"{len(of_kind) - _NAMES} more"] if len(of_kind) > _NAMES else []
        parts.append(
            f"{len(of_kind)} ({_shortened(kind, _KIND_LENGTH)}: {', '.join(shown + more)})"
        )
    rest = sum(len(of_kind) for _, of_kind in kinds[_KINDS:])
    return ", ".join(parts + ([f"{rest} of other kinds"] if rest else []))


def _shortened(text: str, length: int) -> str:
    """The text with its middle left out: names differ at their ends."""
    if len(text) <= length:
        return text
    return f"{text[: length // 4]}...{text[3 - length + length // 4 :]}"
