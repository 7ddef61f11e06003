# TORCHIUM_CUDA=AUTO|ON|OFF decides whether the CUDA sources are built, TORCHIUM_ARCHS for which GPUs;
# sets TORCHIUM_WITH_CUDA.

set(TORCHIUM_CUDA "AUTO" CACHE STRING "Build the CUDA kernels: AUTO (if nvcc is found), ON or OFF")
set_property(CACHE TORCHIUM_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TORCHIUM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TORCHIUM_CUDA is '${TORCHIUM_CUDA}'; it must be AUTO, ON or OFF.")
endif()
set(TORCHIUM_ARCHS "" CACHE STRING
    "GPU architectures in torch's spelling, as 8.0;9.0a;12.0+PTX (empty: $TORCH_CUDA_ARCH_LIST, else 9.0a)")

# Torch's spelling of architectures ("9.0a 8.0+PTX") as CMake's ("90a-real;80").
function(torchium_cuda_architectures torch_spelling result)
  string(REGEX REPLACE "[ ,;]+" ";" _archs "${torch_spelling}")
  set(_architectures "")
  foreach(_arch IN LISTS _archs)
    if(NOT _arch MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
      message(FATAL_ERROR
        "TORCHIUM_ARCHS or TORCH_CUDA_ARCH_LIST names the architecture '${_arch}'; write compute "
        "capabilities as 8.0, 9.0a or 12.0+PTX, separated by semicolons.")
    endif()
    set(_kind "-real")
    if(CMAKE_MATCH_3) # for later GPUs as well
      set(_kind "")
    endif()
    list(APPEND _architectures "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${_kind}")
  endforeach()
  set(${result} "${_architectures}" PARENT_SCOPE)
endfunction()

# "90" runs on a Hopper GPU, but without the instructions that it alone has.
function(torchium_warn_of_plain_hopper architectures)
  if("${architectures}" MATCHES "(^|;)90(-|;|$)" AND NOT "${architectures}" MATCHES "90a")
    message(WARNING
      "The GPU architectures ${architectures} have 9.0 without 9.0a, which leaves out the kernels that "
      "make Shampoo's products and large inverse roots fast on a Hopper GPU (H100, H200). Write 9.0a in "
      "TORCHIUM_ARCHS or TORCH_CUDA_ARCH_LIST.")
  endif()
endfunction()

set(TORCHIUM_WITH_CUDA OFF)
if(NOT TORCHIUM_CUDA STREQUAL "OFF")
  if(TORCHIUM_ARCHS)
    torchium_cuda_architectures("${TORCHIUM_ARCHS}" CMAKE_CUDA_ARCHITECTURES)
  elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(_archs "$ENV{TORCH_CUDA_ARCH_LIST}")
    if(NOT _archs)
      set(_archs "9.0a")
    endif()
    torchium_cuda_architectures("${_archs}" CMAKE_CUDA_ARCHITECTURES)
  endif()
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    # Toolkits are installed here without being on PATH, which is all that CMake looks at.
    find_program(_nvcc nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
    if(_nvcc)
      set(CMAKE_CUDA_COMPILER "${_nvcc}")
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(TORCHIUM_WITH_CUDA ON)
    torchium_warn_of_plain_hopper("${CMAKE_CUDA_ARCHITECTURES}")
    set(CMAKE_CUDA_STANDARD 17) # CMake 3.25 has no flag for C++20 of nvcc; kernels do not need it
    message(STATUS "TORCHIUM_CUDA=${TORCHIUM_CUDA}: building CUDA kernels with ${CMAKE_CUDA_COMPILER} "
                   "${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(TORCHIUM_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "TORCHIUM_CUDA=ON, but no CUDA compiler (nvcc) was found. Install the CUDA toolkit and put nvcc "
      "on PATH, or set CUDACXX=/path/to/nvcc; or configure with -DTORCHIUM_CUDA=OFF.")
  else()
    message(STATUS "TORCHIUM_CUDA=AUTO: nvcc not found, building without CUDA kernels")
  endif()
endif()
