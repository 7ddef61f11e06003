# Finds libtorch and defines the imported target torchium::libtorch.
#
# torch's own TorchConfig.cmake refuses a CUDA build of torch on a machine without the CUDA toolkit,
# and adds architectures that newer nvcc versions refuse. Torchium needs headers and libraries only.
#
# Looked up, in this order: TORCHIUM_TORCH_ROOT (the folder with include/ and lib/), Torch_DIR and
# CMAKE_PREFIX_PATH (a libtorch archive), then the torch package of Python_EXECUTABLE.
# Sets Libtorch_FOUND, Libtorch_ROOT, Libtorch_VERSION, Libtorch_HAS_CUDA.

if(NOT TARGET torchium::libtorch)
  set(_hints ${TORCHIUM_TORCH_ROOT})
  if(Torch_DIR)
    list(APPEND _hints "${Torch_DIR}/../../..")
  endif()
  foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
    list(APPEND _hints "${_prefix}" "${_prefix}/../..")
  endforeach()
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND _hints "${_python_torch}")
  endif()

  find_path(Libtorch_INCLUDE_DIR NAMES torch/csrc/api/include/torch/torch.h
            HINTS ${_hints} PATH_SUFFIXES include NO_CACHE)
  if(Libtorch_INCLUDE_DIR)
    get_filename_component(Libtorch_ROOT "${Libtorch_INCLUDE_DIR}" DIRECTORY)
    get_filename_component(Libtorch_ROOT "${Libtorch_ROOT}" REALPATH)
    file(STRINGS "${Libtorch_ROOT}/include/torch/headeronly/version.h" _version_lines
         REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3"
           Libtorch_VERSION "${_version_lines}")
  endif()
  foreach(_name torch torch_cpu c10)
    find_library(Libtorch_${_name}_LIBRARY NAMES ${_name} HINTS "${Libtorch_ROOT}/lib"
                 NO_DEFAULT_PATH NO_CACHE)
  endforeach()
  foreach(_name torch_cuda c10_cuda)
    find_library(Libtorch_${_name}_LIBRARY NAMES ${_name} HINTS "${Libtorch_ROOT}/lib"
                 NO_DEFAULT_PATH NO_CACHE)
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libtorch
  REQUIRED_VARS Libtorch_ROOT Libtorch_torch_LIBRARY Libtorch_torch_cpu_LIBRARY Libtorch_c10_LIBRARY
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE
    "Pass -DPython_EXECUTABLE=<a Python that has torch> or -DTORCHIUM_TORCH_ROOT=<folder of libtorch>.")

if(Libtorch_FOUND AND NOT TARGET torchium::libtorch)
  add_library(torchium::libtorch INTERFACE IMPORTED)
  set(_libraries "${Libtorch_torch_LIBRARY}" "${Libtorch_torch_cpu_LIBRARY}" "${Libtorch_c10_LIBRARY}")
  set(Libtorch_HAS_CUDA OFF)
  if(Libtorch_c10_cuda_LIBRARY AND Libtorch_torch_cuda_LIBRARY)
    set(Libtorch_HAS_CUDA ON)
    # --as-needed would drop libtorch_cuda, which registers the CUDA backend when it is loaded.
    list(APPEND _libraries "-Wl,--no-as-needed,${Libtorch_torch_cuda_LIBRARY}"
         "${Libtorch_c10_cuda_LIBRARY}")
  endif()
  set_target_properties(
    torchium::libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${_libraries}"
    # torch's libraries find NCCL and the like beside them when they are loaded; the linker of a program
    # would look in the system's folders and may find an older one.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
