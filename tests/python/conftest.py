"""Shared by all Python tests: the tested build, and programs that use its installation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torchium_cpp
from documentation import ROOT, TUTORIAL_CPP, code_blocks, cpp_programs

TORCH_HEADER = "#include <torch/torch.h>"
# These fixtures are created in one worker.
GROUPED = {"prefix", "wheel", "programs"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GROUPED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("build"))


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The CMake folder of the tested build: no test compiles the library again."""
    # torchium_cpp is either staged at BUILD/python/torchium_cpp, or installed by `make`.
    default = Path(torchium_cpp.__file__).resolve().parents[2]
    folder = Path(os.environ.get("TORCHIUM_BUILD_DIR", default))
    if not (folder / "CMakeCache.txt").exists() or shutil.which("cmake") is None:
        pytest.skip(f"no CMake, or no build in {folder} (TORCHIUM_BUILD_DIR)")
    return folder


@pytest.fixture(scope="session")
def prefix(build_dir: Path) -> Path:
    """An installation of the C++ package, at a fixed path so that `programs` are not recompiled."""
    prefix = build_dir / "tests" / "prefix"
    shutil.rmtree(prefix, ignore_errors=True)
    subprocess.run(["cmake", "--install", build_dir, "--prefix", prefix], check=True)
    return prefix


@pytest.fixture(scope="session")
def programs(build_dir: Path, prefix: Path) -> Path:
    """A folder with tests/consumer and the programs of the documentation, built outside the tree.

    It is the tutorial's project, so torch/torch.h is parsed once for all of them.
    """
    folder = build_dir / "tests" / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    (project,) = (b for b in code_blocks(TUTORIAL_CPP, "cmake") if "project(" in b)
    project += "target_precompile_headers(train PRIVATE <torch/torch.h>)\n"
    sources = {"consumer": (ROOT / "tests/consumer/main.cpp").read_text(), **cpp_programs()}
    for name, text in sources.items():
        source = folder / f"{name}.cpp"
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        if name == "train":  # the tutorial's own
            continue
        project += f"add_executable({name} {name}.cpp)\n"
        project += f"target_link_libraries({name} PRIVATE torchium::torchium)\n"
        if TORCH_HEADER in text:  # otherwise it would compile here even with the header missing
            project += f"target_precompile_headers({name} REUSE_FROM train)\n"
    (folder / "CMakeLists.txt").write_text(project)
    for command in (
        ("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", folder / "build"),
    ):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.returncode == 0, run.stdout
    return folder / "build"
