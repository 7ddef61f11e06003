"""Builds libtorchium and the module `_C` with CMake; everything else is said in pyproject.toml.

A build_ext of our own and not scikit-build-core's setuptools backend, because that one deletes its
CMake folder before each build: `make test` would compile the library twice, once for the C++ tests
and once for the package. Here both share one folder, and a second build compiles what has changed.

Environment: TORCHIUM_CUDA (AUTO, ON or OFF), TORCHIUM_BUILD_DIR (the CMake folder), CMAKE_ARGS.
"""

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NO_TORCH = """
torchium is built against the torch that is installed, and this build sees none. (pip builds in an
isolated environment unless told otherwise.) Run

    make install PYTHON=path/to/python

or, where torch>=2.11, setuptools>=77, cmake>=3.25 and ninja are installed,

    pip install --no-build-isolation .
"""


def installed_torch() -> str:
    """The version of the torch that this build uses; exits with the remedy where there is none."""
    try:
        return importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        sys.exit(NO_TORCH)


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake component `python` into the package."""

    def run(self) -> None:
        cmake = shutil.which("cmake")
        if cmake is None:
            sys.exit("torchium is built with CMake 3.25 or newer: pip install cmake ninja")
        build_dir = self._build_dir()
        prefix = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        configure = [f"-S{ROOT}", f"-B{build_dir}", f"-DPython_EXECUTABLE={sys.executable}"]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        if "TORCHIUM_CUDA" in os.environ:
            configure.append(f"-DTORCHIUM_CUDA={os.environ['TORCHIUM_CUDA']}")
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        build = ["--build", str(build_dir), "--parallel"]
        install = ["--install", str(build_dir), "--component", "python", "--prefix", str(prefix)]
        for arguments in (configure, build, install):
            subprocess.run([cmake, *arguments], check=True)

    def _build_dir(self) -> Path:
        if "TORCHIUM_BUILD_DIR" in os.environ:
            return Path(os.environ["TORCHIUM_BUILD_DIR"]).resolve()
        # A folder for each Python and torch: CMake's cache must not mix them.
        return ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch{installed_torch()}"


class FreshBuildPy(build_py):
    """Starts from an empty folder: setuptools would keep modules that have left the sources."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if "sdist" in sys.argv:
    requirement = "torch>=2.11"
else:
    major, minor = installed_torch().split(".")[:2]
    requirement = f"torch=={major}.{minor}.*"

setup(
    install_requires=[requirement],
    ext_modules=[Extension("torchium_cpp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuildPy},
)
