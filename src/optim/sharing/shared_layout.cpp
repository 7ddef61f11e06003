// The memory of SharedPlans: what this rank computes, sends and receives in a step.
#include "distributed/buffer_layout.h"
#include "optim/sharing/cuda/block_moves.h"
#include "optim/sharing/shared_plans.h"
#include "optim/sharing/shared_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Parameters, the memory of their updates, and the blocks of this rank.
void SharedPlans::lay_out(const std::vector<BlockedGroup>& groups) {
  // Blocks stay the same tensors, by which blocks_ knows what their states were made for.
  Tensors before;
  for (const Parameter& p : parameters_) {
    for (const OwnBlock& own : p.own) {
      before[{p.param.tensor().unsafeGetTensorImpl(), own.block}] = own.tensor;
    }
  }
  options_.clear();
  plans_of_groups_.clear();
  parameters_.clear();
  names_.clear();
  exchanges_.clear();
  for (size_t g = 0; g < groups.size(); ++g) {
    options_.push_back(groups[g].options);
    const auto& params = groups[g].params;
    plans_of_groups_.push_back(plan_of(groups[g], params.empty() ? device_ : params[0].device()));
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const SharedBlocks* shared = owners_.find(param);
      const at::Tensor whole = groups[g].whole(i);
      device_ = param.device();
      names_.push_back(groups[g].name_of(g, i));
      parameters_.push_back({.group = g,
                             .index = i,
                             .param = SeenTensor(param),
                             .state = {},
                             .tensors = {},
                             .shared = shared,
                             .kind = rules_->kind(*groups[g].options, whole.sizes()),
                             .own = {}});
      for (size_t b = 0; shared != nullptr && b < shared->blocks.size(); ++b) {
        Exchange& exchange = exchanges_[state_dtype(param)];
        const size_t p = parameters_.size() - 1;
        if (gathers(*shared, b)) {
          exchange.gathered_places.push_back({p, b});
        } else {
          add_parts(exchange, p, b);
        }
      }
    }
  }
  find_local();
  for (auto& [dtype, exchange] : exchanges_) {
    assign_stages(dtype, exchange.gathered_places);
    allocate(dtype, exchange, before);
    lay_out_updates(exchange);
    lay_out_own_directions(dtype, exchange);
  }
  lay_out_sent();
  if (!stream_ || stream_->device() != device_) {
    stream_.emplace(device_);
  }
}

// The share of the elements of matrices at which each of their stages but the first begins. Later
// ones are smaller, so that little has still to travel when all are computed.
constexpr double kStageBegins[] = {0.4, 0.7, 0.9};

// Blocks without matrices come first. If those with matrices fill a bucket, each owner's are cut
// into stages. Those of one parameter stay together: their matrices are neighbours in its state.
void SharedPlans::assign_stages(at::ScalarType dtype, std::vector<Place>& places) const {
  struct Owned {
    int64_t elements = 0;  // with matrices
    int64_t before = 0;    // of these, in the parameters so far
    std::optional<size_t> parameter = {};
    size_t stage = 0;
  };
  std::vector<Owned> owned(ranks_.size());
  const auto owned_with = [&](const Place& place) -> Owned& {
    return owned[parameters_[place.parameter].shared->owners[place.block]];
  };
  const auto block_of = [&](const Place& place) -> const distributed::Block& {
    return parameters_[place.parameter].shared->blocks[place.block];
  };
  int64_t bytes = 0;
  for (const Place& place : places) {
    if (block_of(place).slot >= 0) {
      const int64_t elements = block_of(place).rectangle.numel();
      owned_with(place).elements += elements;
      bytes += elements * static_cast<int64_t>(c10::elementSize(dtype));
    }
  }
  const bool is_one_stage = bytes < sharing_.bucket_bytes;
  for (Place& place : places) {
    if (is_one_stage || block_of(place).slot < 0) {
      continue;
    }
    Owned& of_owner = owned_with(place);
    if (of_owner.parameter != place.parameter) {
      of_owner.parameter = place.parameter;
      const double share =
          static_cast<double>(of_owner.before) / static_cast<double>(of_owner.elements);
      of_owner.stage =
          1 + std::ranges::count_if(kStageBegins, [&](double b) { return share >= b; });
    }
    place.stage = of_owner.stage;
    of_owner.before += block_of(place).rectangle.numel();
  }
  std::ranges::stable_sort(places, {}, &Place::stage);
}

// Whether every rank has all elements of a block.
bool SharedPlans::gathers(const SharedBlocks& shared, size_t block) const {
  const auto& parts = shared.parts[block];
  return parts.size() == 1 && static_cast<int64_t>(parts[0].holders.size()) == ranks_.size();
}

void SharedPlans::add_parts(Exchange& exchange, size_t parameter, size_t block) const {
  const SharedBlocks& shared = *parameters_[parameter].shared;
  for (size_t i = 0; i < shared.parts[block].size(); ++i) {
    const distributed::Part& part = shared.parts[block][i];
    const int64_t owner = shared.owners[block];
    if (part.source != owner) {
      exchange.gradient_places.push_back({parameter, block, i, part.source, owner});
    }
    for (const auto& holder : part.holders) {
      if (holder.rank != owner) {
        exchange.update_places.push_back({parameter, block, i, owner, holder.rank});
      }
    }
  }
}

void SharedPlans::allocate(at::ScalarType dtype, Exchange& exchange, const Tensors& before) {
  const at::ScalarType comm_dtype = dtype == at::kDouble ? dtype : sharing_.comm_dtype;
  std::vector<distributed::UpdateExchange::Part> gathered;
  for (const Place& place : exchange.gathered_places) {
    const SharedBlocks& shared = *parameters_[place.parameter].shared;
    gathered.push_back(
        {shared.owners[place.block], shared.blocks[place.block].rectangle.numel(), place.stage});
  }
  exchange.gathered = std::make_unique<distributed::UpdateExchange>(
      ranks_, gathered, dtype, comm_dtype, sharing_.bucket_bytes, device_, /*shares_memory=*/true);
  for (size_t k = 0; k < gathered.size(); ++k) {
    if (gathered[k].owner == ranks_.rank()) {
      add_own_block(exchange.gathered_places[k], exchange.gathered->own(k), before);
    }
  }
  const auto exchange_of = [&](const std::vector<PartPlace>& places, at::ScalarType travels_in) {
    std::vector<distributed::PartExchange::Transfer> transfers;
    for (const PartPlace& place : places) {
      transfers.push_back({place.from, place.to, part_at(place).rectangle.numel()});
    }
    return std::make_unique<distributed::PartExchange>(ranks_, transfers, dtype, travels_in,
                                                       sharing_.bucket_bytes, device_);
  };
  exchange.gradients = exchange_of(exchange.gradient_places, dtype);
  exchange.updates = exchange_of(exchange.update_places, comm_dtype);
  allocate_directions(dtype, exchange, before);
}

// One buffer for the directions of the own blocks that are not gathered. Those of local blocks are
// neither written nor read: all begin where the buffer does.
void SharedPlans::allocate_directions(at::ScalarType dtype, Exchange& exchange,
                                      const Tensors& before) {
  struct Range {
    Place place;
    int64_t begin, elements;
  };
  std::vector<Range> ranges;
  int64_t total = 0, unwritten = 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const SharedBlocks* shared = parameters_[p].shared;
    if (shared == nullptr || state_dtype(shared->param) != dtype) {
      continue;
    }
    for (size_t b = 0; b < shared->blocks.size(); ++b) {
      if (shared->owners[b] == ranks_.rank() && !gathers(*shared, b)) {
        const int64_t elements = shared->blocks[b].rectangle.numel();
        if (parameters_[p].is_local) {
          ranges.push_back({{p, b}, 0, elements});
          unwritten = std::max(unwritten, elements);
        } else {
          ranges.push_back({{p, b}, total, elements});
          total += distributed::aligned(elements);
        }
      }
    }
  }
  exchange.directions =
      at::zeros({std::max(total, unwritten)}, at::TensorOptions(device_).dtype(dtype));
  for (const auto& [place, begin, elements] : ranges) {
    add_own_block(place, exchange.directions.narrow(0, begin, elements), before);
  }
}

void SharedPlans::add_own_block(const Place& place, const at::Tensor& memory,
                                const Tensors& before) {
  Parameter& p = parameters_[place.parameter];
  at::Tensor tensor = memory.view(p.shared->blocks[place.block].rectangle.sizes);
  const auto found = before.find({p.param.tensor().unsafeGetTensorImpl(), place.block});
  if (found != before.end() && found->second.device() == device_) {
    found->second.mutable_grad().reset();
    found->second.set_data(tensor);
    tensor = found->second;
  }
  p.own.push_back({place.block, tensor, p.is_local ? tensor.detach() : at::zeros_like(tensor)});
  p.stage = place.stage;
}

SharedPlans::OwnBlock& SharedPlans::own_block(size_t parameter, size_t block) {
  auto& own = parameters_[parameter].own;
  return *std::ranges::find(own, block, &OwnBlock::block);
}

const distributed::Part& SharedPlans::part_at(const PartPlace& place) const {
  return parameters_[place.parameter].shared->parts[place.block][place.part];
}

SharedPlans::Target SharedPlans::target_of(size_t parameter, const distributed::Part& part) const {
  return {parameter, &part, rows_of_part(parameters_[parameter], part)};
}

// What this rank receives and sends.
void SharedPlans::lay_out_updates(Exchange& exchange) {
  const int64_t rank = ranks_.rank();
  const auto part_of_own = [&](const PartPlace& place, at::Tensor OwnBlock::*tensor) {
    return part_of_block(own_block(place.parameter, place.block).*tensor,
                         parameters_[place.parameter].shared->blocks[place.block], part_at(place));
  };
  for (const Place& place : exchange.gathered_places) {
    const SharedBlocks& shared = *parameters_[place.parameter].shared;
    exchange.gathered_targets.push_back(target_of(place.parameter, shared.parts[place.block][0]));
  }
  for (const PartPlace& place : exchange.gradient_places) {
    exchange.gradient_targets.push_back(place.to == rank ? part_of_own(place, &OwnBlock::gradient)
                                                         : at::Tensor());
  }
  for (size_t t = 0; t < exchange.update_places.size(); ++t) {
    const PartPlace& place = exchange.update_places[t];
    exchange.update_targets.push_back(place.to == rank ? target_of(place.parameter, part_at(place))
                                                       : Target());
    if (place.from == rank) {
      exchange.sent_directions.push_back(
          {place.parameter, exchange.updates->outgoing(t).view(part_at(place).rectangle.sizes),
           part_of_own(place, &OwnBlock::tensor)});
    }
  }
}

// The directions of own blocks for this rank's own elements.
void SharedPlans::lay_out_own_directions(at::ScalarType dtype, Exchange& exchange) {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    const Parameter& p = parameters_[index];
    if (p.shared == nullptr || p.is_local || state_dtype(p.param.tensor()) != dtype) {
      continue;
    }
    for (const OwnBlock& own : p.own) {
      if (gathers(*p.shared, own.block)) {
        continue;
      }
      const distributed::Block& block = p.shared->blocks[own.block];
      for (const distributed::Part& part : p.shared->parts[own.block]) {
        if (part.source == ranks_.rank()) {  // the owner is the source where it holds the part
          exchange.own_directions.push_back(
              {target_of(index, part), part_of_block(own.tensor, block, part)});
        }
      }
    }
  }
}

// On a GPU, the steps of blocks that this rank alone holds wait for the agreement of the ranks and
// then update the parameters themselves: their directions are neither written nor read again, and
// their gradients are read where they are. That saves nothing where they fill less than a bucket.
void SharedPlans::find_local() {
  int64_t bytes = 0;
  for (Parameter& p : parameters_) {
    p.is_local = has_local_blocks(p);
    if (p.is_local) {  // of float32 directions
      bytes += p.param.tensor().numel() * static_cast<int64_t>(sizeof(float));
    }
  }
  for (Parameter& p : parameters_) {
    p.is_local = p.is_local && bytes >= sharing_.bucket_bytes;
  }
}

bool SharedPlans::has_local_blocks(const Parameter& p) const {
  const at::Tensor& param = p.param.tensor();
  if (p.shared == nullptr || !param.is_cuda() || !param.is_contiguous() ||
      state_dtype(param) != at::kFloat || sharing_.comm_dtype != at::kFloat) {
    return false;
  }
  const auto blocks = blocks_of(*p.shared, ranks_.rank());
  return !blocks.empty() && std::ranges::all_of(blocks, [&](size_t b) {
    const auto& parts = p.shared->parts[b];
    return !gathers(*p.shared, b) && parts.size() == 1 && parts[0].holders.size() == 1 &&
           parts[0].holders[0].rank == ranks_.rank() && lies_in_rows(p, b) &&
           rules_->updates_in_place(p.kind, p.shared->blocks[b].rectangle.sizes);
  });
}

// Whether a block that is a part of this rank's tensor lies there in one piece, or with matrices in
// its rows.
bool SharedPlans::lies_in_rows(const Parameter& p, size_t block) const {
  const auto rows = rows_of_part(p, p.shared->parts[block][0]);
  const distributed::Block& its = p.shared->blocks[block];
  const auto& sizes = its.rectangle.sizes;
  return rows && (rows->columns == its.rectangle.numel() ||
                  (its.slot >= 0 && sizes.size() == 2 && rows->columns == sizes[1]));
}

BlockUpdate SharedPlans::update_of(const Parameter& p, const OwnBlock& own) const {
  if (p.is_local) {
    const distributed::Part& part = p.shared->parts[own.block][0];
    return {0, p.param.tensor().detach(), *rows_of_part(p, part)};
  }
  return {p.stage == 0 ? 0 : p.stage - 1};
}

// In one piece, or where the step updates the parameter at once, by rows: lies_in_rows().
std::vector<int64_t> SharedPlans::strides_in_place(const Parameter& p, const Sent& sent) const {
  const at::Tensor& block = sent.block->tensor;
  if (sent.rows && sent.rows->columns == block.numel()) {
    return block.strides().vec();
  }
  return p.is_local ? std::vector<int64_t>{sent.rows->stride, 1} : std::vector<int64_t>();
}

// The gradients that this rank gives, in the order of the parameters.
void SharedPlans::lay_out_sent() {
  std::map<std::pair<const distributed::Part*, int64_t>, at::Tensor> outgoing;
  for (const auto& [dtype, exchange] : exchanges_) {
    for (size_t t = 0; t < exchange.gradient_places.size(); ++t) {
      const PartPlace& place = exchange.gradient_places[t];
      outgoing[{&part_at(place), place.to}] = exchange.gradients->outgoing(t);
    }
  }
  sent_.clear();
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const SharedBlocks* shared = parameters_[p].shared;
    for (size_t b = 0; shared != nullptr && b < shared->blocks.size(); ++b) {
      for (const distributed::Part& part : shared->parts[b]) {
        if (part.source != ranks_.rank()) {
          continue;
        }
        Sent sent{.parameter = p,
                  .part = &part,
                  .rows = rows_of_part(parameters_[p], part),
                  .memory = {}};
        const auto& sizes = part.rectangle.sizes;
        if (shared->owners[b] != ranks_.rank()) {
          sent.memory = outgoing.at({&part, shared->owners[b]}).view(sizes);
        } else if (OwnBlock& own = own_block(p, b); part.rectangle == shared->blocks[b].rectangle) {
          if (!parameters_[p].is_local) {
            sent.memory = own.gradient;
          }
          sent.block = &own;
          sent.strides = strides_in_place(parameters_[p], sent);
        } else {
          sent.memory = at::zeros(sizes, own.gradient.options());
          sent.target = part_of_block(own.gradient, shared->blocks[b], part);
        }
        sent_.push_back(std::move(sent));
      }
    }
  }
}

}  // namespace torchium::optim::detail
