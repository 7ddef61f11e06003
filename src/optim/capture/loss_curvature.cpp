#include "optim/capture/loss_curvature.h"

#include "optim/core/options.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchium::optim::detail {
namespace {

template <typename Requirement>
void check_choice(const char* name, const std::string& value, const Requirement& requirement) {
  TORCH_CHECK_VALUE(requirement.accepts(value), name, " must be ", requirement.requirement(),
                    ", got ", text_of(value));
}

// "a tensor of dtype int64 and shape [2, 3] on cpu"
std::string described(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "no tensor";
  }
  return c10::str("a tensor of dtype ", c10::getDtypeNames(tensor.scalar_type()).first,
                  " and shape ", tensor.sizes(), " on ", tensor.device());
}

// The dimension of the classes, at least 1.
int64_t class_dim_of(const at::Tensor& outputs, std::optional<int64_t> given) {
  const int64_t dims = outputs.dim();
  TORCH_CHECK_VALUE(dims >= 2, "outputs of loss='cross_entropy' must be [N, C] or have more ",
                    "dimensions, got ", outputs.sizes());
  TORCH_CHECK_VALUE(given || dims == 2, "outputs ", outputs.sizes(),
                    " have more than two dimensions: pass class_dim, -1 for [N, ..., C] or 1 for "
                    "[N, C, ...]");
  const int64_t dim = given.value_or(1);
  TORCH_CHECK_VALUE(dim > -dims && dim < dims && dim != 0,
                    "class_dim must be a dimension of the outputs ", outputs.sizes(),
                    " other than 0, the samples; got ", dim);
  return dim < 0 ? dim + dims : dim;
}

void check_curvature_outputs(const at::Tensor& outputs) {
  TORCH_CHECK_VALUE(outputs.defined() && at::isFloatingType(outputs.scalar_type()) &&
                        outputs.layout() == at::kStrided && outputs.dim() >= 1,
                    "outputs must be a dense real floating-point tensor with the samples in "
                    "dimension 0, got ",
                    described(outputs));
  TORCH_CHECK_VALUE(outputs.requires_grad(),
                    "outputs must have their graph, but do not require gradients; pass what the "
                    "model has returned, not detached and not computed under no_grad()");
}

// The square root of w / samples.
at::Tensor root_of_weights(const at::Tensor& logits, const CurvatureOptions& options,
                           at::IntArrayRef mask_shape, int64_t samples) {
  const at::Tensor& mask = options.mask();
  const bool is_mean = options.reduction() == "mean";
  const int64_t elements = std::max<int64_t>(logits.size(1), 1);
  if (!mask.defined()) {
    const double w = (is_mean ? 1.0 / static_cast<double>(elements) : 1.0);
    return at::full({1, 1, 1}, std::sqrt(w / static_cast<double>(samples)), logits.options());
  }
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kBool && mask.sizes() == mask_shape &&
                        mask.device() == logits.device(),
                    "mask must be a bool tensor of shape ", mask_shape, " on ", logits.device(),
                    ", got ", described(mask));
  const at::Tensor w = mask.reshape({logits.size(0), logits.size(1), 1}).to(logits.scalar_type());
  const at::Tensor counted =
      is_mean ? w.sum().clamp_min(1.0).div(logits.size(0)) : at::ones_like(w);
  return w.div(counted).div(samples).sqrt();
}

}  // namespace

void check_takes_curvature(const std::string& fisher) {
  TORCH_CHECK(fisher != "empirical", "update_curvature() needs fisher='mc' or 'ggn', got '", fisher,
              "', which takes the curvature from backward()");
}

LossCurvature::LossCurvature(const at::Tensor& outputs, std::string loss, const std::string& fisher,
                             const CurvatureOptions& options)
    : outputs_(outputs),
      loss_(std::move(loss)),
      is_sampled_(fisher == "mc"),
      generator_(options.generator()) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_curvature_outputs(outputs);
  check_choice("loss", loss_, one_of("cross_entropy", "mse", "bce"));
  check_choice("reduction", options.reduction(), one_of("mean", "sum"));
  TORCH_CHECK_VALUE(options.samples() >= 1, "samples must be an integer of at least 1, got ",
                    options.samples());
  const bool has_classes = loss_ == "cross_entropy";
  TORCH_CHECK_VALUE(has_classes || !options.class_dim(), "class_dim is for loss='cross_entropy', ",
                    "got ", options.class_dim().value_or(0), " with loss=", text_of(loss_));
  std::vector<int64_t> mask_shape = outputs.sizes().vec();
  at::Tensor f = outputs.detach();
  int64_t classes = 1;
  if (has_classes) {
    class_dim_ = class_dim_of(outputs, options.class_dim());
    classes = outputs.size(class_dim_);
    mask_shape.erase(mask_shape.begin() + class_dim_);
    f = f.movedim(class_dim_, -1);
  }
  const int64_t elements = c10::multiply_integers(mask_shape.begin() + 1, mask_shape.end());
  logits_ = f.reshape({f.size(0), elements, classes})
                .to(outputs.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (has_classes) {
    p_ = logits_.softmax(-1);
  } else if (loss_ == "bce") {
    p_ = logits_.sigmoid();
  }
  root_ = root_of_weights(logits_, options, mask_shape, is_sampled_ ? options.samples() : 1);
  columns_ = is_sampled_ ? options.samples() : elements * classes;
}

// The gradient of a target from the model's own distribution.
at::Tensor LossCurvature::sampled() const {
  if (loss_ == "mse") {  // 2 (f - y) with f - y ~ N(0, 1/2)
    return at::empty_like(logits_).normal_(0.0, 1.0, generator_).mul_(std::sqrt(2.0));
  }
  if (loss_ == "bce") {
    return p_ - at::rand(p_.sizes(), generator_, p_.options()).lt(p_).to(p_.scalar_type());
  }
  // argmax of f_c - ln E_c with E_c ~ Exp(1) is distributed as p. at::multinomial() would wait.
  const at::Tensor noise = at::empty_like(logits_).exponential_(1.0, generator_);
  const at::Tensor target = (logits_ - noise.log_()).argmax(-1, /*keepdim=*/true);
  const at::Tensor classes = at::arange(p_.size(-1), target.options());
  return p_ - classes.eq(target).to(p_.scalar_type());
}

// A column of the root of H / w: that of diag(p) - p p^T is sqrt(p_c) (e_c - p).
at::Tensor LossCurvature::exact(int64_t k) const {
  const int64_t classes = logits_.size(2);
  at::Tensor v = at::zeros_like(logits_);
  at::Tensor element = v.select(1, k / classes);
  if (loss_ == "mse") {
    element.fill_(std::sqrt(2.0));
    return v;
  }
  const at::Tensor p = p_.select(1, k / classes);
  if (loss_ == "bce") {  // 1 - p loses digits
    element.copy_((p * logits_.select(1, k / classes).neg().sigmoid_()).sqrt_());
    return v;
  }
  const int64_t c = k % classes;
  const at::Tensor root = p.narrow(1, c, 1).sqrt();
  element.copy_(p.neg().mul_(root));
  element.narrow(1, c, 1).add_(root);
  return v;
}

at::Tensor LossCurvature::column(int64_t k) const {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor v = (is_sampled_ ? sampled() : exact(k)).mul_(root_).to(outputs_.scalar_type());
  if (class_dim_ < 0) {
    return v.reshape(outputs_.sizes());
  }
  std::vector<int64_t> shape = outputs_.sizes().vec();
  shape.erase(shape.begin() + class_dim_);
  shape.push_back(v.size(2));
  return v.reshape(shape).movedim(-1, class_dim_);
}

}  // namespace torchium::optim::detail
