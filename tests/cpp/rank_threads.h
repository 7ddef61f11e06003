// Ranks of a process group as threads of one process; libtorch has no headers of its own backends
// on the CPU.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <barrier>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torchium::testing {

inline constexpr int kRanks = 2;

// What the ranks show each other.
struct Board {
  std::barrier<> barrier{kRanks};
  std::vector<at::Tensor> shown = std::vector<at::Tensor>(kRanks);
};

class Done : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

class Threads : public c10d::Backend {
 public:
  Threads(std::shared_ptr<Board> board, int rank)
      : Backend(rank, kRanks), board_(std::move(board)) {}
  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const std::vector<at::Tensor> all = exchange(tensors[0]);
    const at::Tensor stacked = at::stack(all);
    tensors[0].copy_(options.reduceOp == c10d::ReduceOp::MAX
                         ? stacked.amax(0)
                         : stacked.sum(0, /*keepdim=*/false, stacked.scalar_type()));
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    output.copy_(at::cat(exchange(input)));
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    tensors[0].copy_(exchange(tensors[0])[options.rootRank]);
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions&) override {
    const std::vector<at::Tensor> inputs = exchange(input);
    const std::vector<at::Tensor> sizes = exchange(at::tensor(input_sizes, at::kLong));
    int64_t received = 0;
    for (int from = 0; from < kRanks; ++from) {
      const int64_t first = sizes[from].narrow(0, 0, rank_).sum().item<int64_t>();
      output.narrow(0, received, output_sizes[from])
          .copy_(inputs[from].narrow(0, first, output_sizes[from]));
      received += output_sizes[from];
    }
    return c10::make_intrusive<Done>();
  }

 private:
  std::vector<at::Tensor> exchange(const at::Tensor& own) {
    board_->shown[rank_] = own.clone();
    board_->barrier.arrive_and_wait();
    const std::vector<at::Tensor> all = board_->shown;
    board_->barrier.arrive_and_wait();
    return all;
  }

  std::shared_ptr<Board> board_;
};

inline c10::intrusive_ptr<c10d::ProcessGroup> group_of(const std::shared_ptr<Board>& board,
                                                       int rank) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kRanks);
  group->setBackend(torch::kCPU, c10d::ProcessGroup::CUSTOM,
                    c10::make_intrusive<Threads>(board, rank));
  return group;
}

// Calls body(rank, group) in one thread per rank; rethrows what one has thrown.
template <typename Body>
void on_all_ranks(const Body& body) {
  const auto board = std::make_shared<Board>();
  std::vector<std::exception_ptr> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, group_of(board, rank));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace torchium::testing
