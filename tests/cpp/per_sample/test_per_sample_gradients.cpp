// Per-sample gradients against a loop, also for models that move, mix or hide the samples of a
// batch.
#include "natural_gradient_testing.h"
#include "per_sample_testing.h"
#include "torchium/gradients.h"

#include <ATen/CPUGeneratorImpl.h>

namespace torchium::testing {
namespace {

struct Layers : public nn::Module {
  Layers() {
    torch::manual_seed(0);
    a = register_module("a", nn::Linear(4, 4));
    b = register_module("b", nn::Linear(4, 4));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    positions = register_module("positions", nn::Embedding(8, 4));
    calls = register_buffer("calls", torch::zeros({}, torch::kDouble));
    to(torch::kDouble);
  }
  nn::Linear a{nullptr};
  nn::Linear b{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Embedding positions{nullptr};
  torch::Tensor calls;
};

using Forward = std::function<torch::Tensor(Layers&, const torch::Tensor&)>;  // [n, T, 4] -> [n, 4]

torch::Tensor by_lengths(const torch::Tensor& x) { return x.sum({1, 2}).argsort(); }

std::vector<std::pair<std::string, Forward>> forwards() {
  return {
      {"plain", [](Layers& m, const auto& x) { return m.b(torch::tanh(m.a(x))).sum(1); }},
      {"time_first",
       [](Layers& m, const auto& x) {
         return m.norm(m.b(torch::tanh(m.a(x.transpose(0, 1))))).sum(0);
       }},
      {"last_step", [](Layers& m, const auto& x) { return m.a(x.transpose(0, 1))[-1]; }},
      {"in_reverse_and_back",
       [](Layers& m, const auto& x) { return m.b(torch::tanh(m.a(x.flip(0)))).flip(0).sum(1); }},
      {"sorted_and_back",
       [](Layers& m, const auto& x) {
         const auto order = by_lengths(x);
         return m.a(x.index({order})).index({order.argsort()}).exp().sum(1);
       }},
      {"in_reverse", [](Layers& m, const auto& x) { return m.a(x.flip(0)).sum(1); }},
      {"rolled", [](Layers& m, const auto& x) { return m.b(m.a(x).roll(1, 0)).sum(1); }},
      {"sorted", [](Layers& m, const auto& x) { return m.a(x.index({by_lengths(x)})).sum(1); }},
      {"all_but_the_first_exchanged",
       [](Layers& m, const auto& x) {
         return m.a(torch::cat({x.narrow(0, 0, 1), x.narrow(0, 1, x.size(0) - 1).flip(0)})).sum(1);
       }},
      {"centred", [](Layers& m, const auto& x) { return m.a(torch::exp(x - x.mean(0))).sum(1); }},
      {"added_up", [](Layers& m, const auto& x) { return m.a(x.cumsum(0)).sum(1); }},
      {"mixed_behind_layers",
       [](Layers& m, const auto& x) {
         const auto y = m.a(x.mean(1));
         return y + 0.1 * y.mean(0);
       }},
      {"zero_for_now",
       [](Layers& m, const auto& x) {
         const torch::NoGradGuard no_grad;
         m.b->weight.zero_();
         m.b->bias.zero_();
         const torch::AutoGradMode grad(true);
         return m.a(x).sum(1) + m.b(x - x.mean(0)).sum(1);
       }},
      {"shared_positions",
       [](Layers& m, const auto& x) {
         return m.a(x + m.positions(torch::arange(x.size(1)))).exp().sum(1);
       }},
      {"used_otherwise",
       [](Layers& m, const auto& x) { return m.a(x).sum(1) + m.b->weight.square().sum(); }},
      {"folded",
       [](Layers& m, const auto& x) {
         return m.a(x.reshape({-1, 4})).view_as(x).exp().sum(1);
       }},
      {"read_by_the_host",
       [](Layers& m, const auto& x) {
         return x.sum().template item<double>() > 0 ? m.a(x).sum(1) : m.b(x).sum(1);
       }},
      {"read_in_a_recorded_block",
       [](Layers& m, const auto& x) {
         RECORD_FUNCTION("block", {});
         return x.sum().template item<double>() > 0 ? m.a(x).sum(1) : m.b(x).sum(1);
       }},
      {"counted",
       [](Layers& m, const auto& x) {
         m.calls += 1;
         return m.a(x).sum(1) * m.calls;
       }},
  };
}

torch::Tensor loop_gradient(Layers& model, const Forward& forward, const torch::Tensor& param,
                            const torch::Tensor& inputs, const torch::Tensor& targets) {
  Tensors rows;
  for (int64_t i = 0; i < inputs.size(0); ++i) {
    model.calls.zero_();
    const auto loss =
        cross_entropy(forward(model, inputs.narrow(0, i, 1)), targets.narrow(0, i, 1));
    const auto gradient = torch::autograd::grad({loss}, {param}, {}, true, false, true)[0];
    rows.push_back(gradient.defined() ? gradient : torch::zeros_like(param));
  }
  model.calls.zero_();
  return torch::stack(rows);
}

void expect_rows_of_a_loop(const std::string& name, const Forward& forward,
                           const torch::Tensor& inputs, const torch::Tensor& targets) {
  Layers model;
  const auto rows = per_sample_gradients(
      model, [&](const torch::Tensor& x) { return forward(model, x); }, &cross_entropy, inputs,
      targets);
  EXPECT_EQ(model.calls.item<double>(), 0.0);
  for (const auto& [key, row] : rows.pairs()) {
    SCOPED_TRACE(name + ", " + key);
    EXPECT_FALSE(row.requires_grad());
    expect_near(row, loop_gradient(model, forward, model.named_parameters()[key], inputs, targets),
                1e-10);
  }
  SCOPED_TRACE(name);
  expect_quantities(
      model, [&](const torch::Tensor& x) { return forward(model, x); }, &cross_entropy, inputs,
      targets, rows);
  EXPECT_EQ(model.calls.item<double>(), 0.0);
}

TEST(PerSampleGradientsOf, ModelsThatMoveOrMixSamples) {
  for (const auto& [name, forward] : forwards()) {
    for (const auto& [samples, time] : std::vector<std::pair<int64_t, int64_t>>{
             {5, 5}, {5, 1}, {2, 2}, {1, 1}, {1, 3}, {4, 3}, {9, 4}}) {
      torch::manual_seed(1);
      expect_rows_of_a_loop(name, forward, torch::randn({samples, time, 4}, torch::kDouble),
                            torch::randint(4, {samples}));
    }
  }
}

// Only the targets identify the sample of a row.
TEST(PerSampleGradientsOf, EqualSamples) {
  const auto inputs = torch::randn({1, 3, 4}, torch::kDouble).expand({5, 3, 4});
  expect_rows_of_a_loop("in_reverse_and_back", forwards()[3].second, inputs,
                        torch::tensor({0, 1, 2, 3, 1}));
}

template <typename Model>
void expect_rows_of_a_stock_model(Model model, torch::IntArrayRef sample,
                                  const std::function<torch::Tensor(Model&, torch::Tensor)>& run) {
  torch::manual_seed(0);
  model->to(torch::kDouble);
  auto sizes = sample.vec();
  sizes.insert(sizes.begin(), 4);
  const auto inputs = torch::randn(sizes, torch::kDouble);
  const auto targets = torch::rand({4}, torch::kDouble);
  const auto loss = [](const auto& y, const auto& t) { return y.square().sum() * t.sum(); };
  const auto rows = per_sample_gradients(
      *model, [&](const torch::Tensor& x) { return run(model, x); }, loss, inputs, targets);
  expect_quantities(
      *model, [&](const torch::Tensor& x) { return run(model, x); }, loss, inputs, targets, rows);
  const auto params = model->named_parameters();
  ASSERT_EQ(rows.keys(), params.keys());
  for (int64_t i = 0; i < 4; ++i) {
    const auto value = loss(run(model, inputs.narrow(0, i, 1)), targets.narrow(0, i, 1));
    const auto expected = torch::autograd::grad({value}, model->parameters());
    for (size_t p = 0; p < expected.size(); ++p) {
      expect_near(rows[p].value()[i], expected[p], 1e-10);
    }
  }
}

TEST(PerSampleGradientsOf, LayersOfOtherKinds) {
  expect_rows_of_a_stock_model<nn::LSTM>(
      nn::LSTM(nn::LSTMOptions(3, 4).num_layers(2)), {4, 3},
      [](auto& m, auto x) { return std::get<0>(m(x.transpose(0, 1))).sum(0); });
  expect_rows_of_a_stock_model<nn::GRU>(nn::GRU(nn::GRUOptions(3, 4).batch_first(true)), {5, 3},
                                        [](auto& m, auto x) { return std::get<0>(m(x)).sum(1); });
  expect_rows_of_a_stock_model<nn::MultiheadAttention>(
      nn::MultiheadAttention(4, 2), {4, 4}, [](auto& m, auto x) {
        x = x.transpose(0, 1);
        return std::get<0>(m(x, x, x)).transpose(0, 1);
      });
  expect_rows_of_a_stock_model<nn::PReLU>(nn::PReLU(), {5}, [](auto& m, auto x) { return m(x); });
}

// With a layer call for the whole batch: the forward function is not called for each sample.
template <typename Model>
void expect_rows_of_one_pass(Model model, torch::IntArrayRef sample) {
  int64_t calls = 0;
  expect_rows_of_a_stock_model<Model>(model, sample, [&](auto& m, auto x) {
    ++calls;
    return m(x);
  });
  torch::manual_seed(0);
  auto sizes = sample.vec();
  sizes.insert(sizes.begin(), 20);
  calls = 0;
  const auto x = torch::randn(sizes, torch::kDouble);
  per_sample_gradients(
      *model,
      [&](const torch::Tensor& inputs) {
        ++calls;
        return model(inputs);
      },
      [](const auto& y, const auto&) { return y.square().sum(); }, x, torch::ones({20}));
  EXPECT_LT(calls, 10);
}

TEST(PerSampleGradientsOf, ConvolutionsAndTransposedConvolutionsOfAllDimensions) {
  expect_rows_of_one_pass(
      nn::Conv1d(nn::Conv1dOptions(4, 6, 3).stride(2).padding(2).dilation(2).groups(2)), {4, 7});
  expect_rows_of_one_pass(
      nn::Conv1d(nn::Conv1dOptions(2, 3, 3).padding(1).padding_mode(torch::kCircular)), {2, 5});
  expect_rows_of_one_pass(nn::Conv3d(nn::Conv3dOptions(4, 6, 2).stride({1, 2, 1}).groups(2)),
                          {4, 3, 4, 5});
  expect_rows_of_one_pass(
      nn::ConvTranspose1d(nn::ConvTranspose1dOptions(4, 6, 3).stride(2).output_padding(1)), {4, 5});
  expect_rows_of_one_pass(
      nn::ConvTranspose2d(
          nn::ConvTranspose2dOptions(4, 6, 3).stride(2).padding(1).dilation(2).groups(2)),
      {4, 4, 5});
  expect_rows_of_one_pass(nn::ConvTranspose3d(nn::ConvTranspose3dOptions(2, 3, 2).bias(false)),
                          {2, 3, 2, 4});
}

struct RmsNorm : public nn::Module {
  RmsNorm() { weight = register_parameter("weight", torch::rand({3, 4})); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::rms_norm(x, {3, 4}, weight); }
  torch::Tensor weight;
};

TEST(PerSampleGradientsOf, RmsNorms) {
  expect_rows_of_one_pass(nn::ModuleHolder<RmsNorm>(), {2, 3, 4});
}

// A buffer whose value cannot be restored raises; from a destructor that would terminate the
// program.
TEST(PerSampleGradients, RaiseForABufferThatChangesItsShape) {
  Layers model;
  const auto forward = [&](const torch::Tensor& x) {
    model.calls.resize_({3}).fill_(1.0);
    return model.a(x);
  };
  const auto loss = [](const torch::Tensor& y, const torch::Tensor& t) { return (y - t).sum(); };
  const auto inputs = torch::randn({2, 4}, torch::kDouble);
  model.calls.resize_({2});
  const auto message = message_of<c10::Error>(
      [&] { per_sample_gradients(model, forward, loss, inputs, torch::zeros_like(inputs)); });
  expect_contains(message, "size");
}

TEST_P(Problems, HavePerSampleGradients) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto model = make(dtype);
    const auto batch = GetParam().batch(0, dtype);
    const auto expected = dense_jacobian(GetParam(), *model, batch);
    const torch::NoGradGuard no_grad;
    const auto gradients = per_sample_gradients(
        *model, [&](const torch::Tensor& x) { return GetParam().forward(*model, x); },
        &cross_entropy, batch.inputs, batch.targets);
    const auto params = model->named_parameters();
    ASSERT_EQ(gradients.keys(), params.keys());
    Tensors rows;
    for (const auto& [name, gradient] : gradients.pairs()) {
      EXPECT_EQ(gradient.scalar_type(), dtype);
      EXPECT_FALSE(params[name].grad().defined());
      EXPECT_EQ(gradient.sizes().slice(1), params[name].sizes());
      rows.push_back(gradient.flatten(1));
    }
    expect_near(torch::cat(rows, 1), expected, dtype == torch::kDouble ? 1e-10 : 1e-4);
    expect_quantities(
        *model, [&](const torch::Tensor& x) { return GetParam().forward(*model, x); },
        &cross_entropy, batch.inputs, batch.targets, gradients,
        dtype == torch::kDouble ? 1e-9 : 1e-4);
  }
}

torch::OrderedDict<std::string, torch::Tensor> gradients_of(nn::Sequential model,
                                                            const torch::Tensor& inputs,
                                                            const torch::Tensor& targets) {
  return NaturalGradient::compute_per_sample_gradients(
      *model, [&](const torch::Tensor& x) { return model->forward(x); }, &cross_entropy, inputs,
      targets);
}

TEST(PerSampleGradients, ChangeNothing) {
  auto model = make_mlp();
  NaturalGradient watching(*model);
  const auto batch = make_batch(0, kMlpSample);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  Tensors before;
  for (const auto& param : model->parameters()) {
    before.push_back(param.grad().clone());
  }
  torch::manual_seed(9);
  gradients_of(model, batch.inputs, batch.targets);
  const auto drawn = torch::rand({3});
  torch::manual_seed(9);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({3})));
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(model->parameters()[i].grad(), before[i]));
  }
  watching.step();
  EXPECT_EQ(watching.report().samples, 6);  // invisible to other captures
}

TEST(PerSampleGradients, LeaveBuffersAlone) {
  struct Counting : public nn::Module {
    Counting() {
      linear = register_module("linear", nn::Linear(5, 3));
      calls = register_buffer("calls", torch::zeros({}));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      calls.add_(1);
      return linear(x);
    }
    nn::Linear linear{nullptr};
    torch::Tensor calls;
  };
  Counting model;
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto gradients = per_sample_gradients(
      model, [&](const torch::Tensor& x) { return model.forward(x); }, &cross_entropy, batch.inputs,
      batch.targets);
  EXPECT_EQ(gradients.keys(), (std::vector<std::string>{"linear.weight", "linear.bias"}));
  EXPECT_EQ(model.calls.item<float>(), 0.0F);
}

TEST(PerSampleGradients, LeaveTablesThatLookupsRenormalise) {
  for (const bool is_trained : {false, true}) {
    nn::Sequential model(nn::Embedding(nn::EmbeddingOptions(6, 5).max_norm(0.5)), nn::Linear(5, 3));
    const auto table = model->parameters()[0];
    table.set_requires_grad(is_trained);
    const auto before = table.detach().clone();
    gradients_of(model, torch::arange(4), torch::randint(3, {4}));
    EXPECT_TRUE(torch::equal(table, before));
  }
}

// Values of the model itself, which are the same for all samples, and those that operators check.
TEST(PerSampleGradients, ReadValuesOfTheModelInOnePass) {
  struct Scaled : public nn::Module {
    Scaled() {
      linear = register_module("linear", nn::Linear(5, 3));
      scale = register_buffer("scale", torch::full({}, 2.0));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      ++calls;
      const auto signs = torch::one_hot(x.gt(0).select(1, 0).to(torch::kLong), 3);
      return linear(x) * scale.item<double>() + signs;
    }
    nn::Linear linear{nullptr};
    torch::Tensor scale;
    int64_t calls = 0;
  };
  Scaled model;
  const auto batch = make_batch(0, kMlpSample, 20, torch::kFloat);
  per_sample_gradients(
      model, [&](const torch::Tensor& x) { return model.forward(x); }, &cross_entropy, batch.inputs,
      batch.targets);
  EXPECT_LT(model.calls, 10);
}

TEST(PerSampleGradients, LeaveOutFrozenParametersAndZeroUnusedOnes) {
  nn::Sequential model(nn::Linear(5, 4), nn::Linear(4, 3));
  model->parameters()[0].set_requires_grad(false);
  model->push_back("unused", nn::Linear(2, 2));
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto gradients = per_sample_gradients(
      *model,
      [&](const torch::Tensor& x) {
        return model[1]->as<nn::Linear>()->forward(model[0]->as<nn::Linear>()->forward(x));
      },
      &cross_entropy, batch.inputs, batch.targets);
  EXPECT_EQ(gradients.keys(), (std::vector<std::string>{"0.bias", "1.weight", "1.bias",
                                                        "unused.weight", "unused.bias"}));
  EXPECT_EQ(gradients["unused.weight"].sizes(), (std::vector<int64_t>{6, 2, 2}));
  EXPECT_EQ(gradients["unused.weight"].abs().max().item<float>(), 0.0F);
  EXPECT_GT(gradients["0.bias"].abs().max().item<float>(), 0.0F);
}

TEST(PerSampleGradients, IncludePenaltiesOfTheLoss) {
  const auto batch = make_batch(0, kMlpSample, 6, torch::kDouble);
  for (const bool on_all : {false, true}) {
    for (const int64_t samples : {1, 6}) {
      nn::Sequential model(nn::Linear(5, 6), nn::Tanh(), nn::Linear(6, 3));
      model->to(torch::kDouble);
      const auto weight = model[0]->as<nn::Linear>()->weight;
      const auto last = model[2]->as<nn::Linear>()->weight;
      const auto loss = [&](const torch::Tensor& y, const torch::Tensor& t) {
        // As many rows as samples, by an operator that layers call too.
        const auto penalty = torch::linear(weight, weight).square().sum();
        return cross_entropy(y, t) + (on_all ? penalty + last.abs().sum() : penalty);
      };
      const auto forward = [&](const torch::Tensor& x) { return model->forward(x); };
      const auto x = batch.inputs.narrow(0, 0, samples);
      const auto t = batch.targets.narrow(0, 0, samples);
      const auto gradients = per_sample_gradients(*model, forward, loss, x, t);
      for (int64_t i = 0; i < samples; ++i) {
        model->zero_grad();
        loss(forward(x.narrow(0, i, 1)), t.narrow(0, i, 1)).backward();
        for (const auto& param : model->named_parameters()) {
          EXPECT_TRUE(
              torch::allclose(gradients[param.key()][i], param.value().grad(), 1e-12, 1e-12))
              << param.key();
        }
      }
    }
  }
}

TEST(PerSampleGradients, RefuseWhatHasNone) {
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto refused = [&](nn::Sequential model) {
    return refusal([&] { gradients_of(model, batch.inputs, batch.targets); });
  };
  nn::Sequential plain(nn::Linear(5, 3));
  expect_contains(refused(nn::Sequential(nn::Linear(5, 3), nn::BatchNorm1d(3))),
                  "layer '1' (BatchNorm1d) normalises with the statistics of the batch");
  expect_contains(refused(nn::Sequential(nn::Linear(5, 3), nn::Dropout(0.5))),
                  "draws random numbers");
  {  // A generator of the program's own.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto noisy = [&](const torch::Tensor& x) {
      return plain->forward(x) * torch::rand({3}, generator);
    };
    const auto loss = [](const auto& y, const auto& t) { return cross_entropy(y, t); };
    const auto message =
        refusal([&] { per_sample_gradients(*plain, noisy, loss, batch.inputs, batch.targets); });
    expect_contains(message, "draws random numbers");
  }
  expect_contains(
      refusal([&] { gradients_of(plain, batch.inputs, batch.targets.narrow(0, 0, 2)); }),
      "inputs hold 6 samples and targets 2");
  expect_contains(refusal([&] {
                    gradients_of(plain, batch.inputs.narrow(0, 0, 0),
                                 batch.targets.narrow(0, 0, 0));
                  }),
                  "at least one");
  const auto with_loss = [&](const LossFunction& loss) {
    per_sample_gradients(
        *plain, [&](const torch::Tensor& x) { return plain->forward(x); }, loss, batch.inputs,
        batch.targets);
  };
  expect_contains(refusal([&] { with_loss([](const auto& y, const auto&) { return y; }); }),
                  "loss_fn returned shape [1, 3]");
  const auto nothing = [](const auto&...) { return torch::Tensor(); };
  expect_contains(refusal([&] { with_loss(nothing); }), "loss_fn returned an undefined tensor");
  expect_contains(refusal([&] { with_loss(nullptr); }), "loss_fn is empty");
  const auto with_forward = [&](const ForwardFunction& forward) {
    per_sample_gradients(
        *plain, forward, [](const auto& y, const auto&) { return y.sum(); }, batch.inputs,
        batch.targets);
  };
  expect_contains(refusal([&] { with_forward(nothing); }), "forward returned an undefined tensor");
  expect_contains(refusal([&] { with_forward(nullptr); }), "forward is empty");
}

}  // namespace
}  // namespace torchium::testing
