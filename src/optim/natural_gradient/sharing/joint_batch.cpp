// The batches of all ranks that share a step of NaturalGradientPlan, put together.
#include "optim/natural_gradient/gradient_rounding.h"
#include "optim/natural_gradient/natural_gradient_plan.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

using Source = RankBatch::Source;

namespace {

// Whether the gradients of a rank are scaled, which also changes which of them are one tensor.
bool is_scaled(const std::vector<RankBatch>& batches, int64_t rank) {
  return batches[rank].source == Source::kCurvature && curvature_factor(batches, rank) != 1.0;
}

}  // namespace

// Whether these are samples of this rank, and not of another one that has saved them.
bool NaturalGradientPlan::is_own(const KeptBatch& batch) const {
  return is_shared() ? batch.rank == ranks().rank() && batch.ranks == ranks().size()
                     : batch.ranks == 1;
}

std::vector<at::Tensor> NaturalGradientPlan::all_params() const {
  std::vector<at::Tensor> params;
  for (const auto i : c10::irange(size())) {
    params.push_back(param(i));
  }
  return params;
}

RankBatch NaturalGradientPlan::own_batch(bool refreshed) const {
  RankBatch own;
  if (batch_ == nullptr) {
    return own;
  }
  own.source = !batch_->given_rows.empty() ? Source::kGiven
               : !refreshed                ? Source::kKept
               : batch_->is_curvature()    ? Source::kCurvature
                                           : Source::kBackward;
  own.rows = batch_->rows();
  own.samples = batch_->samples();
  if (is_shared()) {
    distributed::Hash hash;
    for (const double rounding : gradient_roundings(all_params(), batch_->calls)) {
      hash.add(rounding);
    }
    own.precision = static_cast<int64_t>(hash.value() >> 1);
    own.calls_hash = hash_of(list_of(captured(*batch_).calls, ranks().rank()).list);
    own.known_lists_hash = lists_ == nullptr ? 0 : lists_->hash;
  }
  return own;
}

// Changes the output gradients of a curvature to those of rows of all ranks.
NaturalGradientPlan::JointBatch NaturalGradientPlan::joint_batch(const RankBatch& own) {
  const auto is_of_gradient = [](const RankBatch& batch) {
    return batch.source == Source::kBackward || batch.source == Source::kGiven;
  };
  if (!is_shared()) {
    return {nullptr, own.rows, own.samples, is_of_gradient(own), own.has_factorization};
  }
  const std::vector<RankBatch> batches = gather_batches(ranks(), own);
  JointBatch joint;
  std::vector<int64_t> counts;
  distributed::Hash lists;
  for (const auto rank : c10::irange(batches.size())) {
    const RankBatch& batch = batches[rank];
    counts.push_back(batch.rows);
    lists.add(batch.calls_hash).add(int64_t{is_scaled(batches, static_cast<int64_t>(rank))});
    joint.rows += batch.rows;
    joint.samples += batch.samples;
  }
  joint.is_of_gradient = std::ranges::all_of(batches, is_of_gradient);
  joint.has_factorization = std::ranges::all_of(batches, &RankBatch::has_factorization);
  joint.lists_hash = static_cast<int64_t>(lists.value() >> 1);
  joint.knows_lists = std::ranges::all_of(
      batches, [&](const RankBatch& batch) { return batch.known_lists_hash == joint.lists_hash; });
  if (batch_ != nullptr) {
    joint.shared = std::make_shared<SharedRows>(ranks(), counts);
  }
  if (is_scaled(batches, ranks().rank())) {
    auto scaled = std::make_shared<KeptBatch>(*batch_);
    scale_gradients(*scaled, curvature_factor(batches, ranks().rank()));
    batch_ = std::move(scaled);
  }
  return joint;
}

std::shared_ptr<const JointLists> NaturalGradientPlan::agree_on_lists(const CapturedBatch& batch,
                                                                      const JointBatch& joint) {
  if (batch.shared == nullptr || !batch.given_rows.empty()) {
    return nullptr;
  }
  if (!joint.knows_lists) {
    auto lists = gather_lists(ranks(), list_of(batch.calls, ranks().rank()).list);
    lists_ = std::make_shared<const JointLists>(JointLists{std::move(lists), joint.lists_hash});
  }
  return lists_;
}

}  // namespace torchium::optim::detail
