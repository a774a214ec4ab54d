# strata_add_device_kernels: the .cu files compiled for GPUs, each together with ptxas's report of its kernels.
set(STRATA_GPU_ARCHITECTURES 80 90 100 CACHE STRING "compute capabilities that nvcc compiles for; PTX of the last is kept too")

# strata_add_device_kernels(target SOURCES a.cu ...)
# A static library, built only where something asks for it. Its property STRATA_PTXAS_REPORTS lists a file for every
# source with what `ptxas -v` said of each kernel and architecture (tests/cuda/ptxas_gate.py reads them).
# Products are never contracted to fused ones: kernels say fma where they mean it, and so give the same bits everywhere.
function(strata_add_device_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  set(architectures)
  foreach(number IN LISTS STRATA_GPU_ARCHITECTURES)
    list(APPEND architectures -gencode arch=compute_${number},code=sm_${number})
  endforeach()
  list(GET STRATA_GPU_ARCHITECTURES -1 newest)
  list(APPEND architectures -gencode arch=compute_${newest},code=compute_${newest})

  set(objects)
  set(reports)
  foreach(source IN LISTS arg_SOURCES)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
    cmake_path(GET source STEM LAST_ONLY name)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}/${name}.o)
    set(report ${CMAKE_CURRENT_BINARY_DIR}/${target}/${name}.ptxas)
    add_custom_command(OUTPUT ${object} ${report} DEPFILE ${object}.d VERBATIM
      COMMAND sh ${CMAKE_SOURCE_DIR}/cuda/nvcc_report.sh ${report}
        ${CMAKE_CXX_COMPILER_LAUNCHER} ${CUDAToolkit_NVCC_EXECUTABLE} -ccbin ${CMAKE_CXX_COMPILER}
        -c ${source} -o ${object} -MD -MF ${object}.d -MT ${object}
        -std=c++20 -O3 -fmad=false ${architectures} -Xptxas -v -Werror all-warnings
        -Xcompiler -fPIC,-Wall,-Wextra,-Werror -I${CMAKE_SOURCE_DIR} -I${CMAKE_SOURCE_DIR}/src
      DEPENDS ${source} ${CMAKE_SOURCE_DIR}/cuda/nvcc_report.sh
      COMMENT "nvcc ${name}.cu for ${STRATA_GPU_ARCHITECTURES}")
    list(APPEND objects ${object})
    list(APPEND reports ${report})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  add_library(${target} STATIC EXCLUDE_FROM_ALL ${objects})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX STRATA_PTXAS_REPORTS "${reports}")
  target_link_libraries(${target} PUBLIC CUDA::cudart_static)
endfunction()
