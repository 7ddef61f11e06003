"""The C++ package, the wheel, the version check and the choices of the build."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torchium
import torchium_cpp
from torchium_cpp._build_info import CUDA_VERSION

ROOT = Path(__file__).resolve().parents[3]
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


def run(
    *command: object, env: dict[str, str] | None = None, **options
) -> subprocess.CompletedProcess:
    """Run a command and capture its output; the caller checks the return code."""
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def succeed(*command: object, **options) -> str:
    result = run(*command, **options)
    assert result.returncode == 0, result.stdout
    return result.stdout


# They install from one build folder, so they must not run in parallel.
pytestmark = pytest.mark.xdist_group("build")


@pytest.fixture(scope="module")
def staged(build_dir: Path) -> Path:
    """The folder of the built packages, for PYTHONPATH."""
    return build_dir / "python"


@pytest.fixture(scope="module")
def wheel(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in the folder of the tested build."""
    folder = tmp_path_factory.mktemp("wheel")
    # As an interrupted build leaves it.
    tag = sysconfig.get_platform()
    left_over = f"build/bdist.{tag}/wheel/torchium-{torchium.__version__}.dist-info"
    (ROOT / left_over).mkdir(parents=True, exist_ok=True)
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    succeed(
        *(sys.executable, "-m", "pip", "wheel", *options, ROOT),
        env={"TORCHIUM_BUILD_DIR": str(build_dir), "CMAKE_ARGS": ""},
    )
    (wheel,) = folder.glob("torchium-*.whl")
    return wheel


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of `pip install`: the wheel unpacked next to torch."""
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(folder)
    installed = Path(torch.__file__).parents[1]
    for name in ("torch", "nvidia"):
        if (installed / name).exists():
            (folder / name).symlink_to(installed / name)
    return folder


SHORT_PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(program CXX)
find_package(Torchium REQUIRED)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE torchium::torchium)
"""
# With headers and functions of both libraries that compile in a second.
SHORT_PROGRAM = """
#include <c10/core/Device.h>
#include <torchium/config.h>

#include <iostream>

int main() {
  std::cout << torchium::show_config() << "device: " << c10::Device("cpu") << '\\n';
}
"""


class TestCppPackage:
    def test_program_outside_the_tree_trains(self, programs: Path) -> None:
        output = succeed(programs, "consumer", env={"LD_LIBRARY_PATH": ""})
        assert f"torchium: {torchium.__version__}\n" in output

    def test_installs_public_headers_only(self, prefix: Path) -> None:
        names = {path.name for path in (prefix / "include").rglob("*.h")}
        public = {path.name for path in (ROOT / "include").rglob("*.h")}
        assert names == public | {"version.h"}

    def test_refuses_a_libtorch_of_another_minor_version(
        self, programs: Path, prefix: Path, tmp_path: Path
    ) -> None:
        libtorch = tmp_path / "libtorch"
        built_against = Path(torch.__file__).parent
        (libtorch / "include/torch/headeronly").mkdir(parents=True)
        (libtorch / "include/torch/csrc/api/include/torch").mkdir(parents=True)
        (libtorch / "include/torch/csrc/api/include/torch/torch.h").touch()
        (libtorch / "lib").symlink_to(built_against / "lib")
        header = (built_against / "include/torch/headeronly/version.h").read_text()
        (libtorch / "include/torch/headeronly/version.h").write_text(
            re.sub(r"(TORCH_VERSION_MINOR) \d+", r"\1 99", header)
        )
        result = run(
            *("cmake", "-S", programs.parents[1], "-B", tmp_path / "build"),
            *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTORCHIUM_TORCH_ROOT={libtorch}"),
        )
        assert result.returncode != 0
        message = " ".join(result.stdout.split())
        assert f"was built against torch {TORCH_MINOR}" in message
        assert "2.99" in message


class TestWheel:
    def test_contents(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        expected = {
            path.relative_to(ROOT / "python").as_posix()
            for pattern in ("*.py", "*.pyi", "py.typed")
            for path in (ROOT / "python").rglob(pattern)
            if "egg-info" not in str(path)
        }
        assert {
            "torchium/py.typed",
            "torchium_cpp/py.typed",
            "torchium_cpp/_C/__init__.pyi",
        } <= expected
        modules = {name for name in names if not re.search(r"\.dist-info/", name)}
        libraries = {name for name in modules if name.endswith(".so")}
        headers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "include").rglob("*.h")}
        headers.add("include/torchium/version.h")
        package = ("Config", "ConfigVersion", "Targets", "Targets-release")
        scripts = {f"share/cmake/Torchium/Torchium{part}.cmake" for part in package}
        scripts.add("share/cmake/Torchium/FindLibtorch.cmake")
        for_cpp = {f"torchium_cpp/{name}" for name in headers | scripts}
        assert modules - libraries == expected | for_cpp | {"torchium_cpp/_build_info.py"}
        assert "torchium_cpp/libtorchium.so" in libraries
        others = libraries - {"torchium_cpp/libtorchium.so"}
        assert all(name.startswith("torchium_cpp/_C.") for name in others)
        assert len(others) == 1

    def test_metadata(self, wheel: Path) -> None:
        archive = zipfile.ZipFile(wheel)
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
        assert f"Version: {torchium.__version__}" in lines
        assert f"+torch{TORCH_MINOR}." in torchium.__version__
        assert wheel.name.startswith(f"torchium-{torchium.__version__}-")
        assert f"Requires-Dist: torch=={TORCH_MINOR}.*" in lines
        assert "none-any" not in wheel.name

    def test_libraries_find_torch_without_absolute_paths(self, wheel: Path, tmp_path: Path) -> None:
        if shutil.which("readelf") is None:
            pytest.skip("no readelf")
        zipfile.ZipFile(wheel).extractall(tmp_path)
        for library in (tmp_path / "torchium_cpp").glob("*.so"):
            (rpath,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", succeed("readelf", "-d", library))
            assert all(part.startswith("$ORIGIN") for part in rpath.split(":")), rpath

    def test_works_where_it_is_unpacked(self, site_packages: Path, tmp_path: Path) -> None:
        """Its import, its version, and a C++ program that finds it."""
        code = """
import importlib.metadata, torchium, torchium_cpp._C
torchium_cpp._C.show_config()
print(torchium.__file__, importlib.metadata.version("torchium"), torchium.__version__)
print(torchium.utils.cmake_prefix_path)
"""
        output = succeed(
            *(sys.executable, "-c", code),
            env={"PYTHONPATH": str(site_packages)},
            cwd=site_packages,
        )
        *_, line, prefix = output.strip().splitlines()
        file, installed, of_module = line.split()
        assert Path(file).is_relative_to(site_packages)
        assert installed == of_module == torchium.__version__
        assert Path(prefix).is_relative_to(site_packages)
        scripts = "".join(path.read_text() for path in Path(prefix).rglob("*.cmake"))
        assert str(Path(torch.__file__).parents[1]) not in scripts
        (tmp_path / "CMakeLists.txt").write_text(SHORT_PROJECT)
        (tmp_path / "main.cpp").write_text(SHORT_PROGRAM)
        build = tmp_path / "build"
        succeed("cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
        succeed("cmake", "--build", build)
        program = build / "program"
        output = succeed(program, env={"LD_LIBRARY_PATH": ""})
        assert f"torchium: {torchium.__version__}\n" in output
        assert "device: cpu\n" in output
        assert str(site_packages) in succeed("ldd", program, env={"LD_LIBRARY_PATH": ""})


def with_build_info(staged: Path, folder: Path, **values: str) -> None:
    """Copies the built packages to `folder` with other values in _build_info.py."""
    for package in ("torchium", "torchium_cpp"):
        shutil.copytree(staged / package, folder / package)
    info = folder / "torchium_cpp/_build_info.py"
    text = info.read_text()
    for name, value in values.items():
        text, count = re.subn(rf'^{name} = ".*"$', f'{name} = "{value}"', text, flags=re.MULTILINE)
        assert count == 1
    info.write_text(text)


class TestVersionCheck:
    def import_torchium(self, folder: Path) -> subprocess.CompletedProcess:
        return run(
            *(sys.executable, "-c", "import torchium"), env={"PYTHONPATH": str(folder)}, cwd=folder
        )

    def test_another_minor_version_is_refused(self, staged: Path, tmp_path: Path) -> None:
        with_build_info(staged, tmp_path, TORCH_VERSION="2.10.1")
        result = self.import_torchium(tmp_path)
        assert result.returncode != 0
        assert "ImportError" in result.stdout
        assert "built against torch 2.10.1" in result.stdout
        assert f"torch {torch.__version__} is installed" in result.stdout
        assert "pip install --no-build-isolation" in result.stdout

    def test_another_patch_version_is_accepted(self, staged: Path, tmp_path: Path) -> None:
        with_build_info(staged, tmp_path, TORCH_VERSION=f"{TORCH_MINOR}.77")
        result = self.import_torchium(tmp_path)
        assert result.returncode == 0, result.stdout


class TestShowConfig:
    def test_names_what_the_build_consists_of(self) -> None:
        lines = dict(line.split(": ", 1) for line in torchium.show_config().splitlines())
        assert lines["torchium"] == torchium.__version__
        assert lines["torch (running)"] == torch.__version__.split("+")[0]
        expected = CUDA_VERSION or "not built"
        assert lines["CUDA kernels"] == expected
        assert {"CUDA architectures", "BLAS", "LAPACK", "compiler", "build type"} <= set(lines)
        assert "unknown" not in lines.values()

    def test_version_is_that_of_the_file(self) -> None:
        version = (ROOT / "VERSION").read_text().strip()
        assert torchium.__version__.split("+")[0] == version
        assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
class TestConfigure:
    """CMake's decisions; nothing is compiled."""

    def configure(self, folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
        return run(
            *("cmake", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *options),
            env=env,
        )

    def test_cuda_on_without_nvcc_says_what_is_missing(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_CUDA=ON", CUDACXX="/nonexistent/nvcc")
        assert result.returncode != 0
        assert "no CUDA compiler (nvcc) was found" in " ".join(result.stdout.split())

    def test_cuda_auto_without_nvcc_builds_for_the_cpu(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_CUDA=AUTO", CUDACXX="/nonexistent/nvcc")
        assert result.returncode == 0, result.stdout
        assert "TORCHIUM_CUDA=AUTO: nvcc not found" in result.stdout

    def test_cuda_off_needs_no_nvcc_though_torch_has_cuda(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_CUDA=OFF", CUDACXX="/nonexistent/nvcc")
        assert result.returncode == 0, result.stdout
        assert (
            "CUDA_VERSION: str | None = None"
            in (tmp_path / "python/torchium_cpp/_build_info.py").read_text()
        )

    def test_another_value_is_refused(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_CUDA=maybe")
        assert result.returncode != 0
        assert "TORCHIUM_CUDA is 'maybe'" in result.stdout

    def test_architectures_are_given_in_the_spelling_of_torch(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_ARCHS=8.0;9.0;9.0a;12.0+PTX")
        if "nvcc not found" in result.stdout:
            pytest.skip("no CUDA toolkit")
        assert result.returncode == 0, result.stdout
        assert "for 80-real;90-real;90a-real;120\n" in result.stdout
        assert "without 9.0a" not in " ".join(result.stdout.split())

    def test_hopper_without_its_own_instructions_is_warned_of(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, TORCH_CUDA_ARCH_LIST="8.0;9.0")
        if "nvcc not found" in result.stdout:
            pytest.skip("no CUDA toolkit")
        assert result.returncode == 0, result.stdout
        message = " ".join(result.stdout.split())
        assert "have 9.0 without 9.0a" in message
        assert "Write 9.0a in TORCHIUM_ARCHS" in message

    def test_an_unknown_architecture_is_refused(self, tmp_path: Path) -> None:
        result = self.configure(tmp_path, "-DTORCHIUM_ARCHS=8.0;hopper")
        assert result.returncode != 0
        assert "names the architecture 'hopper'" in " ".join(result.stdout.split())


class TestWithoutTorch:
    """An isolated environment with setuptools but no torch, as pip and build create."""

    def run(self, folder: Path, *command: str) -> subprocess.CompletedProcess:
        import setuptools

        site = Path(setuptools.__file__).parents[1]
        for pattern in ("setuptools", "setuptools-*.dist-info", "_distutils_hack", "pkg_resources"):
            for path in site.glob(pattern):
                (folder / path.name).symlink_to(path)
        return run(*(sys.executable, "-S", *command), cwd=ROOT, env={"PYTHONPATH": str(folder)})

    def test_build_names_the_commands_that_work(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "setup.py", "dist_info", "--output-dir", str(tmp_path))
        assert result.returncode != 0
        assert "make install PYTHON=path/to/python" in result.stdout
        assert "pip install --no-build-isolation ." in result.stdout

    def test_sdist_is_made(self, tmp_path: Path) -> None:
        code = f"""
from setuptools import build_meta
assert build_meta.get_requires_for_build_sdist() == []
print(build_meta.build_sdist({str(tmp_path)!r}))
"""
        result = self.run(tmp_path, "-c", code)
        assert result.returncode == 0, result.stdout
        version = (ROOT / "VERSION").read_text().strip()
        with tarfile.open(tmp_path / f"torchium-{version}.tar.gz") as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        for name in (
            "setup.py",
            "cmake/TorchiumVersion.cmake",
            "src/CMakeLists.txt",
            "docs/index.md",
        ):
            assert name in names
        assert not [name for name in names if name.endswith(".so")]


class TestStubs:
    """The stubs of `_C` are written by hand: pybind11 has no shapes and few types."""

    FOLDER = ROOT / "python/torchium_cpp/_C"

    @staticmethod
    def public(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    def stub(self, name: str) -> dict[str, ast.stmt]:
        body = ast.parse((self.FOLDER / f"{name}.pyi").read_text()).body
        return {
            node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    def members(self, classes: dict[str, ast.stmt], name: str) -> set[str]:
        """Public members of a class of a stub, with those of its bases."""
        node = classes[name]
        own = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        bases = (base.id for base in node.bases if isinstance(base, ast.Name))
        return self.public(own).union(*(self.members(classes, base) for base in bases))

    def test_modules_have_the_names_of_their_stubs(self) -> None:
        module = torchium_cpp._C
        assert self.public(dir(module)) == self.public(self.stub("__init__")) | {"optim"}
        assert self.public(dir(module.optim)) == self.public(self.stub("optim"))

    @pytest.mark.parametrize("name", ["Shampoo", "Adagrad"])
    def test_optimizers_have_the_members_of_their_stubs(self, name: str) -> None:
        runtime = self.public(dir(getattr(torchium_cpp._C.optim, name)))
        assert runtime == self.members(self.stub("optim"), name)
