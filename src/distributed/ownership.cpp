#include "distributed/ownership.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>

namespace torchium::distributed {
namespace {

// A root of order n takes about kRootProducts n^3 operations (docs/roots.md).
constexpr int64_t kRootProducts = 25;
// Element-wise work is bound by memory: operations that a GPU does in the time for one element.
constexpr int64_t kOperationsPerElement = 512;

// Ranks that hold the whole block.
std::vector<int64_t> holders(const Block& block, const std::vector<Source>& sources) {
  std::vector<int64_t> ranks;
  for (const Source& source : sources) {
    if (source.rectangle.contains(block.rectangle)) {
      ranks.push_back(source.rank);
    }
  }
  return ranks;
}

int64_t least_loaded(const std::vector<int64_t>& candidates, const std::vector<int64_t>& load) {
  return *std::ranges::min_element(candidates, [&](int64_t a, int64_t b) {
    return load[a] != load[b] ? load[a] < load[b] : a < b;
  });
}

}  // namespace

int64_t matrix_cost(const std::vector<int64_t>& sizes, int64_t frequency) {
  const int64_t elements = whole(sizes).numel();
  int64_t cost = elementwise_cost(elements);
  for (const int64_t n : sizes) {
    // n^2 numel / n for one triangle of a symmetric product, 2 n numel for R g.
    cost += 3 * n * elements;
    cost += kRootProducts * n * n * n / frequency;
  }
  return cost;
}

int64_t elementwise_cost(int64_t elements) { return kOperationsPerElement * elements; }

std::vector<int64_t> assign_owners(const std::vector<Block>& blocks,
                                   const std::vector<std::vector<Source>>& sources, int64_t ranks,
                                   std::vector<int64_t> load) {
  load.resize(ranks, 0);
  std::vector<int64_t> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::vector<int64_t>> candidates;
  for (const Block& block : blocks) {
    candidates.push_back(holders(block, sources[block.param]));
    if (candidates.back().empty()) {
      candidates.back() = all;
    }
  }
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  // Blocks without a choice come first: the others make up for them.
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    const bool a_is_fixed = candidates[a].size() == 1, b_is_fixed = candidates[b].size() == 1;
    return a_is_fixed != b_is_fixed ? a_is_fixed : blocks[a].cost > blocks[b].cost;
  });
  std::vector<int64_t> owners(blocks.size());
  for (const size_t b : order) {
    owners[b] = least_loaded(candidates[b], load);
    load[owners[b]] += blocks[b].cost;
  }
  return owners;
}

std::vector<Part> parts_of(const std::vector<Block>& blocks,
                           const std::vector<std::vector<Source>>& sources,
                           const std::vector<int64_t>& owners, int64_t ranks) {
  std::vector<Part> parts;
  std::vector<int64_t> sent(ranks, 0);
  for (size_t b = 0; b < blocks.size(); ++b) {
    const auto first = static_cast<std::ptrdiff_t>(parts.size());
    for (const Source& source : sources[blocks[b].param]) {
      const auto common = overlap(source.rectangle, blocks[b].rectangle);
      if (!common) {
        continue;
      }
      auto found = std::find_if(parts.begin() + first, parts.end(),
                                [&](const Part& part) { return part.rectangle == *common; });
      if (found == parts.end()) {
        parts.push_back({static_cast<int64_t>(b), *common, {}, 0});
        found = parts.end() - 1;
      }
      std::vector<int64_t> local = source.local;
      for (size_t d = 0; d < local.size(); ++d) {
        local[d] += common->offsets[d] - source.rectangle.offsets[d];
      }
      found->holders.push_back({source.rank, std::move(local)});
    }
    for (auto part = parts.begin() + first; part != parts.end(); ++part) {
      std::vector<int64_t> holders;
      std::ranges::transform(part->holders, std::back_inserter(holders), &Part::Holder::rank);
      part->source = owners[b];
      if (std::ranges::find(holders, owners[b]) == holders.end()) {
        part->source = least_loaded(holders, sent);
        sent[part->source] += part->rectangle.numel();
      }
    }
  }
  return parts;
}

const std::vector<int64_t>& Part::local_on(int64_t rank) const {
  return std::ranges::lower_bound(holders, rank, {}, &Holder::rank)->local;
}

}  // namespace torchium::distributed
