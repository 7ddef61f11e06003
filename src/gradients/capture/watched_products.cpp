#include "gradients/capture/watched_products.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>

namespace torchium::gradients::detail {
namespace {

struct Watch {
  std::vector<at::Tensor> weights;
  SeeProduct see;
  std::exception_ptr error;
};

thread_local std::vector<Watch> watches;
thread_local at::CallbackHandle callback;  // registered as long as there are some

struct Product : public at::ObserverContext {
  Product(at::Tensor input, size_t index) : input(std::move(input)), index(index) {}

  const at::Tensor input;
  const size_t index;
};

std::unique_ptr<at::ObserverContext> start_product(const at::RecordFunction& function) {
  if (watches.empty() || std::string_view(function.name()) != "aten::linear") {
    return nullptr;
  }
  const auto inputs = function.inputs();
  const auto& weights = watches.back().weights;
  const auto found = std::find_if(weights.begin(), weights.end(), [&](const at::Tensor& weight) {
    return weight.is_same(inputs[1].toTensor());
  });
  if (found == weights.end()) {
    return nullptr;
  }
  return std::make_unique<Product>(inputs[0].toTensor(),
                                   static_cast<size_t>(found - weights.begin()));
}

void end_product(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto& outputs = function.outputs();
  if (context == nullptr || outputs.empty() || watches.empty()) {  // it has thrown
    return;
  }
  const auto& product = static_cast<const Product&>(*context);
  Watch& watch = watches.back();
  try {
    watch.see(outputs.front().toTensor(), product.input, product.index);
  } catch (...) {  // an exception would be lost here
    watch.error = std::current_exception();
  }
}

}  // namespace

void watch_products(std::vector<at::Tensor> weights, SeeProduct see) {
  if (watches.empty()) {
    callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&start_product, &end_product)
                                              .needsInputs(true)
                                              .needsOutputs(true)
                                              .scopes({at::RecordScope::FUNCTION}));
  }
  watches.push_back({std::move(weights), std::move(see), nullptr});
}

void end_watching_products() {
  TORCH_INTERNAL_ASSERT(!watches.empty());
  const Watch watch = std::move(watches.back());
  watches.pop_back();
  if (watches.empty()) {
    at::removeCallback(callback);
  }
  if (watch.error != nullptr) {
    std::rethrow_exception(watch.error);
  }
}

}  // namespace torchium::gradients::detail
