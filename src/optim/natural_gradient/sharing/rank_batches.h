// What the ranks that share a step bring to it.
#pragma once

#include "distributed/communicator.h"

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Of a rank.
struct RankBatch {
  enum class Source : int64_t {
    kNone,       // the step only creates state
    kBackward,   // calls of this step, with gradients of the loss
    kCurvature,  // calls of this step, with columns of the curvature
    kKept,       // calls of an earlier step
    kGiven,      // rows of update_jacobian()
  };
  Source source = Source::kNone;
  int64_t rows = 0;
  int64_t samples = 0;
  bool has_factorization = false;  // of these rows
  int64_t precision = 0;           // a hash of the roundings of gradients
  int64_t calls_hash = 0;
  int64_t known_lists_hash = 0;  // of the lists of all ranks that this one knows; 0: none
};

// Those of all ranks, which must all call this. Throws c10::Error on all of them if their batches
// cannot be combined into one step.
std::vector<RankBatch> gather_batches(const distributed::Communicator& ranks, const RankBatch& own);

// What the output gradients of this rank's curvature are to be multiplied by. A rank with R rows of
// N samples has rows sqrt(R / N) S of the square root S^T S of the curvature, and J of all ranks
// sqrt(sum R / sum N) S.
double curvature_factor(const std::vector<RankBatch>& batches, int64_t rank);

}  // namespace torchium::optim::detail
