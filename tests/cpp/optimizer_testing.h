// Shared by the tests of the optimizers.
#pragma once

#include "torchium/optim/second_order_optimizer.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace torchium::testing {

using Tensors = std::vector<torch::Tensor>;

inline torch::Tensor parameter(torch::Tensor value) { return value.clone().requires_grad_(); }

inline void set_grad(torch::Tensor& param, const torch::Tensor& grad) {
  param.mutable_grad() = grad.clone();
}

template <typename Options>
Options& options_of(torch::optim::Optimizer& optimizer, size_t group = 0) {
  return static_cast<Options&>(optimizer.param_groups().at(group).options());
}
template <typename Options>
const Options& options_of(const torch::optim::Optimizer& optimizer, size_t group = 0) {
  return static_cast<const Options&>(optimizer.param_groups().at(group).options());
}

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Parameters of all orders from 0 to 4; blocks of 4 do not divide the matrix.
inline Tensors odd_parameters(torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(1);
  Tensors params;
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {7, 5}, {5}, {}, {1, 7}, {7, 1}, {2, 3, 4}, {4, 2, 3, 3}, {7, 5}}) {
    params.push_back(parameter(torch::randn(shape).to(dtype)));
  }
  return params;
}

// Steps with gradients that depend only on the step number and the parameters.
inline void train(torch::optim::Optimizer& optimizer, const Tensors& params, int first, int last) {
  for (int t = first; t < last; ++t) {
    auto generator = torch::make_generator<torch::CPUGeneratorImpl>(1000 + t);
    for (auto param : params) {
      const auto noise = torch::randn(param.sizes(), generator, torch::kFloat);
      set_grad(param, param.detach() + noise.to(param.options().requires_grad(false)));
    }
    optimizer.step();
  }
}

inline Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

inline Tensors parameters_like(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(parameter(tensor.detach()));
  }
  return result;
}

// Bitwise, except NaN.
inline void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "tensor " << i << ":\n"
                                                      << actual[i] << "\nexpected\n"
                                                      << expected[i];
  }
}

inline void expect_near(const torch::Tensor& actual, const torch::Tensor& expected,
                        double tolerance = 1e-5) {
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance)) << actual << "\nexpected\n"
                                                                       << expected;
}

// All state tensors of a parameter; empty if it has none.
inline std::vector<std::pair<std::string, torch::Tensor>> state_tensors(
    const torch::optim::Optimizer& optimizer, const torch::Tensor& param) {
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) {
    return {};
  }
  return static_cast<const optim::SecondOrderParamState&>(*found->second).tensors();
}

// The dtype of a parameter's state tensor that is not float64.
inline torch::Dtype float32_state_dtype(const std::string& key) {
  return key == "step" || key.ends_with("_start") ? torch::kDouble
         : key.rfind("root_failures", 0) == 0     ? torch::kInt
                                                  : torch::kFloat;
}

inline Tensors all_state(const torch::optim::Optimizer& optimizer) {
  Tensors result;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      for (const auto& [key, tensor] : state_tensors(optimizer, param)) {
        result.push_back(tensor.clone());
      }
    }
  }
  return result;
}

inline std::string saved(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  return stream.str();
}

inline void load(torch::optim::Optimizer& optimizer, const std::string& data) {
  std::istringstream stream(data);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

// Runs `action` and returns the message of its exception of type Error.
template <typename Error, typename Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace torchium::testing
