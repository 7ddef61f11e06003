// Moved-from optimizers: they raise a clear error until another one is moved into them.
#include "model_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/kfac_preconditioner.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <utility>

namespace torchium::testing {
namespace {

template <typename Optimizer>
Optimizer make(nn::Sequential& model) {
  if constexpr (std::is_base_of_v<optim::CapturingOptimizer, Optimizer>) {
    return Optimizer(*model);
  } else {
    return Optimizer(model->parameters());
  }
}

template <typename Optimizer>
class MovedFrom : public ::testing::Test {};

using Optimizers = ::testing::Types<optim::Shampoo, optim::Adagrad, optim::KFAC,
                                    optim::KFACPreconditioner, optim::NaturalGradient>;
TYPED_TEST_SUITE(MovedFrom, Optimizers);

TYPED_TEST(MovedFrom, OptimizersRefuseToWork) {
  auto model = make_mlp();
  auto first = make<TypeParam>(model);
  train_on(first, model, make_batch(0, kMlpSample));
  TypeParam second(std::move(first));
  const auto refused = [&](auto&& call) {
    expect_contains(message_of<c10::Error>(call), "this optimizer was moved from");
  };
  refused([&] { first.step(); });
  refused([&] { first.check_errors(); });
  refused([&] { first.memory_report(); });
  refused([&] { first.add_param_group({model->parameters()}); });
  refused([&] { saved(first); });
  refused([&] { load(first, saved(second)); });
  if constexpr (std::is_base_of_v<optim::CapturingOptimizer, TypeParam>) {
    refused([&] { first.zero_grad(); });
  }
  if constexpr (!std::is_same_v<TypeParam, optim::Adagrad>) {
    refused([&] { first.report(); });
  }
  train_on(second, model, make_batch(1, kMlpSample));

  auto other = make_mlp();
  first = make<TypeParam>(other);
  train_on(first, other, make_batch(0, kMlpSample));
  train_on(first, other, make_batch(1, kMlpSample));
  expect_equal(copies(other->parameters()), copies(model->parameters()));
}

}  // namespace
}  // namespace torchium::testing
