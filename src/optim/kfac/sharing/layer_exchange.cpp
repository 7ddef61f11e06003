#include "optim/kfac/sharing/layer_exchange.h"

#include "distributed/alignment.h"

#include <ATen/ATen.h>

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

LayerExchange::LayerExchange(const distributed::Communicator& ranks, WorkerGroups groups,
                             DampingSplit split, int64_t bucket_bytes)
    : ranks_(ranks), groups_(groups), split_(split), bucket_bytes_(bucket_bytes) {}

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
    return distributed::parcel_bytes(inverses_of(layer));
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
  return bytes + (moments.defined() ? distributed::parcel_bytes({moments}) : 0);
}

void LayerExchange::send_inverses(const std::vector<KfacLayer>& layers,
                                  bool KfacLayer::*wanted) const {
  std::vector<const KfacLayer*> renewed;
  std::vector<TensorExchange::Parcel> parcels;
  bool any_travels = false;
  for (const KfacLayer& layer : layers) {
    if (layer.*wanted) {
      renewed.push_back(&layer);
      parcels.push_back({bytes_of_inverses(layer), routes_of_inverses(layer)});
      any_travels |= !parcels.back().routes.empty();
    }
  }
  if (renewed.empty()) {
    return;
  }
  if (any_travels) {
    const TensorExchange exchange(ranks_, std::move(parcels), bucket_bytes_,
                                  renewed[0]->root_failures.device());
    exchange.run([&](size_t parcel) { return inverses_of(*renewed[parcel]); });
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
    std::vector<TensorExchange::Parcel> parcels;
    for (size_t l = 0; l < layers.size(); ++l) {
      parcels.push_back({distributed::parcel_bytes(directions(l)), routes_of_direction(layers[l])});
    }
    directions_.emplace(ranks_, std::move(parcels), bucket_bytes_,
                        layers[0].factor_updates.device());
  }
  directions_->run(directions);
}

}  // namespace torchium::optim::detail
