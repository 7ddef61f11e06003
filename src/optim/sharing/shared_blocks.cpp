#include "optim/sharing/shared_blocks.h"

#include "optim/core/step_plan.h"

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <span>
#include <utility>

namespace torchium::optim::detail {
namespace {

// Smaller ranges cost more launches than they balance.
constexpr int64_t kSmallestRange = int64_t{1} << 16;
constexpr int64_t kRangesPerRank = 2;

bool same_cut(const SharedBlocks& a, const SharedBlocks& b) {
  return a.dims == b.dims && a.sharding == b.sharding &&
         std::ranges::equal(a.blocks, b.blocks, {}, &distributed::Block::rectangle,
                            &distributed::Block::rectangle);
}

at::Tensor rectangle_of(at::Tensor tensor, const std::vector<int64_t>& offsets,
                        const std::vector<int64_t>& sizes) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    tensor = tensor.narrow(static_cast<int64_t>(d), offsets[d], sizes[d]);
  }
  return tensor;
}

// A range of a flat parameter, and how many ranks hold it whole.
struct Range {
  int64_t begin, length, holders;
};

// The ranges between the shards that begin at multiples of `unit`.
std::vector<Range> ranges_of(const std::vector<distributed::Source>& sources, int64_t elements,
                             int64_t unit) {
  std::vector<int64_t> ends;
  for (const distributed::Source& source : sources) {
    if (const int64_t begin = source.rectangle.offsets[0]; begin > 0 && begin % unit == 0) {
      ends.push_back(begin);
    }
  }
  ends.push_back(elements);
  std::ranges::sort(ends);
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    if (end > begin) {
      const auto holders = std::ranges::count_if(sources, [&](const distributed::Source& source) {
        return source.rectangle.contains({{begin}, {end - begin}});
      });
      ranges.push_back({begin, end - begin, holders});
    }
    begin = end;
  }
  return ranges;
}

}  // namespace

SharedBlocks BlockOwners::cut(const BlockedGroup& group, size_t i) const {
  SharedBlocks result;
  result.param = group.params[i];
  result.whole = group.whole(i);
  const distributed::ShardedShape* sharded = group.sharded_shape(i);
  result.sharding =
      sharded != nullptr
          ? sharded->sharding
          : distributed::Sharding{{ranks_}, {{distributed::Placement::Kind::kReplicate}}};
  const at::IntArrayRef shape = result.whole.sizes();
  Blocking blocking = rules_.blocking(*group.options, shape);
  result.dims = std::move(blocking.dims);
  result.shapes = std::move(blocking.shapes);
  if (result.shapes.empty()) {
    cut_elements(result, rules_.unit(*group.options, rules_.kind(*group.options, shape)));
  } else {
    cut_matrices(result, rules_.root_interval(*group.options));
  }
  result.local_dims = distributed::local_sizes(shape.vec(), result.sharding, rank_, result.dims);
  return result;
}

// Each block lies in one shard, unless shards begin between multiples of `unit`.
void BlockOwners::cut_elements(SharedBlocks& result, int64_t unit) const {
  const std::vector<int64_t> shape = result.whole.sizes().vec();
  const int64_t elements = result.whole.numel();
  const auto add = [&](distributed::Rectangle rectangle) {
    const int64_t cost = distributed::elementwise_cost(rectangle.numel());
    result.blocks.push_back({0, std::move(rectangle), -1, cost});
    result.matrices.push_back(0);
  };
  result.dims = {elements};
  auto sources = distributed::sources(shape, result.sharding, result.dims);
  auto in_shape = distributed::sources(shape, result.sharding);
  if (in_shape.size() < sources.size()) {  // a shard of columns is many ranges
    if (unit == 0) {
      result.dims = shape;
      for (distributed::Source& source : in_shape) {
        if (std::ranges::find(result.blocks, source.rectangle, &distributed::Block::rectangle) ==
            result.blocks.end()) {
          add(std::move(source.rectangle));
        }
      }
      return;
    }
    sources.clear();
  }
  for (const auto& [first, length, holders] :
       ranges_of(sources, elements, std::max<int64_t>(unit, 1))) {
    const int64_t pieces = kRangesPerRank * (holders > 0 ? holders : ranks_);
    const int64_t range =
        at::round_up<int64_t>(std::max(kSmallestRange, (length + pieces - 1) / pieces),
                              std::clamp<int64_t>(unit, 1, length));
    for (int64_t at = 0; at < length; at += range) {
      add({{first + at}, {std::min(range, length - at)}});
    }
  }
}

void BlockOwners::cut_matrices(SharedBlocks& result, int64_t root_interval) const {
  int64_t slot = 0;
  for (const BlockShape& shape : result.shapes) {
    const int64_t cost = distributed::matrix_cost(shape.sizes, root_interval);
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
}

void refuse_other_blocks(const std::string& name) {
  TORCH_CHECK_VALUE(false, "the state of ", name,
                    " was made for other blocks; set block_size, merge_dims, target_order, "
                    "preconditioner_1d, preconditioned and max_preconditioned_dim back, or delete "
                    "its entry in the state of the optimizer to start afresh");
}

const SharedBlocks* BlockOwners::find(const at::Tensor& param) const {
  const auto found = of_.find(param.unsafeGetTensorImpl());
  return found == of_.end() ? nullptr : &found->second;
}

const std::vector<int64_t>* BlockOwners::given_to(const at::Tensor& param) const {
  const auto found =
      std::ranges::find_if(given_, [&](const auto& each) { return each.first.is_same(param); });
  return found == given_.end() ? nullptr : &found->second;
}

// The parameters without owners that may be stepped.
std::vector<SharedBlocks> BlockOwners::new_cuts(const BlockedGroup& group, size_t g) const {
  std::vector<SharedBlocks> cuts;
  for (size_t i = 0; i < group.params.size(); ++i) {
    const at::Tensor& param = group.params[i];
    const bool has_state = !group.states[i].is_empty();
    if (!param.requires_grad() && !gradient_of(param).defined() && !has_state) {
      continue;
    }
    SharedBlocks own = cut(group, i);
    if (const SharedBlocks* before = find(param)) {
      if (same_cut(*before, own)) {
        continue;
      }
      if (has_state) {
        refuse_other_blocks(group.name_of(g, i));
      }
    } else if (const auto* given = given_to(param);
               has_state && given != nullptr && given->size() != own.blocks.size()) {
      refuse_other_blocks(group.name_of(g, i));
    }
    cuts.push_back(std::move(own));
  }
  return cuts;
}

void BlockOwners::give(const at::Tensor& param, std::vector<int64_t> owners) {
  given_.emplace_back(param, std::move(owners));
}

std::vector<int64_t> BlockOwners::owners(const at::Tensor& param) const {
  if (const SharedBlocks* shared = find(param)) {
    return shared->owners;
  }
  const auto given =
      std::ranges::find_if(given_, [&](const auto& each) { return each.first.is_same(param); });
  return given == given_.end() ? std::vector<int64_t>() : given->second;
}

// Cuts with given owners come first. Returns their number.
size_t BlockOwners::take_given_owners(std::vector<SharedBlocks>& cuts) {
  for (SharedBlocks& own : cuts) {
    const auto given = std::ranges::find_if(
        given_, [&](const auto& each) { return each.first.is_same(own.param); });
    if (given == given_.end()) {
      continue;
    }
    if (given->second.size() == own.blocks.size() &&
        std::ranges::all_of(given->second, [&](int64_t rank) { return rank < ranks_; })) {
      own.owners = std::move(given->second);
    }
    given_.erase(given);
  }
  const auto rest = std::ranges::stable_partition(cuts, [](const SharedBlocks& own) {
    return !own.owners.empty() || own.blocks.empty();  // no elements: nothing to own
  });
  return cuts.size() - rest.size();
}

BlockOwners::Plan BlockOwners::plan_of(std::span<const SharedBlocks> cuts) {
  Plan plan;
  for (const SharedBlocks& own : cuts) {
    for (distributed::Block block : own.blocks) {
      block.param = static_cast<int64_t>(plan.sources.size());
      plan.blocks.push_back(std::move(block));
    }
    plan.sources.push_back(distributed::sources(own.whole.sizes().vec(), own.sharding, own.dims));
  }
  return plan;
}

void BlockOwners::choose_owners(std::span<SharedBlocks> cuts) const {
  const Plan plan = plan_of(cuts);
  const auto owners = distributed::assign_owners(plan.blocks, plan.sources, ranks_, load_);
  auto next = owners.begin();
  for (SharedBlocks& own : cuts) {
    const auto end = next + static_cast<std::ptrdiff_t>(own.blocks.size());
    own.owners.assign(std::exchange(next, end), end);
  }
}

void BlockOwners::add(std::span<SharedBlocks> cuts) {
  const Plan plan = plan_of(cuts);
  std::vector<int64_t> owners;
  for (const SharedBlocks& own : cuts) {
    owners.insert(owners.end(), own.owners.begin(), own.owners.end());
  }
  load_.resize(ranks_, 0);
  for (size_t b = 0; b < owners.size(); ++b) {
    load_[owners[b]] += plan.blocks[b].cost;
  }
  auto parts = distributed::parts_of(plan.blocks, plan.sources, owners, ranks_);
  auto next = parts.begin();
  int64_t b = 0;
  for (SharedBlocks& own : cuts) {
    for (size_t i = 0; i < own.blocks.size(); ++i, ++b) {
      own.parts.emplace_back();
      for (; next != parts.end() && next->block == b; ++next) {
        own.parts.back().push_back(std::move(*next));
      }
    }
    const at::TensorImpl* key = own.param.unsafeGetTensorImpl();
    of_.insert_or_assign(key, std::move(own));
  }
}

void BlockOwners::share_out(const std::vector<BlockedGroup>& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<SharedBlocks> cuts = new_cuts(groups[g], g);
    const size_t given = take_given_owners(cuts);
    add(std::span(cuts).first(given));
    choose_owners(std::span(cuts).subspan(given));
    add(std::span(cuts).subspan(given));
  }
}

void BlockOwners::share_out_given(const BlockedGroup& group, size_t g) {
  std::vector<SharedBlocks> cuts = new_cuts(group, g);
  if (!given_.empty()) {
    add(std::span(cuts).first(take_given_owners(cuts)));
  }
}

// From the last dimension on, dimensions that the rectangle spans are one with those before them.
std::optional<ElementRows> rows_of(const std::vector<int64_t>& dims,
                                   const std::vector<int64_t>& offsets,
                                   const std::vector<int64_t>& sizes) {
  ElementRows rows{0, 0, 1};
  int64_t stride = 1, count = 1;  // of a dimension, and of the rows so far
  for (size_t d = dims.size(); d-- > 0; stride *= dims[d]) {
    rows.offset += offsets[d] * stride;
    if (sizes[d] == 1) {
      continue;
    }
    if (stride == rows.columns && count == 1) {
      rows.columns *= sizes[d];
    } else if (count == 1 || stride == rows.stride * count) {
      rows.stride = count == 1 ? stride : rows.stride;
      count *= sizes[d];
    } else {
      return std::nullopt;
    }
  }
  return rows;
}

at::Tensor block_of(const at::Tensor& tensor, const SharedBlocks& of, size_t block) {
  const auto& [offsets, sizes] = of.blocks[block].rectangle;
  return rectangle_of(tensor.view(of.dims), offsets, sizes);
}

at::Tensor part_of_block(const at::Tensor& values, const distributed::Block& block,
                         const distributed::Part& part) {
  std::vector<int64_t> offsets = part.rectangle.offsets;
  for (size_t d = 0; d < offsets.size(); ++d) {
    offsets[d] -= block.rectangle.offsets[d];
  }
  return rectangle_of(values, offsets, part.rectangle.sizes);
}

at::Tensor part_of_shard(const at::Tensor& tensor, const SharedBlocks& of,
                         const distributed::Part& part, const std::vector<int64_t>& local) {
  return rectangle_of(tensor.view(of.local_dims), local, part.rectangle.sizes);
}

}  // namespace torchium::optim::detail
