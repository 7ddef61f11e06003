#include "optim/natural_gradient/sharing/rank_batches.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <cmath>
#include <string_view>

namespace torchium::optim::detail {
namespace {

using Source = RankBatch::Source;

std::string_view name_of_source(Source source) {
  switch (source) {
    case Source::kNone:
      return "no samples";
    case Source::kGiven:
      return "the rows of update_jacobian()";
    case Source::kBackward:
    case Source::kCurvature:
    case Source::kKept:
      break;
  }
  return "layer calls";
}

}  // namespace

std::vector<RankBatch> gather_batches(const distributed::Communicator& ranks,
                                      const RankBatch& own) {
  std::vector<RankBatch> all;
  for (const auto& row : ranks.all_gather({static_cast<int64_t>(own.source), own.rows, own.samples,
                                           own.has_factorization ? 1 : 0, own.precision,
                                           own.calls_hash, own.known_lists_hash})) {
    all.push_back(
        {static_cast<Source>(row[0]), row[1], row[2], row[3] != 0, row[4], row[5], row[6]});
  }
  for (const auto rank : c10::irange(all.size())) {
    const std::string_view text = name_of_source(all[rank].source);
    TORCH_CHECK(
        text == name_of_source(all[0].source), "rank ", rank, " of the process group has ", text,
        " for the matrix of this step, and rank 0 ", name_of_source(all[0].source),
        "; all ranks need their own samples from the same calls. No rank has taken the step");
    TORCH_CHECK(
        all[rank].precision == all[0].precision, "rank ", rank,
        " of the process group has computed its gradients in a different precision from rank "
        "0; use the same autocast and TF32 settings on all ranks. No rank has taken the "
        "step");
  }
  return all;
}

double curvature_factor(const std::vector<RankBatch>& batches, int64_t rank) {
  double rows = 0.0, samples = 0.0;
  for (const RankBatch& batch : batches) {
    if (batch.source == Source::kCurvature) {
      rows += static_cast<double>(batch.rows);
      samples += static_cast<double>(batch.samples);
    }
  }
  const RankBatch& own = batches[rank];
  return std::sqrt(rows / samples * static_cast<double>(own.samples) /
                   static_cast<double>(own.rows));
}

}  // namespace torchium::optim::detail
