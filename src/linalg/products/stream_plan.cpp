#include "linalg/products/stream_plan.h"

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

// Long enough for the full rate of the copies and products, short enough that the first copy in and
// the last copy out, which nothing overlaps with, are short.
constexpr int64_t kChunk = 4096;
constexpr int64_t kLeastSplitChunk = 256;
// Roundings of the allocator, and what a split product keeps per call.
constexpr int64_t kAllocations = 16 * 512;

// StreamSizes of the product, and bytes of the buffers.
struct StreamSizes {
  int64_t m, n, k, element;
  bool A_on_host, B_on_host, out_on_host;
  bool is_split = false;
  TileBytes bytes{};

  double raw(bool rows) const {
    return (rows ? A_on_host : B_on_host) ? static_cast<double>(k * element) : 0.0;
  }
  double copy(bool rows) const { return static_cast<double>(rows ? bytes.row : bytes.column); }
  int64_t size(bool rows) const { return rows ? m : n; }
};

double buffer_bytes(const StreamSizes& s, const StreamPlan& plan) {
  const bool kept = plan.keeps_rows, passing = !kept;
  const auto rows = static_cast<double>(plan.rows), columns = static_cast<double>(plan.columns);
  const double kept_size = kept ? rows : columns, passing_size = kept ? columns : rows;
  const auto chunks = static_cast<double>(plan.kept_chunks);
  const double raw_chunks = s.is_split ? std::min(2.0, chunks) : chunks;
  const double results = s.out_on_host ? 2.0 * static_cast<double>(s.element) : 0.0;
  return kept_size * (raw_chunks * s.raw(kept) + chunks * s.copy(kept)) +
         passing_size * (2 * s.raw(passing) + s.copy(passing)) +
         rows * columns * (results + static_cast<double>(s.bytes.element)) +
         static_cast<double>(kAllocations) * (1 + chunks);
}

int64_t halved(int64_t size) { return aligned_size((size + 1) / 2, size); }

// Chunks that fit the budget; 0 rows: there are none.
StreamPlan plan_with(const StreamSizes& s, bool keeps_rows, double budget) {
  StreamPlan plan{std::min(s.m, kChunk), std::min(s.n, kChunk), keeps_rows, 1, s.out_on_host};
  while (buffer_bytes(s, plan) > budget) {
    int64_t& larger = plan.rows >= plan.columns ? plan.rows : plan.columns;
    if (larger == 1) return {};
    larger = halved(larger);
  }
  const int64_t chunk = keeps_rows ? plan.rows : plan.columns;
  const int64_t all = (s.size(keeps_rows) + chunk - 1) / chunk;
  int64_t fewest = 1, most = all;
  while (fewest < most) {  // the most chunks that fit
    plan.kept_chunks = (fewest + most + 1) / 2;
    if (buffer_bytes(s, plan) <= budget) {
      fewest = plan.kept_chunks;
    } else {
      most = plan.kept_chunks - 1;
    }
  }
  plan.kept_chunks = fewest;
  return plan;
}

// Bytes that are copied to the device.
double copied_bytes(const StreamSizes& s, const StreamPlan& plan) {
  const bool kept = plan.keeps_rows;
  const int64_t panel = plan.kept_chunks * (kept ? plan.rows : plan.columns);
  const auto panels = static_cast<double>((s.size(kept) + panel - 1) / panel);
  return s.raw(kept) * static_cast<double>(s.size(kept)) +
         s.raw(!kept) * static_cast<double>(s.size(!kept)) * panels;
}

StreamPlan best_plan(const StreamSizes& s, double budget) {
  const StreamPlan columns = plan_with(s, false, budget), rows = plan_with(s, true, budget);
  if (columns.rows == 0 || rows.rows == 0) return columns.rows == 0 ? rows : columns;
  return copied_bytes(s, rows) < copied_bytes(s, columns) ? rows : columns;
}

}  // namespace

StreamPlan plan_stream(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                       c10::Device device, const ProductOptions& options, TileProduct& product) {
  StreamSizes s{.m = out.size(-2),
                .n = out.size(-1),
                .k = A.size(-1),
                .element = static_cast<int64_t>(A.element_size()),
                .A_on_host = A.is_cpu(),
                .B_on_host = B.is_cpu(),
                .out_on_host = out.is_cpu()};
  const auto plan = [&](int64_t& budget) {
    s.is_split = product.is_split();
    s.bytes = product.bytes(A, B);
    StreamPlan whole{std::min(s.m, kChunk), std::min(s.n, kChunk), s.m < s.n, 1, s.out_on_host};
    const int64_t chunk = whole.keeps_rows ? whole.rows : whole.columns;
    whole.kept_chunks = (std::min(s.m, s.n) + chunk - 1) / chunk;
    budget = workspace_budget(device, options.max_workspace_bytes, buffer_bytes(s, whole));
    return best_plan(s, static_cast<double>(budget));
  };
  int64_t budget = 0;
  if (product.split(s.m, s.n, s.k)) {
    const StreamPlan split = plan(budget);
    if (split.rows >= std::min(s.m, kLeastSplitChunk) &&
        split.columns >= std::min(s.n, kLeastSplitChunk)) {
      return split;
    }
    product.use_float32();
  }
  const StreamPlan found = plan(budget);
  if (found.rows == 0) {
    const StreamPlan least{1, 1, false, 1, s.out_on_host};
    check_budget("chunked_matmul", A, B, budget, static_cast<int64_t>(buffer_bytes(s, least)));
  }
  return found;
}

}  // namespace torchium::linalg::detail
