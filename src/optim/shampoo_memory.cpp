#include "optim/shampoo_memory.h"

#include "linalg/device_newton.h"
#include "optim/blocking.h"
#include "optim/preconditioner.h"
#include "optim/shampoo_rules.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <vector>

namespace torchium::optim::detail {
namespace {

// Stacks without memory, whose sizes and dtypes are those that init_state would make.
MatrixStacks planned_stacks(const ShampooHyperparameters& h, at::TensorList params) {
  std::vector<at::Tensor> shapes;
  for (const auto& param : params) {
    shapes.push_back(at::empty(param.sizes(), param.options().device(at::kMeta)));
  }
  return shampoo_init_state(h, shapes);
}

int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

int64_t state_bytes(const at::Tensor& param) {  // of one tensor of the parameter's shape
  return param.numel() * static_cast<int64_t>(c10::elementSize(state_dtype(param)));
}

// Whether a step reads the gradient where it lies, instead of a changed copy.
bool uses_gradient_itself(const ShampooHyperparameters& h, const at::Tensor& param) {
  return !h.maximize && (h.weight_decay == 0.0 || h.decoupled_weight_decay) &&
         param.scalar_type() == state_dtype(param);
}

// All blocks of one shape of a group.
struct BatchMemory {
  int64_t count = 0;
  int64_t bytes = 0;           // of all
  bool one_parameter = false;  // a single block, which is a whole parameter: nothing is packed
  int64_t unpacked = 0;        // what is kept then
};

// What the gradients become lives until the end of a step: g, its average m and the grafted
// direction f, in blocks, and again in the parameter's shape where that is cut; the direction d of
// a diagonal.
struct GradientMemory {
  int64_t kept = 0;  // without the blocks
  int64_t largest_diagonal = 0;
  std::map<std::vector<int64_t>, BatchMemory> batches;
};

GradientMemory gradient_memory(const ShampooHyperparameters& h, at::TensorList params) {
  GradientMemory memory;
  const int64_t derived = (h.beta1 > 0.0) + uses_second_moment(h);  // m and f
  for (const auto& param : params) {
    const int64_t bytes = state_bytes(param);
    const int64_t own = derived + (uses_gradient_itself(h, param) ? 0 : 1);
    const ParameterRule rule = rule_of_shape(h, param.sizes());
    if (rule == ParameterRule::kGrafted) {
      continue;  // one pass that sets nothing aside
    }
    if (rule == ParameterRule::kDiagonal) {
      memory.kept += (own + 1) * bytes;
      memory.largest_diagonal = std::max(memory.largest_diagonal, bytes);
      continue;
    }
    const Blocking blocking =
        make_blocking(merged_dims(param.sizes(), h.block_size, h.merge_dims), h.block_size);
    for (const auto& shape : blocking.shapes) {
      BatchMemory& batch = memory.batches[shape.sizes];
      batch.one_parameter = batch.count == 0 && blocking.is_one_block();
      batch.count += shape.count();
      batch.bytes += shape.count() * c10::multiply_integers(shape.sizes) *
                     static_cast<int64_t>(c10::elementSize(state_dtype(param)));
      batch.unpacked = own * bytes;
    }
    if (!blocking.is_one_block()) {
      memory.kept += own * bytes;
    }
  }
  return memory;
}

// Of all matrices of one order.
struct OrderMemory {
  std::vector<int64_t> stacks = {};  // matrices of each
  int64_t matrices = 0;
  int64_t bytes = 0;  // of their statistics
};

std::map<int64_t, OrderMemory> memory_of_orders(const ShampooHyperparameters& h,
                                                at::TensorList params) {
  std::map<int64_t, OrderMemory> orders;
  for (const at::Tensor& stack : planned_stacks(h, params).statistics) {
    if (stack.numel() == 0) {
      continue;
    }
    OrderMemory& order = orders[stack.size(1)];
    order.stacks.push_back(stack.size(0));
    order.matrices += stack.size(0);
    order.bytes += static_cast<int64_t>(stack.nbytes());
  }
  return orders;
}

// The most matrices that one solve on a CPU takes (preconditioner.cpp): parts of stacks, until they
// are enough.
int64_t most_together_on_cpu(int64_t n, const std::vector<int64_t>& stacks) {
  const int64_t at_once = matrices_at_once_on_cpu(n);
  int64_t most = 0, together = 0;
  for (const int64_t count : stacks) {
    for (int64_t begin = 0; begin < count; begin += at_once) {
      together = together * n * n < kElementsByCopiesOnCpu ? together : 0;
      together += std::min(at_once, count - begin);
      most = std::max(most, together);
    }
  }
  return most;
}

// A root by eigenvectors needs six tensors of the size of its matrices at once: two of the input
// with its bias correction, its symmetric part, eigenvectors, scaled eigenvectors, the result. The
// coupled iteration keeps eight, and "auto" takes it on a CPU for small matrices alone. Besides
// there are a few float64 vectors, of eigenvalues above all. On a CPU a solve takes part of the
// matrices.
int64_t root_temporaries(const ShampooHyperparameters& h, at::TensorList params) {
  constexpr int64_t kBytesOfVectors = 5 * sizeof(double);  // a row
  const int64_t copies = h.root_method == "newton" ? 8 : 6;
  const bool on_cpu = params.empty() || params[0].is_cpu();
  int64_t largest = 0;
  for (const auto& [n, order] : memory_of_orders(h, params)) {
    const int64_t together = on_cpu ? most_together_on_cpu(n, order.stacks) : order.matrices;
    const int64_t bytes = copies * (order.bytes / order.matrices) * together;
    largest = std::max(largest, bytes + together * n * kBytesOfVectors);
  }
  return largest;
}

// The same by the kernels for roots, which renew them in place: the buffers of large
// matrices, and copies of small stacks that are joined.
int64_t root_temporaries_on_device(const ShampooHyperparameters& h, at::TensorList params) {
  constexpr int64_t kJoinedElements = int64_t{1} << 23;
  if (h.root_method == "eigh") {
    return root_temporaries(h, params);
  }
  int64_t largest = 0;
  for (const auto& [n, order] : memory_of_orders(h, params)) {
    const int64_t count = order.matrices;
    const int64_t padded = (n + 31) / 32 * 32;
    const int64_t of_one = 16 * padded * padded;
    const int64_t buffers =
        std::min(of_one * count, linalg::detail::large_root_buffer_limit(padded) + of_one);
    int64_t joined = 3 * 4 * std::min(n * n * count, kJoinedElements);
    if (h.root_dtype.has_value()) {  // copies of the roots, twice as they are rounded
      joined += 2 * 4 * n * n * std::min(count, std::max<int64_t>(1, kElementsOfCopies / (n * n)));
    }
    largest = std::max(largest, (n > 128 ? buffers + buffers / 16 : 0) + joined);
  }
  return largest;
}

// A step by the kernels of a GPU: g and m in blocks of floats or of two halves, directions, and of
// one part of the matrices the operands of the products: roots and what lies between two products.
int64_t temporaries_on_device(const ShampooHyperparameters& h, at::TensorList params) {
  constexpr int64_t kFloat = sizeof(float);
  int64_t blocks = 0, operands = 0, most_operands = 0;
  for (const auto& [sizes, batch] : gradient_memory(h, params).batches) {
    blocks += batch.count * c10::multiply_integers(sizes);
    operands += batch.count * operand_elements(sizes);
    most_operands = std::max({most_operands, operand_elements(sizes), kOperandsInFlight});
  }
  const int64_t gradients = (h.beta1 > 0.0 ? 2 : 1) * kFloat * blocks;
  const int64_t products = kFloat * (blocks + std::min(operands, most_operands));
  return gradients + std::max(root_temporaries_on_device(h, params), products);
}

}  // namespace

StateMemory shampoo_state_memory(const ShampooHyperparameters& h, at::TensorList params) {
  const MatrixStacks stacks = planned_stacks(h, params);
  StateMemory memory;
  memory.statistics = total_bytes(stacks.statistics);
  memory.roots = total_bytes(stacks.roots);
  memory.counters = total_bytes(stacks.root_failures);
  for (const auto& param : params) {
    const int64_t bytes = state_bytes(param);
    memory.counters += static_cast<int64_t>(c10::elementSize(at::kDouble));
    memory.diagonals += rule_of_shape(h, param.sizes()) == ParameterRule::kDiagonal ? bytes : 0;
    memory.averages += h.beta1 > 0.0 ? bytes : 0;
    memory.grafting_second_moments += uses_second_moment(h) ? bytes : 0;
    memory.momentum_buffers += h.momentum > 0.0 ? bytes : 0;
  }
  return memory;
}

int64_t shampoo_step_temporaries(const ShampooHyperparameters& h, at::TensorList params) {
  if (!params.empty() && params[0].is_cuda()) {
    return temporaries_on_device(h, params);
  }
  GradientMemory memory = gradient_memory(h, params);
  const int64_t packed = 1 + (h.beta1 > 0.0) + uses_second_moment(h);  // g, m and f
  int64_t directions = 0;
  int64_t largest_batch = 0;
  for (const auto& [sizes, batch] : memory.batches) {
    memory.kept += batch.one_parameter ? batch.unpacked : packed * batch.bytes;
    directions += batch.bytes;
    int64_t roots = 0;  // of one mode, where they are kept with fewer bits
    if (h.root_dtype.has_value()) {
      const int64_t n = *std::max_element(sizes.begin(), sizes.end());
      roots = batch.bytes / c10::multiply_integers(sizes) * n * n;
    }
    largest_batch = std::max(largest_batch, batch.bytes + roots);
  }
  return memory.kept + std::max({2 * memory.largest_diagonal, root_temporaries(h, params),
                                 directions + largest_batch});
}

}  // namespace torchium::optim::detail
