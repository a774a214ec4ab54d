#pragma once
// Every MPI call goes through one checker that adds file, line and the call.
#define MPICH_SKIP_MPICXX 1
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

namespace strata::mpi {

// Throws NetworkError with MPI's own text.
void check(int code, const char* call, const char* file, int line);

}  // namespace strata::mpi

#define STRATA_MPI(call) ::strata::mpi::check((call), #call, __FILE__, __LINE__)
