"""Shared by all Python tests: devices, the visible skip of tests that need CUDA, the tested build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torchium_cpp


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is a backend for; the CUDA case is skipped where there is none."""
    return torch.device(request.param)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
