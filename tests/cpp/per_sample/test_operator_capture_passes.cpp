// Operator capture over backward passes, threads and errors: what a step may count on besides the
// layer calls themselves.
#include "operator_capture_testing.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <atomic>
#include <thread>

namespace torchium::testing {
namespace {

namespace nn = torch::nn;

TEST(OperatorCapture, DistinguishesBackwardPasses) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  const auto first = layer(torch::randn({2, 3})).square().sum();
  const auto second = layer(torch::randn({5, 3})).square().sum();
  layer(torch::randn({7, 3}));  // no backward pass
  {
    const torch::NoGradGuard no_grad;
    layer(torch::randn({8, 3}));
  }
  second.backward();
  first.backward();
  ASSERT_EQ(recorder.calls.size(), 2U);
  EXPECT_EQ(recorder.calls[0].input.size(0), 5);
  EXPECT_EQ(recorder.calls[0].micro_batch, 0);
  EXPECT_EQ(recorder.calls[1].input.size(0), 2);
  EXPECT_EQ(recorder.calls[1].micro_batch, 1);
  recorder->forget();
  const auto third = layer(torch::randn({6, 3})).square().sum();
  third.backward({}, /*retain_graph=*/true);
  third.backward();
  ASSERT_EQ(recorder.calls.size(), 4U);
  EXPECT_EQ(recorder.calls[2].micro_batch, 0);
  EXPECT_EQ(recorder.calls[3].micro_batch, 1);
}

TEST(OperatorCapture, KeepsPassesWhoseGradientsAreZero) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  for (int pass = 0; pass < 2; ++pass) {
    // With three dimensions the bias is added by an operator of its own, before the call arrives.
    (layer(torch::randn({2, 5, 3})) * 0).sum().backward();
    EXPECT_TRUE(recorder.gone_passes.empty());
  }
}

TEST(OperatorCapture, ReportsWhichGradientsAreGone) {
  using Passes = std::vector<int64_t>;
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  const auto pass = [&] {
    recorder.gone_passes = {-1};
    layer(torch::ones({2, 3})).sum().backward();
    return recorder.gone_passes;
  };
  EXPECT_EQ(pass(), Passes{});
  EXPECT_EQ(pass(), Passes{});
  layer->bias.mutable_grad() = torch::Tensor();
  EXPECT_EQ(pass(), (Passes{0, 1}));
  layer->zero_grad();
  EXPECT_EQ(pass(), (Passes{0, 1, 2, 2}));  // three of the weight, one of the bias
  layer->zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(pass(), Passes{3});
  layer->bias.mutable_grad().mul_(0.5);  // as clipping does
  EXPECT_EQ(pass(), Passes{});
  layer->weight.mutable_grad() = torch::zeros_like(layer->weight);
  EXPECT_EQ(pass(), (Passes{4, 5}));
  recorder->forget();
  layer->zero_grad();
  EXPECT_EQ(pass(), Passes{});
  nn::Linear late(4, 4);
  Recorder both({layer->weight, late->weight});
  layer(torch::ones({2, 3})).sum().backward();
  late(layer(torch::ones({2, 3}))).sum().backward();  // its first gradient
  EXPECT_EQ(both.gone_passes, Passes{});
}

// A forward and backward pass within a backward pass, as in activation checkpointing.
struct Checkpoint : public torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = c10::IValue(layer->weight);
    return torch::linear(x, layer->weight);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const torch::AutoGradMode enable_grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto y = torch::linear(x, context->saved_data["layer"].toTensor());
    y.backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

TEST(OperatorCapture, CountsRecomputedLayersInTheirBackwardPass) {
  nn::Linear outer(3, 3);
  nn::Linear inner(3, 3);
  Recorder recorder({outer->weight, outer->bias, inner->weight});
  for (int pass = 0; pass < 2; ++pass) {
    outer(Checkpoint::apply(outer(torch::randn({2, 3})), inner)).square().sum().backward();
  }
  ASSERT_EQ(recorder.calls.size(), 6U);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(recorder.calls[i].micro_batch, i / 3);
    EXPECT_EQ(recorder.calls[i].weight, i % 3 == 1 ? 2 : 0);
  }
}

TEST(OperatorCapture, LeavesOutWhatIsNotAccumulated) {
  nn::Linear first(3, 4);
  nn::Linear second(4, 2);
  Recorder recorder({first->weight, first->bias, second->weight, second->bias});
  const auto x = torch::randn({5, 3}).requires_grad_();
  const auto loss = second(torch::tanh(first(x))).square().sum();
  torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
  torch::autograd::grad({loss}, {first->weight}, {}, /*retain_graph=*/true);
  EXPECT_EQ(recorder.calls.size(), 0U);
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, Tensors{first->weight});
  ASSERT_EQ(recorder.calls.size(), 1U);
  EXPECT_EQ(recorder.calls[0].weight, 0);
  EXPECT_EQ(recorder.calls[0].bias, -1);
  expect_explains(recorder.calls[0], first->weight, {});
}

TEST(OperatorCapture, WorksWithHigherOrderGradients) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  const auto x = torch::randn({5, 3}).requires_grad_();
  const auto y = layer(x).tanh().sum();
  y.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_EQ(recorder.calls.size(), 1U);
  EXPECT_TRUE(layer->weight.grad().requires_grad());
  expect_explains(recorder.calls[0], layer->weight, layer->bias);
}

// Recurrent layers call linear() internally, with time as the first dimension.
TEST(OperatorCapture, DoesNotLookIntoRecurrentLayers) {
  nn::LSTM lstm(nn::LSTMOptions(3, 4));
  nn::GRU gru(nn::GRUOptions(3, 4).batch_first(true));
  nn::RNN rnn(nn::RNNOptions(3, 4));
  Tensors params = lstm->parameters();
  for (const auto& more : {gru->parameters(), rnn->parameters()}) {
    params.insert(params.end(), more.begin(), more.end());
  }
  Recorder recorder(params);
  const auto x = torch::randn({5, 2, 3});
  (std::get<0>(lstm(x)).sum() + std::get<0>(gru(x)).sum() + std::get<0>(rnn(x)).sum()).backward();
  EXPECT_EQ(recorder.calls.size(), 0U);
  EXPECT_TRUE(params.back().grad().defined());
}

TEST(OperatorCapture, WorksUnderAutocast) {
  nn::Sequential model(nn::Conv2d(2, 3, 3), nn::GroupNorm(1, 3), nn::ReLU(), nn::Flatten(),
                       nn::Linear(12, 4));
  Recorder recorder(model->parameters());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = model->forward(torch::randn({5, 2, 4, 4}));
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  y.square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 3U);
  EXPECT_EQ(recorder.calls[0].weight, 4);
  EXPECT_EQ(recorder.calls[1].weight, 2);
  EXPECT_EQ(recorder.calls[2].weight, 0);
  const auto g =
      weight_gradient({.input = recorder.calls[0].input.to(torch::kFloat),
                       .output_gradient = recorder.calls[0].output_gradient.to(torch::kFloat)});
  EXPECT_TRUE(torch::allclose(g, model->parameters()[4].grad(), 0.05, 0.05));
}

TEST(OperatorCapture, IsSafeOnManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kPasses = 50;
  nn::Sequential model(nn::Linear(3, 8), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(8, 2));
  Recorder recorder(model->parameters());
  std::atomic<bool> stop{false};
  std::thread other([&] {  // captures are created and deleted meanwhile
    while (!stop) {
      OperatorCapture passing(model->parameters(), [](const auto&, const auto&) {});
      passing.set_enabled(true);
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPasses; ++i) {
        const auto x = torch::full({t + 1, 3}, 1.0F);
        torch::autograd::grad({model->forward(x).sum()}, {model->parameters()[0]});
        model->forward(x).sum().backward();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  stop = true;
  other.join();
  recorder->raise_error();
  ASSERT_EQ(recorder.calls.size(), 2U * kThreads * kPasses);
  std::map<int64_t, std::vector<int64_t>> batch_sizes;  // by micro-batch
  for (const auto& call : recorder.calls) {
    batch_sizes[call.micro_batch].push_back(call.input.size(0));
  }
  EXPECT_EQ(batch_sizes.size(), 1U * kThreads * kPasses);
  for (const auto& [micro_batch, sizes] : batch_sizes) {
    ASSERT_EQ(sizes.size(), 2U);
    EXPECT_EQ(sizes[0], sizes[1]);
  }
}

TEST(OperatorCapture, LeavesNoCallbackBehind) {
  nn::Linear layer(3, 4);
  const auto x = torch::randn({2, 3});
  ASSERT_FALSE(at::hasGlobalCallbacks());
  torch::Tensor loss;
  {
    Recorder recorder(layer->parameters());
    EXPECT_TRUE(at::hasGlobalCallbacks());
    Recorder another(layer->parameters());
    recorder->set_enabled(false);
    EXPECT_TRUE(at::hasGlobalCallbacks());
    layer(x).sum().backward();
    EXPECT_EQ(recorder.calls.size(), 0U);
    EXPECT_EQ(another.calls.size(), 1U);
    another->set_enabled(false);
    EXPECT_FALSE(at::hasGlobalCallbacks());
    recorder->set_enabled(true);
    loss = layer(x).sum();
  }
  EXPECT_FALSE(at::hasGlobalCallbacks());
  loss.backward();  // the hook outlives the capture, and does nothing
}

TEST(OperatorCapture, HoldsNoParameters) {
  c10::weak_intrusive_ptr<at::TensorImpl> weak(nn::Linear(3, 4)->weight.getIntrusivePtr());
  Recorder recorder({});
  {
    nn::Linear layer(3, 4);
    weak = c10::weak_intrusive_ptr<at::TensorImpl>(layer->weight.getIntrusivePtr());
    OperatorCapture capture(layer->parameters(), [](const auto&, const auto&) {});
    capture.set_enabled(true);
    layer(torch::randn({2, 3})).sum().backward();
  }
  EXPECT_TRUE(weak.expired());
}

// A graph that outlives its backward pass does not keep the inputs of its layers.
TEST(OperatorCapture, ReleasesInputs) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  auto x = torch::randn({2, 3});
  c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl()));
  const auto loss = layer(x).sum();
  x = torch::Tensor();
  loss.backward();
  recorder.calls.clear();
  EXPECT_TRUE(storage.expired());
}

TEST(OperatorCapture, ErrorsOfOperatorsAreTheirOwn) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  EXPECT_THROW(layer(torch::randn({2, 5})), c10::Error);
  const auto kernel = parameter(torch::randn({3, 2, 3, 3}));
  const auto image = torch::randn({1, 2, 5, 5});
  EXPECT_THROW(torch::conv2d(image, kernel, {}, at::IntArrayRef{}), c10::Error);
  EXPECT_THROW(torch::conv2d(image, layer->weight, {}, 1, "same"), c10::Error);
  layer(torch::randn({2, 3})).sum().backward();
  EXPECT_EQ(recorder.calls.size(), 1U);
  recorder->raise_error();
}

// Makes the capture fail, but no operator: with this key detach() throws.
constexpr auto kFailing = c10::DispatchKey::TESTING_ONLY_GenericMode;
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("detach", [](const at::Tensor& tensor) -> at::Tensor {
    TORCH_CHECK(false, "the capture has failed");
    return tensor;
  });
}

TEST(OperatorCapture, ErrorsOfCallbacksAreKept) {
  nn::Linear layer(3, 4);
  Recorder recorder(layer->parameters());
  {
    const c10::impl::IncludeDispatchKeyGuard failing(kFailing);
    EXPECT_NO_THROW(layer(torch::randn({2, 3})));
  }
  layer(torch::randn({2, 3})).sum().backward();
  EXPECT_EQ(recorder.calls.size(), 1U);
  const auto raise = [&] { recorder->raise_error(); };
  expect_contains(message_of<c10::Error>(raise), "the capture has failed");
  raise();  // once
}

TEST(OperatorCapture, ErrorsOfCallbacksAreRaisedByTheStep) {
  nn::Linear layer(3, 4);
  optim::NaturalGradient natural(*layer);
  optim::KFAC kfac(*layer);
  torch::Tensor output;
  {
    const c10::impl::IncludeDispatchKeyGuard failing(kFailing);
    output = layer(torch::randn({2, 3}));
  }
  output.sum().backward();
  const auto before = copies(layer->parameters());
  expect_contains(message_of<c10::Error>([&] { natural.step(); }), "the capture has failed");
  expect_contains(message_of<c10::Error>([&] { kfac.step(); }), "the capture has failed");
  expect_equal(copies(layer->parameters()), before);
}

TEST(OperatorCapture, ErrorsOfTheReceiverLeaveTheBackwardPass) {
  nn::Linear layer(3, 4);
  OperatorCapture capture(layer->parameters(),
                          [](const auto&, const auto&) { TORCH_CHECK(false, "no room"); });
  capture.set_enabled(true);
  const auto loss = layer(torch::randn({2, 3})).sum();
  expect_contains(message_of<c10::Error>([&] { loss.backward(); }), "no room");
}

TEST(OperatorCapture, DifferentiatesByOutputsAlone) {
  nn::Sequential model(nn::Linear(3, 8), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(8, 2));
  OperatorCapture capture(model->parameters());
  capture.set_enabled(true);
  const auto x = torch::randn({5, 4, 3});
  model->forward(torch::randn({1, 3}));  // the loss does not depend on it
  const auto calls = capture.differentiate(model->forward(x).square().sum());
  for (const auto& param : model->parameters()) {
    EXPECT_FALSE(param.grad().defined());
  }
  capture.set_enabled(false);
  model->forward(x).square().sum().backward();
  ASSERT_EQ(calls.size(), 4U);
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(calls[i].output_gradient.defined());
    const auto& call = calls[i + 2];
    EXPECT_EQ(call.weight, 2 * i);
    EXPECT_EQ(call.bias, 2 * i + 1);
    expect_explains(call, model->parameters()[2 * i], model->parameters()[2 * i + 1]);
  }
}
}  // namespace
}  // namespace torchium::testing
