// Layer calls that operator capture sees in stock torch::nn models and functional calls. The
// captured calls must account for the gradients, which is checked with products written here.
#include "operator_capture_testing.h"

namespace torchium::testing {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

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

// The bias is in one of two results of the product.
TEST_P(LinearInputs, AreSeparateFromABiasThatAPartOfTheProductHas) {
  const Tensors params{parameter(torch::randn({4, 3})), parameter(torch::randn({4}))};
  Recorder recorder(params);
  auto y = torch::randn(GetParam()).matmul(params[0].t());
  const auto without_bias = 3 * y;
  y.add_(params[1]);
  (y.square().sum() + without_bias.sum()).backward();
  ASSERT_EQ(recorder.calls.size(), 2U);
  expect_explains(recorder.calls[0], {}, params[1]);
  expect_explains(recorder.calls[1], params[0], {});
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

TEST(OperatorCapture, HooksOfAnOutputActBeforeItsGradientIsCaptured) {
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
