// Memory of devices, of optimizers and of the arena.
#include <torchium/linalg/products.h>
#include <torchium/memory.h>
#include <torchium/optim/shampoo.h>

#include <torch/torch.h>

#include <algorithm>
#include <gtest/gtest.h>

namespace torchium {
namespace {

class WorkspaceMemory : public ::testing::Test {
 protected:
  void SetUp() override { clean_up(); }
  void TearDown() override { clean_up(); }
  static void clean_up() {
    set_workspace_limit(std::nullopt);
    release_arenas();
  }
};

int64_t scratch_of(const std::string& owner) {
  int64_t bytes = 0;
  for (const WorkspaceUse& use : workspace_report()) {
    bytes += use.owner == owner ? use.scratch_bytes : 0;
  }
  return bytes;
}

TEST_F(WorkspaceMemory, InformsAboutTheMachine) {
  const MemoryInfo info = memory_info(torch::kCPU);
  EXPECT_GT(info.available, 0);
  EXPECT_LE(info.available, info.total);
  EXPECT_EQ(info.workspace_limit, -1);
  EXPECT_THROW(memory_info(torch::Device(torch::kMeta)), c10::ValueError);
  EXPECT_THROW(memory_info(torch::Device(torch::kCUDA, 99)), c10::ValueError);
}

TEST_F(WorkspaceMemory, ArenaTakesItsMemoryAgain) {
  const void* address = nullptr;
  {
    const auto x = efficient_tensor_creation({10, 10}, torch::kCPU, torch::kDouble);
    EXPECT_TRUE(torch::equal(x, torch::zeros({10, 10}, torch::kDouble)));
    address = x.data_ptr();
    x.fill_(1);
    EXPECT_EQ(memory_info(torch::kCPU).arena_in_use, 1024);
  }
  EXPECT_EQ(memory_info(torch::kCPU).arena_in_use, 0);
  const auto y = efficient_tensor_creation({20});
  EXPECT_EQ(y.data_ptr(), address);
  EXPECT_EQ(y.abs().sum().item<float>(), 0);
  EXPECT_EQ(scratch_of("Arena"), int64_t{2} << 20);
  EXPECT_THROW(efficient_tensor_creation({-1}), c10::ValueError);
}

TEST_F(WorkspaceMemory, LimitBoundsTheArenaAndProducts) {
  set_workspace_limit(100);
  EXPECT_EQ(workspace_limit(), 100);
  const auto x = efficient_tensor_creation({20});
  EXPECT_EQ(memory_info(torch::kCPU).arena, 0);
  const auto A = torch::ones({10, 10}, torch::kBFloat16);
  EXPECT_EQ(linalg::chunked_matmul(A, A).sum().item<float>(), 1000);
  set_workspace_limit(10);
  EXPECT_THROW(linalg::chunked_matmul(A, A), c10::ValueError);
  EXPECT_THROW(set_workspace_limit(-1), c10::ValueError);
  EXPECT_EQ(workspace_limit(), 10);
}

TEST_F(WorkspaceMemory, ReportListsOptimizersAsLongAsTheyLive) {
  const auto states = [] {
    const auto report = workspace_report();
    return std::count_if(report.begin(), report.end(), [](const WorkspaceUse& use) {
      return use.owner == "Shampoo" && use.parameters == 2 && use.state_bytes > 0;
    });
  };
  const auto before = states();
  {
    torch::nn::Linear layer(5, 4);
    optim::Shampoo optimizer(layer->parameters());
    layer(torch::ones({3, 5})).sum().backward();
    optimizer.step();
    EXPECT_EQ(states(), before + 1);
  }
  EXPECT_EQ(states(), before);
}

TEST_F(WorkspaceMemory, ProductsKnowTwoPrecisions) {
  const auto A = torch::ones({3, 3});
  for (const char* precision : {"highest", "high"}) {
    EXPECT_EQ(linalg::chunked_matmul(A, A, std::nullopt, precision).sum().item<float>(), 27);
  }
  EXPECT_THROW(linalg::chunked_matmul(A, A, std::nullopt, "medium"), c10::ValueError);
}

}  // namespace
}  // namespace torchium
