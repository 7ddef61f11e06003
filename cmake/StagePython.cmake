# cmake -DSOURCE=<python> -DDESTINATION=<build>/python -P StagePython.cmake
# Mirrors the Python files of both packages; a file that left the sources leaves the copy too.

set(_patterns *.py *.pyi py.typed)
foreach(_package torchium torchium_cpp)
  list(TRANSFORM _patterns PREPEND "${SOURCE}/${_package}/" OUTPUT_VARIABLE _source_globs)
  list(TRANSFORM _patterns PREPEND "${DESTINATION}/${_package}/" OUTPUT_VARIABLE _staged_globs)
  file(GLOB_RECURSE _files RELATIVE "${SOURCE}" ${_source_globs})
  file(GLOB_RECURSE _staged RELATIVE "${DESTINATION}" ${_staged_globs})

  list(REMOVE_ITEM _files torchium_cpp/_build_info.py) # an editable installation puts one there
  list(REMOVE_ITEM _staged ${_files} torchium_cpp/_build_info.py) # generated there
  foreach(_file IN LISTS _staged)
    file(REMOVE "${DESTINATION}/${_file}")
  endforeach()
  foreach(_file IN LISTS _files)
    get_filename_component(_folder "${DESTINATION}/${_file}" DIRECTORY)
    file(MAKE_DIRECTORY "${_folder}")
    file(COPY_FILE "${SOURCE}/${_file}" "${DESTINATION}/${_file}" ONLY_IF_DIFFERENT)
  endforeach()
endforeach()
