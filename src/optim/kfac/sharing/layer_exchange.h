// Brings inverses and directions of layers from the ranks that make them to the others.
#pragma once

#include "distributed/communicator.h"
#include "distributed/held_error.h"
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
  LayerExchange(distributed::Communicator ranks, WorkerGroups groups, DampingSplit split);

  // After the owners of the layers with `wanted` have renewed their inverses, eigensystems and
  // second moments: brings these to the other workers, and the failures of roots to all ranks. Of
  // solver "inverse_free" K and C, their momenta and the counts of updates go to all ranks.
  void send_inverses(const std::vector<KfacLayer>& layers, bool KfacLayer::*wanted) const;

  // Brings the directions of all layers to the ranks that do not compute them. directions(l): those
  // of layer l, to be read or to be filled.
  using Directions = std::function<std::vector<at::Tensor>(size_t)>;
  void send_directions(const std::vector<KfacLayer>& layers, const Directions& directions);

  // Whether the ranks, which must all know it, take the step. Throws on all of them where one holds
  // an error, or where their gradients do not lead to the same answer. The host waits for all.
  bool all_go_on(bool is_kept, const distributed::HeldError& held) const;

 private:
  using Routes = std::vector<distributed::TensorExchange::Route>;
  Routes routes_of_inverses(const KfacLayer& layer) const;
  Routes routes_of_direction(const KfacLayer& layer) const;
  int64_t bytes_of_inverses(const KfacLayer& layer) const;
  void send_failures(const std::vector<const KfacLayer*>& layers) const;

  distributed::Communicator ranks_;
  WorkerGroups groups_;
  DampingSplit split_;
  std::optional<distributed::TensorExchange> directions_;  // from the first call on
};

}  // namespace torchium::optim::detail
