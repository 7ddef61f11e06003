// Holds an error of this rank until it has done its part of what other ranks wait for.
#pragma once

#include <exception>

namespace torchium::distributed {

class HeldError {
 public:
  // Does nothing once there is an error.
  template <typename Work>
  void run(const Work& work) {
    if (error_ == nullptr) {
      try {
        work();
      } catch (...) {
        error_ = std::current_exception();
      }
    }
  }
  bool is_set() const { return error_ != nullptr; }
  void raise() const {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::exception_ptr error_;
};

}  // namespace torchium::distributed
