#include "linalg/products/stream_plan.h"

#include <algorithm>
#include <limits>

namespace torchium::linalg::detail {
namespace {

// Long enough for the full rate of copies and products; many, because nothing overlaps with the
// first copy in and the last copy out.
constexpr int64_t kMostOfChunk = 4096, kLeastOfChunk = 1024, kChunks = 8;
constexpr int64_t kLeastSplitChunk = 256;
// Of the product of two chunks: 128 tiles of 128 x 128, about one per multiprocessor.
constexpr int64_t kLeastElements = int64_t{1} << 21;
// Roundings of the allocator, and what a split product keeps per call.
constexpr int64_t kAllocations = 16 * 512;

// Sizes of the product, and bytes of its operands per row of A and column of B.
struct StreamSizes {
  int64_t m, n, k, element;
  bool A_on_host, B_on_host, out_on_host;
  bool is_split = false;
  TileBytes bytes{};
};

int64_t chunks_of_size(int64_t size, int64_t chunk) { return (size + chunk - 1) / chunk; }

int64_t first_chunk(int64_t size) {
  const int64_t wanted = std::clamp(size / kChunks, kLeastOfChunk, kMostOfChunk);
  return aligned_size(wanted, size);
}

double buffer_bytes(const StreamSizes& s, const StreamPlan& plan) {
  const auto operand = [&](int64_t size, int64_t chunk, int64_t on_device, bool on_host,
                           int64_t copy) {
    const int64_t slots = slots_of(s.is_split, on_device, chunks_of_size(size, chunk));
    const double raw =
        on_host ? static_cast<double>(slots) * static_cast<double>(s.k * s.element) : 0.0;
    return static_cast<double>(chunk) *
           (raw + static_cast<double>(on_device) * static_cast<double>(copy));
  };
  const auto rows = static_cast<double>(plan.rows), columns = static_cast<double>(plan.columns);
  const double results = s.out_on_host ? 2.0 * static_cast<double>(s.element) : 0.0;
  return operand(s.m, plan.rows, plan.rows_on_device, s.A_on_host, s.bytes.row) +
         operand(s.n, plan.columns, plan.columns_on_device, s.B_on_host, s.bytes.column) +
         rows * columns * (results + static_cast<double>(s.bytes.element)) +
         static_cast<double>(kAllocations) *
             static_cast<double>(1 + plan.rows_on_device + plan.columns_on_device);
}

StreamPlan whole_plan(const StreamSizes& s) {
  StreamPlan plan{first_chunk(s.m), first_chunk(s.n), 1, 1, s.out_on_host};
  plan.rows_on_device = chunks_of_size(s.m, plan.rows);
  plan.columns_on_device = chunks_of_size(s.n, plan.columns);
  return plan;
}

// The most chunks of A, or else of B, that fit with these sizes; 0 rows: not even one does.
StreamPlan filled(const StreamSizes& s, bool keeps_rows, double budget, StreamPlan plan) {
  int64_t& kept = keeps_rows ? plan.rows_on_device : plan.columns_on_device;
  plan.rows_on_device = plan.columns_on_device = 1;
  if (buffer_bytes(s, plan) > budget) return {};
  int64_t fewest = 1;
  int64_t most = keeps_rows ? chunks_of_size(s.m, plan.rows) : chunks_of_size(s.n, plan.columns);
  while (fewest < most) {
    kept = (fewest + most + 1) / 2;
    if (buffer_bytes(s, plan) <= budget) {
      fewest = kept;
    } else {
      most = kept - 1;
    }
  }
  kept = fewest;
  return plan;
}

// Bytes of A and B that are copied to the device if chunks of one of them pass, per term.
double copied_bytes(const StreamSizes& s, const StreamPlan& plan, bool keeps_rows) {
  const double A = s.A_on_host ? static_cast<double>(s.m) : 0.0;
  const double B = s.B_on_host ? static_cast<double>(s.n) : 0.0;
  const int64_t panels =
      keeps_rows ? chunks_of_size(chunks_of_size(s.m, plan.rows), plan.rows_on_device)
                 : chunks_of_size(chunks_of_size(s.n, plan.columns), plan.columns_on_device);
  return keeps_rows ? A + B * static_cast<double>(panels) : B + A * static_cast<double>(panels);
}

// Chunks of one operand pass: those sizes, whole or halved, that copy the fewest bytes and whose
// products still fill a device; otherwise the first that fit.
StreamPlan panel_plan(const StreamSizes& s, double budget) {
  const StreamPlan whole = whole_plan(s);
  StreamPlan best{};
  double fewest = std::numeric_limits<double>::infinity();
  const auto consider = [&](int64_t rows, int64_t columns) {
    for (const bool keeps_rows : {false, true}) {
      const StreamPlan plan = filled(s, keeps_rows, budget, {rows, columns, 1, 1, s.out_on_host});
      if (plan.rows == 0 || copied_bytes(s, plan, keeps_rows) >= fewest) continue;
      best = plan;
      fewest = copied_bytes(s, plan, keeps_rows);
    }
  };
  for (const int64_t rows : {whole.rows, whole.rows / 2, whole.rows / 4}) {
    for (const int64_t columns : {whole.columns, whole.columns / 2, whole.columns / 4}) {
      if (rows % kTileAlignment == 0 && columns % kTileAlignment == 0 &&
          rows * columns >= kLeastElements) {
        consider(rows, columns);
      }
    }
  }
  for (int64_t rows = whole.rows, columns = whole.columns; best.rows == 0;) {
    consider(rows, columns);
    int64_t& larger = rows >= columns ? rows : columns;
    if (larger == 1) break;
    larger = aligned_size((larger + 1) / 2, larger);
  }
  return best;
}

StreamPlan best_plan(const StreamSizes& s, double budget) {
  const StreamPlan whole = whole_plan(s);
  return buffer_bytes(s, whole) <= budget ? whole : panel_plan(s, budget);
}

}  // namespace

int64_t slots_of(bool is_split, int64_t on_device, int64_t count) {
  return std::min(count, is_split || on_device == 1 ? 2 : on_device);
}

StreamPlan plan_stream(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                       c10::Device device, const ProductOptions& options, TileProduct& product) {
  StreamSizes s{.m = out.size(-2),
                .n = out.size(-1),
                .k = A.size(-1),
                .element = static_cast<int64_t>(A.element_size()),
                .A_on_host = A.is_cpu(),
                .B_on_host = B.is_cpu(),
                .out_on_host = out.is_cpu()};
  int64_t budget = 0;
  const auto plan = [&] {
    s.is_split = product.is_split();
    s.bytes = product.bytes(A, B);
    budget = workspace_budget(device, options.max_workspace_bytes, buffer_bytes(s, whole_plan(s)));
    return best_plan(s, static_cast<double>(budget));
  };
  if (product.split(s.m, s.n, s.k)) {
    const StreamPlan split = plan();
    if (split.rows >= std::min(s.m, kLeastSplitChunk) &&
        split.columns >= std::min(s.n, kLeastSplitChunk)) {
      return split;
    }
    product.use_float32();
  }
  const StreamPlan found = plan();
  if (found.rows == 0) {
    const StreamPlan least{1, 1, 1, 1, s.out_on_host};
    check_budget("chunked_matmul", A, B, budget, static_cast<int64_t>(buffer_bytes(s, least)));
  }
  return found;
}

}  // namespace torchium::linalg::detail
