#include "cuda_kernels/optimizer_step/parameter_update.cuh"
#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "cuda_kernels/split_gemm/split_fp16.cuh"

#include <type_traits>

namespace torchium::cuda_kernels {
namespace {

template <int bytes>
using ParameterTable = Table<ParameterEntry, bytes>;

// Where neighbouring elements lie.
struct Place {
  int64_t in_state, in_block;  // offsets, the second in the block workspace
  int64_t row;
  int column;

  __device__ int64_t offset(int64_t stride) const { return row * stride + column; }
};

// One tile: some rows of one block of a parameter.
struct Tile {
  const ParameterEntry& parameter;
  int64_t row, column;    // of its first element, in the parameter
  int rows, columns;      // of the tile; columns is the width of the block
  int64_t first;          // offset of its first element in the block workspace
  bool in_fp16;           // of the workspace
  int matrix;             // its block, counted among those of fp16 parts
  bool is_first;          // the first tile of its block
  int first_strip, step;  // tiles of its block: first_strip, first_strip + step, ...
  int strips;

  __device__ Tile(const ParameterEntry& entry, int index, int size) : parameter(entry) {
    const int block_size = block_size_of(entry, size);
    const TileGrid grid(entry.rows, entry.columns, block_size);
    const int local = index - entry.first_tile;
    const int strip = local / grid.block_columns, block_column = local % grid.block_columns;
    const int block_row = strip / grid.strips, strip_of_block = strip % grid.strips;
    const bool last_row = block_row == entry.rows / block_size;
    const bool last_column = block_column == entry.columns / block_size;
    const int height = last_row ? entry.rows % block_size : block_size;
    columns = last_column ? entry.columns % block_size : block_size;
    rows = min(grid.strip_rows, height - strip_of_block * grid.strip_rows);
    row = int64_t{block_row} * block_size + strip_of_block * grid.strip_rows;
    column = int64_t{block_column} * block_size;
    const int whole_columns = entry.columns / block_size;
    const int block = (last_row ? 0 : block_row) * (last_column ? 1 : whole_columns) +
                      (last_column ? 0 : block_column);
    const int kind = 2 * last_row + last_column;
    in_fp16 = entry.in_fp16 >> kind & 1;
    matrix = entry.matrices[kind] + block;
    is_first = strip_of_block == 0;
    first =
        entry.blocks[kind] + (int64_t{block} * height + strip_of_block * grid.strip_rows) * columns;
    first_strip = entry.first_tile + block_row * grid.strips * grid.block_columns + block_column;
    step = grid.block_columns;
    strips = (height + grid.strip_rows - 1) / grid.strip_rows;
  }

  // Calls body(place) for every N neighbours.
  template <int N, typename Body>
  __device__ void for_each(const Body& body) const {
    const int across = columns / N;
    const int inner = parameter.inner, outer = parameter.columns / inner;
    for (int i = static_cast<int>(threadIdx.x); i < rows * across; i += kElementThreads) {
      const int r = i / across, c = static_cast<int>(column) + i % across * N;
      const int c_in_row = inner == 1 ? c : c % inner * outer + c / inner;
      body(Place{(row + r) * parameter.columns + c_in_row, first + int64_t{i} * N, row + r,
                 c_in_row});
    }
  }
};

// Adds the partial sums of a block, the same in all threads.
__device__ float block_squares(const float* partials, const Tile& tile) {
  __shared__ float total;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < tile.strips; i += kElementThreads) {
    sum += partials[tile.first_strip + i * tile.step];
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) total = sum;
  __syncthreads();
  const float result = total;
  __syncthreads();
  return result;
}

// x + weight (y - x) as torch rounds it.
__device__ float lerp(float x, float y, float weight) {
  return weight < 0.5f ? x + weight * (y - x) : y - (y - x) * (1 - weight);
}

// StepNumbers as the elements need them.
struct Inputs {
  const void* gradient;
  int64_t gradient_stride;
  float exp_avg, second_moment, statistics;

  __device__ Inputs(const StepNumbers& numbers, const ParameterEntry& entry)
      : gradient(numbers.gradient),
        gradient_stride(numbers.gradient_stride != 0 ? numbers.gradient_stride : entry.columns),
        exp_avg(static_cast<float>(numbers.exp_avg)),
        second_moment(static_cast<float>(numbers.second_moment)),
        statistics(static_cast<float>(numbers.statistics)) {}
};

// The results of a step for N neighbouring elements, and the values that it needs again later.
template <int N>
class Elements {
 public:
  __device__ Elements(const ElementRule& rule, const ParameterEntry& entry, const Inputs& inputs,
                      const Place& place)
      : rule_(rule),
        entry_(entry),
        inputs_(inputs),
        offset_(place.in_state),
        in_gradient_(place.offset(inputs.gradient_stride)) {}

  // With weight decay the gradient has the layout of the parameter.
  __device__ Lanes<N> gradient() const {
    return penalized_gradient<N>(entry_, inputs_.gradient, rule_.maximize, rule_.weight_decay,
                                 in_gradient_);
  }
  // m of the state as it is, or g without an average.
  __device__ Lanes<N> average() const {
    return entry_.exp_avg == nullptr ? gradient()
                                     : corrected(load_floats<N>(entry_.exp_avg, offset_));
  }
  // The same, after the state has moved on to g.
  __device__ Lanes<N> moved_average(const Lanes<N>& g) const {
    if (entry_.exp_avg == nullptr) return g;
    Lanes<N> average = load_floats<N>(entry_.exp_avg, offset_);
#pragma unroll
    for (int i = 0; i < N; ++i) average.lane[i] = lerp(average.lane[i], g.lane[i], 1 - rule_.beta1);
    store_floats<N>(entry_.exp_avg, offset_, average);
    return corrected(average);
  }
  // A second moment, zero without one; also after it has moved on to g.
  __device__ Lanes<N> moment(const float* state) const {
    return state == nullptr ? Lanes<N>{} : load_floats<N>(state, offset_);
  }
  __device__ Lanes<N> moved_moment(float* state, const Lanes<N>& g, float beta) const {
    Lanes<N> v = moment(state);
    if (state == nullptr) return v;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float square = g.lane[i] * g.lane[i];
      v.lane[i] = beta == 1 ? v.lane[i] + square : lerp(v.lane[i], square, 1 - beta);
    }
    store_floats<N>(state, offset_, v);
    return v;
  }
  // f = m / (sqrt(v / c) + eps), or m
  __device__ Lanes<N> grafted(Lanes<N> m, const Lanes<N>& v) const {
    if (entry_.second_moment == nullptr) return m;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float divisor = sqrtf(v.lane[i] / inputs_.second_moment) + rule_.grafting_eps;
      m.lane[i] = divisor > 0 ? m.lane[i] / divisor : 0;
    }
    return m;
  }
  // d = m (a / c + eps)^(-1/2)
  __device__ Lanes<N> by_diagonal(Lanes<N> m, const Lanes<N>& a) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float damped = a.lane[i] / inputs_.statistics + rule_.diagonal_eps;
      m.lane[i] = damped > 0 ? m.lane[i] * rsqrtf(damped) : 0;
    }
    return m;
  }

 private:
  __device__ Lanes<N> corrected(Lanes<N> average) const {
#pragma unroll
    for (int i = 0; i < N; ++i) average.lane[i] /= inputs_.exp_avg;
    return average;
  }

  const ElementRule& rule_;
  const ParameterEntry& entry_;
  const Inputs& inputs_;
  int64_t offset_, in_gradient_;
};

template <int N>
__device__ float squares(const Lanes<N>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(x.lane[i], x.lane[i], sum);
  return sum;
}

// The scales of the fp16 parts of a block, for its products.
__device__ void store_scales(const StepBuffers& buffers, const Tile& tile,
                             const StepNumbers& numbers) {
  if (!tile.in_fp16 || !tile.is_first || threadIdx.x != 0) return;
  buffers.gradient_scales[tile.matrix] = numbers.gradient_scale;
  if (tile.parameter.exp_avg != nullptr) {
    buffers.average_scales[tile.matrix] = numbers.average_scale;
  }
}

// g and m, to the block workspace.
template <int N>
__device__ void store_blocks(const StepBuffers& buffers, const Tile& tile,
                             const StepNumbers& numbers, int64_t place, const Lanes<N>& g,
                             const Lanes<N>& m) {
  const bool has_average = tile.parameter.exp_avg != nullptr;
  if (tile.in_fp16) {
    const float scale = numbers.gradient_scale;
    store_parts<N>(buffers.gradients_hi, buffers.gradients_lo, place, g, scale);
    if (!has_average) return;
    const float average_scale = numbers.average_scale;
    store_parts<N>(buffers.averages_hi, buffers.averages_lo, place, m, average_scale);
  } else {
    store_floats<N>(buffers.gradients, place, g);
    if (has_average) store_floats<N>(buffers.averages, place, m);
  }
}

template <int N>
__device__ void gather_tile(const ElementRule& rule, const StepBuffers& buffers, const Tile& tile,
                            int index) {
  const ParameterEntry& entry = tile.parameter;
  const StepNumbers& numbers = buffers.numbers[entry.index];
  const Inputs inputs(numbers, entry);
  const bool has_matrices = entry.direction == Direction::kMatrices;
  const bool takes_norms = rule.grafting && entry.direction != Direction::kGrafted;
  float grafted_squares = 0, direction_squares = 0;
  tile.for_each<N>([&](const Place& place) {
    const Elements<N> elements(rule, entry, inputs, place);
    const Lanes<N> g = elements.gradient();
    const Lanes<N> m = elements.moved_average(g);
    const Lanes<N> v = elements.moved_moment(entry.second_moment, g, rule.moment_beta);
    const Lanes<N> a = elements.moved_moment(entry.diagonal, g, rule.diagonal_beta);
    if (has_matrices) {
      store_blocks(buffers, tile, numbers, place.in_block, g, m);
    } else if (takes_norms) {
      direction_squares += squares(elements.by_diagonal(m, a));
    }
    if (takes_norms) grafted_squares += squares(elements.grafted(m, v));
  });
  if (!takes_norms) return;
  grafted_squares = sum_of_block(grafted_squares);
  if (!has_matrices) direction_squares = sum_of_block(direction_squares);
  if (threadIdx.x == 0) {
    buffers.grafted_squares[index] = grafted_squares;
    if (!has_matrices) buffers.direction_squares[index] = direction_squares;
  }
}

// Zeros, for the products of a step that is skipped.
__device__ void clear_tile(const StepBuffers& buffers, const Tile& tile) {
  if (tile.parameter.direction != Direction::kMatrices) return;
  const StepNumbers& numbers = buffers.numbers[tile.parameter.index];
  tile.for_each<1>([&](const Place& place) {
    store_blocks<1>(buffers, tile, numbers, place.in_block, {0}, {0});
  });
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    gather_kernel(const __grid_constant__ ElementRule rule,
                  const __grid_constant__ ParameterTable<bytes> parameters,
                  const __grid_constant__ StepBuffers buffers) {
  const int index = parameters.first_tile + static_cast<int>(blockIdx.x);
  const Tile tile(entry_of_tile(parameters, index), index, rule.block_size);
  store_scales(buffers, tile, buffers.numbers[tile.parameter.index]);
  if (!buffers.control->keep) {
    clear_tile(buffers, tile);
  } else if (tile.parameter.by_fours) {
    gather_tile<4>(rule, buffers, tile, index);
  } else {
    gather_tile<1>(rule, buffers, tile, index);
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    sum_directions_kernel(const __grid_constant__ ElementRule rule,
                          const __grid_constant__ ParameterTable<bytes> parameters,
                          const __grid_constant__ StepBuffers buffers) {
  const int index = parameters.first_tile + static_cast<int>(blockIdx.x);
  const Tile tile(entry_of_tile(parameters, index), index, rule.block_size);
  if (tile.parameter.direction != Direction::kMatrices) return;
  float sum = 0;
  const auto add = [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    tile.for_each<N>([&](const Place& place) {
      sum += squares(load_floats<N>(buffers.directions, place.in_block));
    });
  };
  if (tile.parameter.by_fours) {
    add(std::integral_constant<int, 4>());
  } else {
    add(std::integral_constant<int, 1>());
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) buffers.direction_squares[index] = sum;
}

template <int N>
__device__ void update_tile(const ElementRule& rule, const StepBuffers& buffers, const Tile& tile,
                            float lr, float scale) {
  const ParameterEntry& entry = tile.parameter;
  const StepNumbers numbers = buffers.numbers[entry.index];
  const Inputs inputs(numbers, entry);
  const UpdateFactors factors{lr, rule.decoupled_weight_decay, rule.momentum, rule.nesterov,
                              rule.from_zero};
  tile.for_each<N>([&](const Place& place) {
    const Elements<N> elements(rule, entry, inputs, place);
    Lanes<N> d;
    if (numbers.started == 0 || entry.direction == Direction::kGrafted) {
      d = elements.grafted(elements.average(), elements.moment(entry.second_moment));
    } else {
      d = entry.direction == Direction::kMatrices
              ? load_floats<N>(buffers.directions, place.in_block)
              : elements.by_diagonal(elements.average(), elements.moment(entry.diagonal));
#pragma unroll
      for (int i = 0; i < N; ++i) d.lane[i] *= scale;
    }
    move_parameter<N>(factors, entry.param, entry.param_type, place.offset(entry.param_stride),
                      entry.momentum_buffer, place.in_state, d);
  });
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    update_kernel(const __grid_constant__ ElementRule rule,
                  const __grid_constant__ ParameterTable<bytes> parameters,
                  const __grid_constant__ StepBuffers buffers, LearningRate lr) {
  if (!buffers.control->keep) return;
  const int index = parameters.first_tile + static_cast<int>(blockIdx.x);
  const Tile tile(entry_of_tile(parameters, index), index, rule.block_size);
  float scale = 1;  // |f| / |d|
  if (rule.grafting && tile.parameter.direction != Direction::kGrafted) {
    const float f = block_squares(buffers.grafted_squares, tile);
    const float d = block_squares(buffers.direction_squares, tile);
    scale = d > 0 ? sqrtf(f) / sqrtf(d) : 0;
  }
  const auto rate = static_cast<float>(learning_rate(lr));
  if (tile.parameter.by_fours) {
    update_tile<4>(rule, buffers, tile, rate, scale);
  } else {
    update_tile<1>(rule, buffers, tile, rate, scale);
  }
}

}  // namespace

cudaError_t gather_gradients(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                             const StepBuffers& buffers, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    gather_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(rule, table, buffers);
  });
}

cudaError_t sum_directions(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                           const StepBuffers& buffers, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    sum_directions_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(rule, table, buffers);
  });
}

cudaError_t update_parameters(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                              const StepBuffers& buffers, const LearningRate& lr,
                              cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    update_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(rule, table, buffers, lr);
  });
}

}  // namespace torchium::cuda_kernels
