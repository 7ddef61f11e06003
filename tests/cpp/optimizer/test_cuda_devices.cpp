// Matrix functions on a CUDA device that is not the current one. Skipped with fewer than two
// devices.
#include <torchium/linalg/matrix_functions.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <string>
#include <vector>

#ifdef TORCHIUM_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {

using torchium::linalg::matrix_inverse_root;

class CudaDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    if (torch::cuda::device_count() < 2) {
      GTEST_SKIP() << "fewer than two CUDA devices";
    }
    c10::cuda::set_device(0);
  }
};

torch::Tensor statistics(int64_t n) {
  torch::manual_seed(n);
  const auto G = torch::randn({3, n, 2 * n});
  return G.matmul(G.mT()) / static_cast<double>(2 * n);
}

const std::vector<int64_t> kOrders{5, 33, 100, 200};  // of every kernel

TEST_F(CudaDevices, TheOtherOneGivesTheSameBits) {
  for (const int64_t n : kOrders) {
    const auto A = statistics(n);
    for (const std::string method : {"eigh", "newton"}) {
      const auto first = matrix_inverse_root(A.to("cuda:0"), 4, {.eps = 1e-3, .method = method});
      const auto second = matrix_inverse_root(A.to("cuda:1"), 4, {.eps = 1e-3, .method = method});
      EXPECT_EQ(second.device(), torch::Device("cuda:1"));
      EXPECT_TRUE(torch::equal(first.cpu(), second.cpu())) << method << ", n = " << n;
      EXPECT_EQ(c10::cuda::current_device(), 0);
    }
  }
}

TEST_F(CudaDevices, AStreamOfTheOtherOne) {
  for (const int64_t n : kOrders) {
    const auto A = statistics(n).to("cuda:1");
    const auto expected = matrix_inverse_root(A, 4, {.eps = 1e-3});
    const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, /*device=*/1);
    torch::cuda::synchronize(1);
    torch::Tensor X;
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream);
      const c10::cuda::CUDAGuard on_first(0);
      X = matrix_inverse_root(A, 4, {.eps = 1e-3});
    }
    stream.synchronize();
    EXPECT_TRUE(torch::equal(X, expected)) << "n = " << n;
  }
}

TEST_F(CudaDevices, AListOverBoth) {
  std::vector<torch::Tensor> A;
  for (const int64_t n : kOrders) {
    A.push_back(statistics(n).to("cuda:1"));
    A.push_back(statistics(n).to("cuda:0"));
  }
  const auto roots = matrix_inverse_root(A, 4, {.eps = 1e-2});
  ASSERT_EQ(roots.size(), A.size());
  for (size_t i = 0; i < A.size(); ++i) {
    EXPECT_EQ(roots[i].device(), A[i].device());
    EXPECT_TRUE(torch::equal(roots[i], matrix_inverse_root(A[i], 4, {.eps = 1e-2})));
  }
}

}  // namespace
#endif
