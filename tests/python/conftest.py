"""Shared by all Python tests: the tested build, and programs that use its installation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torchium_cpp
from documentation import ROOT, TUTORIAL_CPP, code_blocks, cpp_programs, one_program

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
    """The tutorial's project outside the tree: one program `train` that runs each by its name.

    tests/consumer (two programs), an example and the programs of the documentation are one source, because torch/torch.h
    takes 15 s to parse.
    """
    folder = build_dir / "tests" / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    (project,) = (b for b in code_blocks(TUTORIAL_CPP, "cmake") if "project(" in b)
    others = {
        "consumer": (ROOT / "tests/consumer/main.cpp").read_text(),
        "transformers": (ROOT / "tests/consumer/transformers.cpp").read_text(),
        "poisson_pinn": (ROOT / "examples/cpp/poisson_pinn.cpp").read_text(),
    }
    for name, text in (
        ("CMakeLists.txt", project),
        ("train.cpp", one_program({**others, **cpp_programs()})),
    ):
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)
    for command in (
        ("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", folder / "build"),
    ):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.returncode == 0, run.stdout
    return folder / "build" / "train"
