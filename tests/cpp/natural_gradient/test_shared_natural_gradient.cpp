// Two ranks, as threads of one process, share the steps of NaturalGradient.
#include "natural_gradient_testing.h"
#include "rank_threads.h"

#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace torchium::testing::shared_natural_gradient {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kOwnSamples = 3;

Problem mlp() { return problems()[0]; }

NaturalGradientOptions solved_by(const std::string& solver) {
  return NaturalGradientOptions(0.5).damping(1e-2).solver(solver).eps(1e-13);
}

// Parameters of this rank, or of one process for all samples.
std::shared_ptr<nn::Module> new_model() {
  static std::mutex mutex;  // the threads of the ranks have one generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(0);
  return mlp().make(torch::kDouble);
}

Batch part(const Batch& batch, int rank) {
  return {batch.inputs.narrow(0, kOwnSamples * rank, kOwnSamples),
          batch.targets.narrow(0, kOwnSamples * rank, kOwnSamples)};
}

// What DistributedDataParallel does.
void average_gradients(nn::Module& model, const Group& group) {
  for (torch::Tensor& param : model.parameters()) {
    Tensors gradient{param.grad()};
    group->allreduce(gradient)->wait();
    gradient[0].div_(kRanks);
  }
}

void train(NaturalGradient& optimizer, nn::Module& model, int first, int last, int rank = -1,
           const Group& group = {}) {
  for (int step = first; step < last; ++step) {
    const Batch all = mlp().batch(step, torch::kDouble);
    const Batch batch = group ? part(all, rank) : all;
    optimizer.zero_grad();
    cross_entropy(mlp().forward(model, batch.inputs), batch.targets).backward();
    if (group) {
      average_gradients(model, group);
    }
    optimizer.step();
  }
}

void expect_close(const Tensors& actual, const Tensors& expected, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], tolerance, tolerance)) << i;
  }
}

TEST(SharedNaturalGradient, EqualsOneProcessWithAllSamples) {
  for (const std::string solver : {"gram", "explicit", "cg"}) {
    const auto options = solved_by(solver).update_freq(2);
    const auto expected = new_model();
    NaturalGradient one(*expected, options);
    train(one, *expected, 0, 5);
    const std::vector<std::shared_ptr<nn::Module>> models{new_model(), new_model()};
    on_all_ranks([&](int rank, const Group& group) {
      nn::Module& model = *models[rank];
      NaturalGradient optimizer(model, NaturalGradientOptions(options).process_group(group));
      train(optimizer, model, 0, 5, rank, group);
      EXPECT_EQ(optimizer.report().solver, solver);
      EXPECT_EQ(optimizer.report().rows, kRanks * kOwnSamples);
      EXPECT_EQ(optimizer.report().samples, kRanks * kOwnSamples);
    });
    expect_close(models[0]->parameters(), expected->parameters(), 1e-8);
    EXPECT_TRUE(torch::equal(flatten(models[0]->parameters()), flatten(models[1]->parameters())));
  }
}

TEST(SharedNaturalGradient, TakesTheJacobiansOfAllRanks) {
  const auto expected = new_model();
  const auto options = solved_by("gram");
  const Tensors start = new_model()->parameters();
  Tensors rows;
  for (const auto& param : expected->parameters()) {
    auto sizes = param.sizes().vec();
    sizes.insert(sizes.begin(), kRanks * kOwnSamples + 1);
    rows.push_back(torch::randn(sizes, torch::kDouble));
  }
  const auto residuals = torch::randn({kRanks * kOwnSamples + 1}, torch::kDouble);
  NaturalGradient one(*expected, options);
  one.update_jacobian(rows, residuals);
  one.step();
  on_all_ranks([&](int rank, const Group& group) {
    const auto model = new_model();
    NaturalGradient optimizer(*model, NaturalGradientOptions(options).process_group(group));
    const int64_t first = rank * kOwnSamples, count = kOwnSamples + rank;
    Tensors own;
    for (const auto& all : rows) {
      own.push_back(all.narrow(0, first, count));
    }
    optimizer.update_jacobian(own, residuals.narrow(0, first, count));
    optimizer.step();
    expect_close(model->parameters(), expected->parameters(), 1e-9);
  });
  EXPECT_FALSE(torch::allclose(expected->parameters()[0], start[0]));
}

TEST(SharedNaturalGradient, RanksFailTogether) {
  std::vector<std::string> messages(kRanks);
  on_all_ranks([&](int rank, const Group& group) {
    const auto model = new_model();
    NaturalGradient optimizer(*model, solved_by("auto").process_group(group));
    train(optimizer, *model, 0, 1, rank, group);
    const auto before = flatten(model->parameters());
    if (rank == 1) {
      static_cast<NaturalGradientOptions&>(optimizer.param_groups()[0].options()).damping(-1.0);
    }
    try {
      train(optimizer, *model, 1, 2, rank, group);
    } catch (const c10::Error& error) {
      messages[rank] = error.what_without_backtrace();
    }
    EXPECT_TRUE(torch::equal(flatten(model->parameters()), before));
  });
  EXPECT_NE(messages[0].find("rank 1 of the process group raised an error in step()"),
            std::string::npos)
      << messages[0];
  EXPECT_NE(messages[1].find("damping"), std::string::npos) << messages[1];
}

TEST(SharedNaturalGradient, ArchivesKeepTheBatchOfTheRank) {
  on_all_ranks([&](int rank, const Group& group) {
    const auto options = solved_by("gram").update_freq(4).process_group(group);
    const auto model = new_model();
    NaturalGradient optimizer(*model, options);
    train(optimizer, *model, 0, 2, rank, group);
    torch::serialize::OutputArchive saved;
    optimizer.save(saved);
    std::ostringstream text;
    saved.save_to(text);
    const auto resumed = new_model();
    NaturalGradient other(*resumed, options);
    std::istringstream stream(text.str());
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    other.load(archive);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        resumed->parameters()[i].copy_(model->parameters()[i]);
      }
    }
    train(optimizer, *model, 2, 6, rank, group);
    train(other, *resumed, 2, 6, rank, group);
    EXPECT_TRUE(torch::equal(flatten(resumed->parameters()), flatten(model->parameters())));
  });
}

}  // namespace
}  // namespace torchium::testing::shared_natural_gradient
