# Sets TORCHIUM_FULL_VERSION: the version with the torch that it was built against, 0.2.0+torch2.11.cu130 (or
# .cpu). It is `torchium.__version__`, torchium::version() and the version of the wheel; setup.py, which needs it
# before CMake runs, computes the same.

set(_cuda "")
if(EXISTS "${Libtorch_ROOT}/version.py") # torch's Python package: cuda: Optional[str] = '13.0'
  file(STRINGS "${Libtorch_ROOT}/version.py" _cuda REGEX "^cuda: [^=]*= '[0-9.]+'")
elseif(EXISTS "${Libtorch_ROOT}/build-version") # an archive of libtorch: 2.11.0+cu130
  file(STRINGS "${Libtorch_ROOT}/build-version" _cuda REGEX "[+]cu[0-9]+")
endif()
set(_flavour "cpu")
if(_cuda MATCHES "('|[+]cu)([0-9.]+)")
  string(REPLACE "." "" _flavour "cu${CMAKE_MATCH_2}")
endif()
string(REGEX MATCH "^[0-9]+[.][0-9]+" _torch "${Libtorch_VERSION}")
set(TORCHIUM_FULL_VERSION "${PROJECT_VERSION}+torch${_torch}.${_flavour}")
