"""Checks that includes point one way: a layer includes itself and the layers before it.

support <- cuda_kernels <- distributed <- linalg <- gradients <- optim <- ops <- torchium_cpp (C++)
torchium_cpp <- torchium (Python)

Inside a layer folders have an order too (FOLDERS), each a place in it; those of one row do not include each other.
A kernel moreover includes no tensor header (neither ATen nor torch), and no layer below torchium_cpp
includes Python or pybind11. Public headers count as the layer that they belong to.
usage: check_includes.py [ROOT]
"""

import re
import sys
from pathlib import Path

LAYERS = [
    "support",
    "cuda_kernels",
    "distributed",
    "linalg",
    "gradients",
    "optim",
    "ops",
    "torchium_cpp",
]
# Public headers that are no folder of their own.
PUBLIC = {
    "export": "support",
    "config": "support",
    "version": "support",
    "memory": "support",
    "linalg": "linalg",
    "gradients": "gradients",
    "register_layer": "gradients",
    "optim": "optim",
    "torchium": "torchium_cpp",  # the umbrella: for programs, not for the library's own sources
}
FOLDERS = {
    "cuda_kernels": [
        {"common"},
        {"split_gemm"},
        {
            "inverse_root",
            "eigenproblem",
            "optimizer_step",
            "factors",
            "samples",
            "kronecker",
            "krylov",
        },
    ],
    "linalg": [
        {"common"},
        {"products"},
        {"spectral"},
        {"roots"},
        {"decompositions", "matrix_functions"},
        {"kronecker", "structured"},
        {"operators"},
        {"krylov", "estimators"},
    ],
    "gradients": [{"capture"}, {"jacobian"}, {"factors", "per_sample"}],
    "optim": [
        {"core"},
        {"reports"},
        {"blocked"},
        {"capture", "sharing"},
        {"shampoo", "adagrad", "adahessian", "kfac", "natural_gradient"},
    ],
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import)\s+torchium\b", re.MULTILINE)
PYTHON_HEADERS = ("Python.h", "pybind11/", "torch/csrc/utils/pybind.h", "torch/extension.h")
TENSOR_HEADERS = ("ATen/", "torch/", "c10/core/Tensor")


def layer_of(path: str) -> str | None:
    """The layer of a source or of an included path; None for headers that are not ours."""
    parts = Path(path).parts
    if parts[0] in ("src", "python") or parts[:2] == ("include", "torchium"):
        parts = parts[1:]
    if parts[0] == "torchium" and len(parts) > 1:
        return PUBLIC.get(Path(parts[1]).name.split(".")[0])
    return parts[0] if parts[0] in LAYERS else None


def rank_of(path: str) -> tuple[str, str, int] | None:
    """The layer and folder of a source, and the place of the folder in the order of its layer."""
    layer, _, rest = path.removeprefix("src/").partition("/")
    folder = rest.split("/")[0]
    for rank, row in enumerate(FOLDERS.get(layer, [])):
        if folder in row:
            return layer, folder, rank
    return None


def is_later_folder(source: str, included: str) -> bool:
    """Whether a source includes a header of a later folder of its layer, or of one beside its own."""
    own, other = rank_of(source), rank_of(included)
    if own is None or other is None or own[0] != other[0] or own[1] == other[1]:
        return False
    return other[2] >= own[2]


def problems_of(source: str, text: str) -> list[str]:
    """What is wrong with the includes of one C++ or CUDA file, named by its path from the root."""
    layer = layer_of(source)
    if layer is None:
        return [f"{source}: belongs to no layer; add its header to PUBLIC of this script"]
    found = []
    for included in INCLUDE.findall(text):
        other = layer_of(included)
        if other and LAYERS.index(other) > LAYERS.index(layer):
            found.append(f"{source}: layer {layer} includes {included} of the later layer {other}")
        if is_later_folder(source, included):
            found.append(
                f"{source}: includes {included} of a later folder, or of one beside its own"
            )
        if layer != "torchium_cpp" and included.startswith(PYTHON_HEADERS):
            found.append(f"{source}: includes {included}, but only torchium_cpp knows Python")
        if layer == "cuda_kernels" and included.startswith(TENSOR_HEADERS):
            found.append(f"{source}: includes {included}, but kernels must not depend on tensors")
    return found


def unordered_folders(root: Path) -> list[str]:
    """Folders of layers with an order that have no place in it."""
    return [
        f"src/{layer}/{path.name}: has no place in FOLDERS of this script"
        for layer, rows in FOLDERS.items()
        for path in sorted((root / "src" / layer).iterdir())
        if path.is_dir() and path.name not in set().union(*rows)
    ]


def main(root: Path) -> int:
    problems = unordered_folders(root)
    files = [
        path
        for folder in ("include", "src", "python")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    ]
    for path in files:
        problems += problems_of(str(path.relative_to(root)), path.read_text())
    for path in sorted((root / "python" / "torchium_cpp").rglob("*.py")):
        if IMPORT.search(path.read_text()):
            problems.append(f"{path.relative_to(root)}: torchium_cpp imports torchium")
    print("\n".join(problems) or f"include order: {len(files)} files")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
