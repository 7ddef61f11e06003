#include "gradients/random_vectors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <cmath>

namespace torchium::gradients::detail {

at::Tensor random_vectors(int64_t size, const at::TensorOptions& options) {
  constexpr int64_t kCount = 8;
  constexpr uint64_t kSeed = 0x5deece66d;
  const at::Generator generator = at::detail::createCPUGenerator(kSeed);
  return at::randn({kCount, size}, generator, options.device(at::kCPU))
      .mul_(1.0 / std::sqrt(static_cast<double>(kCount)))
      .to(options.device());
}

}  // namespace torchium::gradients::detail
