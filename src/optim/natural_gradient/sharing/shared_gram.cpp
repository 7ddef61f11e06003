#include "optim/natural_gradient/sharing/shared_gram.h"

#include "distributed/round_exchange.h"
#include "optim/natural_gradient/sharing/call_lists.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace torchium::optim::detail {
namespace {

using distributed::Assignment;
using distributed::Message;
using gradients::detail::Jacobian;
using gradients::detail::LayerCall;

// Parameters of which one rank computes the part of the Gram matrix. A part has the number of one
// of its parameters; others are empty.
struct Parts {
  std::vector<size_t> of_params;
  std::vector<int64_t> costs, bytes;
};

int64_t cost_from(double operations) { return static_cast<int64_t>(std::min(operations, 1e15)); }

// Parameters that have calls in common, directly or by others.
std::vector<size_t> connected(size_t params, const std::vector<CallList>& lists) {
  std::vector<size_t> part(params);
  std::iota(part.begin(), part.end(), size_t{0});
  for (const CallList& list : lists) {
    for (const LayerCall& call : list.calls) {
      if (call.weight >= 0 && call.bias >= 0) {
        std::ranges::replace(part, size_t{part[call.bias]}, size_t{part[call.weight]});
      }
    }
  }
  return part;
}

double positions_of(const LayerCall& call, const std::vector<int64_t>& gradient) {
  const size_t channel_dim =
      gradient.size() - 1 - (is_convolution(call) ? spatial_dims(call) : size_t{0});
  const int64_t channels = std::max<int64_t>(1, gradient[channel_dim]);
  return static_cast<double>(c10::multiply_integers(gradient) / channels);
}

// Multiplications for n rows of one parameter: either two inner products for each pair of
// positions, or the rows and an inner product for each pair of these.
double gram_cost(const at::Tensor& param, double positions, double n) {
  const auto elements = static_cast<double>(param.numel());
  const double outputs = param.dim() == 0 ? 1.0 : std::max(1.0, static_cast<double>(param.size(0)));
  return std::min(positions * positions * (elements / outputs + outputs),
                  (positions + n * n) * elements);
}

Parts parts_of(at::TensorList params, const std::vector<CallList>& lists, int64_t n) {
  const std::vector<int64_t> none(params.size(), 0);
  Parts parts{connected(params.size(), lists), none, none};
  std::vector<double> positions(params.size(), 0.0);
  for (const CallList& list : lists) {
    for (const auto i : c10::irange(list.messages.size())) {
      parts.bytes[parts.of_params[list.layers[i]]] += list.messages[i].bytes();
    }
    for (const auto i : c10::irange(list.calls.size())) {
      const LayerCall& call = list.calls[i];
      const double more = positions_of(call, list.messages[list.tensors[i].gradient].sizes);
      for (const int64_t p : {call.weight, call.bias}) {
        if (p >= 0) {
          positions[p] += more;
        }
      }
    }
  }
  for (const auto p : c10::irange(params.size())) {
    parts.costs[parts.of_params[p]] +=
        cost_from(gram_cost(params[p], positions[p], static_cast<double>(n)));
  }
  return parts;
}

// The calls of each rank whose tensors have come.
std::vector<std::vector<LayerCall>> arrived_calls(const std::vector<CallList>& lists,
                                                  const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<LayerCall>> of_ranks;
  size_t first_message = 0;
  for (const CallList& list : lists) {
    std::vector<LayerCall>& calls = of_ranks.emplace_back();
    for (const auto i : c10::irange(list.calls.size())) {
      const at::Tensor& input = tensors[first_message + list.tensors[i].input];
      if (input.defined()) {
        calls.push_back(list.calls[i]);
        calls.back().input = input;
        calls.back().output_gradient = tensors[first_message + list.tensors[i].gradient];
      }
    }
    first_message += list.messages.size();
  }
  return of_ranks;
}

// Whether two calls are one with the samples of both.
bool can_join(const LayerCall& a, const LayerCall& b) {
  const auto have_same_samples = [](const at::Tensor& x, const at::Tensor& y) {
    return x.scalar_type() == y.scalar_type() && x.sizes().slice(1) == y.sizes().slice(1);
  };
  return a.kind == b.kind && a.weight == b.weight && a.bias == b.bias && a.settings == b.settings &&
         a.eps == b.eps && has_sample_dimension(a) && has_sample_dimension(b) &&
         have_same_samples(a.input, b.input) &&
         have_same_samples(a.output_gradient, b.output_gradient);
}

// The calls that one process with the samples of all ranks would have, in which products are larger
// and fewer; none if the calls of the ranks differ in more than their samples.
std::vector<LayerCall> joined_calls(const std::vector<std::vector<LayerCall>>& of_ranks) {
  std::vector<LayerCall> joined;
  for (const auto i : c10::irange(of_ranks[0].size())) {
    std::vector<at::Tensor> inputs, gradients;
    for (const std::vector<LayerCall>& calls : of_ranks) {
      if (calls.size() != of_ranks[0].size() || !can_join(calls[i], of_ranks[0][i])) {
        return {};
      }
      inputs.push_back(calls[i].input);
      gradients.push_back(calls[i].output_gradient);
    }
    joined.push_back(of_ranks[0][i]);
    joined.back().input = at::cat(inputs);
    joined.back().output_gradient = at::cat(gradients);
  }
  return joined;
}

// The part of K of these calls. micro_batches: samples of each one of every rank.
at::Tensor part_of_gram(at::TensorList params, std::vector<std::vector<LayerCall>> of_ranks,
                        const std::vector<std::vector<int64_t>>& micro_batches,
                        at::ArrayRef<double> weights) {
  std::vector<int64_t> samples;
  for (const auto& of_rank : micro_batches) {
    samples.insert(samples.end(), of_rank.begin(), of_rank.end());
  }
  if (samples.size() == of_ranks.size()) {
    const std::vector<LayerCall> calls = joined_calls(of_ranks);
    if (!calls.empty()) {
      const int64_t n = std::accumulate(samples.begin(), samples.end(), int64_t{0});
      return Jacobian(params, calls, 1.0, {}, n).gram(weights);
    }
  }
  std::vector<LayerCall> all;
  int64_t first = 0;  // micro-batches of later ranks come later
  for (const auto rank : c10::irange(of_ranks.size())) {
    for (LayerCall& call : of_ranks[rank]) {
      call.micro_batch += first;
      all.push_back(std::move(call));
    }
    first += static_cast<int64_t>(micro_batches[rank].size());
  }
  return Jacobian(params, all, /*scale=*/1.0, /*loss_scale=*/{}, samples).gram(weights);
}

// K += this rank's parts, of calls without the factors of their ranks.
void add_parts_of_calls(at::Tensor& K, at::TensorList params, const CapturedBatch& batch,
                        at::ArrayRef<double> weights, int64_t max_bytes) {
  const distributed::Communicator& ranks = batch.shared->ranks();
  const std::vector<at::Tensor> own = list_of(batch.calls, ranks.rank()).tensors;
  const std::vector<CallList>& lists = batch.lists->of_ranks;
  const Parts parts = parts_of(params, lists, K.size(0));
  const Assignment assignment =
      distributed::assign_parts(parts.costs, parts.bytes, ranks.size(), max_bytes);
  std::vector<Message> messages;
  std::vector<at::Tensor> sent;
  std::vector<std::vector<int64_t>> micro_batches;
  for (const CallList& list : lists) {
    micro_batches.push_back(list.samples());
    for (const auto i : c10::irange(list.messages.size())) {
      const size_t part = parts.of_params[list.layers[i]];
      messages.push_back(list.messages[i]);
      messages.back().to = assignment.owners[part];
      messages.back().round = assignment.rounds[part];
      sent.push_back(messages.back().from == ranks.rank() ? own[i] : at::Tensor());
    }
  }
  distributed::exchange_in_rounds(
      ranks, messages, assignment.round_count, sent, K.device(),
      [&](size_t /*round*/, const std::vector<at::Tensor>& tensors) {
        auto calls = arrived_calls(lists, tensors);
        if (std::ranges::any_of(calls, [](const auto& of_rank) { return !of_rank.empty(); })) {
          K.add_(part_of_gram(params, std::move(calls), micro_batches, weights));
        }
      });
}

// The same for rows that the caller has given, a part for each parameter.
void add_parts_of_rows(at::Tensor& K, at::TensorList params, const CapturedBatch& batch,
                       at::ArrayRef<double> weights, int64_t max_bytes) {
  const SharedRows& shared = *batch.shared;
  const double n = static_cast<double>(shared.total());
  std::vector<int64_t> costs, bytes;
  for (const at::Tensor& rows : batch.given_rows) {
    const int64_t elements = rows.numel() / rows.size(0);
    costs.push_back(cost_from(n * n * static_cast<double>(elements)));
    bytes.push_back(shared.total() * elements * static_cast<int64_t>(rows.itemsize()));
  }
  const Assignment assignment =
      distributed::assign_parts(costs, bytes, shared.ranks().size(), max_bytes);
  std::vector<Message> messages;
  std::vector<at::Tensor> sent;
  for (const auto rank : c10::irange(shared.ranks().size())) {
    for (const auto p : c10::irange(params.size())) {
      const at::Tensor& rows = batch.given_rows[p];
      auto sizes = rows.sizes().vec();
      sizes[0] = shared.counts()[rank];
      messages.push_back(
          {rank, assignment.owners[p], assignment.rounds[p], rows.scalar_type(), sizes});
      sent.push_back(rank == shared.ranks().rank() ? rows : at::Tensor());
    }
  }
  distributed::exchange_in_rounds(
      shared.ranks(), messages, assignment.round_count, sent, K.device(),
      [&](size_t round, const std::vector<at::Tensor>& tensors) {
        for (const auto p : c10::irange(params.size())) {
          if (assignment.owners[p] != shared.ranks().rank() || assignment.rounds[p] != round) {
            continue;
          }
          std::vector<at::Tensor> of_ranks;
          for (size_t i = p; i < tensors.size(); i += params.size()) {
            of_ranks.push_back(tensors[i]);
          }
          K.add_(Jacobian(params[p], at::cat(of_ranks)).gram(weights[p]));
        }
      });
}

}  // namespace

at::Tensor shared_gram(at::TensorList params, const CapturedBatch& batch,
                       at::ArrayRef<double> weights, int64_t max_bytes) {
  const int64_t n = batch.shared->total();
  at::Tensor K = at::zeros({n, n}, params[0].options().dtype(at::kDouble));
  if (!batch.given_rows.empty()) {
    add_parts_of_rows(K, params, batch, weights, max_bytes);
    batch.shared->ranks().all_reduce_sum_(K);
    return K;
  }
  add_parts_of_calls(K, params, batch, weights, max_bytes);
  batch.shared->ranks().all_reduce_sum_(K);
  at::Tensor scale = at::scalar_tensor(batch.scale, K.options());
  if (batch.loss_scale.defined()) {
    scale = scale / batch.loss_scale.to(K.options());
  }
  const at::Tensor scales = batch.shared->of_ranks(scale);
  return K.mul_(scales.unsqueeze(0)).mul_(scales.unsqueeze(1));
}

}  // namespace torchium::optim::detail
