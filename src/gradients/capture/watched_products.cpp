#include "gradients/capture/watched_products.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <string_view>
#include <utility>

namespace torchium::gradients::detail {
namespace {

struct Watch {
  const void* owner;
  std::vector<at::Tensor> weights;
  SeeProduct see;
  std::vector<std::function<void()>> rest;
  std::exception_ptr error;
};

thread_local std::vector<std::shared_ptr<Watch>> watches;
thread_local at::CallbackHandle callback;  // registered as long as there are some

// The product is by the weight at `index` of a watch.
struct Match {
  std::shared_ptr<Watch> watch;
  size_t index;
};

struct Product : public at::ObserverContext {
  Product(at::Tensor input, std::vector<Match> matches)
      : input(std::move(input)), matches(std::move(matches)) {}

  const at::Tensor input;
  const std::vector<Match> matches;
};

// Of each owner the last watch counts.
std::vector<Match> matches_of(const at::Tensor& weight) {
  std::vector<Match> matches;
  for (auto watch = watches.rbegin(); watch != watches.rend(); ++watch) {
    const bool is_last = std::none_of(watches.rbegin(), watch, [&](const auto& later) {
      return later->owner == (*watch)->owner;
    });
    const auto& weights = (*watch)->weights;
    const auto found = std::find_if(weights.begin(), weights.end(),
                                    [&](const at::Tensor& other) { return other.is_same(weight); });
    if (is_last && found != weights.end()) {
      matches.push_back({*watch, static_cast<size_t>(found - weights.begin())});
    }
  }
  return matches;
}

std::unique_ptr<at::ObserverContext> start_product(const at::RecordFunction& function) {
  if (std::string_view(function.name()) != "aten::linear") {
    return nullptr;
  }
  const auto inputs = function.inputs();
  auto matches = matches_of(inputs[1].toTensor());
  return matches.empty() ? nullptr
                         : std::make_unique<Product>(inputs[0].toTensor(), std::move(matches));
}

void end_product(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto& outputs = function.outputs();
  if (context == nullptr || outputs.empty()) {  // it has thrown
    return;
  }
  const auto& product = static_cast<const Product&>(*context);
  for (const auto& [watch, index] : product.matches) {
    try {
      if (auto rest = watch->see(outputs.front().toTensor(), product.input, index)) {
        watch->rest.push_back(std::move(rest));
      }
    } catch (...) {  // an exception would be lost here
      watch->error = std::current_exception();
    }
  }
}

}  // namespace

void watch_products(const void* owner, std::vector<at::Tensor> weights, SeeProduct see) {
  if (watches.empty()) {
    callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&start_product, &end_product)
                                              .needsInputs(true)
                                              .needsOutputs(true)
                                              .scopes({at::RecordScope::FUNCTION}));
  }
  watches.push_back(
      std::make_shared<Watch>(Watch{owner, std::move(weights), std::move(see), {}, nullptr}));
}

void end_watching_products(const void* owner, bool finishes) {
  const auto last = std::find_if(watches.rbegin(), watches.rend(),
                                 [&](const auto& watch) { return watch->owner == owner; });
  TORCH_INTERNAL_ASSERT(last != watches.rend());
  const std::shared_ptr<const Watch> watch = *last;
  watches.erase(std::next(last).base());
  if (watches.empty()) {
    at::removeCallback(callback);
  }
  if (watch->error != nullptr) {
    std::rethrow_exception(watch->error);
  }
  if (finishes) {
    for (const auto& finish : watch->rest) {
      finish();
    }
  }
}

}  // namespace torchium::gradients::detail
