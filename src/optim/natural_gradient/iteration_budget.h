// How many iterations of conjugate gradients a step on a GPU launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

namespace torchium::optim::detail {

// The host does not wait for the residual, so a step launches a number of iterations that earlier
// steps suggest: as many as the last known one if that had an eighth and 4 to spare, but at most a
// third above the number that replaces it else: a quarter and 8 more than that one needed. Twice
// as many where it did not reach its tolerance. Without a known step: the most that are allowed.
class IterationBudget {
 public:
  int64_t next(int64_t most);
  // Whether next() followed a known step.
  bool is_known() const { return known_.has_value(); }
  // numbers: iterations and relative residual of the step, float64 on the device. Copied to the
  // host without a wait; a step whose numbers have not arrived is not known yet.
  void submit(const at::Tensor& numbers, double tolerance);

 private:
  void take_arrived();

  std::optional<int64_t> known_;  // for the next step
  int64_t launched_ = 0;
  struct Pending {
    at::Tensor host;  // pinned
    c10::Event event;
    int64_t launched;
    double tolerance;
  };
  std::optional<Pending> pending_;
};

}  // namespace torchium::optim::detail
