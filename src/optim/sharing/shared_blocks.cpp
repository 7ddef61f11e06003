#include "optim/sharing/shared_blocks.h"

#include "optim/core/state_checks.h"
#include "optim/core/step_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

// Smaller ranges cost more launches than they balance.
constexpr int64_t kSmallestRange = int64_t{1} << 16;
constexpr int64_t kRangesPerRank = 2;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool same_cut(const SharedBlocks& a, const SharedBlocks& b) {
  return a.dims == b.dims &&
         std::ranges::equal(a.blocks, b.blocks, {}, &distributed::Block::rectangle,
                            &distributed::Block::rectangle);
}

}  // namespace

SharedBlocks BlockOwners::cut(const BlockedGroup& group, const at::Tensor& param) const {
  const Blocking blocking = rules_.blocking(*group.options, param.sizes());
  SharedBlocks result{param, blocking.dims, blocking.shapes, {}, {}, {}};
  if (blocking.shapes.empty()) {
    const int64_t elements = param.numel();
    const size_t kind = rules_.kind(*group.options, param.sizes());
    const int64_t range =
        round_up(std::max(kSmallestRange,
                          (elements + kRangesPerRank * ranks_ - 1) / (kRangesPerRank * ranks_)),
                 std::min(rules_.unit(*group.options, kind), std::max<int64_t>(elements, 1)));
    result.dims = {elements};
    for (int64_t begin = 0; begin < elements; begin += range) {
      const int64_t length = std::min(range, elements - begin);
      result.blocks.push_back({0, {{begin}, {length}}, -1, distributed::elementwise_cost(length)});
      result.matrices.push_back(0);
    }
    return result;
  }
  int64_t slot = 0;
  for (const BlockShape& shape : blocking.shapes) {
    const int64_t cost =
        distributed::matrix_cost(shape.sizes, rules_.root_interval(*group.options));
    for (int64_t i = 0; i < shape.count(); ++i) {
      distributed::Rectangle rectangle{shape.offsets, shape.sizes};
      int64_t rest = i;  // row-major in the grid
      for (size_t d = shape.counts.size(); d-- > 0;) {
        rectangle.offsets[d] += rest % shape.counts[d] * shape.sizes[d];
        rest /= shape.counts[d];
      }
      result.blocks.push_back({0, std::move(rectangle), slot, cost});
      result.matrices.push_back(i);
    }
    slot += static_cast<int64_t>(shape.sizes.size());
  }
  return result;
}

const SharedBlocks* BlockOwners::find(const at::Tensor& param) const {
  const auto found = of_.find(param.unsafeGetTensorImpl());
  return found == of_.end() ? nullptr : &found->second;
}

void BlockOwners::share_out(const std::vector<BlockedGroup>& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<SharedBlocks> cuts;
    std::vector<distributed::Block> blocks;
    std::vector<std::vector<distributed::Source>> sources;
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const bool has_state = !groups[g].states[i].is_empty();
      if (!param.requires_grad() && !gradient_of(param).defined() && !has_state) {
        continue;
      }
      SharedBlocks own = cut(groups[g], param);
      if (const SharedBlocks* before = find(param)) {
        if (same_cut(*before, own)) {
          continue;
        }
        TORCH_CHECK_VALUE(
            !has_state, "the state of ",
            parameter_name(g, i, groups[g].names.empty() ? "" : groups[g].names[i], param),
            " was made for other blocks; set block_size, merge_dims, preconditioner_1d, "
            "preconditioned and max_preconditioned_dim back, or delete its entry in the state of "
            "the optimizer to start afresh");
      }
      for (distributed::Block& block : own.blocks) {
        block.param = static_cast<int64_t>(cuts.size());
      }
      blocks.insert(blocks.end(), own.blocks.begin(), own.blocks.end());
      // Replicated: every rank has all elements.
      sources.push_back(
          distributed::sources(own.dims, {{ranks_}, {{distributed::Placement::Kind::kReplicate}}}));
      cuts.push_back(std::move(own));
    }
    const auto owners = distributed::assign_owners(blocks, sources, ranks_, load_);
    load_.resize(ranks_, 0);
    auto owner = owners.begin();
    for (SharedBlocks& own : cuts) {
      for (const distributed::Block& block : own.blocks) {
        load_[*owner] += block.cost;
        own.owners.push_back(*owner++);
      }
      const at::TensorImpl* key = own.param.unsafeGetTensorImpl();
      of_.insert_or_assign(key, std::move(own));
    }
  }
}

at::Tensor block_of(const at::Tensor& tensor, const SharedBlocks& of, size_t block) {
  const distributed::Rectangle& rectangle = of.blocks[block].rectangle;
  at::Tensor view = tensor.view(of.dims);
  for (size_t d = 0; d < of.dims.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    view = view.narrow(dim, rectangle.offsets[d], rectangle.sizes[d]);
  }
  return view;
}

}  // namespace torchium::optim::detail
