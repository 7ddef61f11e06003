// Norms and inner products of Jacobian rows on a GPU, by kernels of cuda_kernels/samples.
#pragma once

#include "gradients/jacobian/jacobian_block.h"
#include "gradients/jacobian/patches.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::gradients::detail {

// The rows of a linear or convolution weight, formed on Hopper's tensor cores from operands in two
// fp16 parts, which are as precise as float32.
class DeviceRows {
 public:
  struct Call {
    PositionImages images;
    int64_t first_row;
  };

  // Whether the kernels take the rows: float32 on such a GPU, several positions, matrices that are
  // not small, and each row in exactly one call.
  static bool are_supported(const std::vector<Call>& calls, int64_t samples);

  // At most `max_bytes` of operands exist at a time, but those of at least one sample. with_bias:
  // the rows of the bias are formed on the way, if channels do not lie side by side.
  DeviceRows(std::vector<Call> calls, int64_t samples, int64_t max_bytes, bool with_bias = false);
  ~DeviceRows();
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;

  // Numbers that add up to the squared norms: [samples, tiles] float32. The sums are to be
  // multiplied by `factor` and divided by the squares of the scales, [2, samples].
  struct Squares {
    at::Tensor tiles, scales;
    double factor;
  };
  Squares squares();
  // rows [samples, groups, outputs, fan_in] <- rows of J, of the outputs from first_output on,
  // times w [samples] if defined.
  void store(const at::Tensor& rows, int64_t first_output, const at::Tensor& w);
  // K += weight * J J^T; K undefined: zeros. Sums over rows of J are float32, as precise as those
  // of a float32 product.
  void add_gram_(at::Tensor& K, double weight);
  // After one of these: the rows of the bias, [samples, groups * fan_out]; undefined: they are not
  // formed.
  const at::Tensor& bias_rows() const { return bias_rows_; }

 private:
  struct Operands;
  const WeightGeometry& weight() const { return calls_[0].images.weight; }
  int64_t positions() const { return calls_[0].images.positions(); }
  // Calls visit(operands, first row) for all pieces of all calls.
  template <typename Visit>
  void for_each_piece(const Visit& visit);
  Operands split(const Call& call, int64_t first, int64_t count) const;

  std::vector<Call> calls_;
  int64_t samples_;
  int64_t piece_;
  at::Tensor scales_;  // [2, samples], of inputs and output gradients
  at::Tensor bias_rows_;
  std::unique_ptr<Operands> kept_;  // if there is only one piece
};

// rows [n, fan_out, fan_in] <- w_i G_i A_i^T, w undefined: ones. False: no kernel takes them.
bool store_outer_rows(const VectorPairs& pairs, const at::Tensor& w, const at::Tensor& rows);

// Whether each of the rows is in exactly one call.
bool have_own_rows(const std::vector<DeviceRows::Call>& calls, int64_t samples);

// The squared norms of samples as sums over blocks, in few launches.
class NormSums {
 public:
  // Whether the device has the kernel.
  static bool is_available(c10::Device device);

  // Adds (|A_i|^2 + 1) |G_i|^2, without 1 where there is no bias.
  void add(const VectorPairs& pairs, bool has_bias);
  // Adds |rows_i|^2: [n, ...] float32.
  void add(const at::Tensor& rows);
  void add(const DeviceRows::Squares& squares);
  // The root of all that was added and of squares [n] float64, unless undefined: [n] of `dtype`.
  at::Tensor norms(const at::Tensor& squares, const at::TensorOptions& options, int64_t samples,
                   at::ScalarType dtype) const;

 private:
  struct Term {
    at::Tensor A, G;
    bool has_bias;
    DeviceRows::Squares squares;
  };
  std::vector<Term> terms_;
};

// K as a sum over blocks whose rows are vectors, or outer products of two, in few launches.
class GramSums {
 public:
  // The largest order of K at which cuBLAS is not faster for vectors of any length.
  static constexpr int64_t kMostSamples = 1024;

  // Whether the device has the kernel.
  static bool is_available(c10::Device device);

  // Adds (weight A_i . A_j + bias_weight) G_i . G_j.
  void add(const VectorPairs& pairs, double weight, double bias_weight);
  // Adds weight R_i . R_j for rows [n, ...] float32.
  void add(const at::Tensor& rows, double weight);
  // K += all that was added, for symmetric K [n, n] float64; undefined: zeros.
  at::Tensor gram(at::Tensor K, const at::TensorOptions& options, int64_t samples) const;

 private:
  struct Term {
    at::Tensor A, G;
    double weight, bias_weight;
  };
  std::vector<Term> terms_;
};

}  // namespace torchium::gradients::detail
