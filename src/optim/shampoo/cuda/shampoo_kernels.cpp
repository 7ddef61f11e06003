#include "optim/shampoo/cuda/shampoo_kernels.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "optim/blocked/cuda/block_products.h"
#include "optim/blocked/cuda/block_workspace.h"
#include "optim/core/cuda/device_check.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#endif

#include <c10/util/accumulate.h>

#include <limits>

namespace torchium::optim::detail {

bool has_kernel_shape(ParameterRule rule, at::IntArrayRef dims) {
  const bool has_rows = !dims.empty() || rule != ParameterRule::kMatrices;  // a scalar has none
  return dims.size() <= 2 && has_rows &&
         c10::multiply_integers(dims) < std::numeric_limits<int>::max();
}

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::Direction;
using cuda_kernels::ParameterEntry;
using cuda_kernels::TileGrid;
using linalg::detail::MatmulPrecision;

// ParameterEntry::inner; 0 for a layout that the kernels do not know. They read a channels-last
// convolution as [out, in kh kw] alone, or [in kh kw] where out is one.
int64_t inner_dimension(const at::Tensor& param, const Blocking& blocking) {
  if (param.is_contiguous()) {
    return 1;
  }
  if (param.dim() != 4 || !param.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return 0;
  }
  const int64_t out = param.size(0);
  const int64_t rows = blocking.order() == 1 ? 1 : blocking.dims.front();
  return rows == out ? param.size(2) * param.size(3) : 0;
}

Direction direction(ParameterRule rule) {
  switch (rule) {
    case ParameterRule::kMatrices:
      return Direction::kMatrices;
    case ParameterRule::kDiagonal:
      return Direction::kDiagonal;
    default:
      return Direction::kGrafted;
  }
}

// State of the shape of the parameter; undefined where it has none.
std::array<const at::Tensor*, 4> elementwise_state(const ParameterState& state) {
  return {&state.exp_avg, &state.grafting_second_moment, &state.momentum_buffer, &state.diagonal};
}

// block_size as the kernels count it.
int kernel_block_size(const ShampooOptions& o) {
  return static_cast<int>(std::min<int64_t>(o.block_size(), 1 << 30));
}

// Blocks with matrices are a matrix, others one row.
int entry_rows(const ShampooGroup& group, size_t i) {
  const Blocking& blocking = group.blockings[i];
  const bool is_matrix = blocking.order() == 2 && group.rules[i] == ParameterRule::kMatrices;
  return is_matrix ? static_cast<int>(blocking.dims[0]) : 1;
}

// Instead of its block, of which the columns are known.
void set_updated_param(ParameterEntry& entry, const BlockUpdate& update) {
  const auto& [stage, param, rows] = update;
  entry.param = static_cast<char*>(param.mutable_data_ptr()) +
                rows.offset * static_cast<int64_t>(param.element_size());
  entry.param_type = element_type(param.scalar_type());
  entry.param_stride = rows.columns == entry.columns ? rows.stride : entry.columns;
  entry.by_fours &= aligned_to_four(param) && rows.offset % 4 == 0 && entry.param_stride % 4 == 0;
}

// Fills all but the places of blocks, `first_tile` and the gradient.
void fill_entry(cuda_kernels::ParameterEntry& entry, const ShampooOptions& o,
                const ShampooGroup& group, size_t i) {
  const at::Tensor& param = group.params[i];
  const Blocking& blocking = group.blockings[i];
  const ParameterState& state = group.states[i];
  entry.direction = direction(group.rules[i]);
  // The blocks of a diagonal, which grafting gives their norms, are those of the flat parameter.
  const int block_size = block_size_of(entry, kernel_block_size(o));
  entry.param = param.mutable_data_ptr();
  entry.exp_avg = floats(state.exp_avg);
  entry.second_moment = floats(state.grafting_second_moment);
  entry.momentum_buffer = floats(state.momentum_buffer);
  entry.diagonal = floats(state.diagonal);
  entry.rows = entry_rows(group, i);
  entry.columns = static_cast<int>(param.numel() / entry.rows);
  entry.param_stride = entry.columns;
  entry.inner = entry.direction == Direction::kGrafted
                    ? 1
                    : static_cast<int>(inner_dimension(param, blocking));
  entry.index = static_cast<int>(i);
  entry.param_type = element_type(param.scalar_type());
  const auto tensors = elementwise_state(state);
  entry.by_fours = entry.inner == 1 && entry.columns % 4 == 0 &&
                   (entry.columns <= block_size || block_size % 4 == 0) && aligned_to_four(param) &&
                   std::all_of(tensors.begin(), tensors.end(),
                               [](const at::Tensor* tensor) { return aligned_to_four(*tensor); });
  if (group.defers) {
    set_updated_param(entry, group.updates[i]);
  }
}

cuda_kernels::ElementRule element_rule(const ShampooRun& run, const ShampooGroup& group) {
  const ShampooOptions& o = run.options;
  return {.block_size = kernel_block_size(o),
          .maximize = o.maximize(),
          .weight_decay = static_cast<float>(l2_penalty(o)),
          .decoupled_weight_decay = static_cast<float>(run.decoupled_weight_decay),
          .beta1 = static_cast<float>(beta1(o)),
          .moment_beta = static_cast<float>(moment_beta(o)),
          .diagonal_beta = static_cast<float>(beta2(o)),
          .grafting_eps = static_cast<float>(o.grafting_eps()),
          .diagonal_eps = static_cast<float>(o.eps()),
          .momentum = static_cast<float>(o.momentum()),
          .nesterov = o.nesterov(),
          .grafting = o.grafting().has_value(),
          .from_zero = group.role == Role::kDirection && !group.defers};
}

// Keeps the tables of the kernels from step to step; memory is allocated for one step alone.
class ShampooKernels : public ShampooSubset {
 public:
  ShampooKernels(const ShampooOptions& o, const ShampooGroup& group,
                 const std::vector<size_t>& members, std::span<const MatrixBatch> batches,
                 DeviceCheck& check);

  void moments(const ShampooRun& run) override;
  void statistics(const ShampooRun& run) override;
  void precondition(const ShampooRun& run, size_t stage) override;
  void apply(const ShampooRun& run, size_t stage) override;
  std::vector<at::Tensor> results() const override;
  void set_results(const std::vector<at::Tensor>& results) override;
  void end() override;

 private:
  // The parameters whose updates are computed together.
  struct Stage {
    KernelTables<ParameterEntry> tables;
    std::vector<TablePlace> places;  // of parameters that have elements
    std::vector<BlockProducts::Piece> blocks;
  };
  void add(Stage& stage, ParameterEntry entry, const ShampooOptions& o, size_t i);
  std::vector<BlockProducts::Piece> blocks_of(size_t stage) const;
  BlockProducts products() const { return {batches_, workspace_, precision_, stream_}; }
  cuda_kernels::StepBuffers buffers() const;

  const ShampooGroup& group_;
  std::span<const MatrixBatch> batches_;
  DeviceCheck& check_;
  at::TensorOptions options_;  // of float32 buffers
  BlockWorkspace workspace_;
  std::vector<Stage> stages_;
  // Of one step.
  cudaStream_t stream_ = nullptr;
  MatmulPrecision precision_ = MatmulPrecision::kHighest;
  at::Tensor grafted_squares_, direction_squares_;  // [tiles]
};

ShampooKernels::ShampooKernels(const ShampooOptions& o, const ShampooGroup& group,
                               const std::vector<size_t>& members,
                               std::span<const MatrixBatch> batches, DeviceCheck& check)
    : group_(group),
      batches_(batches),
      check_(check),
      options_(group.params[0].options().dtype(at::kFloat).requires_grad(false)),
      workspace_(batches, o.block_size(), options_, beta1(o) > 0.0) {
  std::vector<ParameterEntry> entries(group.params.size());
  workspace_.place(entries);
  int tiles = 0;
  for (size_t stage = 0; stage < group.stage_count(); ++stage) {
    stages_.push_back({KernelTables<ParameterEntry>(tiles), {}, blocks_of(stage)});
    for (const size_t i : members) {
      if (group.updates[i].stage == stage) {
        add(stages_.back(), entries[i], o, i);
      }
    }
    tiles = stages_.back().tables.tiles();
  }
}

void ShampooKernels::add(Stage& stage, ParameterEntry entry, const ShampooOptions& o, size_t i) {
  check_.set_updated(i);
  if (beta1(o) > 0.0 && entry.in_fp16 != 0) {  // the average bounds the operands
    check_.add_scan(group_.states[i].exp_avg, i, cuda_kernels::ScanKind::kAverage,
                    std::numeric_limits<double>::infinity(), nullptr);
  }
  if (group_.params[i].numel() > 0) {
    fill_entry(entry, o, group_, i);
    if (entry.inner == 1 && group_.params[i].dim() == 2 && entry.rows == group_.params[i].size(0)) {
      check_.set_reads_rows(i);
    }
    const int block_size = block_size_of(entry, kernel_block_size(o));
    const int tiles = TileGrid(entry.rows, entry.columns, block_size).tiles;
    stage.places.push_back({i, stage.tables.add(entry, tiles), entry.by_fours});
  }
}

// Neighbours in a batch as one piece.
std::vector<BlockProducts::Piece> ShampooKernels::blocks_of(size_t stage) const {
  std::vector<BlockProducts::Piece> pieces;
  for (size_t b = 0; b < batches_.size(); ++b) {
    for (const auto& [param, shape, start] : batches_[b].entries) {
      if (group_.updates[param].stage != stage) {
        continue;
      }
      if (!pieces.empty() && pieces.back().batch == b &&
          pieces.back().start + pieces.back().count == start) {
        pieces.back().count += shape->count();
      } else {
        pieces.push_back({b, start, shape->count()});
      }
    }
  }
  return pieces;
}

cuda_kernels::StepBuffers ShampooKernels::buffers() const {
  cuda_kernels::StepBuffers buffers{};
  buffers.control = check_.control();
  buffers.numbers = check_.numbers();
  buffers.grafted_squares = floats(grafted_squares_);
  buffers.direction_squares = floats(direction_squares_);
  workspace_.fill(buffers);
  return buffers;
}

// One pass over the gradients, which also fills the blocks and sums the squares of f.
void ShampooKernels::moments(const ShampooRun& run) {
  const ShampooOptions& o = run.options;
  stream_ = c10::cuda::getCurrentCUDAStream();
  precision_ = linalg::detail::matmul_precision(o.matmul_precision());
  workspace_.set_aside(precision_);
  if (o.grafting().has_value()) {
    const int tiles = stages_.back().tables.tiles();
    grafted_squares_ = at::empty({tiles}, options_);
    direction_squares_ = at::empty({tiles}, options_);
  }
  for (Stage& stage : stages_) {
    for (const TablePlace& place : stage.places) {
      set_gradient(stage.tables[place.entry], check_.gradient_kind(place.param), place.by_fours);
    }
    for (const auto& table : stage.tables) {
      C10_CUDA_CHECK(gather_gradients(element_rule(run, group_), table, buffers(), stream_));
    }
    for (const TablePlace& place : stage.places) {
      for (const at::Tensor* tensor : elementwise_state(group_.states[place.param])) {
        note_change(*tensor);
      }
    }
  }
}

void ShampooKernels::statistics(const ShampooRun&) {
  products().update_statistics(check_.control());
  for (const MatrixBatch& batch : batches_) {
    for (const at::Tensor& statistics : batch.statistics) {
      note_change(statistics);
    }
  }
}

void ShampooKernels::precondition(const ShampooRun&, size_t stage) {
  if (stage == 0) {
    workspace_.set_aside_directions();
  }
  products().precondition(stages_[stage].blocks);
}

void ShampooKernels::apply(const ShampooRun& run, size_t stage) {
  const auto rule = element_rule(run, group_);
  const at::Tensor lr = readable_learning_rate(run.lr);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();  // finish() may have another
  for (const auto& table : stages_[stage].tables) {
    if (run.options.grafting().has_value()) {
      C10_CUDA_CHECK(sum_directions(rule, table, buffers(), stream));
    }
    C10_CUDA_CHECK(update_parameters(rule, table, buffers(), learning_rate(lr), stream));
  }
  for (const TablePlace& place : stages_[stage].places) {
    note_change(group_.params[place.param]);
  }
}

std::vector<at::Tensor> ShampooKernels::results() const {
  return {workspace_.directions(), grafted_squares_, direction_squares_};
}

void ShampooKernels::set_results(const std::vector<at::Tensor>& results) {
  workspace_.set_directions(results[0]);
  grafted_squares_ = results[1];
  direction_squares_ = results[2];
}

void ShampooKernels::end() {
  grafted_squares_ = direction_squares_ = at::Tensor();
  workspace_.free_all();
}

}  // namespace

bool has_shampoo_kernels(const ShampooGroup& group, size_t i) {
  const at::Tensor& param = group.params[i];
  const Blocking& blocking = group.blockings[i];
  const auto tensors = elementwise_state(group.states[i]);
  // The blocks of a diagonal are counted in the contiguous order.
  const bool in_order =
      param.is_contiguous() || blocking.order() == 1 || group.rules[i] != ParameterRule::kDiagonal;
  return param.is_cuda() && has_kernel_shape(group.rules[i], blocking.dims) && in_order &&
         state_dtype(param) == at::kFloat && inner_dimension(param, blocking) != 0 &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* tensor) {
           return !tensor->defined() || same_layout(*tensor, param);
         });
}

bool can_update_in_place(const ShampooGroup& group, size_t i) {
  const auto& [stage, param, rows] = group.updates[i];
  if (!param.defined() || param.scalar_type() == at::kDouble) {
    return false;
  }
  const int64_t elements = group.params[i].numel();
  return elements == 0 || rows.columns == elements ||
         rows.columns * entry_rows(group, i) == elements;
}

std::unique_ptr<ShampooSubset> make_shampoo_kernels(const ShampooOptions& o,
                                                    const ShampooGroup& group,
                                                    const std::vector<size_t>& members,
                                                    std::span<const MatrixBatch> batches,
                                                    StepPrologue& prologue) {
  return std::make_unique<ShampooKernels>(o, group, members, batches,
                                          static_cast<DeviceCheck&>(prologue));
}

#else

bool has_shampoo_kernels(const ShampooGroup&, size_t) { return false; }
bool can_update_in_place(const ShampooGroup&, size_t) { return false; }

std::unique_ptr<ShampooSubset> make_shampoo_kernels(const ShampooOptions&, const ShampooGroup&,
                                                    const std::vector<size_t>&,
                                                    std::span<const MatrixBatch>, StepPrologue&) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::optim::detail
