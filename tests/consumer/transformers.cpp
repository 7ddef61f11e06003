// Trains transformers on what a program in Python has written, and writes their parameters.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using Tensors = c10::Dict<std::string, torch::Tensor>;

constexpr int64_t kWidth = 8, kHeads = 2, kHidden = 16, kClasses = 3;

struct Encoding : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return head(encoder(x.transpose(0, 1)).mean(0)); }

  torch::nn::TransformerEncoder encoder =
      register_module("encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
                                     torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads)
                                         .dim_feedforward(kHidden)
                                         .dropout(0.0),
                                     2)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kClasses));
};

struct Translating : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto from = x.transpose(0, 1);
    return head(transformer(from, from.tanh()).mean(0));
  }

  torch::nn::Transformer transformer =
      register_module("transformer", torch::nn::Transformer(torch::nn::TransformerOptions()
                                                                .d_model(kWidth)
                                                                .nhead(kHeads)
                                                                .num_encoder_layers(1)
                                                                .num_decoder_layers(1)
                                                                .dim_feedforward(kHidden)
                                                                .dropout(0.0)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kClasses));
};

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors tensors;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    tensors.insert(item.key().toStringRef(), item.value().toTensor());
  }
  return tensors;
}

void write(const Tensors& tensors, const std::string& path) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

template <typename Optimizer, typename Model, typename Options>
void train(const std::string& folder, const std::string& name, const Options& options) {
  const Tensors given = read(folder + "/" + name + ".pt");
  Model model;
  model.to(torch::kDouble);
  for (auto& param : model.named_parameters()) {
    param.value().data().copy_(given.at(param.key()));
  }
  Optimizer optimizer(model, options);
  const auto inputs = given.at("inputs"), targets = given.at("targets");
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    optimizer.zero_grad();
    const auto outputs = model.forward(inputs[step]);
    if (options.fisher() == "ggn") {
      optimizer.update_curvature(outputs, "cross_entropy");
    }
    torch::nn::functional::cross_entropy(outputs, targets[step]).backward();
    optimizer.step();
  }
  Tensors result;
  for (const auto& param : model.named_parameters()) {
    result.insert(param.key(), param.value().detach());
  }
  write(result, folder + "/" + name + "_cpp.pt");
}

int main(int argc, char** argv) {
  const std::string folder = argv[argc - 1];
  const auto kfac = torchium::optim::KFACOptions(0.1).TCov(1).TInv(1);
  const auto natural = torchium::optim::NaturalGradientOptions(0.1);
  using torchium::optim::KFAC;
  using torchium::optim::NaturalGradient;
  train<KFAC, Translating>(folder, "kfac", kfac);
  train<KFAC, Translating>(folder, "kfac_reduce",
                           torchium::optim::KFACOptions(kfac).weight_sharing("reduce"));
  train<KFAC, Translating>(folder, "kfac_ggn", torchium::optim::KFACOptions(kfac).fisher("ggn"));
  train<NaturalGradient, Encoding>(folder, "natural_gradient", natural);
  train<NaturalGradient, Encoding>(folder, "natural_gradient_ggn",
                                   torchium::optim::NaturalGradientOptions(natural).fisher("ggn"));
}
