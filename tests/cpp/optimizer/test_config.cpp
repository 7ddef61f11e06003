#include "model_testing.h"
#include "support/device_code.h"
#include "torchium/linalg/matrix_functions.h"
#include "torchium/linalg/products.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/shampoo.h"
#include <torchium/config.h>
#include <torchium/version.h>

#include <torch/headeronly/version.h>

#include <gtest/gtest.h>

namespace torchium::testing {
namespace {

TEST(Config, LibraryAndHeadersAgree) { EXPECT_EQ(torchium::version(), TORCHIUM_VERSION); }

TEST(Config, ShowConfigNamesTheVersions) {
  const std::string text = torchium::show_config();
  EXPECT_NE(text.find("torchium: " TORCHIUM_VERSION "\n"), std::string::npos) << text;
  EXPECT_NE(text.find("torch (running): " TORCH_VERSION "\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("unknown"), std::string::npos) << text;
  EXPECT_EQ(text.find("CUDA kernels: not built") == std::string::npos, torchium::built_with_cuda());
}

// Whether a library with these architectures runs on a GPU of compute capability major.minor.
bool runs(const std::string& architectures, int major, int minor) {
  return detail::missing_device_code(architectures, "cuda:0 (a GPU)", major, minor).empty();
}

TEST(DeviceCode, IsThatOfTheSameMajorVersion) {
  EXPECT_TRUE(runs("80-real", 8, 0));
  EXPECT_TRUE(runs("80-real", 8, 9));
  EXPECT_FALSE(runs("86-real", 8, 0));
  EXPECT_FALSE(runs("80-real", 9, 0));
  EXPECT_TRUE(runs("80-real 90a-real 120-real", 12, 1));
  EXPECT_FALSE(runs("80-real 90a-real 120-real", 10, 0));
}

TEST(DeviceCode, OfPtxIsThatOfAllLaterGpus) {
  EXPECT_TRUE(runs("80", 9, 0));
  EXPECT_TRUE(runs("80-virtual", 12, 0));
  EXPECT_FALSE(runs("90", 8, 0));
  EXPECT_FALSE(runs("120-virtual", 10, 3));
}

TEST(DeviceCode, OfOneArchitectureAloneIsNoOthers) {
  for (const char* architecture : {"90a", "90a-real", "90a-virtual"}) {
    EXPECT_TRUE(runs(architecture, 9, 0)) << architecture;
    EXPECT_FALSE(runs(architecture, 10, 0)) << architecture;
    EXPECT_FALSE(runs(architecture, 8, 0)) << architecture;
  }
  EXPECT_TRUE(runs("100f", 10, 3));
  EXPECT_FALSE(runs("100f", 12, 0));
  EXPECT_FALSE(runs("100a-real", 10, 3));
}

TEST(DeviceCode, ThatIsNotKnownIsTried) { EXPECT_TRUE(runs("native", 7, 5)); }

TEST(DeviceCode, ThatIsMissingIsNamedWithTheCommand) {
  const auto name_of = [](int major, int minor) {
    return detail::missing_device_code("120-real", "cuda:1 (NVIDIA X)", major, minor);
  };
  const std::string text = name_of(9, 0);
  for (const char* part : {"architectures 120-real, ", "cuda:1 (NVIDIA X)", "capability 9.0.",
                           "make install CMAKE_ARGS='-DTORCHIUM_ARCHS=\"9.0a\"'"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in " << text;
  }
  EXPECT_NE(name_of(8, 6).find("-DTORCHIUM_ARCHS=\"8.6\""), std::string::npos);
}

#ifdef TORCHIUM_WITH_CUDA
// ---- whatever launches kernels refuses a device for which the library has no code

class CudaDeviceCode : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
  void TearDown() override { detail::assume_architectures(""); }
};

// No GPU that torch runs on has compute capability 3.
template <typename Action>
void expect_checked(const Action& action, const char* what) {
  SCOPED_TRACE(what);
  detail::assume_architectures("35-real");
  expect_contains(message_of<c10::Error>(action), "built for the GPU architectures 35-real, which");
  detail::assume_architectures("");
  EXPECT_NO_THROW(action());
}

const auto kOnCuda = torch::TensorOptions(torch::kCUDA);

template <typename Optimizer>
void step_of_a_matrix() {
  const Tensors params{parameter(torch::ones({8, 8}, kOnCuda))};
  Optimizer optimizer(params);
  train(optimizer, params, 0, 1);
}

TEST_F(CudaDeviceCode, IsCheckedByTheFirstStep) {
  expect_checked(step_of_a_matrix<optim::Shampoo>, "Shampoo");
  expect_checked(step_of_a_matrix<optim::Adagrad>, "Adagrad");
  const auto step_of_layers = [] {
    auto model = make_mlp(torch::kFloat);
    model->to(torch::kCUDA);
    optim::KFAC optimizer(*model);
    auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
    train_on(optimizer, model, {batch.inputs.cuda(), batch.targets.cuda()});
  };
  expect_checked(step_of_layers, "KFAC");
}

TEST_F(CudaDeviceCode, IsCheckedByRootsThatAStepDoesNotCompute) {
  const Tensors params{parameter(torch::ones({8, 8}, kOnCuda))};
  optim::Shampoo optimizer(params, optim::ShampooOptions(0.1).root_method("eigh"));
  train(optimizer, params, 0, 1);
  expect_checked([&] { optimizer.update_preconditioners(); }, "update_preconditioners");
}

TEST_F(CudaDeviceCode, IsCheckedByFunctions) {
  const auto A = torch::eye(33, kOnCuda);
  for (const auto& matrix : {A, A.to(torch::kDouble)}) {
    expect_checked([&] { linalg::matrix_inverse_root(matrix, 4, {.method = "newton"}); },
                   matrix.scalar_type() == torch::kFloat ? "float32 root" : "float64 root");
  }
  expect_checked([&] { linalg::fused_mul_add(A, A, A); }, "fused_mul_add");
}

#endif

}  // namespace
}  // namespace torchium::testing
