#pragma once
// XXH3 (64 bits) as 16 hexadecimal digits: how checkpoints say what bytes they hold.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace strata {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void add(std::span<const std::byte> bytes);
  std::string text() const;  // of everything added so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string checksum(std::span<const std::byte> bytes);
std::string checksum(const std::string& text);

}  // namespace strata
