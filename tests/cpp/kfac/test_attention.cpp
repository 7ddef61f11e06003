// Attention and transformer layers, whose samples are dimension 1, against the same function of
// layers that get the samples first.
#include "kfac_testing.h"
#include "torchium/optim/natural_gradient.h"

namespace torchium::testing {
namespace {

constexpr int64_t kSamples = 7, kPositions = 5, kWidth = 8, kHeads = 2, kClasses = 3, kHidden = 16;

struct Transformer : public nn::Module {
  Transformer()
      : layer(register_module(
            "layer", nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(kWidth, kHeads)
                                                     .dropout(0.0)
                                                     .dim_feedforward(kHidden)))),
        head(register_module("head", nn::Linear(kWidth, kClasses))) {}

  torch::Tensor forward(const torch::Tensor& x) {  // [samples, positions, width]
    return head(layer(x.transpose(0, 1)).mean(0));
  }

  nn::TransformerEncoderLayer layer;
  nn::Linear head;
};

// The same function; its parameters come in the same order.
struct OfLinearLayers : public nn::Module {
  explicit OfLinearLayers(const Transformer& model)
      : projection(register_module("projection", nn::Linear(kWidth, 3 * kWidth))),
        output(register_module("output", nn::Linear(kWidth, kWidth))),
        linear1(register_module("linear1", nn::Linear(kWidth, kHidden))),
        linear2(register_module("linear2", nn::Linear(kHidden, kWidth))),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        head(register_module("head", nn::Linear(kWidth, kClasses))) {
    const torch::NoGradGuard no_grad;
    const auto given = model.named_parameters();
    const std::vector<std::pair<std::string, std::string>> names{
        {"projection.weight", "layer.self_attn.in_proj_weight"},
        {"projection.bias", "layer.self_attn.in_proj_bias"},
        {"output.weight", "layer.self_attn.out_proj.weight"},
        {"output.bias", "layer.self_attn.out_proj.bias"}};
    for (auto& own : named_parameters()) {
      const auto found = std::find_if(names.begin(), names.end(),
                                      [&](const auto& pair) { return pair.first == own.key(); });
      std::string other = own.key();
      if (found != names.end()) {
        other = found->second;
      } else if (own.key().rfind("head", 0) != 0) {
        other = "layer." + own.key();
      }
      own.value().copy_(given[other]);
      places.push_back(other);
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = projection(x).chunk(3, -1);
    const auto split = [](const torch::Tensor& part) {
      return part.unflatten(-1, {kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto q = split(parts[0]), k = split(parts[1]), v = split(parts[2]);
    const auto weights = (q.matmul(k.mT()) / std::sqrt(kWidth / kHeads)).softmax(-1);
    const auto y = norm1(x + output(weights.matmul(v).transpose(1, 2).flatten(2)));
    return head(norm2(y + linear2(linear1(y).relu())).mean(1));
  }

  nn::Linear projection, output, linear1, linear2;
  nn::LayerNorm norm1, norm2;
  nn::Linear head;
  std::vector<std::string> places;  // of its parameters in the transformer
};

template <typename Optimizer, typename Options>
void expect_equal_training(const Options& options) {
  torch::manual_seed(0);
  Transformer model;
  model.to(torch::kDouble);
  OfLinearLayers reference(model);
  reference.to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    const auto given = model.named_parameters();
    const auto own = reference.parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      own[i].data().copy_(given[reference.places[i]]);
    }
  }
  Optimizer of_model(model, options);
  Optimizer of_reference(reference, options);
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({kSamples, kPositions, kWidth}, torch::kDouble);
    const auto y = torch::randint(kClasses, {kSamples}, torch::kLong);
    const auto take = [&](auto& net, Optimizer& optimizer) {
      optimizer.zero_grad();
      cross_entropy(net.forward(x), y).backward();
      optimizer.step();
    };
    take(model, of_model);
    take(reference, of_reference);
  }
  const auto given = model.named_parameters();
  const auto own = reference.parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    SCOPED_TRACE(reference.places[i]);
    expect_near(given[reference.places[i]], own[i], 1e-9);
  }
}

TEST(Attention, TrainsAsItsLinearLayersWithKfac) {
  expect_equal_training<KFAC>(KFACOptions(0.1).TCov(1).TInv(1));
}

TEST(Attention, TrainsAsItsLinearLayersWithNaturalGradient) {
  expect_equal_training<optim::NaturalGradient>(optim::NaturalGradientOptions(0.1));
}

}  // namespace
}  // namespace torchium::testing
