# Every source costs the compiler some 3 s before its first line: with a precompiled header GCC still
# instantiates the templates that the header's inline functions use. A batch of sources pays that once.

# Compiles the sources `ARGN` of `target` in even batches, named `name`, of at most `size`. A source with
# definitions or options of its own is compiled alone. Where two anonymous namespaces of a batch define the
# same name, rename one.
function(torchium_compile_in_batches target name size)
  if(NOT TORCHIUM_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  list(LENGTH ARGN _count)
  math(EXPR _batches "(${_count} + ${size} - 1) / ${size}")
  set(_index 0)
  foreach(_source IN LISTS ARGN)
    math(EXPR _batch "${_index} * ${_batches} / ${_count}")
    set_source_files_properties("${_source}" PROPERTIES UNITY_GROUP "${name}_${_batch}")
    math(EXPR _index "${_index} + 1")
  endforeach()
endfunction()
