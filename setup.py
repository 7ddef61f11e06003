"""Builds libtorchium and the module `_C` with CMake; everything else is said in pyproject.toml.

A build_ext of our own and not scikit-build-core's setuptools backend, because that one deletes its
CMake folder before each build: `make test` would compile the library twice, once for the C++ tests
and once for the package. Here both share one folder, and a second build compiles what has changed.

Environment: TORCHIUM_CUDA (AUTO, ON or OFF), TORCHIUM_BUILD_DIR (the CMake folder), CMAKE_ARGS.
"""

import importlib.util
import os
import runpy
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
VERSION = (ROOT / "VERSION").read_text().strip()
NO_TORCH = """
torchium is built against the torch that is installed, and this build sees none. (pip builds in an
isolated environment unless told otherwise.) Run

    make install PYTHON=path/to/python

or, where torch>=2.11, setuptools>=77, cmake>=3.25 and ninja are installed,

    pip install --no-build-isolation .
"""
# Commands that only look at the sources: what makes an sdist, and what pip asks before it builds.
WITHOUT_TORCH = {"sdist", "egg_info", "clean"}


def torch_build() -> tuple[str, str] | None:
    """The minor version of the torch that this build uses and its CUDA, as ("2.11", "cu130")."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    minor = ".".join(version["__version__"].split(".")[:2])
    return minor, f"cu{version['cuda'].replace('.', '')}" if version["cuda"] else "cpu"


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
        return ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch{'-'.join(TORCH)}"


class FreshBuildPy(build_py):
    """Starts from empty folders.

    setuptools would keep modules that have left the sources, and fail at what an interrupted build of
    a wheel has left.
    """

    def run(self) -> None:
        if not self.editable_mode:
            base = Path(self.get_finalized_command("build").build_base)
            for folder in (self.build_lib, *base.glob("bdist.*")):
                shutil.rmtree(folder, ignore_errors=True)
        super().run()


TORCH = None if "sdist" in sys.argv else torch_build()
if TORCH is not None:
    # cmake/TorchiumVersion.cmake computes the same version for `torchium.__version__`.
    version = f"{VERSION}+torch{'.'.join(TORCH)}"
    requirement = f"torch=={TORCH[0]}.*"
elif WITHOUT_TORCH & set(sys.argv[1:]):
    version, requirement = VERSION, "torch>=2.11"
else:
    sys.exit(NO_TORCH)

setup(
    version=version,
    install_requires=[requirement],
    ext_modules=[Extension("torchium_cpp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuildPy},
)
