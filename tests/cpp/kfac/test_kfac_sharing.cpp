// Two ranks, as threads of one process, share the steps of K-FAC.
#include "distributed/bucketed_sum.h"
#include "kfac_testing.h"
#include "optim/kfac/sharing/triangles.h"
#include "optim/kfac/sharing/worker_groups.h"
#include "rank_threads.h"
#include "torchium/optim/kfac_preconditioner.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torchium::testing::kfac_sharing {
namespace {

using optim::KFACPreconditioner;
using optim::KFACPreconditionerOptions;

constexpr int64_t kSamples = 8;

KFACOptions options() { return KFACOptions(0.05).TCov(2).TInv(3); }

// A model per rank, with equal values.
std::vector<nn::Sequential> models() { return {make_convnet(), make_convnet()}; }

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// The gradients of the mean loss of all samples, from the half of a rank.
void backward_half(nn::Sequential& model, int step, int rank, const Group& group) {
  const Batch batch = make_batch(step, kImageSample, kSamples);
  const auto half = [&](const torch::Tensor& all) {
    return all.narrow(0, rank * kSamples / kRanks, kSamples / kRanks);
  };
  cross_entropy(model->forward(half(batch.inputs)), half(batch.targets)).backward();
  for (torch::Tensor& param : model->parameters()) {
    std::vector<torch::Tensor> gradients{param.mutable_grad()};
    group->allreduce(gradients)->wait();
    gradients[0].div_(kRanks);
  }
}

template <typename Optimizer>
void train_half(Optimizer& optimizer, nn::Sequential& model, int rank, const Group& group,
                int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    backward_half(model, step, rank, group);
    optimizer.step();
  }
}

template <typename Optimizer>
void train_whole(Optimizer& optimizer, nn::Sequential& model, int first, int last) {
  for (int step = first; step < last; ++step) {
    train_on(optimizer, model, make_batch(step, kImageSample, kSamples));
  }
}

// Runs with the fraction of workers, and compares with one process.
void expect_steps_of_one_process(const KFACOptions& given, double fraction) {
  auto model = make_convnet();
  KFAC one(*model, given);
  train_whole(one, model, 0, 6);
  auto of_ranks = models();
  std::vector<int> inverses(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    nn::Sequential& own = of_ranks[rank];
    KFAC optimizer(*own, KFACOptions(given).process_group(group).grad_worker_fraction(fraction));
    train_half(optimizer, own, rank, group, 0, 6);
    for (const auto& [key, state] : optimizer.state()) {
      const auto& of_param = static_cast<const KFACParamState&>(*state);
      inverses[rank] += of_param.A_inverse().defined() || of_param.A_eigenvectors().defined();
    }
  });
  expect_near_each(of_ranks[0]->parameters(), model->parameters(), 1e-9);
  expect_equal(copies(of_ranks[1]->parameters()), copies(of_ranks[0]->parameters()));
  if (given.solver() != "inverse_free") {
    EXPECT_EQ(inverses[0] + inverses[1], fraction == 1.0 ? 6 : 3);
  }
}

TEST(KfacSharing, EqualsOneProcess) {
  const Warnings warnings;
  for (const double fraction : {1.0, 0.5}) {
    SCOPED_TRACE(fraction);
    expect_steps_of_one_process(options(), fraction);
    expect_steps_of_one_process(options().damping_split("exact"), fraction);
    expect_steps_of_one_process(KFACOptions(0.05).TCov(2).solver("inverse_free"), fraction);
  }
}

TEST(KfacSharing, PreconditionerGivesTheGradientsOfOneProcess) {
  const Warnings warnings;
  auto model = make_convnet();
  KFACPreconditioner one(*model, KFACPreconditionerOptions(0.1));
  train_whole(one, model, 0, 2);
  auto of_ranks = models();
  on_all_ranks([&](int rank, const auto& group) {
    KFACPreconditioner optimizer(
        *of_ranks[rank],
        KFACPreconditionerOptions(0.1).process_group(group).grad_worker_fraction(0.5));
    train_half(optimizer, of_ranks[rank], rank, group, 0, 2);
  });
  for (const auto& own : of_ranks) {
    const auto params = own->parameters(), expected = model->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      expect_near(params[i].grad(), expected[i].grad(), 1e-10);
    }
  }
}

TEST(KfacSharing, ArchivesHoldTheStateOfAllRanks) {
  const Warnings warnings;
  auto model = make_convnet();
  KFAC one(*model, options());
  train_whole(one, model, 0, 4);
  const std::string start = saved(one);
  auto of_ranks = models();
  for (const auto& own : of_ranks) {
    copy_parameters(*model, *own);
  }
  train_whole(one, model, 4, 8);
  std::vector<std::string> archives(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    KFAC optimizer(*of_ranks[rank], options().process_group(group).grad_worker_fraction(0.5));
    load(optimizer, start);
    train_half(optimizer, of_ranks[rank], rank, group, 4, 8);
    archives[rank] = saved(optimizer);
  });
  expect_near_each(of_ranks[0]->parameters(), model->parameters(), 1e-9);
  auto again = make_convnet();
  KFAC loaded(*again, options());
  load(loaded, archives[1]);
  const auto params = again->parameters(), expected = model->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const KFACParamState& state = kfac_state(loaded, params[i]);
    const KFACParamState& wanted = kfac_state(one, expected[i]);
    ASSERT_EQ(state.A_inverse().defined(), wanted.A_inverse().defined());
    if (state.A_inverse().defined()) {
      expect_near(state.A_inverse(), wanted.A_inverse(), 1e-8);
      expect_near(state.G_inverse(), wanted.G_inverse(), 1e-8);
    }
  }
}

TEST(KfacSharing, AnErrorOfOneRankIsOneOfAll) {
  const Warnings warnings;
  std::vector<std::string> messages(kRanks);
  auto of_ranks = models();
  on_all_ranks([&](int rank, const auto& group) {
    nn::Sequential& own = of_ranks[rank];
    KFAC optimizer(*own, options().process_group(group).grad_worker_fraction(0.5));
    train_half(optimizer, own, rank, group, 0, 1);
    optimizer.zero_grad();
    backward_half(own, 1, rank, group);
    if (rank == 1) {
      static_cast<KFACOptions&>(optimizer.param_groups()[0].options()).eps(-1.0);
    }
    messages[rank] = message_of<c10::Error>([&] { optimizer.step(); });
    static_cast<KFACOptions&>(optimizer.param_groups()[0].options()).eps(1e-8);
    train_half(optimizer, own, rank, group, 1, 3);
  });
  expect_contains(messages[0], "rank 1 of the process group raised an error in step()");
  expect_contains(messages[1], "eps must be");
  expect_equal(copies(of_ranks[1]->parameters()), copies(of_ranks[0]->parameters()));
}

TEST(KfacSharing, AnErrorInUpdateDampingIsOneOfAll) {
  const Warnings warnings;
  std::vector<std::string> messages(kRanks);
  auto of_ranks = models();
  on_all_ranks([&](int rank, const auto& group) {
    nn::Sequential& own = of_ranks[rank];
    KFAC optimizer(*own, options().momentum(0.0).adaptive_damping(rank == 0).process_group(group));
    messages[rank] = message_of<c10::Error>([&] { optimizer.update_damping(1.0, 0.5); });
  });
  expect_contains(messages[0], "rank 1 of the process group raised an error in update_damping()");
  expect_contains(messages[1], "update_damping() needs adaptive_damping=True");
}

TEST(KfacSharing, LayersInAnotherOrderOnOneRankAreFoundOut) {
  const Warnings warnings;
  std::vector<std::string> messages(kRanks);
  on_all_ranks([&](int rank, const auto& group) {
    nn::Linear first(3, 3), second(3, 3);
    nn::Sequential own;
    own->push_back(rank == 0 ? "first" : "second", first);
    own->push_back(rank == 0 ? "second" : "first", second);
    KFAC optimizer(*own, options().process_group(group));
    own->forward(torch::ones({2, 3})).square().mean().backward();
    messages[rank] = message_of<c10::Error>([&] { optimizer.step(); });
  });
  for (const std::string& message : messages) {
    expect_contains(message, "rank 1 of the process group differs from rank 0");
  }
}

TEST(KfacSharing, SumsInBucketsOfAnySize) {
  for (const int64_t bucket_bytes : {1, 100, 1 << 20}) {
    on_all_ranks([&](int rank, const auto& group) {
      Tensors tensors;
      for (const int64_t size : {3, 0, 20, 1, 40}) {
        tensors.push_back(torch::full({size, 2}, 1.0 + rank));
        tensors.push_back(torch::full({size}, 10.0 + rank, torch::kDouble));
      }
      const KFACOptions of_group = KFACOptions().process_group(group);
      distributed::sum_in_buckets(*of_group.ranks(), tensors, bucket_bytes);
      for (const torch::Tensor& sum : tensors) {
        EXPECT_TRUE(sum.eq(sum.dtype() == torch::kDouble ? 21.0 : 3.0).all().item<bool>());
      }
    });
  }
}

TEST(KfacSharing, TrianglesReturn) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device";
  }
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  Tensors matrices, expected;
  for (const auto& [count, order] : {std::pair{1, 1}, {3, 63}, {1, 64}, {2, 65}, {5, 130}}) {
    const torch::Tensor full = torch::rand({count, order, order}, options);
    expected.push_back(full.tril() + full.tril(-1).mT());
    matrices.push_back(full);  // above the diagonal something else
  }
  const torch::Tensor packed = optim::detail::pack_triangles(matrices);
  EXPECT_EQ(packed.numel(), 1 + 3 * 63 * 32 + 64 * 65 / 2 + 2 * 65 * 33 + 5 * 65 * 131);
  EXPECT_TRUE(packed.narrow(0, 1, 3).equal(
      torch::stack({matrices[1][0][0][0], matrices[1][0][1][0], matrices[1][0][1][1]})));
  optim::detail::unpack_triangles_(matrices, packed);
  for (size_t i = 0; i < matrices.size(); ++i) {
    EXPECT_TRUE(matrices[i].equal(expected[i])) << i;
  }
}

TEST(KfacSharing, WorkersAreAsManyAsAsked) {
  using optim::detail::WorkerGroups;
  struct Expected {
    int64_t ranks;
    double fraction;
    int64_t groups, most;
  };
  for (const auto& [ranks, fraction, count, most] :
       {Expected{1, 0.3, 1, 1}, Expected{4, 1.0, 1, 4}, Expected{4, 0.5, 2, 2},
        Expected{4, 0.25, 4, 1}, Expected{4, 0.01, 4, 1}, Expected{3, 0.5, 2, 2},
        Expected{5, 0.8, 2, 3}, Expected{8, 0.3, 4, 2}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << fraction);
    const WorkerGroups groups(ranks, fraction);
    EXPECT_EQ(groups.groups(), count);
    for (int64_t owner = 0; owner < ranks; ++owner) {
      const auto [first, last] = groups.members_beside(owner);
      EXPECT_TRUE(first <= owner && owner < last && last - first <= most);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t source = groups.source(owner, rank);
        EXPECT_EQ(groups.are_together(owner, rank), first <= rank && rank < last);
        EXPECT_TRUE(groups.are_together(owner, source));
        EXPECT_EQ(source == rank, groups.are_together(owner, rank));
      }
    }
  }
}

TEST(KfacSharing, RefusesWrongFractions) {
  auto model = make_mlp();
  for (const double wrong : {0.0, -0.5, 1.5}) {
    expect_contains(message_of<c10::ValueError>(
                        [&] { KFAC(*model, KFACOptions(0.1).grad_worker_fraction(wrong)); }),
                    "grad_worker_fraction must be a number above 0 and at most 1");
  }
  on_all_ranks([](int, const auto& group) {
    nn::Sequential own(nn::Linear(2, 2));
    expect_contains(message_of<c10::ValueError>([&] {
                      KFAC(*own, KFACOptions(0.1)
                                     .ekfac(true)
                                     .damping_split("exact")
                                     .process_group(group)
                                     .grad_worker_fraction(0.5));
                    }),
                    "use grad_worker_fraction=1");
  });
}

}  // namespace
}  // namespace torchium::testing::kfac_sharing
