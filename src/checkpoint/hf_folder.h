#pragma once
// A model in Hugging Face's format: config.json beside model.safetensors, or beside several files with
// model.safetensors.index.json. Weights are fp32, bf16 or fp16.
//
// Nothing is converted on the way: names, shapes and the order of rotary pairs are Hugging Face's already.
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/model_weights.h"
#include "checkpoint/safetensors.h"

namespace strata {

class HfFolder final : public ModelWeights {
 public:
  // Reads the configuration and every file's header. Throws UsageError for a model that is no Llama, and
  // DataError naming the tensors that are missing, too many, or of another shape or type than the model's.
  // Tables of rotary frequencies, which old files hold, are passed over; so is the output matrix of a tied
  // model where it repeats the embedding.
  explicit HfFolder(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const LlamaConfig& model() const override { return model_; }
  const std::vector<UnitSpec>& units() const override { return units_; }
  DType dtype() const override { return dtype_; }
  std::vector<float> values(int unit, std::int64_t begin, std::int64_t count) const override;

 private:
  struct Tensor {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };

  void open_files();
  void check_tensors();
  void check_tied_output(const Tensor& output) const;
  // `count` numbers of a tensor from `first` on.
  void read(const Tensor& tensor, std::int64_t first, std::int64_t count, float* out) const;

  std::filesystem::path folder_;
  LlamaConfig model_;
  std::vector<UnitSpec> units_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Tensor> tensors_;
  DType dtype_ = DType::bf16;
};

// "model.safetensors.index.json": tensor name to file name. Throws DataError naming `source`.
std::map<std::string, std::string> parse_hf_index(const std::string& text, const std::string& source);

}  // namespace strata
