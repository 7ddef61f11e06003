// Two ranks, as threads of one process, share the steps of Shampoo.
#include "rank_threads.h"
#include "torchium/torchium.h"

#include <torch/torch.h>

#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace torchium::testing::shared_steps {
namespace {

using optim::Shampoo;
using optim::ShampooOptions;
using Tensors = std::vector<torch::Tensor>;

Tensors parameters() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
  Tensors params;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{40, 24}, {16, 16}, {24}, {}, {8, 3, 3, 3}, {16, 48}}) {
    params.push_back(torch::randn(shape, generator).requires_grad_());
  }
  return params;
}

void train(Shampoo& optimizer, const Tensors& params, int first, int last) {
  for (int step = first; step < last; ++step) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1 + step);
    for (torch::Tensor param : params) {
      param.mutable_grad() = torch::randn(param.sizes(), generator);
    }
    optimizer.step();
  }
}

ShampooOptions options() {
  return ShampooOptions(0.05)
      .block_size(16)
      .update_freq(2)
      .root_method("eigh")
      .betas({0.9, 0.99})
      .grafting("adam")
      .momentum(0.9)
      .weight_decay(0.1)
      .decoupled_weight_decay(true);
}

std::string archive_of(const Shampoo& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void load(Shampoo& optimizer, const std::string& text) {
  std::istringstream stream(text);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

// The sums of products may differ in their last bits between batches, see docs/distributed.md.
void expect_close(const Tensors& actual, const Tensors& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-3, 1e-5)) << "parameter " << i;
  }
}

TEST(SharedSteps, EqualThoseOfOneProcess) {
  const Tensors expected = parameters();
  Shampoo one(expected, options());
  train(one, expected, 0, 6);
  std::vector<Tensors> all(kRanks);
  std::vector<int64_t> matrices(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    all[rank] = parameters();
    Shampoo optimizer(all[rank], options().process_group(group).bucket_bytes(1000));
    train(optimizer, all[rank], 0, 6);
    for (const auto& [key, state] : optimizer.state()) {
      for (const auto& slot : static_cast<const optim::ShampooParamState&>(*state).statistics()) {
        matrices[rank] += slot.size(0);
      }
    }
  });
  expect_close(all[0], expected);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(all[0][i], all[1][i]));
  }
  EXPECT_EQ(matrices[0] + matrices[1], 2 * (6 + 1 + 2 + 3));  // of 40x24, 16x16, 8x27 and 16x48
  EXPECT_GE(matrices[0], 10);
  EXPECT_GE(matrices[1], 10);
}

TEST(SharedSteps, ArchivesFitAnyNumberOfRanks) {
  Tensors expected = parameters();
  Shampoo one(expected, options());
  train(one, expected, 0, 3);
  const std::string start = archive_of(one);
  Tensors values;
  for (const auto& param : expected) {
    values.push_back(param.detach().clone());
  }
  const auto restored = [&] {
    Tensors params;
    for (const auto& value : values) {
      params.push_back(value.clone().requires_grad_());
    }
    return params;
  };
  train(one, expected, 3, 6);
  std::vector<std::string> archives(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    const Tensors params = restored();
    Shampoo optimizer(params, options().process_group(group));
    load(optimizer, start);
    train(optimizer, params, 3, 6);
    expect_close(params, expected);
    archives[rank] = archive_of(optimizer);
  });
  Tensors params = expected;
  Shampoo again(params, options());
  load(again, archives[1]);
  for (const auto& [key, state] : again.state()) {
    const auto& actual = static_cast<const optim::ShampooParamState&>(*state);
    const auto& wanted = static_cast<const optim::ShampooParamState&>(*one.state().at(key));
    EXPECT_TRUE(torch::equal(actual.step(), wanted.step()));
    EXPECT_TRUE(torch::allclose(actual.momentum_buffer(), wanted.momentum_buffer(), 1e-3, 1e-4));
    for (size_t slot = 0; slot < wanted.statistics().size(); ++slot) {
      EXPECT_TRUE(
          torch::allclose(actual.statistics()[slot], wanted.statistics()[slot], 1e-4, 1e-5));
    }
  }
}

TEST(SharedSteps, RanksSkipAndFailTogether) {
  std::vector<std::string> messages(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    const Tensors params = parameters();
    Shampoo optimizer(params, options().process_group(group));
    train(optimizer, params, 0, 2);
    const auto message = [&] {
      try {
        optimizer.step();
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string();
    };
    if (rank == 1) {
      params[1].mutable_grad().reset();
    }
    EXPECT_NE(message().find("(shape [16, 16]) has a gradient on rank 0"), std::string::npos);
    const Tensors before{params[0].detach().clone(), params[1].detach().clone()};
    for (int attempt = 0; attempt < 3; ++attempt) {
      for (torch::Tensor param : params) {
        param.mutable_grad() = torch::full_like(param, rank == 1 ? NAN : 1.0);
      }
      messages[rank] = message();
    }
    EXPECT_TRUE(torch::equal(params[0], before[0]));
    EXPECT_TRUE(torch::equal(params[1], before[1]));
  });
  EXPECT_NE(messages[0].find("3 steps in a row"), std::string::npos) << messages[0];
  EXPECT_EQ(messages[0], messages[1]);
}

TEST(SharedSteps, GroupsOfParametersShareWithTheSameRanks) {
  on_all_ranks([](int, const auto& group) {
    const Tensors params = parameters();
    Shampoo optimizer({params[0]}, options());
    EXPECT_THROW(
        optimizer.add_param_group(torch::optim::OptimizerParamGroup(
            {params[1]}, std::make_unique<ShampooOptions>(options().process_group(group)))),
        c10::ValueError);
  });
}

}  // namespace
}  // namespace torchium::testing::shared_steps
