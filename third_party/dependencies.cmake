# Every dependency comes from the distribution; docs/architecture.md says what each is for.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(nlohmann_json 3.10 REQUIRED)
find_package(fmt 8 REQUIRED)
find_package(CLI11 2.1 REQUIRED)
find_package(OneDNN REQUIRED)   # third_party/cmake/FindOneDNN.cmake: 2.6 and 3.x
find_package(XxHash REQUIRED)   # third_party/cmake/FindXxHash.cmake
find_package(HWY REQUIRED)      # third_party/cmake/FindHWY.cmake

set(STRATA_HAVE_CUDA OFF)
if(NOT STRATA_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    set(STRATA_HAVE_CUDA ON)
  elseif(STRATA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "STRATA_CUDA=ON but no CUDA toolkit was found -> install one or pass -DSTRATA_CUDA=OFF")
  endif()
endif()
if(STRATA_HAVE_CUDA)
  message(STATUS "CUDA: toolkit ${CUDAToolkit_VERSION} (${CUDAToolkit_NVCC_EXECUTABLE})")
else()
  message(STATUS "CUDA: not used; the CPU backend is built")
endif()
