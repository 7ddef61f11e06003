// Brings inverses and directions of layers from the ranks that make them to the others.
#pragma once

#include "distributed/communicator.h"
#include "distributed/tensor_exchange.h"
#include "optim/kfac/kfac_layer.h"
#include "optim/kfac/sharing/worker_groups.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace torchium::optim::detail {

// Of the layers of one planned step, the same on all ranks, which must all make the same calls.
// Waits for no GPU.
class LayerExchange {
 public:
  // The communicator must outlive this object.
  LayerExchange(const distributed::Communicator& ranks, WorkerGroups groups, DampingSplit split,
                int64_t bucket_bytes);

  // After the owners of the layers with `wanted` have renewed their inverses, eigensystems and
  // second moments: brings these to the other workers, and the failures of roots to all ranks. Of
  // solver "inverse_free" K and C, their momenta and the counts of updates go to all ranks.
  void send_inverses(const std::vector<KfacLayer>& layers, bool KfacLayer::*wanted) const;

  // Brings the directions of all layers to the ranks that do not compute them. directions(l): those
  // of layer l, to be read or to be filled.
  using Directions = std::function<std::vector<at::Tensor>(size_t)>;
  void send_directions(const std::vector<KfacLayer>& layers, const Directions& directions);

 private:
  using Routes = std::vector<distributed::TensorExchange::Route>;
  Routes routes_of_inverses(const KfacLayer& layer) const;
  Routes routes_of_direction(const KfacLayer& layer) const;
  int64_t bytes_of_inverses(const KfacLayer& layer) const;
  void send_failures(const std::vector<const KfacLayer*>& layers) const;

  const distributed::Communicator& ranks_;
  WorkerGroups groups_;
  DampingSplit split_;
  int64_t bucket_bytes_;
  std::optional<distributed::TensorExchange> directions_;  // from the first call on
};

}  // namespace torchium::optim::detail
