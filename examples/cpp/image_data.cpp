#include "image_data.h"

#ifdef EXAMPLE_WITH_ZLIB
#include <zlib.h>
#endif

#include <torch/torch.h>

#include <array>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

#ifdef EXAMPLE_WITH_ZLIB
// gzread also reads files that are not compressed.
Bytes read_bytes(const fs::path& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), &gzclose);
  if (!file) {
    throw std::runtime_error("cannot open " + path.string());
  }
  Bytes content;
  std::array<uint8_t, 1 << 16> part{};
  int count = 0;
  while ((count = gzread(file.get(), part.data(), part.size())) > 0) {
    content.insert(content.end(), part.begin(), part.begin() + count);
  }
  if (count < 0) {
    throw std::runtime_error("cannot decompress " + path.string());
  }
  return content;
}
constexpr std::array kSuffixes{"", ".gz"};
#else
Bytes read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}
constexpr std::array kSuffixes{""};
#endif

fs::path find_file(const fs::path& folder, const std::string& name) {
  for (const auto* suffix : kSuffixes) {
    fs::path path = folder / (name + suffix);
    if (fs::is_regular_file(path)) {
      return path;
    }
  }
  throw std::runtime_error(
      "no file " + name + (kSuffixes.size() > 1 ? " (or " + name + ".gz)" : "") + " in " +
      folder.string() +
      ".\nInstall the Debian package dataset-fashion-mnist, or pass --data-dir with the folder of "
      "the four files.\nexport_digits.py writes scikit-learn's digits in this form.");
}

// The header is big-endian: two zero bytes, the type (8 = uint8), the number of dimensions, and
// each dimension as uint32.
torch::Tensor read_idx(const fs::path& path) {
  const Bytes content = read_bytes(path);
  const auto broken = [&] {
    return std::runtime_error(path.string() + " is not a whole IDX file of unsigned bytes");
  };
  if (content.size() < 4 || content[0] != 0 || content[1] != 0 || content[2] != 8) {
    throw broken();
  }
  std::vector<int64_t> shape(content[3]);
  const size_t header = 4 + 4 * shape.size();
  if (content.size() < header) {
    throw broken();
  }
  size_t count = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    const uint8_t* bytes = &content[4 + 4 * i];
    shape[i] = (int64_t{bytes[0]} << 24) | (bytes[1] << 16) | (bytes[2] << 8) | bytes[3];
    count *= static_cast<size_t>(shape[i]);
  }
  if (content.size() != header + count) {
    throw broken();
  }
  return torch::from_blob(const_cast<uint8_t*>(content.data()) + header, shape, torch::kByte)
      .clone();
}

}  // namespace

ImageData ImageData::to(torch::Device device) const {
  return {train_images.to(device), train_labels.to(device), test_images.to(device),
          test_labels.to(device)};
}

ImageData load_image_data(const fs::path& folder) {
  const auto read = [&](const std::string& name) { return read_idx(find_file(folder, name)); };
  const auto train_images = read("train-images-idx3-ubyte").to(torch::kFloat);
  const auto test_images = read("t10k-images-idx3-ubyte").to(torch::kFloat);
  const auto [deviation, mean] = torch::std_mean(train_images);
  return {((train_images - mean) / deviation).unsqueeze(1),
          read("train-labels-idx1-ubyte").to(torch::kLong),
          ((test_images - mean) / deviation).unsqueeze(1),
          read("t10k-labels-idx1-ubyte").to(torch::kLong)};
}
