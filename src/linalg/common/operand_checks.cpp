#include "linalg/common/operand_checks.h"

#include <c10/util/Exception.h>

#include <limits>

namespace torchium::linalg::detail {

void check_floating(const char* op, const Operand& operand) {
  const auto& tensor = operand.tensor;
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", operand.name, " is an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op, ": ", operand.name, " has layout ",
                    tensor.layout(), "; pass a dense tensor, e.g. ", operand.name, ".to_dense()");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      op, ": ", operand.name, " has dtype ", dtype,
      "; it must be float32, float64, bfloat16 or float16");
}

void check_matrices(const char* op, std::initializer_list<Operand> operands) {
  const auto& first = *operands.begin();
  for (const auto& operand : operands) {
    const auto& tensor = operand.tensor;
    check_floating(op, operand);
    TORCH_CHECK_VALUE(tensor.dim() >= 2, op, ": ", operand.name, " has shape ", tensor.sym_sizes(),
                      "; it must have at least two dimensions (unsqueeze a vector)");
    TORCH_CHECK_VALUE(tensor.scalar_type() == first.tensor.scalar_type(), op, ": ", operand.name,
                      " has dtype ", tensor.scalar_type(), " and ", first.name, " has ",
                      first.tensor.scalar_type(), "; convert one of them with .to(dtype)");
    TORCH_CHECK_VALUE(tensor.device() == first.tensor.device(), op, ": ", operand.name, " is on ",
                      tensor.device(), " and ", first.name, " on ", first.tensor.device(),
                      "; move one of them with .to(device)");
  }
}

void check_square(const char* op, const Operand& operand) {
  const auto& tensor = operand.tensor;
  TORCH_CHECK_VALUE(tensor.dim() >= 2 && tensor.sym_size(-1) == tensor.sym_size(-2), op, ": ",
                    operand.name, " has shape ", tensor.sym_sizes(), "; it must be [..., n, n]");
}

void check_damping(const char* op, double damping, const at::Tensor& operand) {
  const double largest = compute_dtype(operand) == at::kDouble
                             ? std::numeric_limits<double>::max()
                             : double{std::numeric_limits<float>::max()};
  TORCH_CHECK_VALUE(damping >= 0 && damping <= largest, op, ": damping is ", damping,
                    "; it must be finite and not negative");
}

namespace {

// The broadcast of the dimensions before the last `kept` ones, which are `what`.
std::vector<c10::SymInt> broadcast(const char* op, std::initializer_list<Operand> operands,
                                   int64_t kept, const char* what) {
  std::vector<c10::SymInt> shape;
  const Operand* previous = operands.begin();
  for (const auto& operand : operands) {
    const auto sizes = operand.tensor.sym_sizes().slice(0, operand.tensor.dim() - kept);
    if (sizes.size() > shape.size()) {
      shape.insert(shape.begin(), sizes.size() - shape.size(), c10::SymInt(1));
    }
    const auto offset = shape.size() - sizes.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto& size = shape[offset + i];
      TORCH_CHECK_VALUE(size == sizes[i] || size == 1 || sizes[i] == 1, op, ": the ", what, " of ",
                        previous->name, " ", previous->tensor.sym_sizes(), " and ", operand.name,
                        " ", operand.tensor.sym_sizes(), " do not broadcast");
      if (size == 1) size = sizes[i];
    }
    previous = &operand;
  }
  return shape;
}

}  // namespace

std::vector<c10::SymInt> broadcast_shape(const char* op, std::initializer_list<Operand> operands) {
  return broadcast(op, operands, /*kept=*/0, "shapes");
}

std::vector<c10::SymInt> broadcast_batch(const char* op, std::initializer_list<Operand> operands) {
  return broadcast(op, operands, /*kept=*/2, "leading dimensions");
}

at::ScalarType compute_dtype(const at::Tensor& operand) {
  const auto dtype = operand.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

}  // namespace torchium::linalg::detail
