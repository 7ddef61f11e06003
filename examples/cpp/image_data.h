// Fashion-MNIST, or other images in the same four IDX files.
#pragma once

#include <torch/types.h>

#include <filesystem>

struct ImageData {
  torch::Tensor train_images;  // float32 [N, 1, height, width], mean 0 and deviation 1
  torch::Tensor train_labels;  // int64 [N]
  torch::Tensor test_images;
  torch::Tensor test_labels;

  ImageData to(torch::Device device) const;
};

// The folder of the Debian package dataset-fashion-mnist.
inline const std::filesystem::path kSystemDirectory = "/usr/share/datasets/fashion-mnist";

// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte from `folder`, each with or without ".gz".
// Throws std::runtime_error with the remedy if a file is missing or broken.
ImageData load_image_data(const std::filesystem::path& folder);
