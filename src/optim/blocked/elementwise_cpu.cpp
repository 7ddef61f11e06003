#include "optim/blocked/elementwise_cpu.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace torchium::optim::detail {
namespace {

constexpr int64_t kElementsPerTask = int64_t{1} << 15;
constexpr int64_t kChunk = 512;  // of elements whose g and m stay in the first-level cache

template <typename T>
T* mutable_pointer(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return nullptr;
  }
  tensor.unsafeGetTensorImpl()->bump_version();
  return tensor.mutable_data_ptr<T>();
}

template <typename T>
T* result_pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
}

// Parameter dtype P, state dtype S.
template <typename P, typename S>
struct GradientPointers {
  const P* param;
  const P* grad;
  S* exp_avg;
  S* moment;
  S* diagonal;
  S* g;
  S* m;
  S* f;
  S* d;
};

// v <- b v + (1 - b) g^2 on a chunk.
template <typename S>
void decay_and_add_square(S* moment, const S* g, S beta, S weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    moment[i] = beta * moment[i] + weight * g[i] * g[i];
  }
}

template <typename S>
S weight_of_new(double beta) {
  return beta == 1.0 ? S(1) : S(1.0 - beta);
}

template <typename P, typename S>
void gradient_chunk(const GradientRule& rule, const GradientElements& e,
                    const GradientPointers<P, S>& x, int64_t begin, int64_t count) {
  S g[kChunk];
  S average[kChunk];
  const S sign = rule.maximize ? S(-1) : S(1);
  const P* grad = x.grad + begin;
  for (int64_t i = 0; i < count; ++i) {
    g[i] = sign * static_cast<S>(grad[i]);
  }
  if (rule.weight_decay != 0.0) {
    const S decay = static_cast<S>(rule.weight_decay);
    const P* param = x.param + begin;
    for (int64_t i = 0; i < count; ++i) {
      g[i] += decay * static_cast<S>(param[i]);
    }
  }
  const S* m = g;
  if (x.exp_avg != nullptr) {
    const S weight = static_cast<S>(1.0 - rule.beta1);
    const S inverse = static_cast<S>(1.0 / e.exp_avg_correction.host);
    S* exp_avg = x.exp_avg + begin;
    for (int64_t i = 0; i < count; ++i) {
      exp_avg[i] += weight * (g[i] - exp_avg[i]);
      average[i] = exp_avg[i] * inverse;
    }
    m = average;
  }
  if (x.moment != nullptr) {
    S* moment = x.moment + begin;
    decay_and_add_square(moment, g, static_cast<S>(rule.moment_beta),
                         weight_of_new<S>(rule.moment_beta), count);
    const S inverse = static_cast<S>(1.0 / e.moment_correction.host);
    const S eps = static_cast<S>(rule.grafting_eps);
    S* f = x.f + begin;
    for (int64_t i = 0; i < count; ++i) {
      const S divisor = std::sqrt(moment[i] * inverse) + eps;
      f[i] = divisor > S(0) ? m[i] / divisor : S(0);
    }
  }
  if (x.diagonal != nullptr) {
    S* diagonal = x.diagonal + begin;
    decay_and_add_square(diagonal, g, static_cast<S>(rule.diagonal_beta),
                         weight_of_new<S>(rule.diagonal_beta), count);
    const S inverse = static_cast<S>(1.0 / e.diagonal_correction.host);
    const S eps = static_cast<S>(rule.diagonal_eps);
    S* d = x.d + begin;
    for (int64_t i = 0; i < count; ++i) {
      const S damped = diagonal[i] * inverse + eps;
      d[i] = damped > S(0) ? m[i] / std::sqrt(damped) : S(0);
    }
  }
  if (x.g != nullptr) {
    std::copy(g, g + count, x.g + begin);
  }
  if (x.m != nullptr) {
    std::copy(m, m + count, x.m + begin);
  }
}

template <typename P, typename S>
void run_gradient_pass(const GradientRule& rule, const GradientElements& e) {
  const GradientPointers<P, S> pointers{
      e.param.const_data_ptr<P>(),  e.grad.const_data_ptr<P>(),     mutable_pointer<S>(e.exp_avg),
      mutable_pointer<S>(e.moment), mutable_pointer<S>(e.diagonal), result_pointer<S>(e.g),
      result_pointer<S>(e.m),       result_pointer<S>(e.f),         result_pointer<S>(e.d)};
  at::parallel_for(0, e.param.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kChunk) {
      gradient_chunk(rule, e, pointers, at, std::min(kChunk, end - at));
    }
  });
}

template <typename S>
void run_scale_and_add(S* target, const S* value, S decay, S weight, int64_t count) {
  at::parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      target[i] = decay * target[i] + weight * value[i];
    }
  });
}

// x if it is finite, else 0.
template <typename S>
S finite_or_zero(S x) {
  return std::abs(x) <= std::numeric_limits<S>::max() ? x : S(0);
}

// x, or the nearest number of type P.
template <typename P, typename S>
S saturated(S x) {
  const S most = static_cast<S>(std::numeric_limits<P>::max());
  return std::min(std::max(x, -most), most);
}

template <typename P, typename S>
void run_update(const UpdateRule& rule, double lr, at::Tensor& param, const at::Tensor& direction,
                at::Tensor* momentum_buffer) {
  P* p = mutable_pointer<P>(param);
  const S* d = direction.const_data_ptr<S>();
  S* buffer = momentum_buffer == nullptr ? nullptr : mutable_pointer<S>(*momentum_buffer);
  const S keep = static_cast<S>(1.0 - lr * rule.decoupled_weight_decay);
  const S scale = static_cast<S>(lr);
  const S momentum = static_cast<S>(rule.momentum);
  const S direction_scale = static_cast<S>(rule.direction_scale.host);
  at::parallel_for(0, param.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    if (buffer == nullptr) {
      for (int64_t i = begin; i < end; ++i) {
        const S step = finite_or_zero(direction_scale * d[i]);
        p[i] = static_cast<P>(saturated<P>(keep * static_cast<S>(p[i]) - scale * step));
      }
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      const S scaled = finite_or_zero(direction_scale * d[i]);
      buffer[i] = saturated<S>(momentum * buffer[i] + scaled);
      const S step = rule.nesterov ? scaled + momentum * buffer[i] : buffer[i];
      p[i] = static_cast<P>(saturated<P>(keep * static_cast<S>(p[i]) - scale * step));
    }
  });
}

// See grafted_step. One loop, so that everything stays in registers: `average` and `buffer` are
// null where the flags say so.
template <bool has_average, bool has_momentum, typename P, typename S>
void grafted_range(const GradientRule& rule, const UpdateRule& update, const GradientElements& e,
                   double lr, P* __restrict p, const P* __restrict grad, S* __restrict average,
                   S* __restrict moment, S* __restrict buffer, int64_t count) {
  const S sign = rule.maximize ? S(-1) : S(1), decay = static_cast<S>(rule.weight_decay);
  const S average_weight = static_cast<S>(1.0 - rule.beta1);
  const S average_scale = static_cast<S>(1.0 / e.exp_avg_correction.host);
  const S moment_beta = static_cast<S>(rule.moment_beta);
  const S moment_weight = weight_of_new<S>(rule.moment_beta);
  const S moment_scale = static_cast<S>(1.0 / e.moment_correction.host);
  const S eps = static_cast<S>(rule.grafting_eps), scale = static_cast<S>(lr);
  const S keep = static_cast<S>(1.0 - lr * update.decoupled_weight_decay);
  const S momentum = static_cast<S>(update.momentum);
  for (int64_t i = 0; i < count; ++i) {
    const S old = static_cast<S>(p[i]);
    const S g = sign * static_cast<S>(grad[i]) + decay * old;
    S m = g;
    if constexpr (has_average) {
      average[i] += average_weight * (g - average[i]);
      m = average[i] * average_scale;
    }
    moment[i] = moment_beta * moment[i] + moment_weight * g * g;
    S d = finite_or_zero(m / (std::sqrt(moment[i] * moment_scale) + eps));
    if constexpr (has_momentum) {
      buffer[i] = saturated<S>(momentum * buffer[i] + d);
      d = update.nesterov ? d + momentum * buffer[i] : buffer[i];
    }
    p[i] = static_cast<P>(saturated<P>(keep * old - scale * d));
  }
}

template <typename P, typename S>
void run_grafted_step(const GradientRule& rule, const UpdateRule& update, double lr,
                      GradientElements& e, at::Tensor* momentum_buffer) {
  const P* grad = e.grad.const_data_ptr<P>();
  S* average = mutable_pointer<S>(e.exp_avg);
  S* moment = mutable_pointer<S>(e.moment);
  S* buffer = momentum_buffer == nullptr ? nullptr : mutable_pointer<S>(*momentum_buffer);
  P* p = mutable_pointer<P>(e.param);
  const auto run = [&](auto has_average_type, auto has_momentum_type) {
    constexpr bool has_average = decltype(has_average_type)::value;
    constexpr bool has_momentum = decltype(has_momentum_type)::value;
    at::parallel_for(0, e.param.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
      grafted_range<has_average, has_momentum>(
          rule, update, e, lr, p + begin, grad + begin, has_average ? average + begin : nullptr,
          moment + begin, has_momentum ? buffer + begin : nullptr, end - begin);
    });
  };
  if (average != nullptr && buffer != nullptr) {
    run(std::true_type(), std::true_type());
  } else if (average != nullptr) {
    run(std::true_type(), std::false_type());
  } else if (buffer != nullptr) {
    run(std::false_type(), std::true_type());
  } else {
    run(std::false_type(), std::false_type());
  }
}

// Calls function<P, S>() for a parameter dtype P and its state dtype S.
template <typename Function>
void dispatch(at::ScalarType dtype, Function&& function) {
  switch (dtype) {
    case at::kDouble:
      return function.template operator()<double, double>();
    case at::kBFloat16:
      return function.template operator()<at::BFloat16, float>();
    case at::kHalf:
      return function.template operator()<at::Half, float>();
    default:
      return function.template operator()<float, float>();
  }
}

}  // namespace

bool can_fuse(const at::Tensor& param, at::TensorList others) {
  switch (param.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      break;
    default:
      return false;
  }
  return param.is_cpu() && param.is_contiguous() &&
         std::all_of(others.begin(), others.end(), [](const at::Tensor& other) {
           return !other.defined() || (other.is_cpu() && other.is_contiguous());
         });
}

void gradient_pass_cpu(const GradientRule& rule, const GradientElements& elements) {
  dispatch(elements.param.scalar_type(),
           [&]<typename P, typename S>() { run_gradient_pass<P, S>(rule, elements); });
}

void grafted_step_cpu(const GradientRule& gradient_rule, const UpdateRule& update_rule, double lr,
                      GradientElements& elements, at::Tensor* momentum_buffer) {
  dispatch(elements.param.scalar_type(), [&]<typename P, typename S>() {
    run_grafted_step<P, S>(gradient_rule, update_rule, lr, elements, momentum_buffer);
  });
}

void scale_and_add_cpu_(at::Tensor& target, double decay, const at::Tensor& value, double weight) {
  dispatch(target.scalar_type(), [&]<typename P, typename S>() {
    if constexpr (std::is_same_v<P, S>) {
      run_scale_and_add(mutable_pointer<S>(target), value.const_data_ptr<S>(),
                        static_cast<S>(decay), static_cast<S>(weight), target.numel());
    }
  });
}

void apply_update_cpu(const UpdateRule& rule, double lr, at::Tensor& param,
                      const at::Tensor& direction, at::Tensor* momentum_buffer) {
  dispatch(param.scalar_type(), [&]<typename P, typename S>() {
    run_update<P, S>(rule, lr, param, direction, momentum_buffer);
  });
}

}  // namespace torchium::optim::detail
