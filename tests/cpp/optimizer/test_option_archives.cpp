// Options of all optimizers in archives. The lists of options give the tests their cases, so that a
// new option needs no new one.
#include "optim/adagrad/adagrad_options.h"
#include "optim/adahessian/adahessian_options.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_preconditioner_options.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/shampoo/shampoo_options.h"
#include "optimizer_testing.h"

#include <optional>
#include <tuple>

namespace torchium::testing {
namespace {

using optim::detail::for_each_option;

// Another value of the same type; archives do not check it.
void change(double& value) { value += 1.0; }
void change(int64_t& value) { ++value; }
void change(bool& value) { value = !value; }
void change(std::string& value) { value += "-other"; }
template <typename T>
void change(std::tuple<T, T>& value) {
  change(std::get<0>(value));
  change(std::get<1>(value));
}
template <typename T>
void change(std::optional<T>& value) {
  if (value) {
    value.reset();
  } else {
    change(value.emplace());
  }
}

template <typename Options>
Options changed_options() {
  Options options;
  for_each_option(options, [](const auto& option) { change(option.value); });
  return options;
}

// Name of each option, and whether it has the same value in both.
template <typename Options>
std::vector<std::pair<std::string, bool>> compared(const Options& a, const Options& b) {
  std::vector<std::pair<std::string, bool>> same;
  for_each_option(a, b, [&](const auto& of_a, const auto& of_b) {
    same.emplace_back(of_a.name, of_a.value == of_b.value);
  });
  return same;
}

template <typename Options>
void read(torch::serialize::OutputArchive& written, Options& options) {
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  options.serialize(archive);
}

template <typename Options>
class OptionArchives : public ::testing::Test {};

using AllOptions =
    ::testing::Types<optim::ShampooOptions, optim::AdagradOptions, optim::AdaHessianOptions,
                     optim::KFACOptions, optim::KFACPreconditionerOptions,
                     optim::NaturalGradientOptions>;
TYPED_TEST_SUITE(OptionArchives, AllOptions);

TYPED_TEST(OptionArchives, HoldEachOption) {
  const auto written = changed_options<TypeParam>();
  torch::serialize::OutputArchive archive;
  written.serialize(archive);
  TypeParam loaded;
  for (const auto& [name, same] : compared(loaded, written)) {
    EXPECT_FALSE(same) << name;
  }
  read(archive, loaded);
  for (const auto& [name, same] : compared(loaded, written)) {
    EXPECT_TRUE(same) << name;
  }
}

// As an archive of an earlier version, whatever the type of the option.
TYPED_TEST(OptionArchives, ThatLackAnOptionLeaveIt) {
  const auto written = changed_options<TypeParam>();
  for (const auto& [missing, _] : compared(written, written)) {
    SCOPED_TRACE(missing);
    torch::serialize::OutputArchive archive;
    for_each_option(written, [&, &missing = missing](const auto& option) {
      if (option.name != missing) {
        archive.write(option.name, c10::IValue(option.value));
      }
    });
    TypeParam loaded;
    read(archive, loaded);
    for (const auto& [name, same] : compared(loaded, written)) {
      EXPECT_EQ(same, name != missing) << name;
    }
    for (const auto& [name, same] : compared(loaded, TypeParam())) {
      EXPECT_EQ(same, name == missing) << name;
    }
  }
}

}  // namespace
}  // namespace torchium::testing
