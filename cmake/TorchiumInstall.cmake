# Two things are installed from one build: the C++ package (`cmake --install`, default), and what
# setup.py puts into the wheel (`cmake --install --component python`). Both hold the CMake package.

include(CMakePackageConfigHelpers)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/TorchiumConfigVersion.cmake" COMPATIBILITY SameMinorVersion)

# Headers to `includes` and the CMake package to `package`, for the exported `targets`; its libtorch is
# looked for at `torch`. More arguments: those of install(), as the component.
function(torchium_install_package targets includes package torch)
  set(_torch_of_package "${torch}")
  set(_config "${PROJECT_BINARY_DIR}/${targets}/TorchiumConfig.cmake")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/TorchiumConfig.cmake.in" "${_config}"
                                INSTALL_DESTINATION "${package}")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/torchium" DESTINATION "${includes}" ${ARGN}
          FILES_MATCHING PATTERN "*.h")
  install(FILES "${PROJECT_BINARY_DIR}/include/torchium/version.h" DESTINATION "${includes}/torchium" ${ARGN})
  install(FILES "${_config}" "${PROJECT_BINARY_DIR}/TorchiumConfigVersion.cmake"
                "${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake" DESTINATION "${package}" ${ARGN})
  install(EXPORT ${targets} FILE TorchiumTargets.cmake NAMESPACE torchium:: DESTINATION "${package}" ${ARGN})
endfunction()

# C++: the absolute path of libtorch in the RPATH, as torch's own C++ programs have it.
set_target_properties(
  torchium PROPERTIES
  INSTALL_RPATH "${Libtorch_ROOT}/lib"
  INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS torchium EXPORT TorchiumTargets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
torchium_install_package(TorchiumTargets "${CMAKE_INSTALL_INCLUDEDIR}" "${CMAKE_INSTALL_LIBDIR}/cmake/Torchium"
                         "${Libtorch_ROOT}" COMPONENT cpp)

# Python: a wheel may be unpacked anywhere, so its libraries find torch, and the CUDA runtime of torch's
# wheels, beside themselves. (Python has loaded both when torchium is imported; C++ programs have not.)
set(_wheel_rpath [[$ORIGIN:$ORIGIN/../torch/lib]])
if(TORCHIUM_WITH_CUDA)
  if(CUDAToolkit_VERSION_MAJOR GREATER_EQUAL 13)
    string(APPEND _wheel_rpath [[:$ORIGIN/../nvidia/cu]] "${CUDAToolkit_VERSION_MAJOR}/lib")
  else()
    string(APPEND _wheel_rpath [[:$ORIGIN/../nvidia/cuda_runtime/lib]])
  endif()
endif()
set(_python COMPONENT python EXCLUDE_FROM_ALL)
if(TARGET torchium_python)
  set_target_properties(torchium_python PROPERTIES INSTALL_RPATH "${_wheel_rpath}")
  install(TARGETS torchium_python LIBRARY DESTINATION torchium_cpp ${_python})
endif()
install(TARGETS torchium EXPORT TorchiumWheelTargets LIBRARY DESTINATION torchium_cpp ${_python}
        INCLUDES DESTINATION torchium_cpp/include)
torchium_install_package(TorchiumWheelTargets torchium_cpp/include torchium_cpp/share/cmake/Torchium
                         [[${CMAKE_CURRENT_LIST_DIR}/../../../../torch]] ${_python})
# A target has one INSTALL_RPATH; the copy in the wheel needs another. BUILD_RPATH leaves room for it.
set_target_properties(torchium PROPERTIES BUILD_RPATH "${_wheel_rpath}")
install(
  CODE "file(RPATH_SET FILE \"\${CMAKE_INSTALL_PREFIX}/torchium_cpp/$<TARGET_FILE_NAME:torchium>\" NEW_RPATH [[${_wheel_rpath}]])"
  ${_python})
install(FILES "${TORCHIUM_STAGE_DIR}/torchium_cpp/_build_info.py" DESTINATION torchium_cpp ${_python})
