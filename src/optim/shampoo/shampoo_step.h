// Shampoo (Gupta, Koren, Singer 2018, arXiv 1802.09568; blocking and grafting: Anil et al. 2020,
// arXiv 2002.09018; Shi et al. 2023, arXiv 2309.06497).
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/core/step_prologue.h"
#include "optim/shampoo/shampoo_subset.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Steps of the same parameters with the same state: by CUDA kernels for the parameters that these
// support, by PyTorch operators for all others.
class ShampooStep : public PrologueStep {
 public:
  // One parameter at least, and a state for each that fits the options
  // (BlockedPlan::fit). Keeps the tensors, which stay the caller's, and the reference: numbers
  // among the options may change between steps. status: see step_status.h.
  ShampooStep(const ShampooOptions& options, Role role, std::vector<at::Tensor> params,
              StateList states, std::vector<BlockUpdate> updates, at::Tensor status);
  ShampooStep(const ShampooStep&) = delete;
  ShampooStep& operator=(const ShampooStep&) = delete;

  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;
  void set_end_of_stages(std::function<void()> end_stage) override {
    end_stage_ = std::move(end_stage);
  }
  void end() override {
    end_subsets();
    PrologueStep::end();
  }
  bool defers() const override { return group_.defers; }
  std::vector<at::Tensor> results() const override {
    return group_.defers ? subsets_[0]->results() : std::vector<at::Tensor>();
  }
  void set_results(at::TensorList results) override {
    if (group_.defers) {
      subsets_[0]->set_results(results.vec());
    }
  }
  void finish(const at::Tensor& lr, double decoupled_weight_decay) override;

 private:
  void make_subsets();
  void end_subsets();
  void renew_roots(const Schedule& schedule);
  bool kernels_renew_roots() const;

  const ShampooOptions& options_;
  ShampooGroup group_;
  at::Tensor status_;
  std::vector<MatrixBatch> batches_;  // of all subsets
  std::vector<std::unique_ptr<ShampooSubset>> subsets_;
  bool all_by_kernels_ = false;
  std::function<void()> end_stage_;
};

}  // namespace torchium::optim::detail
