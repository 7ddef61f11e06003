"""Shared by all Python tests: the tested build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torchium_cpp


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The CMake folder that holds the tested build: no test compiles the library again."""
    # torchium_cpp is either staged at BUILD/python/torchium_cpp, or installed by `make`.
    default = Path(torchium_cpp.__file__).resolve().parents[2]
    folder = Path(os.environ.get("TORCHIUM_BUILD_DIR", default))
    if not (folder / "CMakeCache.txt").exists() or shutil.which("cmake") is None:
        pytest.skip(f"no CMake, or no build in {folder} (TORCHIUM_BUILD_DIR)")
    return folder


@pytest.fixture(scope="session")
def prefix(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of the C++ package."""
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run(["cmake", "--install", build_dir, "--prefix", prefix], check=True)
    return prefix
