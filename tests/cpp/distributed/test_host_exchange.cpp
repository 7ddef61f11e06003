// Numbers between hosts, with a thread for each rank.
#include "distributed/host_exchange.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

namespace {

using c10d::ProcessGroup;
using torchium::distributed::HostExchange;
using Rows = std::vector<std::vector<int64_t>>;
using Store = c10::intrusive_ptr<c10d::Store>;

Store server() {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.port = 0;  // any free one
  options.timeout = std::chrono::milliseconds(20000);
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<ProcessGroup> group_over(const Store& store, int rank, int ranks) {
  return c10::make_intrusive<ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>("default_pg", store), rank, ranks);
}

HostExchange exchange_of(const c10::intrusive_ptr<ProcessGroup>& group) {
  return {HostExchange::connect(*group), "numbers", group->getRank(), group->getSize()};
}

TEST(HostExchange, NeedsATcpStoreAndFewRanks) {
  const Store store = server();
  const auto connects = [](const c10::intrusive_ptr<ProcessGroup>& group) {
    return HostExchange::connect(*group) != nullptr;
  };
  EXPECT_TRUE(connects(group_over(store, 0, 2)));
  EXPECT_TRUE(connects(group_over(store, 0, HostExchange::kMostRanks)));
  EXPECT_FALSE(connects(group_over(store, 0, HostExchange::kMostRanks + 1)));
  EXPECT_FALSE(connects(group_over(c10::make_intrusive<c10d::HashStore>(), 0, 2)));
  EXPECT_FALSE(connects(c10::make_intrusive<ProcessGroup>(/*rank=*/0, /*size=*/2)));
}

TEST(HostExchange, GathersWhatEachRankHasGivenInTheSameCall) {
  constexpr int kRanks = 3, kCalls = 200;
  const Store store = server();
  const int64_t keys_before = store->getNumKeys();
  std::vector<std::vector<Rows>> received(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      HostExchange exchange = exchange_of(group_over(store, rank, kRanks));
      for (int64_t call = 0; call < kCalls; ++call) {
        if ((call + rank) % 7 == 0) {  // none is always the last
          std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        received[rank].push_back(exchange.gather({call, -rank, INT64_MIN}));
      }
      received[rank].push_back(exchange.gather({}));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int64_t call = 0; call < kCalls; ++call) {
      const Rows expected{{call, 0, INT64_MIN}, {call, -1, INT64_MIN}, {call, -2, INT64_MIN}};
      ASSERT_EQ(received[rank][call], expected) << "rank " << rank << ", call " << call;
    }
    EXPECT_EQ(received[rank].back(), Rows(kRanks));
  }
  // The keys of the last two calls stay.
  EXPECT_LE(store->getNumKeys() - keys_before, 2 * kRanks);
}

// Later calls raise too: a rank that is late would read the numbers of another call.
TEST(HostExchange, RaisesWhereARankDoesNotCome) {
  const Store store = server();
  store->setTimeout(std::chrono::milliseconds(200));
  HostExchange exchange = exchange_of(group_over(store, 0, 2));
  EXPECT_THROW(exchange.gather({1}), c10::Error);
  HostExchange late = exchange_of(group_over(store, 1, 2));
  EXPECT_EQ(late.gather({2}), (Rows{{1}, {2}}));
  EXPECT_THROW(exchange.gather({1}), c10::Error);
  EXPECT_EQ(store->check({"default_pg/numbers/1/0"}), false);
}

TEST(HostExchange, RaisesWhereARankIsInAnotherCall) {
  const Store store = server();
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      HostExchange exchange = exchange_of(group_over(store, rank, 2));
      try {
        exchange.gather(std::vector<int64_t>(3 + rank, 7));
      } catch (const c10::Error& error) {
        errors[rank] = error.what_without_backtrace();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("is in another call of an optimizer"), std::string::npos) << error;
  }
}

}  // namespace
