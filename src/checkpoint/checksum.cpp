#include "checkpoint/checksum.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace strata {

struct Checksum::State {
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> hash{XXH3_createState()};
};

Checksum::Checksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(state_->hash.get());
}
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->hash.get(), bytes.data(), bytes.size());
}

std::string Checksum::text() const {
  return fmt::format("{:016x}", XXH3_64bits_digest(state_->hash.get()));
}

std::string checksum(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

std::string checksum(const std::string& text) {
  return checksum(std::as_bytes(std::span(text)));
}

}  // namespace strata
