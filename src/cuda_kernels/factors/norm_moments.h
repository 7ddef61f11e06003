// Sums over the input x and the output gradient g of a norm, of which the Fisher matrices of its
// scale and shift are made (gradients/factors/fisher_blocks.h). x and g are read once, in their own
// types.
//
// A tensor has `samples` samples of `positions` positions of `channels` elements of the scale. A
// sample is cut into parts, and a part sums for each channel, with y = x - shift and w = g, or w =
// g^2 where each position counts as a sample,
//   w, w y, w y^2, and y, y^2.
// The shift is the median of three x of the part, so that no sum cancels if |mean| is much larger
// than the standard deviation. Where the statistics are those of a row of channels, the kernel
// knows them before it sums, y is the normalised input, and a part has the first three sums alone.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// Of a part: one float of each channel.
enum NormPlane : int { kW, kWy, kWyy, kRowPlanes, kY = kRowPlanes, kYy, kShift, kChannelPlanes };

struct NormInput {
  const void *x, *g;           // dense, in the same order
  ElementType x_type, g_type;  // not kDouble
  int64_t samples, positions;
  int channels;
  bool squares;  // w = g^2, else g
};

// At most kMostPartsOfSample without `squares`, because one thread of norm_blocks() adds those.
constexpr int64_t kMostPartsOfSample = 64;
struct NormParts {
  int64_t per_sample;
  int64_t positions;  // of each but the last of a sample
};

// Norms with statistics of channels. channels_last: [samples, positions, channels]; else [samples,
// channels, positions]. parts: [samples, per_sample, kChannelPlanes, channels].
cudaError_t plan_channel_moments(const NormInput& input, bool channels_last, NormParts& parts);
cudaError_t channel_moments(const NormInput& input, bool channels_last, const NormParts& parts,
                            float* sums, cudaStream_t stream);

// Norms over rows of channels, [samples, positions, channels], with up to kMostRowChannels. parts:
// [samples, per_sample, kRowPlanes, channels].
constexpr int kMostRowChannels = 8192;
struct RowStatistics {
  bool has_mean;  // layer norm; else RMS norm
  double eps;
};
cudaError_t plan_row_moments(const NormInput& input, NormParts& parts);
cudaError_t row_moments(const NormInput& input, const RowStatistics& statistics,
                        const NormParts& parts, float* sums, cudaStream_t stream);

enum class NormStatistics : uint8_t {
  kOfRows,    // known to the sums: x^ = y
  kOfBatch,   // of all positions of all samples
  kOfGroups,  // of the positions of a sample and of channels / groups channels
  kGiven,     // mean and variance of each channel
};

struct NormBlocks {
  NormInput input;
  NormParts parts;
  const float* sums;
  NormStatistics statistics;
  double eps;
  const void *mean, *variance;  // kGiven: [channels]
  ElementType mean_type, variance_type;
  int groups;         // kOfGroups
  double* of_groups;  // kOfGroups: workspace [samples, groups, 2]
  float* blocks;      // [channels, order, order]
  int order;          // 2, or 1: of the scale alone
  bool accumulate;    // adds to the blocks
};

// blocks <- sum of (u, v) (u, v)^T with u = sum of g x^ and v = sum of g over a sample, or over a
// position with `squares`. In float64, from the sums of the parts, in a fixed order.
cudaError_t norm_blocks(const NormBlocks& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
