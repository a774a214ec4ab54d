#include "backend/communicator.h"

namespace strata {

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::all_gather:
      return "all-gather";
    case Collective::reduce_scatter:
      return "reduce-scatter";
    case Collective::all_reduce:
      return "all-reduce";
    case Collective::broadcast:
      return "broadcast";
    case Collective::count_:
      break;
  }
  return "?";
}

}  // namespace strata
