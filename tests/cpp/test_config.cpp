#include "support/device_code.h"
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

// Whether a library with these architectures runs on a GPU of compute capability major.minor.
bool runs(const std::string& architectures, int major, int minor) {
  return torchium::detail::missing_device_code(architectures, "cuda:0 (a GPU)", major, minor)
      .empty();
}

TEST(DeviceCode, IsThatOfTheSameMajorVersion) {
  EXPECT_TRUE(runs("80-real", 8, 0));
  EXPECT_TRUE(runs("80-real", 8, 9));
  EXPECT_FALSE(runs("86-real", 8, 0));
  EXPECT_FALSE(runs("80-real", 9, 0));
  EXPECT_TRUE(runs("80-real 90a-real 120-real", 12, 1));
  EXPECT_FALSE(runs("80-real 90a-real 120-real", 10, 0));
}

TEST(DeviceCode, OfPtxIsThatOfAllLaterGpus) {
  EXPECT_TRUE(runs("80", 9, 0));
  EXPECT_TRUE(runs("80-virtual", 12, 0));
  EXPECT_FALSE(runs("90", 8, 0));
  EXPECT_FALSE(runs("120-virtual", 10, 3));
}

TEST(DeviceCode, OfOneArchitectureAloneIsNoOthers) {
  for (const char* architecture : {"90a", "90a-real", "90a-virtual"}) {
    EXPECT_TRUE(runs(architecture, 9, 0)) << architecture;
    EXPECT_FALSE(runs(architecture, 10, 0)) << architecture;
    EXPECT_FALSE(runs(architecture, 8, 0)) << architecture;
  }
  EXPECT_TRUE(runs("100f", 10, 3));
  EXPECT_FALSE(runs("100f", 12, 0));
  EXPECT_FALSE(runs("100a-real", 10, 3));
}

TEST(DeviceCode, ThatIsNotKnownIsTried) { EXPECT_TRUE(runs("native", 7, 5)); }

TEST(DeviceCode, ThatIsMissingIsNamedWithTheCommand) {
  const auto name_of = [](int major, int minor) {
    return torchium::detail::missing_device_code("120-real", "cuda:1 (NVIDIA X)", major, minor);
  };
  const std::string text = name_of(9, 0);
  for (const char* part : {"architectures 120-real, ", "cuda:1 (NVIDIA X)", "capability 9.0.",
                           "make install CMAKE_ARGS='-DTORCHIUM_ARCHS=\"9.0a\"'"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in " << text;
  }
  EXPECT_NE(name_of(8, 6).find("-DTORCHIUM_ARCHS=\"8.6\""), std::string::npos);
}

}  // namespace
