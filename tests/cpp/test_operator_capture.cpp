// Operator capture on stock torch::nn models and functional calls. The captured calls must account
// for the gradients, which is checked with products written here.
#include "gradients/capture/operator_capture.h"
#include "optimizer_testing.h"
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
namespace F = torch::nn::functional;
using gradients::detail::LayerCall;
using gradients::detail::LayerKind;
using gradients::detail::OperatorCapture;
using torch::indexing::Slice;

// An active capture of some parameters that stores its calls.
class Recorder {
 public:
  explicit Recorder(const Tensors& params)
      : capture_(params, [this](LayerCall call, const std::vector<int64_t>& gone) {
          calls.push_back(std::move(call));
          gone_passes = gone;
        }) {
    capture_.set_enabled(true);
  }
  OperatorCapture* operator->() { return &capture_; }

  std::vector<LayerCall> calls;
  std::vector<int64_t> gone_passes;  // from the last callback

 private:
  OperatorCapture capture_;
};

// The gradients of a linear layer from one of its calls.
torch::Tensor weight_gradient(const LayerCall& call) {
  const auto g = call.output_gradient.reshape({-1, call.output_gradient.size(-1)});
  const auto a = call.input.reshape({-1, call.input.size(-1)});
  return g.t().mm(a);
}
torch::Tensor bias_gradient(const LayerCall& call) {
  return call.output_gradient.reshape({-1, call.output_gradient.size(-1)}).sum(0);
}

void expect_explains(const LayerCall& call, const torch::Tensor& weight,
                     const torch::Tensor& bias) {
  EXPECT_EQ(call.kind, LayerKind::kLinear);
  EXPECT_FALSE(call.input.requires_grad());
  EXPECT_FALSE(call.output_gradient.requires_grad());
  if (weight.defined()) {
    expect_near(weight_gradient(call), weight.grad());
  }
  if (bias.defined()) {
    expect_near(bias_gradient(call), bias.grad());
  }
}

class LinearInputs : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(LinearInputs, AreCapturedWithWeightAndBias) {
  for (const bool has_bias : {true, false}) {
    for (const bool in_place : {true, false}) {
      nn::Linear layer(nn::LinearOptions(3, 4).bias(has_bias));
      Recorder recorder(layer->parameters());
      const auto x = torch::randn(GetParam());
      auto y = layer(x);
      y = in_place ? y.relu_() : y.relu();
      (y * torch::randn_like(y)).sum().backward();
      ASSERT_EQ(recorder.calls.size(), 1U);
      const auto& call = recorder.calls[0];
      EXPECT_EQ(call.weight, 0);
      EXPECT_EQ(call.bias, has_bias ? 1 : -1);
      EXPECT_EQ(call.micro_batch, 0);
      expect_equal({call.input}, {x});
      EXPECT_EQ(call.output_gradient.sizes(), y.sizes());
      expect_explains(call, layer->weight, layer->bias);
    }
  }
}

TEST_P(LinearInputs, OfFunctionalCallsAreCaptured) {
  using Function = std::function<torch::Tensor(torch::Tensor, torch::Tensor, torch::Tensor)>;
  const std::vector<Function> functions{
      [](auto x, auto w, auto b) { return torch::linear(x, w, b); },
      [](auto x, auto w, auto b) { return F::linear(x, w, b); },
      [](auto x, auto w, auto b) { return x.matmul(w.t()).add_(b); },
      [](auto x, auto w, auto b) { return x.matmul(w.transpose(0, 1)).add_(b); },
      [](auto x, auto w, auto b) { return x.matmul(w.mT()).add_(b); },
  };
  for (size_t i = 0; i < functions.size(); ++i) {
    SCOPED_TRACE(i);
    const Tensors params{parameter(torch::randn({4, 3})), parameter(torch::randn({4}))};
    Recorder recorder(params);
    functions[i](torch::randn(GetParam()), params[0], params[1]).relu_().square().sum().backward();
    ASSERT_EQ(recorder.calls.size(), 1U);
    EXPECT_EQ(recorder.calls[0].weight, 0);
    EXPECT_EQ(recorder.calls[0].bias, 1);
    expect_explains(recorder.calls[0], params[0], params[1]);
  }
}

// Some terms alone: the bias is a separate call, and frozen parameters are left out.
TEST_P(LinearInputs, MayComeInPieces) {
  const Tensors params{parameter(torch::randn({4, 3})), parameter(torch::randn({4}))};
  const auto x = torch::randn(GetParam());
  {
    Recorder recorder(params);
    (x.matmul(params[0].t()) + params[1]).square().sum().backward();
    ASSERT_EQ(recorder.calls.size(), 2U);
    // In the order of the backward pass.
    EXPECT_EQ(recorder.calls[0].bias, 1);
    EXPECT_EQ(recorder.calls[0].weight, -1);
    EXPECT_EQ(recorder.calls[1].bias, -1);
    EXPECT_EQ(recorder.calls[1].weight, 0);
    expect_explains(recorder.calls[0], {}, params[1]);
    expect_explains(recorder.calls[1], params[0], {});
  }
  nn::Linear layer(3, 4);
  for (const bool frozen_weight : {true, false}) {
    Recorder recorder(layer->parameters());
    layer->zero_grad();
    layer->weight.set_requires_grad(!frozen_weight);
    layer->bias.set_requires_grad(frozen_weight);
    layer(x).square().sum().backward();
    ASSERT_EQ(recorder.calls.size(), 1U);
    EXPECT_EQ(recorder.calls[0].weight, frozen_weight ? -1 : 0);
    EXPECT_EQ(recorder.calls[0].bias, frozen_weight ? 1 : -1);
    expect_explains(recorder.calls[0], frozen_weight ? torch::Tensor() : layer->weight,
                    frozen_weight ? layer->bias : torch::Tensor());
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearInputs,
                         ::testing::Values(std::vector<int64_t>{5, 3}, std::vector<int64_t>{1, 3},
                                           std::vector<int64_t>{3}, std::vector<int64_t>{2, 5, 3},
                                           std::vector<int64_t>{2, 1, 4, 3}));

// Products that only look like calls with a parameter.
TEST(OperatorCapture, LeavesOtherProductsAlone) {
  const auto w = parameter(torch::randn({3, 3}));
  const auto other = parameter(torch::randn({3, 3}));
  const auto x = torch::randn({3, 3});
  const auto untracked = [&] {
    const torch::NoGradGuard no_grad;
    return w.t();
  }();
  Recorder recorder({w});
  const Tensors results{
      w.matmul(x.t()),                    // from the left
      w.matmul(torch::randn({2, 3, 4})),  // folds into a product with the transpose
      x.matmul(other.t()),                // of another parameter
      x.matmul((2 * w).t()),              // of a function of it
      x.matmul(w.flip(0).t()),
      x.matmul(w.slice(0, 0, 2).t()),       // of a part
      other.matmul(w.detach().t()),         // no gradient reaches it
      other.matmul(untracked),              // neither
      torch::addmm(x, x, w.t(), 1.0, 2.0),  // scaled
      torch::addmm(x, x, w.t(), 2.0, 1.0),
  };
  for (const auto& result : results) {
    result.sum().backward();
  }
  recorder->raise_error();
  EXPECT_EQ(recorder.calls.size(), 0U);
}

TEST(OperatorCapture, SeesProductsWithAParameterItself) {
  const auto w = parameter(torch::randn({3, 4}));
  const auto x = torch::randn({5, 2, 3});
  for (const auto& input : {x, x.view({10, 3}), x.select(1, 0)}) {
    Recorder recorder({w});
    input.matmul(w).square().sum().backward();
    ASSERT_EQ(recorder.calls.size(), 1U);
    const auto& call = recorder.calls[0];
    EXPECT_EQ(call.settings[0], 1);
    EXPECT_EQ(call.input.size(0), 5);  // the samples of the tensor that the view is of
    EXPECT_EQ(call.output_gradient.sizes().slice(0, 1), call.input.sizes().slice(0, 1));
    expect_near(weight_gradient(call).t(), w.grad());
    w.mutable_grad() = torch::Tensor();
  }
}

TEST(OperatorCapture, SeesTheAddendOfAddmm) {
  const auto w = parameter(torch::randn({4, 3}));
  const auto x = torch::randn({2, 3});
  const auto residual = parameter(torch::randn({2, 4}));
  Recorder recorder({w, residual});
  torch::addmm(residual, x, w.t()).square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 1U);
  EXPECT_EQ(recorder.calls[0].bias, -1);  // not a bias: it has one row per sample
  expect_explains(recorder.calls[0], w, {});
}

using Settings = std::array<int64_t, 12>;

// The gradient with respect to a convolution's weight, from one of its calls.
torch::Tensor convolution_gradient(const LayerCall& call, const torch::Tensor& weight) {
  const auto& s = call.settings;
  const auto w = parameter(weight);
  const auto y = torch::conv2d(call.input, w, {}, {s[0], s[1]}, {s[2], s[3]}, {s[4], s[5]}, s[6]);
  return torch::autograd::grad({y}, {w}, {call.output_gradient})[0];
}

TEST(OperatorCapture, SeesConvolutions) {
  using Options = nn::Conv2dOptions;
  struct Case {
    Options options;
    Settings settings;
  };
  const std::vector<Case> cases{
      {Options(4, 6, 3), {1, 1, 0, 0, 1, 1, 1, 0}},
      {Options(4, 6, {3, 2}).stride({2, 1}).padding({1, 0}).dilation({1, 2}).groups(2),
       {2, 1, 1, 0, 1, 2, 2, 0}},
      {Options(4, 6, 3).padding(1).bias(false), {1, 1, 1, 1, 1, 1, 1, 0}},
      {Options(4, 6, 3).padding(torch::kSame), {1, 1, 1, 1, 1, 1, 1, 0}},
      {Options(4, 6, {2, 3}).padding(torch::kSame), {1, 1, 0, 1, 1, 1, 1, 0}},
      {Options(4, 6, {2, 4}).padding(torch::kSame).dilation(3), {1, 1, 1, 4, 3, 3, 1, 0}},
      {Options(4, 6, 3).padding(torch::kValid), {1, 1, 0, 0, 1, 1, 1, 0}},
      {Options(4, 6, 3).padding(2).padding_mode(torch::kCircular), {1, 1, 0, 0, 1, 1, 1, 0}},
      {Options(4, 6, 3).padding(2).padding_mode(torch::kReflect), {1, 1, 0, 0, 1, 1, 1, 0}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const bool batched : {true, false}) {
      SCOPED_TRACE(::testing::Message() << "case " << i << (batched ? "" : ", one sample"));
      nn::Conv2d layer(cases[i].options);
      Recorder recorder(layer->parameters());
      const auto x = batched ? torch::randn({2, 4, 7, 8}) : torch::randn({4, 7, 8});
      auto y = layer(x);
      y.relu_();
      (y * torch::randn_like(y)).sum().backward();
      ASSERT_EQ(recorder.calls.size(), 1U);
      const auto& call = recorder.calls[0];
      EXPECT_EQ(call.kind, LayerKind::kConv2d);
      EXPECT_EQ(call.weight, 0);
      EXPECT_EQ(call.bias, layer->bias.defined() ? 1 : -1);
      EXPECT_EQ(call.settings, cases[i].settings);
      EXPECT_EQ(call.output_gradient.sizes(), y.sizes());
      expect_near(convolution_gradient(call, layer->weight), layer->weight.grad());
      recorder->raise_error();
    }
  }
}

TEST(OperatorCapture, SeesConvolutionsByTheirOperators) {
  const Tensors params{parameter(torch::randn({6, 2, 3, 3})), parameter(torch::randn({6}))};
  const auto x = torch::randn({2, 4, 7, 8});
  const auto transposed = parameter(torch::randn({4, 6, 3, 3}));
  Recorder recorder({params[0], params[1], transposed});
  torch::convolution(x, params[0], params[1], {2, 2}, {1, 1}, {1, 1}, false, {0, 0}, 2)
      .square()
      .sum()
      .backward();
  ASSERT_EQ(recorder.calls.size(), 1U);
  EXPECT_EQ(recorder.calls[0].settings, (Settings{2, 2, 1, 1, 1, 1, 2, 0}));
  expect_near(convolution_gradient(recorder.calls[0], params[0]), params[0].grad());
  torch::convolution(x, transposed, {}, {2, 1}, {1, 0}, {1, 1}, true, {1, 0}, 1)
      .square()
      .sum()
      .backward();
  ASSERT_EQ(recorder.calls.size(), 2U);
  EXPECT_EQ(recorder.calls[1].settings, (Settings{2, 1, 1, 0, 1, 1, 1, 1}));
}

// What a layer with a bias has captured, for an input with samples and for one sample.
template <typename Layer>
LayerCall call_of(Layer layer, const torch::Tensor& x) {
  Recorder recorder(layer->parameters());
  layer(x).square().sum().backward();
  recorder->raise_error();
  EXPECT_EQ(recorder.calls.size(), 1U);
  EXPECT_EQ(recorder.calls[0].weight, 0);
  EXPECT_EQ(recorder.calls[0].bias, 1);
  return recorder.calls[0];
}

TEST(OperatorCapture, SeesConvolutionsOfOneDimensionAsImagesOfHeightOne) {
  const auto x = torch::randn({2, 4, 9});
  const auto options = nn::Conv1dOptions(4, 6, 3).stride(2).padding(1).groups(2);
  for (const bool is_single : {false, true}) {
    const auto call = call_of(nn::Conv1d(options), is_single ? x[0] : x);
    EXPECT_EQ(call.kind, LayerKind::kConv2d);
    EXPECT_EQ(call.settings, (Settings{1, 2, 0, 1, 1, 1, 2, 0}));
    expect_equal({call.input}, {(is_single ? x[0] : x).unsqueeze(-2)});
    EXPECT_EQ(call.output_gradient.sizes().slice(call.output_gradient.dim() - 3),
              torch::IntArrayRef({6, 1, 5}));
  }
  const auto same = call_of(nn::Conv1d(nn::Conv1dOptions(4, 6, 4).padding(torch::kSame)), x);
  EXPECT_EQ(same.settings, (Settings{1, 1, 0, 1, 1, 1, 1, 0}));
  expect_equal({same.input}, {torch::constant_pad_nd(x, {0, 1}).unsqueeze(-2)});
}

TEST(OperatorCapture, SeesConvolutionsOfThreeDimensions) {
  const auto x = torch::randn({2, 4, 5, 6, 7});
  const auto plain = call_of(
      nn::Conv3d(nn::Conv3dOptions(4, 6, {1, 2, 3}).stride({1, 2, 3}).dilation({3, 2, 1})), x);
  EXPECT_EQ(plain.kind, LayerKind::kConv3d);
  EXPECT_EQ(plain.settings, (Settings{1, 2, 3, 0, 0, 0, 3, 2, 1, 1, 0}));
  const auto same =
      call_of(nn::Conv3d(nn::Conv3dOptions(4, 6, {2, 3, 4}).padding(torch::kSame)), x);
  EXPECT_EQ(same.settings, (Settings{1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0}));
  expect_equal({same.input}, {torch::constant_pad_nd(x, {0, 1, 0, 0, 0, 1})});
}

TEST(OperatorCapture, SeesTransposedConvolutions) {
  const auto line =
      call_of(nn::ConvTranspose1d(nn::ConvTranspose1dOptions(4, 6, 3).stride(2).output_padding(1)),
              torch::randn({2, 4, 5}));
  EXPECT_EQ(line.kind, LayerKind::kConv2d);
  EXPECT_EQ(line.settings, (Settings{1, 2, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(line.output_gradient.sizes(), torch::IntArrayRef({2, 6, 1, 12}));
  const auto image =
      call_of(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 6, {3, 2}).padding(1).groups(2)),
              torch::randn({2, 4, 5, 6}));
  EXPECT_EQ(image.settings, (Settings{1, 1, 1, 1, 1, 1, 2, 1}));
  const auto volume =
      call_of(nn::ConvTranspose3d(nn::ConvTranspose3dOptions(4, 6, 2).dilation({1, 2, 3})),
              torch::randn({4, 5, 6, 3}));
  EXPECT_EQ(volume.kind, LayerKind::kConv3d);
  EXPECT_EQ(volume.settings, (Settings{1, 1, 1, 0, 0, 0, 1, 2, 3, 1, 1}));
}

TEST(OperatorCapture, SeesRmsNorms) {
  const auto weight = parameter(torch::randn({3, 4}));
  Recorder recorder({weight});
  const auto x = torch::randn({5, 2, 3, 4});
  torch::rms_norm(x, {3, 4}, weight, 1e-3).square().sum().backward();
  torch::rms_norm(x, {3, 4}, weight).square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 2U);
  for (const auto& call : recorder.calls) {
    EXPECT_EQ(call.kind, LayerKind::kRmsNorm);
    EXPECT_EQ(call.settings[0], 2);
    EXPECT_EQ(call.weight, 0);
    EXPECT_EQ(call.bias, -1);
  }
  EXPECT_EQ(recorder.calls[0].eps, 1e-3);
  EXPECT_EQ(recorder.calls[1].eps, -1.0);  // of the dtype
}

TEST(OperatorCapture, SeesEmbeddings) {
  nn::Embedding layer(nn::EmbeddingOptions(7, 3).padding_idx(2));
  nn::Embedding by_frequency(nn::EmbeddingOptions(7, 3).scale_grad_by_freq(true));
  nn::Embedding sparse(nn::EmbeddingOptions(7, 3).sparse(true));
  Recorder recorder({layer->weight, by_frequency->weight, sparse->weight});
  const auto indices = torch::tensor({{1, 2, 6}, {1, 0, 0}});
  (layer(indices).square().sum() + by_frequency(indices).sum() + sparse(indices).sum()).backward();
  ASSERT_EQ(recorder.calls.size(), 1U);
  const auto& call = recorder.calls[0];
  EXPECT_EQ(call.kind, LayerKind::kEmbedding);
  EXPECT_EQ(call.weight, 0);
  EXPECT_EQ(call.settings[0], 2);
  expect_equal({call.input}, {indices});
  const auto expected =
      torch::zeros({7, 3}).index_add(0, indices.reshape(-1), call.output_gradient.reshape({-1, 3}));
  expect_near(layer->weight.grad(), expected.index_fill(0, torch::tensor({2}), 0.0));
}

TEST(OperatorCapture, SeesNormalizations) {
  nn::LayerNorm layer_norm(nn::LayerNormOptions({3, 4}).eps(1e-3));
  nn::GroupNorm group_norm(nn::GroupNormOptions(2, 4).eps(1e-4));
  Recorder recorder({layer_norm->weight, layer_norm->bias, group_norm->weight, group_norm->bias});
  const auto x = torch::randn({5, 2, 3, 4});
  const auto images = torch::randn({5, 4, 3});
  layer_norm(x).square().sum().backward();
  std::get<0>(torch::native_layer_norm(x, {3, 4}, layer_norm->weight, layer_norm->bias, 1e-3))
      .square()
      .sum()
      .backward();
  group_norm(images).square().sum().backward();
  std::get<0>(
      torch::native_group_norm(images, group_norm->weight, group_norm->bias, 5, 4, 3, 2, 1e-4))
      .square()
      .sum()
      .backward();
  ASSERT_EQ(recorder.calls.size(), 4U);
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    const auto& call = recorder.calls[i];
    const bool is_layer_norm = i < 2;
    EXPECT_EQ(call.kind, is_layer_norm ? LayerKind::kLayerNorm : LayerKind::kGroupNorm);
    EXPECT_EQ(call.settings[0], 2);  // two dimensions, two groups
    EXPECT_EQ(call.eps, is_layer_norm ? 1e-3 : 1e-4);
    EXPECT_EQ(call.weight, is_layer_norm ? 0 : 2);
    EXPECT_EQ(call.bias, is_layer_norm ? 1 : 3);
    EXPECT_EQ(call.micro_batch, i);
    const auto bias_gradient = call.output_gradient.sum(is_layer_norm ? std::vector<int64_t>{0, 1}
                                                                      : std::vector<int64_t>{0, 2});
    expect_near(2 * bias_gradient, (is_layer_norm ? layer_norm->bias : group_norm->bias).grad());
  }
}

// A weight with several calls, and an embedding that is also the output layer.
TEST(OperatorCapture, SeesSharedWeights) {
  nn::Embedding embedding(7, 3);
  nn::Linear layer(3, 3);
  Recorder recorder({embedding->weight, layer->weight, layer->bias});
  const auto h = layer(torch::tanh(layer(embedding(torch::tensor({1, 2, 2, 5})))));
  torch::linear(h, embedding->weight).square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 4U);
  EXPECT_EQ(recorder.calls[0].kind, LayerKind::kLinear);
  EXPECT_EQ(recorder.calls[0].weight, 0);
  EXPECT_EQ(recorder.calls[1].weight, 1);
  EXPECT_EQ(recorder.calls[2].weight, 1);
  EXPECT_EQ(recorder.calls[3].kind, LayerKind::kEmbedding);
  for (const auto& call : recorder.calls) {
    EXPECT_EQ(call.micro_batch, 0);
  }
  expect_near(weight_gradient(recorder.calls[1]) + weight_gradient(recorder.calls[2]),
              layer->weight.grad());
}

TEST(OperatorCapture, TellsBackwardPassesApart) {
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

TEST(OperatorCapture, TellsWhichGradientsAreGone) {
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

TEST(OperatorCapture, WorksOnCuda) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "skipped: no CUDA device";
  }
  nn::Sequential model(nn::Conv2d(2, 3, 3), nn::ReLU(nn::ReLUOptions(true)), nn::Flatten(),
                       nn::Linear(12, 4));
  model->to(torch::kCUDA);
  Recorder recorder(model->parameters());
  model->forward(torch::randn({5, 2, 4, 4}, torch::kCUDA)).square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 2U);
  expect_near(weight_gradient(recorder.calls[0]), model->parameters()[2].grad());
  expect_near(convolution_gradient(recorder.calls[1], model->parameters()[0]),
              model->parameters()[0].grad(), 1e-3);
}

TEST(OperatorCaptureTest, HooksOfAnOutputActBeforeItsGradientIsCaptured) {
  nn::Linear layer(4, 3);
  Recorder recorder({layer->weight, layer->bias});
  const auto output = layer->forward(torch::randn({5, 4}));
  output.register_hook([](const torch::Tensor& gradient) { return gradient * 10; });
  output.square().sum().backward();
  ASSERT_EQ(recorder.calls.size(), 1);
  expect_explains(recorder.calls[0], layer->weight, layer->bias);
}

}  // namespace
}  // namespace torchium::testing
