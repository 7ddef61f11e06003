#include "optim/kfac/sharing/layer_exchange.h"

#include "distributed/buffer_layout.h"
#include "distributed/step_agreement.h"

#include <ATen/ATen.h>

#include <utility>

namespace torchium::optim::detail {
namespace {

using distributed::TensorExchange;
using Tensors = std::vector<at::Tensor>;

// What a worker keeps of what the owner makes.
Tensors inverses_of(const KfacLayer& layer) {
  const Tensors all = layer.is_inverse_free()
                          ? Tensors{layer.K, layer.C, layer.m_K, layer.m_C}
                          : Tensors{layer.A_root, layer.G_root, layer.A_eigenvalues,
                                    layer.G_eigenvalues, layer.second_moments};
  Tensors defined;
  for (const at::Tensor& tensor : all) {
    if (tensor.defined()) {
      defined.push_back(tensor);
    }
  }
  return defined;
}

}  // namespace

LayerExchange::LayerExchange(distributed::Communicator ranks, WorkerGroups groups,
                             DampingSplit split)
    : ranks_(std::move(ranks)), groups_(groups), split_(split) {}

LayerExchange::Routes LayerExchange::routes_of_inverses(const KfacLayer& layer) const {
  Routes routes;
  for (int64_t rank = 0; rank < groups_.ranks(); ++rank) {
    if (rank != layer.owner &&
        (layer.is_inverse_free() || groups_.are_together(rank, layer.owner))) {
      routes.push_back({layer.owner, rank});
    }
  }
  return routes;
}

LayerExchange::Routes LayerExchange::routes_of_direction(const KfacLayer& layer) const {
  Routes routes;
  for (int64_t rank = 0; rank < groups_.ranks(); ++rank) {
    const int64_t source = groups_.source(layer.owner, rank);
    if (source != rank) {
      routes.push_back({source, rank});
    }
  }
  return routes;
}

// Known to all ranks, also to those that keep no inverses.
int64_t LayerExchange::bytes_of_inverses(const KfacLayer& layer) const {
  if (layer.is_inverse_free()) {
    return distributed::packed_bytes(inverses_of(layer));
  }
  const auto element = static_cast<int64_t>(c10::elementSize(layer.root_dtype));
  int64_t bytes = 0;
  for (const at::Tensor& factor : {layer.A, layer.G}) {
    bytes += distributed::aligned(factor.numel() * element);
    if (split_ == DampingSplit::kExact) {
      bytes += distributed::aligned(factor.size(0) * factor.size(1) * element);
    }
  }
  const at::Tensor& moments = layer.second_moments;  // there is one group then
  return bytes + (moments.defined() ? distributed::packed_bytes({moments}) : 0);
}

void LayerExchange::send_inverses(const std::vector<KfacLayer>& layers,
                                  bool KfacLayer::*wanted) const {
  std::vector<const KfacLayer*> renewed;
  std::vector<TensorExchange::Message> messages;
  bool any_travels = false;
  for (const KfacLayer& layer : layers) {
    if (layer.*wanted) {
      renewed.push_back(&layer);
      messages.push_back({bytes_of_inverses(layer), routes_of_inverses(layer)});
      any_travels |= !messages.back().routes.empty();
    }
  }
  if (renewed.empty()) {
    return;
  }
  if (any_travels) {
    const TensorExchange exchange(ranks_, std::move(messages), renewed[0]->root_failures.device());
    exchange.run([&](size_t message) { return inverses_of(*renewed[message]); });
  }
  send_failures(renewed);
}

// And how often K and C were corrected.
void LayerExchange::send_failures(const std::vector<const KfacLayer*>& layers) const {
  Tensors counts;
  for (const KfacLayer* layer : layers) {
    Tensors own{layer->root_failures};
    if (layer->is_inverse_free()) {
      own.push_back(layer->factor_updates);
    }
    for (at::Tensor& count : own) {
      if (!layer->inverts) {
        count.zero_();
      }
      counts.push_back(count);
    }
  }
  ranks_.combine_(counts);
}

void LayerExchange::send_directions(const std::vector<KfacLayer>& layers,
                                    const Directions& directions) {
  if (groups_.groups() == 1 || layers.empty()) {
    return;
  }
  if (!directions_) {
    std::vector<TensorExchange::Message> messages;
    for (size_t l = 0; l < layers.size(); ++l) {
      messages.push_back(
          {distributed::packed_bytes(directions(l)), routes_of_direction(layers[l])});
    }
    directions_.emplace(ranks_, std::move(messages), layers[0].factor_updates.device());
  }
  directions_->run(directions);
}

bool LayerExchange::all_go_on(bool is_kept, const distributed::HeldError& held) const {
  const std::vector<int64_t> most = ranks_.all_reduce_max(
      {held.is_set() ? ranks_.rank() + 1 : 0, is_kept || held.is_set() ? 0 : 1, is_kept ? 1 : 0});
  held.raise();
  distributed::check_failure(most[0], ranks_);
  TORCH_CHECK(
      most[1] == 0 || most[2] == 0,
      "gradients are finite and small enough on some ranks of the process group alone; all "
      "ranks need the same gradients. No parameter has changed, but the state of some ranks "
      "has: continue from a checkpoint");
  return is_kept;
}

}  // namespace torchium::optim::detail
