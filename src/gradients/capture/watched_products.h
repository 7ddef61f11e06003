// Products by given weights within the forward pass of a module, which no hook of a module sees.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace torchium::gradients::detail {

// Calls see(output, input, index) for each call of the operator linear with one of these weights on
// this thread, until end_watching_products(). Pairs of one owner may be nested, and the inner one
// counts; those of several owners overlap in any order.
using SeeProduct =
    std::function<void(const at::Tensor& output, const at::Tensor& input, size_t index)>;
void watch_products(const void* owner, std::vector<at::Tensor> weights, SeeProduct see);
// Rethrows what see() has thrown.
void end_watching_products(const void* owner);

}  // namespace torchium::gradients::detail
