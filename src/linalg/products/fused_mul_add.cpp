#include "linalg/products/fused_mul_add.h"

#include "linalg/common/operand_checks.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/addcmul.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/common/fused_mul_add.h"
#include "linalg/common/element_type.h"
#include "support/device_code.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <type_traits>
#endif

namespace torchium::linalg::detail {
namespace {

bool is_symbolic(const at::Tensor& x) {
  return x.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// What mostly is so, and shows in a fraction of the time.
bool is_alike(const at::Tensor& entry, const at::Tensor& target) {
  return entry.defined() && entry.layout() == at::kStrided &&
         entry.scalar_type() == target.scalar_type() && entry.device() == target.device() &&
         (is_symbolic(entry) || is_symbolic(target) ? entry.sym_sizes() == target.sym_sizes()
                                                    : entry.sizes() == target.sizes());
}

#ifdef TORCHIUM_WITH_CUDA
// torch's scalar type as CUDA's.
template <typename T>
using CudaScalar =
    std::conditional_t<std::is_same_v<T, at::Half>, __half,
                       std::conditional_t<std::is_same_v<T, at::BFloat16>, __nv_bfloat16, T>>;

bool is_plain(const at::Tensor& x) { return x.is_contiguous() && !x.is_neg(); }

// For operands of which is_alike holds.
bool is_for_kernel(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return c.is_cuda() && is_plain(c) && is_plain(a) && is_plain(b);
}

bool has_kernel(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return is_alike(a, c) && is_alike(b, c) && is_for_kernel(a, b, c);
}

void fused_mul_add_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                        const at::Tensor& out) {
  torchium::detail::check_device_code(c.device());
  const c10::cuda::CUDAGuard device_guard(c.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.scalar_type(), "fused_mul_add", [&] {
    using T = CudaScalar<scalar_t>;
    const auto pointer = [](const at::Tensor& x) {
      return reinterpret_cast<const T*>(x.const_data_ptr<scalar_t>());
    };
    cuda_kernels::fused_mul_add<T>(pointer(a), pointer(b), pointer(c),
                                   reinterpret_cast<T*>(out.mutable_data_ptr<scalar_t>()),
                                   c.numel(), c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The entries of one device, launched when the table is full and at the end.
class EntryTable {
 public:
  explicit EntryTable(c10::Device device) : device_(device) {
    torchium::detail::check_device_code(device);
  }

  void add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    if (table_.count == decltype(table_)::kCapacity) launch();
    const void* const pointers[] = {a.const_data_ptr(), b.const_data_ptr()};
    void* const target = c.mutable_data_ptr();
    const auto address = reinterpret_cast<uintptr_t>(pointers[0]) |
                         reinterpret_cast<uintptr_t>(pointers[1]) |
                         reinterpret_cast<uintptr_t>(target);
    table_.entries[table_.count++] = {.a = pointers[0],
                                      .b = pointers[1],
                                      .c = target,
                                      .elements = c.numel(),
                                      .first_tile = table_.end_tile,
                                      .type = *element_type(c.scalar_type()),
                                      .is_aligned = address % 16 == 0};
    const int64_t tiles = (c.numel() + cuda_kernels::kMulAddTile - 1) / cuda_kernels::kMulAddTile;
    table_.end_tile += static_cast<int>(tiles);
  }

  c10::Device device() const { return device_; }

  void launch() {
    if (table_.count == 0) return;
    const c10::cuda::CUDAGuard device_guard(device_);
    C10_CUDA_CHECK(cuda_kernels::fused_mul_add_lists(table_, c10::cuda::getCurrentCUDAStream()));
    table_.count = 0;
    table_.end_tile = 0;
  }

 private:
  c10::Device device_;
  cuda_kernels::Table<cuda_kernels::MulAddEntry> table_;
};
#endif

constexpr char kName[] = "fused_mul_add";
constexpr char kListName[] = "fused_mul_add_";

// Numbers, operands without dimensions, may be on any device.
void check_tensors(std::initializer_list<Operand> operands) {
  const Operand* first = nullptr;  // that is no number
  for (const Operand& operand : operands) {
    check_floating(kName, operand);
    if (operand.tensor.dim() == 0) continue;
    if (first == nullptr) first = &operand;
    TORCH_CHECK_VALUE(operand.tensor.device() == first->tensor.device(), kName, ": ", operand.name,
                      " is on ", operand.tensor.device(), " and ", first->name, " on ",
                      first->tensor.device(), "; move one of them with .to(device)");
  }
}

void check_operands(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  check_tensors({{"a", a}, {"b", b}, {"c", c}});
  broadcast_shape(kName, {{"a", a}, {"b", b}, {"c", c}});
}

// A target in which entries share memory, or that shares a part of its memory with an operand,
// would be read after it is written.
void check_target(const char* op, const Operand& target, std::initializer_list<Operand> operands) {
  if (target.tensor.is_meta()) return;
  TORCH_CHECK_VALUE(at::has_internal_overlap(target.tensor) != at::MemOverlap::Yes, op, ": ",
                    target.name, " has entries that share memory; pass ", target.name,
                    ".clone() or a tensor that is not expanded.");
  for (const Operand& operand : operands) {
    TORCH_CHECK_VALUE(
        at::get_overlap_status(target.tensor, operand.tensor) != at::MemOverlapStatus::Partial, op,
        ": ", target.name, " shares a part of its memory with ", operand.name, "; pass ",
        operand.name, ".clone().");
  }
}

// Of addcmul(c, a, b).
at::ScalarType result_type_of(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  at::native::ResultTypeState state = at::native::update_result_type_state(c, {});
  state = at::native::update_result_type_state(a, state);
  return at::native::result_type(at::native::update_result_type_state(b, state));
}

bool broadcasts_to(const at::Tensor& x, const at::Tensor& target) {
  return at::is_expandable_to(x.sym_sizes(), target.sym_sizes());
}

std::string name_of(const char* list, size_t i) {
  return std::string(list) + "[" + std::to_string(i) + "]";
}

// An entry of a list that fits its target, which is checked before.
void check_entry(const char* list, size_t i, const at::Tensor& entry, const at::Tensor& target) {
  const std::string name = name_of(list, i);
  check_floating(kListName, {name.c_str(), entry});
  TORCH_CHECK_VALUE(entry.scalar_type() == target.scalar_type() && broadcasts_to(entry, target) &&
                        (entry.device() == target.device() || entry.dim() == 0),
                    kListName, ": ", name, " is ", entry.sym_sizes(), " of ", entry.scalar_type(),
                    " on ", entry.device(), "; it must fit c[", i, "], which is ",
                    target.sym_sizes(), " of ", target.scalar_type(), " on ", target.device(), ".");
}

// Whether check_target has something to check.
bool shares_memory(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  return !c.is_non_overlapping_and_dense() || c.is_alias_of(a) || c.is_alias_of(b);
}

// Everything, before anything is changed. Returns for each i whether a[i] and b[i] have the shape,
// dtype and device of c[i].
std::vector<bool> check_lists(at::TensorList a, at::TensorList b, at::TensorList c) {
  TORCH_CHECK_VALUE(a.size() == c.size() && b.size() == c.size(), kListName, ": a, b and c have ",
                    a.size(), ", ", b.size(), " and ", c.size(),
                    " entries; they must be lists of one length.");
  std::vector<bool> alike(c.size());
  std::vector<const void*> targets;
  targets.reserve(c.size());
  at::ScalarType known =
      at::ScalarType::Undefined;  // the last dtype of c, once it has been checked
  for (size_t i = 0; i < c.size(); ++i) {
    if (!c[i].defined() || c[i].layout() != at::kStrided || c[i].scalar_type() != known) {
      check_entry("c", i, c[i], c[i]);
      known = c[i].scalar_type();
    }
    const bool a_is_alike = is_alike(a[i], c[i]), b_is_alike = is_alike(b[i], c[i]);
    if (!a_is_alike) check_entry("a", i, a[i], c[i]);
    if (!b_is_alike) check_entry("b", i, b[i], c[i]);
    alike[i] = a_is_alike && b_is_alike;
    if (c[i].is_meta() || c[i].sym_numel() == 0) continue;
    targets.push_back(c[i].const_data_ptr());
    if (shares_memory(c[i], a[i], b[i])) {
      check_target(kListName, {name_of("c", i).c_str(), c[i]},
                   {{name_of("a", i).c_str(), a[i]}, {name_of("b", i).c_str(), b[i]}});
    }
  }
  // Allocated one after another, they mostly are in order already.
  if (!std::is_sorted(targets.begin(), targets.end())) std::sort(targets.begin(), targets.end());
  TORCH_CHECK_VALUE(std::adjacent_find(targets.begin(), targets.end()) == targets.end(), kListName,
                    ": an entry is in c twice; call the function once for each.");
  return alike;
}

}  // namespace

at::Tensor fused_mul_add_by_torch(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  check_operands(a, b, c);
  return at::addcmul(c, a, b);
}

at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
#ifdef TORCHIUM_WITH_CUDA
  check_operands(a, b, c);
  if (has_kernel(a, b, c)) {
    const at::Tensor out = at::empty_like(c);
    fused_mul_add_cuda(a, b, c, out);
    return out;
  }
#endif
  return fused_mul_add_by_torch(a, b, c);
}

void fused_mul_add_out(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                       at::Tensor& out) {
  check_tensors({{"a", a}, {"b", b}, {"c", c}, {"out", out}});
  const auto shape = broadcast_shape(kName, {{"a", a}, {"b", b}, {"c", c}});
  const at::ScalarType dtype = result_type_of(a, b, c);
  TORCH_CHECK_VALUE(out.sym_sizes() == c10::SymIntArrayRef(shape) && out.scalar_type() == dtype,
                    kName, ": out is ", out.sym_sizes(), " of ", out.scalar_type(), "; it must be ",
                    c10::SymIntArrayRef(shape), " of ", dtype, ".");
  check_target(kName, {"out", out}, {{"a", a}, {"b", b}, {"c", c}});
#ifdef TORCHIUM_WITH_CUDA
  if (has_kernel(a, b, c) && is_alike(out, c) && is_plain(out)) {
    fused_mul_add_cuda(a, b, c, out);
    return;
  }
#endif
  at::addcmul_out(out, c, a, b);
}

void fused_mul_add_(at::TensorList a, at::TensorList b, at::TensorList c) {
  [[maybe_unused]] const std::vector<bool> alike = check_lists(a, b, c);
#ifdef TORCHIUM_WITH_CUDA
  std::map<c10::DeviceIndex, EntryTable> tables;
  EntryTable* table = nullptr;  // of the entry before
#endif
  for (size_t i = 0; i < c.size(); ++i) {
    const at::Tensor& target = c[i];
    if (target.sym_numel() == 0) continue;
#ifdef TORCHIUM_WITH_CUDA
    if (alike[i] && is_for_kernel(a[i], b[i], target)) {
      if (table == nullptr || table->device() != target.device()) {
        table = &tables.try_emplace(target.device().index(), target.device()).first->second;
      }
      table->add(a[i], b[i], target);
      continue;
    }
#endif
    target.addcmul_(a[i], b[i]);
  }
#ifdef TORCHIUM_WITH_CUDA
  for (auto& [index, each] : tables) each.launch();
#endif
}

}  // namespace torchium::linalg::detail
