#include "gradients/jacobian/pair_block.h"

#include "support/huge_pages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// The largest number of elements of explicit rows at a time. On a GPU each piece costs launches.
int64_t max_row_elements(bool is_cuda) { return int64_t{1} << (is_cuda ? 26 : 23); }

// The largest number of samples on one side of a product of pairs, of `of_sample` elements each, in
// groups of T x T pairs. Only blocks on and below the diagonal of the result are computed: on a CPU
// small ones, on a GPU few.
int64_t max_pair_samples(bool is_cuda, int64_t of_sample, int64_t T, int64_t groups) {
  if (!is_cuda) {
    return std::clamp<int64_t>(kMaxWorkspaceElements / of_sample, 1, 128);
  }
  constexpr int64_t kElements = int64_t{1} << 25;
  const auto side = static_cast<int64_t>(std::sqrt(kElements / std::max<int64_t>(1, groups)));
  return std::max<int64_t>(1, std::min(kElements / of_sample, side / T));
}

// From as many positions on, a product reads kept rows in less time than it multiplies positions.
constexpr int64_t kLeastPositionsOfRows = 32;

// Whether the squared norms of the rows take fewer operations over pairs of positions. Those are
// float64, of which tensor cores do a quarter as many as of rows in two parts.
bool saves_norms_by_pairs(int64_t T, int64_t fan_in, int64_t fan_out) {
  return 2 * T * T < fan_in * fan_out && 4 * T * (fan_in + fan_out) < fan_in * fan_out;
}

// rows [n, groups, fan_out, fan_in] <- beta rows + sum_t G[group, i, t] A[group, i, t]^T
void add_rows_(at::Tensor rows, const Positions& x, double beta) {
  const int64_t groups = x.A.size(0);
  const int64_t samples = x.A.size(1);
  if (groups <= samples) {
    for (int64_t group = 0; group < groups; ++group) {
      rows.select(1, group).baddbmm_(x.G[group].mT(), x.A[group], beta);
    }
  } else {
    for (int64_t i = 0; i < samples; ++i) {
      rows.select(0, i).baddbmm_(x.G.select(1, i).mT(), x.A.select(1, i), beta);
    }
  }
}

// Some samples of all sources, their positions side by side.
Positions joined(const std::vector<const PositionSource*>& sources, int64_t first, int64_t count) {
  if (sources.size() == 1) {
    return sources[0]->of_samples(first, count);
  }
  std::vector<at::Tensor> A, G;
  for (const auto* source : sources) {
    const Positions x = source->of_samples(first, count);
    A.push_back(x.A);
    G.push_back(x.G);
  }
  return {at::cat(A, 2), at::cat(G, 2)};
}

// sum over groups of |A_i|^2 |G_i|^2, for one position
at::Tensor norms_of_one_position(const Positions& x) {
  const auto squares = [](const at::Tensor& vectors) {
    return at::linalg_vector_norm(vectors.squeeze(2), 2, at::IntArrayRef({2}), false, at::kDouble)
        .square_();
  };
  return squares(x.A).mul_(squares(x.G)).sum(0);
}

// sum over groups, t and s of (A_it . A_is) (G_it . G_is). In float64, because terms may cancel.
at::Tensor norms_by_pairs(const Positions& x) {
  const auto products = [](const at::Tensor& vectors) {
    const at::Tensor of_samples = vectors.to(at::kDouble).flatten(0, 1);
    return at::bmm(of_samples, of_samples.mT());
  };
  const at::Tensor sums = products(x.A).mul_(products(x.G)).sum(at::IntArrayRef({1, 2}));
  return sums.view({x.A.size(0), x.A.size(1)}).sum(0).clamp_min_(0);
}

// sum over groups of |sum_t G_it A_it^T|^2
at::Tensor norms_by_rows(const Positions& x) {
  const at::Tensor rows = at::bmm(x.G.flatten(0, 1).mT(), x.A.flatten(0, 1));
  return squared_norms_of(rows).view({x.A.size(0), x.A.size(1)}).sum(0);
}

Positions weighted(const Positions& x, const at::Tensor& w) {
  return {x.A, x.G * w.view({1, -1, 1, 1})};
}

}  // namespace

PairBlock::PairBlock(std::vector<Call> calls, int64_t groups, at::IntArrayRef shape,
                     int64_t samples, const at::TensorOptions& options)
    : calls_(std::move(calls)),
      groups_(groups),
      fan_in_(c10::multiply_integers(shape.slice(1))),
      fan_out_(shape[0] / groups),
      shape_(shape.vec()),
      samples_(samples),
      options_(options) {}

template <typename Visit>
void PairBlock::for_each_piece(const Visit& visit, int64_t max_bytes) const {
  for (const auto& [source, first_row] : calls_) {
    const int64_t piece = source.piece(max_bytes);
    for (int64_t first = 0; first < source.samples(); first += piece) {
      const int64_t count = std::min(piece, source.samples() - first);
      visit(source.of_samples(first, count), first_row + first);
    }
  }
}

// Compares multiplications per group. Either every pair of positions needs two inner products, or
// all rows are formed, and every pair of samples needs one inner product of length p o.
bool PairBlock::saves_by_pairs() const {
  double positions = 0;  // of all samples
  for (const auto& call : calls_) {
    positions += static_cast<double>(call.source.samples() * call.source.positions());
  }
  const double n = static_cast<double>(samples_);
  const double p = static_cast<double>(fan_in_);
  const double o = static_cast<double>(fan_out_);
  return positions * positions * (p + o) <= positions * p * o + n * n * p * o;
}

std::vector<DeviceRows::Call> PairBlock::device_calls() const {
  std::vector<DeviceRows::Call> calls;
  if (!options_.device().is_cuda()) {
    return calls;
  }
  for (const auto& [source, first_row] : calls_) {
    auto images = source.positions() > 1 ? source.images() : std::nullopt;
    if (!images) {
      return {};
    }
    calls.push_back({*std::move(images), first_row});
  }
  return calls;
}

std::optional<NarrowRows> PairBlock::narrow_rows(int64_t max_bytes) const {
  const auto calls = device_calls();
  const bool fits = samples_ * groups_ * fan_out_ * (fan_in_ + 1) <= max_bytes / 4;
  return fits && !calls.empty() ? detail::narrow_rows(calls, samples_) : std::nullopt;
}

std::vector<int64_t> PairBlock::shape_of_rows() const {
  auto shape = shape_;
  shape.insert(shape.begin(), samples_);
  return shape;
}

std::unique_ptr<DeviceRows> PairBlock::device_rows(int64_t max_bytes, bool with_bias) const {
  auto calls = device_calls();
  return !calls.empty() && DeviceRows::are_supported(calls, samples_)
             ? std::make_unique<DeviceRows>(std::move(calls), samples_, max_bytes, with_bias)
             : nullptr;
}

void PairBlock::add_gram_(at::Tensor& K, double weight) const {
  if (rows_) {
    rows_->add_gram_(K, weight);
  } else if (saves_by_pairs()) {
    add_gram_by_pairs_(K, weight, 0.0);
  } else {
    add_gram_by_rows_(K, weight);
  }
}

bool PairBlock::add_gram_with_bias_(at::Tensor& K, double weight, double bias_weight) const {
  if (rows_ || !saves_by_pairs()) {
    return false;
  }
  add_gram_by_pairs_(K, weight, bias_weight);
  return true;
}

Added PairBlock::add_gram_to(GramSums& sums, double weight, double bias_weight) const {
  const auto pairs = vector_pairs();
  if (!pairs || pairs->A.scalar_type() != at::kFloat || pairs->G.scalar_type() != at::kFloat) {
    return Added::kNothing;
  }
  sums.add(*pairs, weight, bias_weight);
  return Added::kBlockAndBias;
}

Added PairBlock::add_gram_in_float32_(at::Tensor& K, GramSums& sums, double weight,
                                      double bias_weight) const {
  if (rows_ || saves_by_pairs()) {
    return Added::kNothing;
  }
  const bool takes_vectors = samples_ <= GramSums::kMostSamples;
  if (const auto narrow = takes_vectors ? narrow_rows(kMostOperandBytes) : std::nullopt) {
    sums.add(narrow->weight, weight);
    if (bias_weight != 0.0) sums.add(narrow->bias, bias_weight);
    return Added::kBlockAndBias;
  }
  const auto rows = device_rows(kMostOperandBytes, bias_weight != 0.0);
  if (!rows) {
    return Added::kNothing;
  }
  rows->add_gram_(K, weight);
  if (!rows->bias_rows().defined()) {
    return Added::kBlock;
  }
  sums.add(rows->bias_rows(), bias_weight);
  return Added::kBlockAndBias;
}

// K_ij += sum over groups, t and s of (weight * A_it . A_js + bias_weight) (G_it . G_js)
void PairBlock::add_gram_by_pairs_(at::Tensor& K, double weight, double bias_weight) const {
  const at::NoTF32Guard full_precision;
  struct Piece {
    const Call* call;
    int64_t first;
    int64_t count;
    int64_t row() const { return call->first_row + first; }
  };
  std::vector<Piece> pieces;
  for (const auto& call : calls_) {
    const int64_t T = std::max<int64_t>(1, call.source.positions());
    const int64_t of_sample = groups_ * T * std::max({fan_in_, fan_out_, T});
    const int64_t count = max_pair_samples(K.is_cuda(), of_sample, T, groups_);
    for (int64_t first = 0; first < call.source.samples(); first += count) {
      pieces.push_back({&call, first, std::min(count, call.source.samples() - first)});
    }
  }
  const auto positions = [](const Piece& piece) {
    return piece.call->source.of_samples(piece.first, piece.count).to(at::kDouble);
  };
  for (size_t a = 0; a < pieces.size(); ++a) {
    const Positions x = positions(pieces[a]);
    for (size_t b = 0; b <= a; ++b) {
      const Positions y = a == b ? x : positions(pieces[b]);
      at::Tensor sums = at::bmm(x.A.flatten(1, 2), y.A.flatten(1, 2).mT());
      if (weight != 1.0) {
        sums.mul_(weight);
      }
      if (bias_weight != 0.0) {
        sums.add_(bias_weight);
      }
      sums.mul_(at::bmm(x.G.flatten(1, 2), y.G.flatten(1, 2).mT()));
      sums = sums.view({groups_, x.A.size(1), x.A.size(2), y.A.size(1), y.A.size(2)});
      sums = sums.size(2) * sums.size(4) == 1 ? sums.squeeze(4).squeeze(2)
                                              : sums.sum(at::IntArrayRef({2, 4}));
      for (int64_t group = 0; group < groups_; ++group) {
        K.narrow(0, pieces[a].row(), pieces[a].count)
            .narrow(1, pieces[b].row(), pieces[b].count)
            .add_(sums[group]);
        if (a != b) {
          K.narrow(0, pieces[b].row(), pieces[b].count)
              .narrow(1, pieces[a].row(), pieces[a].count)
              .add_(sums[group].t());
        }
      }
    }
  }
}

void PairBlock::add_gram_by_rows_(at::Tensor& K, double weight) const {
  const at::NoTF32Guard full_precision;
  if (const auto narrow = narrow_rows(kMostOperandBytes)) {
    add_product_of_rows_(K, narrow->weight.flatten(1), weight);
    return;
  }
  const int64_t of_output = samples_ * groups_ * fan_in_;
  const int64_t chunk = std::max<int64_t>(1, max_row_elements(K.is_cuda()) / of_output);
  const auto on_device = device_rows(kMostOperandBytes);
  for (int64_t first = 0; first < fan_out_; first += chunk) {
    const int64_t outputs = std::min(chunk, fan_out_ - first);
    at::Tensor rows;
    if (on_device) {
      rows = at::empty({samples_, groups_, outputs, fan_in_}, options_);
      on_device->store(rows, first, {});
      add_product_of_rows_(K, rows.flatten(1), weight);
      continue;
    }
    for_each_piece([&](const Positions& x, int64_t row) {
      if (!rows.defined()) {
        rows = at::zeros({samples_, groups_, outputs, fan_in_}, x.A.options());
      }
      add_rows_(rows.narrow(0, row, x.A.size(1)), {x.A, x.G.narrow(3, first, outputs)}, 1.0);
    });
    add_product_of_rows_(K, rows.flatten(1), weight);
  }
}

at::Tensor PairBlock::transpose_product(const at::Tensor& w) const {
  const at::NoTF32Guard full_precision;
  if (rows_) {
    return rows_->transpose_product(w);
  }
  at::Tensor result = at::empty({groups_, fan_out_, fan_in_}, w.options());
  double beta = 0.0;
  for_each_piece([&](const Positions& x, int64_t row) {
    const auto [A, G] = weighted(x, w.narrow(0, row, x.A.size(1)));
    result.baddbmm_(G.flatten(1, 2).mT(), A.flatten(1, 2), beta);
    beta = 1.0;
  });
  return result.view(shape_);
}

at::Tensor PairBlock::product(const at::Tensor& x) const {
  const at::NoTF32Guard full_precision;
  if (rows_) {
    return rows_->product(x);
  }
  const at::Tensor matrices = x.reshape({groups_, fan_out_, fan_in_}).mT();
  const at::Tensor result = at::zeros({samples_}, x.options());
  for_each_piece([&](const Positions& y, int64_t row) {
    const at::Tensor outputs = at::bmm(y.A.flatten(1, 2), matrices).view(y.G.sizes());
    result.narrow(0, row, y.A.size(1)).add_((outputs * y.G).sum(at::IntArrayRef({0, 2, 3})));
  });
  return result.to(at::kDouble);
}

std::optional<VectorPairs> PairBlock::vector_pairs() const {
  const auto& source = calls_[0].source;
  if (calls_.size() > 1 || groups_ > 1 || source.positions() != 1 || source.samples() != samples_ ||
      source.piece() < samples_) {
    return std::nullopt;
  }
  const auto [A, G] = source.of_samples(0, samples_);
  return VectorPairs{A.view({samples_, fan_in_}), G.view({samples_, fan_out_})};
}

void PairBlock::add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const {
  const at::NoTF32Guard full_precision;
  std::map<int64_t, std::vector<const PositionSource*>> micro_batches;  // by their first row
  for (const auto& [source, first_row] : calls_) {
    if (source.samples() > 0) {
      micro_batches[first_row].push_back(&source);
    }
  }
  for (const auto& [first_row, sources] : micro_batches) {
    int64_t T = 0;
    int64_t count = sources[0]->samples();
    for (const auto* source : sources) {
      T += source->positions();
      count = std::min(count, source->piece());
    }
    // Multiplications: every pair of positions needs two inner products, or the row is formed.
    const bool by_pairs = 2 * T * T < fan_in_ * fan_out_;
    if (T > 1) {
      const int64_t elements =
          groups_ * (T * (fan_in_ + fan_out_) + (by_pairs ? 2 * T * T : fan_in_ * fan_out_));
      count = std::clamp<int64_t>(max_workspace_bytes / (8 * elements), 1, count);
    }
    for (int64_t first = 0; first < sources[0]->samples(); first += count) {
      const Positions x = joined(sources, first, std::min(count, sources[0]->samples() - first));
      squares.narrow(0, first_row + first, x.A.size(1))
          .add_(T == 1     ? norms_of_one_position(x)
                : by_pairs ? norms_by_pairs(x)
                           : norms_by_rows(x));
    }
  }
}

Added PairBlock::add_norms_to(NormSums& sums, bool has_bias, int64_t max_workspace_bytes) const {
  if (const auto pairs = vector_pairs()) {
    if (pairs->A.scalar_type() != at::kFloat || pairs->G.scalar_type() != at::kFloat) {
      return Added::kNothing;
    }
    sums.add(*pairs, has_bias);
    return Added::kBlockAndBias;
  }
  if (saves_norms_by_pairs(calls_[0].source.positions(), fan_in_, fan_out_)) {
    return Added::kNothing;
  }
  if (const auto narrow = narrow_rows(max_workspace_bytes)) {
    sums.add(narrow->weight);
    if (has_bias) sums.add(narrow->bias);
    return Added::kBlockAndBias;
  }
  const auto rows = device_rows(max_workspace_bytes, has_bias);
  if (!rows) {
    return Added::kNothing;
  }
  sums.add(rows->squares());
  if (!rows->bias_rows().defined()) {
    return Added::kBlock;
  }
  sums.add(rows->bias_rows());
  return Added::kBlockAndBias;
}

void PairBlock::keep_patches(int64_t& bytes) {
  const int64_t of_rows = samples_ * groups_ * fan_out_ * fan_in_ * 4;
  if (calls_[0].source.positions() >= kLeastPositionsOfRows && of_rows <= bytes) {
    const auto narrow = narrow_rows(bytes);
    if (narrow || device_rows(kMostOperandBytes)) {
      rows_ = std::make_unique<DenseBlock>(narrow ? narrow->weight.view(shape_of_rows())
                                                  : weighted_rows({}, kMostOperandBytes));
      bytes -= of_rows;
      return;
    }
  }
  for (auto& call : calls_) {
    call.source.keep_patches(bytes);
  }
}

at::Tensor PairBlock::weighted_rows(const at::Tensor& w, int64_t max_workspace_bytes) const {
  const at::NoTF32Guard full_precision;
  if (rows_) {
    return rows_->weighted_rows(w, max_workspace_bytes);
  }
  const bool covered = calls_.size() == 1 && calls_[0].source.samples() == samples_;
  if (const auto narrow = narrow_rows(std::numeric_limits<int64_t>::max())) {
    if (w.defined()) narrow->weight.mul_(w.view({-1, 1, 1, 1}));
    return narrow->weight.view(shape_of_rows());
  }
  const std::vector<int64_t> sizes{samples_, groups_, fan_out_, fan_in_};
  const at::Tensor rows = torchium::detail::empty_in_huge_pages(sizes, options_);
  const auto pairs = rows.is_cuda() ? vector_pairs() : std::nullopt;  // may be copies
  if (pairs && store_outer_rows(*pairs, w, rows)) {
    return rows.view(shape_of_rows());
  }
  if (const auto on_device = device_rows(std::min(max_workspace_bytes, kMostOperandBytes))) {
    on_device->store(rows, 0, w);
    return rows.view(shape_of_rows());
  }
  if (!covered) {
    rows.zero_();
  }
  const auto add = [&](const Positions& x, int64_t row) {
    const int64_t count = x.A.size(1);
    add_rows_(rows.narrow(0, row, count), w.defined() ? weighted(x, w.narrow(0, row, count)) : x,
              covered ? 0.0 : 1.0);
  };
  for_each_piece(add, max_workspace_bytes);
  return rows.view(shape_of_rows());
}

}  // namespace torchium::gradients::detail
