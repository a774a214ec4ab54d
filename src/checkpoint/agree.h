#pragma once
// Work that may fail on one rank and must then fail on all: nobody is left waiting for a rank that gave up.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/communicator.h"

namespace strata {

// Collective over the world: every rank does its work and all receive everyone's result, in rank order;
// `unit` and `step` say what it is for, should a rank never come. When the work of any rank throws, every
// rank throws the first such rank's error: DataError for failures of files, else an Error with the same exit
// code.
std::vector<std::string> agree(World& world, const std::string& unit, std::int64_t step,
                               const std::function<std::string()>& work);

}  // namespace strata
