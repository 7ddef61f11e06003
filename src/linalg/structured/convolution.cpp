// Periodic convolutions: diagonal in Fourier space.
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace torchium::linalg::detail {
namespace {

using Shape = std::vector<int64_t>;

int64_t points(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The last d dimensions.
Shape grid_dims(const Shape& shape) {
  Shape dims(shape.size());
  std::iota(dims.begin(), dims.end(), -static_cast<int64_t>(shape.size()));
  return dims;
}

class ConvolutionNode final : public NodeOf<ConvolutionNode> {
 public:
  // response: the real Fourier transform of the kernel, [..., *half of shape].
  ConvolutionNode(const at::Tensor& response, const Shape& shape)
      : NodeOf("Convolution", batch_of(response, static_cast<int64_t>(shape.size())), points(shape),
               at::TensorOptions(c10::toRealValueType(response.scalar_type()))
                   .device(response.device())),
        response_(response),
        shape_(shape) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    if (X.numel() == 0) {  // MKL refuses it
      return at::zeros_like(X);
    }
    // [..., n, m] -> [..., m, *shape]
    Shape sizes = X.sizes().slice(0, X.dim() - 2).vec();
    sizes.push_back(X.size(-1));
    sizes.insert(sizes.end(), shape_.begin(), shape_.end());
    const at::Tensor transformed = transform(X.mT().reshape(sizes));
    const int64_t column_dim = -static_cast<int64_t>(shape_.size()) - 1;
    const at::Tensor Y = inverse_transform(response_.unsqueeze(column_dim) * transformed);
    return Y.flatten(column_dim + 1).mT();
  }

  LinearOperator transpose() const override {
    return make_operator<ConvolutionNode>(response_.conj().resolve_conj(), shape_);
  }

  at::Tensor kernel() const { return inverse_transform(response_).flatten(first_dim()); }

  bool is_symmetric() const override { return points(shape_) == 1; }

  std::optional<at::Tensor> diag(const EstimateOptions&) const override {
    at::Tensor at_origin = kernel().select(-1, 0).unsqueeze(-1);
    Shape sizes = batch;
    sizes.push_back(n);
    return at_origin.expand(sizes);
  }

  std::optional<Slogdet> slogdet(const EstimateOptions&) const override {
    const at::Tensor values = eigenvalues();
    const at::Tensor phase = at::real(at::sgn(values).prod(-1)).round();
    return Slogdet{phase, values.abs().log().sum(at::IntArrayRef{-1})};
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    const at::Tensor flat = response_.flatten(first_dim());
    const at::Tensor image = function_of_values(kind, f, flat, eigenvalue_rounding(flat));
    return make_operator<ConvolutionNode>(image.view_as(response_), shape_);
  }

  // The Fourier modes exp(2 pi i sum_a k_a x_a / shape_a) / sqrt(n).
  // Their real and imaginary parts added (Hartley's basis) are the real ones of a symmetric matrix.
  std::optional<Eigensolution> eigen() const override {
    const bool real = assumed >= Property::kSymmetric;
    const auto vectors = [real, shape = shape_, n = n,
                          options = options](const at::Tensor& indices) {
      const at::Tensor point = at::arange(n, indices.options());
      at::Tensor angle = at::zeros({}, options.dtype(at::kDouble));
      int64_t stride = n;
      for (const int64_t size : shape) {
        stride /= size;
        const auto along = [&](const at::Tensor& index) {
          return index.div(stride, "floor").remainder(size);
        };
        const at::Tensor turns = (along(point).unsqueeze(1) * along(indices)).remainder(size);
        angle = angle + turns.to(at::kDouble) * (2 * M_PI / static_cast<double>(size));
      }
      const at::Tensor length = at::full_like(angle, 1 / std::sqrt(static_cast<double>(n)));
      const auto dtype = c10::toComplexType(c10::typeMetaToScalarType(options.dtype()));
      const at::Tensor modes = at::polar(length, angle).to(dtype);
      return real ? at::real(modes) + at::imag(modes) : modes;
    };
    return Eigensolution{real ? at::real(eigenvalues()) : eigenvalues(), vectors};
  }

 private:
  int64_t first_dim() const { return -static_cast<int64_t>(shape_.size()); }
  at::Tensor transform(const at::Tensor& x) const {
    return at::fft_rfftn(x, std::nullopt, grid_dims(shape_));
  }
  at::Tensor inverse_transform(const at::Tensor& x) const {
    return at::fft_irfftn(x, shape_, grid_dims(shape_));
  }
  at::Tensor eigenvalues() const {
    const at::Tensor on_grid = inverse_transform(response_);
    return at::fft_fftn(on_grid, std::nullopt, grid_dims(shape_)).flatten(first_dim());
  }

  at::Tensor response_;
  Shape shape_;
};

LinearOperator make_convolution(const at::Tensor& kernel, const std::optional<Shape>& given) {
  checked_operand("Convolution", "kernel", kernel, 1);
  const Shape shape = given.value_or(kernel.sizes().vec());
  const auto d = static_cast<int64_t>(shape.size());
  TORCH_CHECK_VALUE(d > 0 && d <= kernel.dim(), "Convolution: shape is ", at::IntArrayRef(shape),
                    "; it must have from 1 to ", kernel.dim(), " dimensions, as kernel, ",
                    kernel.sizes(), ".");
  std::vector<int64_t> padding;
  for (int64_t a = d - 1; a >= 0; --a) {
    const int64_t size = kernel.size(kernel.dim() - d + a);
    TORCH_CHECK_VALUE(size > 0 && size <= shape[a], "Convolution: kernel is ", kernel.sizes(),
                      "; in each dimension it must have from 1 to as many entries as shape, ",
                      at::IntArrayRef(shape), ".");
    padding.insert(padding.end(), {0, shape[a] - size});
  }
  const at::Tensor padded = at::constant_pad_nd(kernel, padding);
  return make_operator<ConvolutionNode>(at::fft_rfftn(padded, std::nullopt, grid_dims(shape)),
                                        shape);
}

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Convolution::Convolution(const at::Tensor& kernel, const std::optional<std::vector<int64_t>>& shape)
    : LinearOperator(detail::make_convolution(kernel, shape)) {}

}  // namespace torchium::linalg
