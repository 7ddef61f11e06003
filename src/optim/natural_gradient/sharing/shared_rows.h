// The rows of J on several ranks, each of which has those of its own samples.
#pragma once

#include "distributed/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Rows are ordered by rank. All ranks must call the methods that communicate; what these return is
// the same on all ranks, bit for bit. The host waits only on a CPU.
class SharedRows {
 public:
  // counts: rows of each rank.
  SharedRows(distributed::Communicator ranks, std::vector<int64_t> counts);

  const distributed::Communicator& ranks() const { return ranks_; }
  const std::vector<int64_t>& counts() const { return counts_; }
  int64_t total() const { return total_; }
  int64_t first() const { return first_; }  // of this rank
  int64_t own_count() const { return counts_[ranks_.rank()]; }

  // A number of each row: this rank's part [own_count] -> all [total].
  at::Tensor gather(const at::Tensor& own) const;
  at::Tensor own(const at::Tensor& all) const { return all.narrow(0, first_, own_count()); }
  // One number of each rank, 0-dim -> the one of its rank for each row: [total].
  at::Tensor of_ranks(const at::Tensor& own) const;
  // a [total] float64 with J^T a / total the mean over the ranks of the mean row of each.
  at::Tensor weights_of_mean_gradient(const at::TensorOptions& options) const;

  // Sums over the ranks, in one exchange.
  std::vector<at::Tensor> sum(const std::vector<at::Tensor>& own) const;
  // In place: what rank 0 has.
  void equalize_(const std::vector<at::Tensor>& tensors) const;
  // Whether `own` is true on any rank. Waits.
  bool any(bool own) const { return most(own ? 1 : 0) != 0; }
  // The largest on any rank. Waits.
  int64_t most(int64_t own) const { return ranks_.all_reduce_max({own})[0]; }

 private:
  at::Tensor expand(const std::vector<at::Tensor>& of_ranks) const;

  distributed::Communicator ranks_;
  std::vector<int64_t> counts_;
  int64_t total_ = 0;
  int64_t first_ = 0;
};

}  // namespace torchium::optim::detail
