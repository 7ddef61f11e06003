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
//
// see() may return the rest of its work (or null), which end_watching_products() does. What may
// raise an error of Python belongs there: it would stay set after the operator has returned.
using SeeProduct = std::function<std::function<void()>(const at::Tensor& output,
                                                       const at::Tensor& input, size_t index)>;
void watch_products(const void* owner, std::vector<at::Tensor> weights, SeeProduct see);
// Rethrows what see() has thrown. finishes: whether to do the rest of the work.
void end_watching_products(const void* owner, bool finishes);

}  // namespace torchium::gradients::detail
