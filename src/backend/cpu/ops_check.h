#pragma once
// Checks of the operands of an operation, made at the call. Each throws InternalError with the operation, the
// operand, what it is and what it should be.
#include <initializer_list>
#include <string>

#include "backend/tensor.h"
#include "base/error.h"

namespace strata::cpu {

class Check {
 public:
  explicit Check(const char* operation) : operation_(operation) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw InternalError(std::string(operation_) + ": " + what + " -> a fault of the caller; report it");
  }
  void that(bool holds, const char* what) const {
    if (!holds) fail(what);
  }

  void matrix(const char* name, const ConstMatrix& x, std::int64_t rows, std::int64_t cols) const {
    present(name, x.data);
    floating(name, x.dtype);
    if (x.rows != rows || x.cols != cols || x.stride < x.cols) {
      fail(std::string(name) + " is " + shape(x) + ", expected " + std::to_string(rows) + " x " +
           std::to_string(cols));
    }
  }
  // count < 0: any
  void flat(const char* name, const ConstFlat& x, std::int64_t count) const {
    if (x.count != 0 || count > 0) present(name, x.data);
    floating(name, x.dtype);
    if (x.count < 0 || (count >= 0 && x.count != count)) {
      fail(std::string(name) + " has " + std::to_string(x.count) + " elements, expected " +
           std::to_string(count));
    }
  }
  void dtype(const char* name, DType found, DType expected) const {
    if (found != expected) {
      fail(std::string(name) + " is " + name_of(found) + ", expected " + name_of(expected));
    }
  }
  void present(const char* name, const void* pointer) const {
    if (pointer == nullptr) fail(std::string(name) + " is missing");
  }

 private:
  void floating(const char* name, DType type) const {
    if (type != DType::f32 && type != DType::bf16) {
      fail(std::string(name) + " is " + name_of(type) + ", expected fp32 or bf16");
    }
  }
  static std::string shape(const ConstMatrix& x) {
    return std::to_string(x.rows) + " x " + std::to_string(x.cols) + " (stride " + std::to_string(x.stride) +
           ")";
  }

  const char* operation_;
};

}  // namespace strata::cpu
