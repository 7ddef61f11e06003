// Finds normalisations with the statistics of a batch: they leave a sample without a gradient of
// its own.
#pragma once

namespace torchium::gradients::detail {

// Whether the backward pass that runs on this thread goes through batch_norm() in training, called
// as a function or by a module. Normalisation of one sample alone, such as instance_norm(), does
// not count. False outside of a backward pass.
bool backward_pass_mixes_samples();

}  // namespace torchium::gradients::detail
