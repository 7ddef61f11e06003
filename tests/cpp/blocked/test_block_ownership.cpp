// The plan of work for several ranks, without processes: owners, sources and routes.
#include "distributed/ownership.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace torchium::testing::block_ownership {
namespace {

using namespace distributed;
using BlockShape = std::vector<int64_t>;
using Kind = Placement::Kind;

const Placement kReplicate{};
Placement shard(int64_t dim) { return {Kind::kShard, dim, 1}; }
Placement strided(int64_t dim, int64_t factor) { return {Kind::kStridedShard, dim, factor}; }

// Blocks of 2-dim parameters, each dimension cut at multiples of `size`.
std::vector<Block> blocks_of(const std::vector<BlockShape>& shapes, int64_t size,
                             int64_t frequency) {
  std::vector<Block> blocks;
  for (size_t p = 0; p < shapes.size(); ++p) {
    for (int64_t i = 0; i < shapes[p][0]; i += size) {
      for (int64_t j = 0; j < shapes[p][1]; j += size) {
        const BlockShape sizes{std::min(size, shapes[p][0] - i), std::min(size, shapes[p][1] - j)};
        blocks.push_back(
            {static_cast<int64_t>(p), {{i, j}, sizes}, 0, matrix_cost(sizes, frequency)});
      }
    }
  }
  return blocks;
}

std::vector<std::vector<Source>> sources_of(const std::vector<BlockShape>& shapes,
                                            const Sharding& sharding) {
  std::vector<std::vector<Source>> all;
  for (const BlockShape& shape : shapes) {
    all.push_back(sources(shape, sharding));
  }
  return all;
}

std::vector<int64_t> loads(const std::vector<Block>& blocks, const std::vector<int64_t>& owners,
                           int64_t ranks) {
  std::vector<int64_t> load(ranks, 0);
  for (size_t b = 0; b < blocks.size(); ++b) {
    load[owners[b]] += blocks[b].cost;
  }
  return load;
}

// Largest work of a rank, divided by the mean.
double imbalance(const std::vector<Block>& blocks, const std::vector<int64_t>& owners,
                 int64_t ranks) {
  const std::vector<int64_t> load = loads(blocks, owners, ranks);
  const auto total = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0}));
  return total == 0.0
             ? 1.0
             : static_cast<double>(std::ranges::max(load)) * static_cast<double>(ranks) / total;
}

// Bytes of gradients that each rank sends.
std::vector<int64_t> gradient_bytes(const std::vector<Part>& parts,
                                    const std::vector<int64_t>& owners, int64_t ranks,
                                    int64_t bytes_per_element) {
  std::vector<int64_t> bytes(ranks, 0);
  for (const Part& part : parts) {
    if (part.source != owners[part.block]) {
      bytes[part.source] += part.rectangle.numel() * bytes_per_element;
    }
  }
  return bytes;
}

// Bytes of updates that leave each rank's blocks for the ranks that hold their elements, counted
// once per receiver.
std::vector<int64_t> update_bytes(const std::vector<Part>& parts,
                                  const std::vector<int64_t>& owners, int64_t ranks,
                                  int64_t bytes_per_element) {
  std::vector<int64_t> bytes(ranks, 0);
  for (const Part& part : parts) {
    const int64_t owner = owners[part.block];
    const auto receivers = std::ranges::count_if(
        part.holders, [&](const Part::Holder& holder) { return holder.rank != owner; });
    bytes[owner] += receivers * part.rectangle.numel() * bytes_per_element;
  }
  return bytes;
}

// Weights of a decoder with 24 layers, 302 million elements: q, k, v, o, up, down.
std::vector<BlockShape> decoder() {
  std::vector<BlockShape> shapes;
  for (int layer = 0; layer < 24; ++layer) {
    for (const BlockShape& shape : {BlockShape{1024, 1024},
                                    {1024, 1024},
                                    {1024, 1024},
                                    {1024, 1024},
                                    {4096, 1024},
                                    {1024, 4096}}) {
      shapes.push_back(shape);
    }
  }
  return shapes;
}

// How often each element of a tensor is in one of the rectangles.
std::map<BlockShape, int> coverage(const BlockShape& shape,
                                   const std::vector<Rectangle>& rectangles) {
  std::map<BlockShape, int> count;
  for (const Rectangle& rectangle : rectangles) {
    for (int64_t i = 0; i < rectangle.sizes[0]; ++i) {
      for (int64_t j = 0; j < rectangle.sizes[1]; ++j) {
        ++count[{rectangle.offsets[0] + i, rectangle.offsets[1] + j}];
      }
    }
  }
  EXPECT_EQ(static_cast<int64_t>(count.size()), shape[0] * shape[1]);
  return count;
}

// Whether the rank's tensor has the rectangle at this place.
bool holds(const std::vector<Source>& all, const Part::Holder& holder, const Rectangle& part) {
  return std::ranges::any_of(all, [&](const Source& source) {
    bool same = source.rank == holder.rank && source.rectangle.contains(part);
    for (size_t d = 0; same && d < holder.local.size(); ++d) {
      same = holder.local[d] - source.local[d] == part.offsets[d] - source.rectangle.offsets[d];
    }
    return same;
  });
}

TEST(BlockOwnership, BalancesReplicatedBlocks) {
  const auto shapes = decoder();
  const auto blocks = blocks_of(shapes, 1024, 10);
  ASSERT_EQ(blocks.size(), 24U * 12U);
  for (const int64_t ranks : {1, 2, 4, 8, 16, 32}) {
    const auto owners = assign_owners(blocks, sources_of(shapes, {{ranks}, {kReplicate}}), ranks);
    EXPECT_LE(imbalance(blocks, owners, ranks), 1.05) << ranks;
    EXPECT_EQ(std::set<int64_t>(owners.begin(), owners.end()).size(), static_cast<size_t>(ranks));
  }
  // 288 equal blocks on 64 ranks: the best is 5 on the fullest, 4.5 on average.
  const auto owners = assign_owners(blocks, sources_of(shapes, {{64}, {kReplicate}}), 64);
  EXPECT_DOUBLE_EQ(imbalance(blocks, owners, 64), 5 / 4.5);
}

// The table of docs/distributed.md.
TEST(BlockOwnership, BalanceAndBytesOfADecoder) {
  const auto shapes = decoder();
  const auto expect = [&](int64_t size, int64_t ranks, double balance, double mib) {
    const auto blocks = blocks_of(shapes, size, 10);
    const auto all = sources_of(shapes, {{ranks}, {kReplicate}});
    const auto owners = assign_owners(blocks, all, ranks);
    EXPECT_NEAR(imbalance(blocks, owners, ranks), balance, 0.005) << size << " on " << ranks;
    const int64_t most =
        std::ranges::max(update_bytes(parts_of(blocks, all, owners, ranks), owners, ranks, 4));
    EXPECT_EQ(static_cast<double>(most) / static_cast<double>((ranks - 1) << 20), mib);
  };
  expect(1024, 4, 1.0, 288);
  expect(1024, 8, 1.0, 144);
  expect(1024, 64, 1.11, 20);
  expect(1024, 512, 1.78, 4);
  expect(512, 4, 1.0, 288);
  expect(512, 8, 1.0, 144);
  expect(512, 64, 1.0, 18);
  expect(512, 512, 1.33, 3);
}

// The same under fully_shard, whose shards are rows: gradients that the busiest rank sends, and
// directions.
TEST(BlockOwnership, BalanceAndBytesOfAShardedDecoder) {
  const auto shapes = decoder();
  const auto expect = [&](int64_t size, int64_t ranks, double balance, double gradient_mib,
                          double update_mib) {
    const auto blocks = blocks_of(shapes, size, 10);
    const auto all = sources_of(shapes, {{ranks}, {shard(0)}});
    const auto owners = assign_owners(blocks, all, ranks);
    EXPECT_NEAR(imbalance(blocks, owners, ranks), balance, 0.005) << size << " on " << ranks;
    const auto parts = parts_of(blocks, all, owners, ranks);
    const auto most = [](const std::vector<int64_t>& bytes) {
      return static_cast<double>(std::ranges::max(bytes)) / (1 << 20);
    };
    EXPECT_NEAR(most(gradient_bytes(parts, owners, ranks, 4)), gradient_mib, 0.05)
        << size << " on " << ranks;
    EXPECT_NEAR(most(update_bytes(parts, owners, ranks, 4)), update_mib, 0.05)
        << size << " on " << ranks;
  };
  expect(256, 4, 1.0, 0, 0);
  expect(512, 4, 1.0, 120, 120);
  expect(512, 8, 1.0, 90, 90);
  expect(512, 64, 1.0, 18, 18);
  expect(512, 512, 1.33, 2.25, 3);
}

TEST(BlockOwnership, BalancesBlocksOfMixedSizes) {
  std::vector<BlockShape> shapes;
  for (int64_t i = 1; i <= 400; ++i) {
    shapes.push_back({32 * (1 + i * 7 % 29), 48 * (1 + i * 11 % 23)});
  }
  const auto blocks = blocks_of(shapes, 512, 10);
  for (const int64_t ranks : {2, 4, 8, 64}) {
    const auto owners = assign_owners(blocks, sources_of(shapes, {{ranks}, {kReplicate}}), ranks);
    EXPECT_LE(imbalance(blocks, owners, ranks), 1.05) << ranks;
    EXPECT_EQ(owners, assign_owners(blocks, sources_of(shapes, {{ranks}, {kReplicate}}), ranks));
  }
}

TEST(BlockOwnership, EqualBlocksGoToTheLowestRanksFirst) {
  const std::vector<BlockShape> shapes{{4, 4}, {4, 4}, {8, 4}};
  const auto blocks = blocks_of(shapes, 4, 1);
  const auto owners = assign_owners(blocks, sources_of(shapes, {{3}, {kReplicate}}), 3);
  EXPECT_EQ(owners, (std::vector<int64_t>{0, 1, 2, 0}));
}

TEST(BlockOwnership, ReplicatedGradientsDoNotTravel) {
  const auto shapes = decoder();
  const auto blocks = blocks_of(shapes, 1024, 10);
  const auto all = sources_of(shapes, {{8}, {kReplicate}});
  const auto owners = assign_owners(blocks, all, 8);
  const auto parts = parts_of(blocks, all, owners, 8);
  EXPECT_EQ(gradient_bytes(parts, owners, 8, 4), BlockShape(8, 0));
  const auto bytes = update_bytes(parts, owners, 8, 4);
  EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}),
            int64_t{7} * 4 * 288 * 1024 * 1024);
}

TEST(BlockOwnership, BlocksInsideAShardStay) {
  const std::vector<BlockShape> shapes{{8, 6}, {16, 3}};
  const auto all = sources_of(shapes, {{4}, {shard(0)}});
  const auto blocks = blocks_of(shapes, 2, 1);
  const auto owners = assign_owners(blocks, all, 4);
  const auto parts = parts_of(blocks, all, owners, 4);
  EXPECT_EQ(gradient_bytes(parts, owners, 4, 4), BlockShape(4, 0));
  for (size_t b = 0; b < blocks.size(); ++b) {
    EXPECT_EQ(owners[b], blocks[b].rectangle.offsets[0] / (shapes[blocks[b].param][0] / 4));
  }
  EXPECT_EQ(update_bytes(parts, owners, 4, 4), BlockShape(4, 0));
}

TEST(BlockOwnership, ReplicasOfAShardShareItsBlocks) {
  // HSDP: 2 replicas of 2 shards.
  const std::vector<BlockShape> shapes{{8, 8}};
  const auto all = sources_of(shapes, {{2, 2}, {kReplicate, shard(0)}});
  const auto blocks = blocks_of(shapes, 4, 1);
  const auto owners = assign_owners(blocks, all, 4);
  EXPECT_EQ(owners, (std::vector<int64_t>{0, 2, 1, 3}));
  const auto parts = parts_of(blocks, all, owners, 4);
  EXPECT_EQ(gradient_bytes(parts, owners, 4, 4), BlockShape(4, 0));
  EXPECT_EQ(update_bytes(parts, owners, 4, 4), BlockShape(4, 16 * 4));
}

TEST(BlockOwnership, EveryElementReachesTheOwnerOnce) {
  const BlockShape shape{13, 10};
  const std::vector<Sharding> shardings{{{4}, {shard(0)}},
                                        {{16}, {shard(0)}},  // empty shards
                                        {{3}, {shard(1)}},
                                        {{2, 2}, {kReplicate, shard(0)}},
                                        {{2, 3}, {shard(0), shard(1)}},
                                        {{2, 2}, {shard(0), shard(0)}},
                                        {{2, 2}, {strided(0, 2), shard(0)}},
                                        {{64}, {shard(0)}}};
  for (const Sharding& sharding : shardings) {
    const int64_t ranks = std::accumulate(sharding.mesh.begin(), sharding.mesh.end(), int64_t{1},
                                          std::multiplies<>());
    const auto blocks = blocks_of({shape}, 4, 1);
    const auto all = sources_of({shape}, sharding);
    const auto owners = assign_owners(blocks, all, ranks);
    std::vector<Rectangle> arrived;
    for (const Part& part : parts_of(blocks, all, owners, ranks)) {
      EXPECT_TRUE(blocks[part.block].rectangle.contains(part.rectangle));
      for (const Part::Holder& holder : part.holders) {
        EXPECT_TRUE(holds(all[0], holder, part.rectangle));
      }
      EXPECT_NE(std::ranges::find(part.holders, part.source, &Part::Holder::rank),
                part.holders.end());
      arrived.push_back(part.rectangle);
    }
    for (const auto& [element, count] : coverage(shape, arrived)) {
      ASSERT_EQ(count, 1) << element[0] << ", " << element[1];
    }
  }
}

TEST(BlockOwnership, ShardsHaveTheSizesOfChunk) {
  const auto rows = [](const std::vector<Source>& all) {
    BlockShape sizes;
    for (const Source& source : all) {
      sizes.push_back(source.rectangle.sizes[0]);
    }
    return sizes;
  };
  EXPECT_EQ(rows(sources({10, 2}, {{4}, {shard(0)}})), (BlockShape{3, 3, 3, 1}));
  EXPECT_EQ(rows(sources({5, 2}, {{4}, {shard(0)}})), (BlockShape{2, 2, 1}));  // the last is empty
  // FSDP over tensor parallelism on one dimension: rank (i, j) has part i of part j.
  const auto all = sources({8, 1}, {{2, 2}, {strided(0, 2), shard(0)}});
  BlockShape offsets;
  for (const Source& source : all) {
    offsets.push_back(source.rectangle.offsets[0]);
  }
  EXPECT_EQ(offsets, (BlockShape{0, 4, 2, 6}));
}

TEST(BlockOwnership, SourcesFollowMergedDimensions) {
  const BlockShape convolution{6, 4, 3, 3}, dims{6, 36};
  const auto of_rank = [](const std::vector<Source>& all, int64_t rank) {
    std::vector<std::pair<Rectangle, BlockShape>> result;
    for (const Source& source : all) {
      if (source.rank == rank) {
        result.emplace_back(source.rectangle, source.local);
      }
    }
    return result;
  };
  using Held = std::vector<std::pair<Rectangle, BlockShape>>;
  EXPECT_EQ(of_rank(sources(convolution, {{2}, {shard(0)}}, dims), 1),
            (Held{{{{3, 0}, {3, 36}}, {0, 0}}}));
  EXPECT_EQ(of_rank(sources(convolution, {{2}, {shard(1)}}, dims), 1),
            (Held{{{{0, 18}, {6, 18}}, {0, 0}}}));
  EXPECT_EQ(of_rank(sources({2, 3}, {{3}, {shard(1)}}, {6}), 1),
            (Held{{{{1}, {1}}, {0}}, {{{4}, {1}}, {1}}}));
  EXPECT_EQ(of_rank(sources({1, 5, 1}, {{3}, {shard(1)}}, {5}), 2), (Held{{{{4}, {1}}, {0}}}));
  EXPECT_EQ(of_rank(sources({}, {{2}, {kReplicate}}, {1}), 1), (Held{{{{0}, {1}}, {0}}}));
  EXPECT_TRUE(sources({5, 0}, {{2}, {shard(0)}}, {5, 0}).empty());
  // A strided shard holds its pieces one after the other.
  EXPECT_EQ(of_rank(sources({8, 3}, {{2}, {strided(0, 2)}}), 1),
            (Held{{{{2, 0}, {2, 3}}, {0, 0}}, {{{6, 0}, {2, 3}}, {2, 0}}}));
  EXPECT_EQ(local_sizes({8, 3}, {{2}, {strided(0, 2)}}, 1, {8, 3}), (BlockShape{4, 3}));
  EXPECT_EQ(local_sizes({0, 3}, {{2}, {shard(0)}}, 1, {0, 3}), (BlockShape{0, 3}));
  EXPECT_EQ(local_sizes(convolution, {{4}, {shard(1)}}, 3, dims), (BlockShape{6, 9}));
}

// FSDP on a part of the ranks: those with the same remainder of the rank by 2 form a mesh.
TEST(BlockOwnership, MeshesOfSomeRanksRepeat) {
  const auto all = sources({4, 2}, {{2}, {shard(0)}, {2}, 4});
  BlockShape offsets;
  for (const Source& source : all) {
    offsets.push_back(source.rectangle.offsets[0]);
  }
  EXPECT_EQ(offsets, (BlockShape{0, 0, 2, 2}));
}

}  // namespace
}  // namespace torchium::testing::block_ownership
