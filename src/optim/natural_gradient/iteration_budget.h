// How many iterations of conjugate gradients a step on a GPU launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

namespace torchium::optim::detail {

// The host does not wait for the residual, so the number of iterations follows from the last step
// that is known: it has launched l and needed n. The next step launches
//   l, if n + n/8 + 4 <= l <= 4/3 (n + n/4 + 8);
//   n + n/4 + 8 otherwise;
//   2 l, if the last one did not reach its tolerance;
//   as many as are allowed, if no step is known.
class IterationBudget {
 public:
  // takes_arrived: whether numbers may be asked for that have arrived since.
  int64_t next(int64_t most, bool takes_arrived);
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
