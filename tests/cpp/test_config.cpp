#include <torchium/config.h>
#include <torchium/version.h>

#include <torch/headeronly/version.h>

#include <gtest/gtest.h>

namespace {

TEST(Config, LibraryAndHeadersAgree) { EXPECT_EQ(torchium::version(), TORCHIUM_VERSION); }

TEST(Config, ShowConfigNamesTheVersions) {
  const std::string text = torchium::show_config();
  EXPECT_NE(text.find("torchium: " TORCHIUM_VERSION "\n"), std::string::npos) << text;
  EXPECT_NE(text.find("torch (running): " TORCH_VERSION "\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("unknown"), std::string::npos) << text;
  EXPECT_EQ(text.find("CUDA kernels: not built") == std::string::npos, torchium::built_with_cuda());
}

}  // namespace
