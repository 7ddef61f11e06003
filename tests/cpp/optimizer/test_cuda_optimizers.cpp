// The C++ optimizers on a CUDA device: they agree with the CPU and report errors without a
// synchronisation. Skipped without a device.
#include "optimizer_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/shampoo.h"

#include <functional>

#ifdef TORCHIUM_WITH_CUDA
#include "captured_graph.h"
#endif

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::Shampoo;
using optim::ShampooOptions;

class CudaOptimizers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

Tensors on_cuda(const Tensors& params) {
  Tensors result;
  for (const auto& param : params) {
    result.push_back(parameter(param.detach().to(torch::kCUDA)));
  }
  return result;
}

ShampooOptions shampoo_options() {
  return ShampooOptions(0.1)
      .update_freq(3)
      .block_size(4)
      .betas({0.9, 0.99})
      .momentum(0.9)
      .grafting("adam");
}

// A step in which the gradient of parameter 2 is not finite.
void skipped_step(torch::optim::Optimizer& optimizer, Tensors& params) {
  for (auto& param : params) {
    set_grad(param, torch::ones_like(param));
  }
  params[2].mutable_grad().fill_(kNaN);
  optimizer.step();
}

template <typename Optimizer, typename Options>
void expect_follows_the_cpu(const Options& options) {
  const auto cpu_params = odd_parameters(torch::kDouble);
  const auto cuda_params = on_cuda(cpu_params);
  Optimizer cpu(cpu_params, options);
  Optimizer cuda(cuda_params, options);
  train(cpu, cpu_params, 0, 10);
  train(cuda, cuda_params, 0, 10);
  cuda.check_errors();
  for (size_t i = 0; i < cpu_params.size(); ++i) {
    expect_near(cuda_params[i].detach().cpu(), cpu_params[i].detach(), 1e-8);
  }
}

TEST_F(CudaOptimizers, FollowTheCpu) {
  expect_follows_the_cpu<Shampoo>(shampoo_options());
  // Large damping: the null space of the first statistics would amplify every rounding error.
  expect_follows_the_cpu<Shampoo>(ShampooOptions(0.1).preconditioner_1d("full").eps(1.0));
  expect_follows_the_cpu<Adagrad>(AdagradOptions(0.1).lr_decay(0.1));
  expect_follows_the_cpu<Adagrad>(AdagradOptions(0.1).full_matrix(true).update_freq(2).eps(1.0));
}

// The host's step count, which determines the root schedule, is corrected once a skip is known.
TEST_F(CudaOptimizers, SkippedStepsDoNotShiftTheRootSchedule) {
  const auto cpu_params = odd_parameters(torch::kDouble);
  auto cuda_params = on_cuda(cpu_params);
  Shampoo cpu(cpu_params, shampoo_options().update_freq(4));
  Shampoo cuda(cuda_params, shampoo_options().update_freq(4));
  train(cpu, cpu_params, 0, 9);
  train(cuda, cuda_params, 0, 3);
  const auto before = copies(cuda_params);
  skipped_step(cuda, cuda_params);
  expect_equal(copies(cuda_params), before);
  cuda.check_errors();  // one skipped step is not an error
  train(cuda, cuda_params, 3, 9);
  for (size_t i = 0; i < cpu_params.size(); ++i) {
    expect_near(cuda_params[i].detach().cpu(), cpu_params[i].detach(), 1e-8);
  }
}

TEST_F(CudaOptimizers, ThirdSkippedStepIsReportedByALaterStep) {
  auto params = on_cuda(odd_parameters());
  Shampoo optimizer(params, shampoo_options());
  train(optimizer, params, 0, 2);
  const auto report = [&](auto&& find_out) {
    const auto message = message_of<c10::Error>([&] {
      for (int i = 0; i < 3; ++i) {
        skipped_step(optimizer, params);
      }
      torch::cuda::synchronize();
      find_out();
    });
    expect_contains(message, "3 steps in a row");
    expect_contains(message, "parameter 2 of group 0 (shape [])");
  };
  report([&] { optimizer.step(); });
  train(optimizer, params, 2, 4);
  optimizer.check_errors();
  report([&] { optimizer.check_errors(); });
}

// The report of three skips waits for its step although a good step has reset their count.
TEST_F(CudaOptimizers, ReportsAreNotLost) {
  auto params = on_cuda(odd_parameters());
  Adagrad optimizer(params, AdagradOptions(0.1));
  EXPECT_THROW(
      {
        for (int i = 0; i < 3; ++i) {
          skipped_step(optimizer, params);
        }
        train(optimizer, params, 0, 1);
        optimizer.check_errors();
      },
      c10::Error);
}

TEST_F(CudaOptimizers, ArchivesContinueBitForBit) {
  const auto params = on_cuda(odd_parameters());
  Shampoo optimizer(params, shampoo_options());
  train(optimizer, params, 0, 5);
  std::stringstream stream;
  torch::save(optimizer, stream);
  const auto resumed_params = parameters_like(params);
  train(optimizer, params, 5, 10);
  Shampoo resumed(resumed_params, shampoo_options());
  torch::load(resumed, stream);
  train(resumed, resumed_params, 5, 10);
  expect_equal(copies(resumed_params), copies(params));
}

// ---- graphs that the optimizer captures itself

// Multiples of 8 are for the split fp16 kernels, the others for cuBLAS.
Tensors matrices_and_vectors() {
  torch::manual_seed(2);
  Tensors params;
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{64, 32}, {32}, {48, 64}, {48}, {16, 8, 3, 3}, {20, 90}}) {
    params.push_back(parameter(torch::randn(shape, torch::kCUDA)));
  }
  return params;
}

// 40 steps whose gradients lie in new memory each; halfway `change` is made.
template <typename Optimizer, typename Options>
void expect_replayed_steps_equal_launched_ones(const Options& options,
                                               const std::function<void(Options&)>& change) {
  std::vector<Tensors> results;
  for (const std::string graphs : {"always", "never"}) {
    Tensors params = matrices_and_vectors();
    Optimizer optimizer(params, Options(options).graphs(graphs));
    const auto graph_bytes = [&] { return optimizer.memory_report().total().graphs; };
    Tensors kept;  // so that no memory is used twice
    for (int step = 0; step < 40; ++step) {
      if (step == 20) {
        EXPECT_EQ(graph_bytes() > 0, graphs == "always");
        change(static_cast<Options&>(optimizer.param_groups()[0].options()));
      }
      optimizer.zero_grad(/*set_to_none=*/true);
      train(optimizer, params, step, step + 1);
      for (const auto& param : params) {
        kept.push_back(param.grad());
      }
    }
    optimizer.check_errors();
    EXPECT_EQ(graph_bytes() > 0, graphs == "always");
    results.push_back(copies(params));
    const Tensors state = all_state(optimizer);
    results.back().insert(results.back().end(), state.begin(), state.end());
  }
  expect_equal(results[0], results[1]);
}

TEST_F(CudaOptimizers, ReplayedStepsEqualLaunchedOnes) {
  const std::vector<std::pair<const char*, std::function<void(ShampooOptions&)>>> changes{
      {"none", [](auto&) {}},
      {"lr", [](auto& o) { o.lr(0.02); }},
      {"eps", [](auto& o) { o.eps(1e-2); }},
      {"update_freq", [](auto& o) { o.update_freq(3); }},
      {"weight_decay", [](auto& o) { o.weight_decay(0.1); }},
      {"betas",
       [](auto& o) {
         o.betas({0.5, 0.9});
       }},
      {"grafting", [](auto& o) { o.grafting("sgd"); }},
      {"maximize", [](auto& o) { o.maximize(true); }}};
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    expect_replayed_steps_equal_launched_ones<Shampoo>(
        shampoo_options().block_size(1024).momentum(0.5).update_freq(5), change);
  }
}

TEST_F(CudaOptimizers, ReplayedStepsOfAdagradEqualLaunchedOnes) {
  const std::vector<std::pair<const char*, std::function<void(AdagradOptions&)>>> changes{
      {"none", [](auto&) {}},
      {"lr", [](auto& o) { o.lr(0.02); }},
      {"eps", [](auto& o) { o.eps(1e-3); }},
      {"weight_decay", [](auto& o) { o.weight_decay(0.1); }},
      {"update_freq", [](auto& o) { o.update_freq(5); }}};
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    expect_replayed_steps_equal_launched_ones<Adagrad>(AdagradOptions(0.1).lr_decay(0.01), change);
    expect_replayed_steps_equal_launched_ones<Adagrad>(
        AdagradOptions(0.1).eps(1e-2).full_matrix(true).update_freq(10), change);
  }
}

#ifdef TORCHIUM_WITH_CUDA
// Two optimizers with equal parameters; one is to be captured.
struct PlainAndCaptured {
  Tensors plain_params = on_cuda(odd_parameters());
  Tensors captured_params = on_cuda(odd_parameters());
  Shampoo plain{plain_params, shampoo_options().capturable(true)};
  Shampoo captured{captured_params, shampoo_options().capturable(true)};

  void expect_alike() {
    captured.check_errors();
    expect_equal(copies(captured_params), copies(plain_params));
    expect_equal(all_state(captured), all_state(plain));
  }
};

TEST_F(CudaOptimizers, CapturedStepsEqualPlainOnes) {
  PlainAndCaptured pair;
  Tensors& plain_params = pair.plain_params;
  Tensors& captured_params = pair.captured_params;
  Shampoo& plain = pair.plain;
  Shampoo& captured = pair.captured;
  const auto set_gradients = [](Tensors& params, int step) {
    for (auto& param : params) {
      const auto value = torch::full_like(param.detach(), 1.0 + step) + param.detach();
      param.grad().defined() ? void(param.mutable_grad().copy_(value)) : set_grad(param, value);
    }
  };
  set_gradients(plain_params, 0);
  set_gradients(captured_params, 0);
  plain.step();
  captured.step();

  CapturedGraph graph([&] { captured.step(); });
  for (int step = 1; step < 6; ++step) {
    for (auto* optimizer : {&plain, &captured}) {
      optimizer->param_groups()[0].options().set_lr(0.1 / step);
    }
    captured.sync_lr();
    set_gradients(plain_params, step);
    set_gradients(captured_params, step);
    plain.step();
    graph.replay();
    if (step % 2 == 0) {
      plain.update_preconditioners();
      captured.update_preconditioners();
    }
  }
  pair.expect_alike();
  // check_errors() finds a replayed step that is skipped.
  captured_params[2].mutable_grad().fill_(kNaN);
  for (int step = 0; step < 3; ++step) {
    graph.replay();
  }
  expect_contains(message_of<c10::Error>([&] { captured.check_errors(); }),
                  "parameter 2 of group 0");
}

TEST_F(CudaOptimizers, CapturedRootsEqualPlainOnes) {
  PlainAndCaptured pair;
  Tensors& plain_params = pair.plain_params;
  Tensors& captured_params = pair.captured_params;
  Shampoo& plain = pair.plain;
  Shampoo& captured = pair.captured;
  train(plain, plain_params, 0, 2);
  train(captured, captured_params, 0, 2);
  plain.update_preconditioners();
  captured.update_preconditioners();

  CapturedGraph graph([&] { captured.update_preconditioners(); });
  for (int step = 2; step < 5; ++step) {
    train(plain, plain_params, step, step + 1);
    train(captured, captured_params, step, step + 1);
    plain.update_preconditioners();
    graph.replay();
  }
  pair.expect_alike();
}

TEST_F(CudaOptimizers, CaptureIsRefusedWhereTheHostDecides) {
  auto params = on_cuda(odd_parameters());
  Shampoo decides(params, shampoo_options());
  auto fresh_params = on_cuda(odd_parameters());
  Shampoo fresh(fresh_params, shampoo_options().capturable(true));
  train(decides, params, 0, 1);
  for (auto& param : fresh_params) {
    set_grad(param, torch::ones_like(param));
  }
  std::string refusal;
  std::string roots;
  std::string early;
  const CapturedGraph graph([&] {
    refusal = message_of<c10::Error>([&] { decides.step(); });
    early = message_of<c10::Error>([&] { fresh.step(); });
    roots = message_of<c10::Error>([&] { decides.update_preconditioners(); });
  });
  expect_contains(refusal, "capturable=True");
  expect_contains(roots, "cannot be captured");
  expect_contains(early, "run a step before the capture");
}

// Actions that a replay would repeat each time: creating an average, writing a learning rate.
TEST_F(CudaOptimizers, CaptureIsRefusedAfterAChangeOfOptions) {
  using Change = std::function<void(ShampooOptions&)>;
  for (const auto& [change, part] : std::vector<std::pair<Change, std::string>>{
           {[](auto& o) {
              o.betas({0.9, 1.0});
            },
            "has to be created"},
           {[](auto& o) { o.grafting("adam"); }, "has to be created"},
           {[](auto& o) { o.momentum(0.9); }, "has to be created"},
           {[](auto& o) { o.lr(0.05); }, "lr has been set to 0.05"}}) {
    auto params = on_cuda(odd_parameters());
    Shampoo optimizer(params, ShampooOptions(0.1).capturable(true));
    train(optimizer, params, 0, 2);
    change(static_cast<ShampooOptions&>(optimizer.param_groups()[0].options()));
    const auto state = all_state(optimizer);
    std::string refusal;
    const CapturedGraph graph([&] { refusal = message_of<c10::Error>([&] { optimizer.step(); }); });
    expect_contains(refusal, part);
    expect_equal(all_state(optimizer), state);
    optimizer.step();
    CapturedGraph after([&] { optimizer.step(); });
    after.replay();
    optimizer.check_errors();
    EXPECT_EQ(state_tensors(optimizer, params[0])[0].second.item<double>(), 4.0);
  }
}
#endif

TEST_F(CudaOptimizers, GroupsMaySpanDevices) {
  const auto cpu_params = odd_parameters();
  Tensors mixed = parameters_like(cpu_params);
  const auto cuda_params = on_cuda(cpu_params);
  mixed.insert(mixed.end(), cuda_params.begin(), cuda_params.end());
  Shampoo optimizer(mixed, shampoo_options());
  train(optimizer, mixed, 0, 5);
  optimizer.check_errors();
  for (size_t i = 0; i < cuda_params.size(); ++i) {
    EXPECT_TRUE(mixed[i].isfinite().all().item<bool>());
    EXPECT_EQ(state_tensors(optimizer, cuda_params[i])[0].second.device().type(), torch::kCUDA);
  }
}

}  // namespace
}  // namespace torchium::testing
