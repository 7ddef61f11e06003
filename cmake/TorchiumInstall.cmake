# Two things are installed from one build: the C++ package (`cmake --install`, default), and what
# setup.py puts into the wheel (`cmake --install --component python`).

include(CMakePackageConfigHelpers)
set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Torchium")

# C++: the absolute path of libtorch in the RPATH, as torch's own C++ programs have it.
set_target_properties(
  torchium PROPERTIES
  INSTALL_RPATH "${Libtorch_ROOT}/lib"
  INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS torchium EXPORT TorchiumTargets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/torchium" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        COMPONENT cpp FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_BINARY_DIR}/include/torchium/version.h"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/torchium" COMPONENT cpp)
install(EXPORT TorchiumTargets NAMESPACE torchium:: DESTINATION "${_package_dir}" COMPONENT cpp)
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/TorchiumConfig.cmake.in" "${PROJECT_BINARY_DIR}/TorchiumConfig.cmake"
  INSTALL_DESTINATION "${_package_dir}")
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/TorchiumConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/TorchiumConfig.cmake"
              "${PROJECT_BINARY_DIR}/TorchiumConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake"
        DESTINATION "${_package_dir}" COMPONENT cpp)

# Python: a wheel may be unpacked anywhere, so its libraries find torch beside themselves. (It is loaded
# already when Python imports torchium.)
set(_wheel_rpath [[$ORIGIN:$ORIGIN/../torch/lib]])
if(TARGET torchium_python)
  set_target_properties(torchium_python PROPERTIES INSTALL_RPATH "${_wheel_rpath}")
  install(TARGETS torchium_python LIBRARY DESTINATION torchium_cpp COMPONENT python EXCLUDE_FROM_ALL)
endif()
install(TARGETS torchium LIBRARY DESTINATION torchium_cpp COMPONENT python EXCLUDE_FROM_ALL)
# A target has one INSTALL_RPATH; the copy in the wheel needs another. BUILD_RPATH leaves room for it.
set_target_properties(torchium PROPERTIES BUILD_RPATH "${_wheel_rpath}")
install(
  CODE "file(RPATH_SET FILE \"\${CMAKE_INSTALL_PREFIX}/torchium_cpp/$<TARGET_FILE_NAME:torchium>\" NEW_RPATH [[${_wheel_rpath}]])"
  COMPONENT python EXCLUDE_FROM_ALL)
install(FILES "${TORCHIUM_STAGE_DIR}/torchium_cpp/_build_info.py" DESTINATION torchium_cpp
        COMPONENT python EXCLUDE_FROM_ALL)
