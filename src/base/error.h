#pragma once
// One exception type per exit code of the program. A message says what was found, where, what is allowed,
// and ends with "-> what to do".
#include <stdexcept>
#include <string>

namespace strata {

enum class ExitCode : int {
  done = 0,
  failure = 1,     // a fault of the program itself
  usage = 2,       // bad command line or configuration
  data = 3,        // bad data or checkpoint
  network = 4,     // a peer hung or the network failed: a deadline passed
  non_finite = 5,  // loss or gradient went non-finite
  stopped = 75,    // stopped cleanly by a signal; a checkpoint was written; to be requeued
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

struct InternalError : Error {
  explicit InternalError(const std::string& m) : Error(ExitCode::failure, m) {}
};
struct UsageError : Error {
  explicit UsageError(const std::string& m) : Error(ExitCode::usage, m) {}
};
struct DataError : Error {
  explicit DataError(const std::string& m) : Error(ExitCode::data, m) {}
};
struct NetworkError : Error {
  explicit NetworkError(const std::string& m) : Error(ExitCode::network, m) {}
};
struct NonFiniteError : Error {
  explicit NonFiniteError(const std::string& m) : Error(ExitCode::non_finite, m) {}
};

}  // namespace strata
