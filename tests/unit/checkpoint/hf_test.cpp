// Hugging Face folders in and out: what transformers wrote is read on every sharding and gives transformers'
// logits; what is written is what was read; folders that do not fit their configuration are refused by name.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "backend/cpu/device.h"
#include "backend/cpu/ops.h"
#include "base/error.h"
#include "checkpoint/hf_export.h"
#include "checkpoint/hf_folder.h"
#include "checkpoint/save.h"
#include "config/load.h"
#include "federation/scheduler.h"
#include "model/llama.h"
#include "model/parameter_table.h"
#include "tests/support/catch.h"
#include "tests/support/thread_world.h"

using namespace strata;
using Catch::Matchers::Contains;
namespace fs = std::filesystem;

namespace {

const fs::path kGolden = fs::path(STRATA_SOURCE_DIR) / "tests/golden";
const char* const kFolders[] = {"hf_single_fp32", "hf_sharded_bf16"};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "strata-hf-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
}

// Tensors of a folder as they lie in its files.
std::map<std::string, std::vector<std::byte>> tensors_of(const fs::path& folder) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    for (const SafetensorsEntry& tensor : file.entries()) {
      const auto bytes = file.bytes(tensor);
      CHECK(all.emplace(tensor.name, std::vector(bytes.begin(), bytes.end())).second);
    }
  }
  return all;
}

struct Logits {
  std::vector<float> values;
  double loss = 0;  // mean over targets
};

// The folder's model on a world of `ranks` shards, forward, on the golden batch.
Logits logits_of(const HfFolder& folder, const SafetensorsFile& golden, int ranks) {
  Logits out;
  run_ranks(ranks, [&](World& world) {
    const auto device = make_cpu_device({CpuDeviceOptions::deferred, 5, true});
    const auto ops = make_cpu_ops(*device);
    const MeshGroups groups = make_groups(world, Mesh(1, 1, ranks));
    Stream& compute = device->create_stream("compute", Device::StreamKind::compute);
    const auto shape = golden.at("input.tokens").shape;
    LlamaSetup setup;
    setup.config = folder.model(), setup.batch = shape[0], setup.sequence = shape[1];
    Llama model(setup, *device, *ops);
    EngineOptions options;
    options.moments = false;
    ShardingEngine engine(model.units(), groups, *device, *ops, compute, options);
    load_weights(folder, engine, *device, compute);

    const auto tokens = golden.values<std::int32_t>("input.tokens");
    auto targets = golden.values<std::int32_t>("input.targets");
    const Buffer on_device = device->allocate(2 * tokens.size() * sizeof(std::int32_t), Purpose::data);
    auto* first = on_device.as<std::int32_t>();
    device->copy_to_device(compute, first, tokens.data(), tokens.size() * sizeof(std::int32_t));
    device->copy_to_device(compute, first + tokens.size(), targets.data(),
                           targets.size() * sizeof(std::int32_t));
    const Buffer loss = device->allocate(sizeof(double), Purpose::data);
    device->fill_zero(compute, loss.data(), loss.bytes());
    engine.begin_evaluation(0);
    model.evaluate(compute, engine, first, first + tokens.size(), loss.as<double>());
    engine.end_evaluation();
    const std::int64_t count = setup.tokens() * setup.config.vocab_size;
    const Buffer logits = device->allocate(static_cast<std::size_t>(count) * sizeof(float), Purpose::data);
    engine.begin_evaluation(1);
    model.logits(compute, engine, first,
                 matrix(logits.data(), DType::f32, setup.tokens(), setup.config.vocab_size));
    engine.end_evaluation();
    std::vector<float> values(static_cast<std::size_t>(count));
    double sum = 0;
    device->copy_to_host(compute, values.data(), logits.data(), logits.bytes());
    device->copy_to_host(compute, &sum, loss.data(), sizeof sum);
    device->synchronize();
    if (world.rank() != 0) return;
    const auto counted = std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
    out.values = values, out.loss = sum / static_cast<double>(counted);
  });
  return out;
}

// ||found - expected|| / ||expected||
double relative(const std::vector<float>& found, const std::vector<float>& expected) {
  REQUIRE(found.size() == expected.size());
  double squares = 0, scale = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    squares += std::pow(static_cast<double>(found[i]) - expected[i], 2);
    scale += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(squares / scale);
}

// Copies a folder's tensors into one file; `change` may alter, drop or add specs and their bytes.
using Tensors = std::vector<std::pair<SafetensorsSpec, std::vector<std::byte>>>;
void rewrite(const fs::path& from, const fs::path& to, const std::function<void(Tensors&)>& change) {
  fs::create_directories(to);
  fs::copy_file(from / "config.json", to / "config.json", fs::copy_options::overwrite_existing);
  Tensors tensors;
  for (const auto& entry : fs::directory_iterator(from)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    for (const SafetensorsEntry& t : file.entries()) {
      const auto bytes = file.bytes(t);
      tensors.push_back({{t.name, t.dtype, t.shape}, std::vector(bytes.begin(), bytes.end())});
    }
  }
  change(tensors);
  std::vector<SafetensorsSpec> specs;
  for (const auto& [spec, bytes] : tensors) specs.push_back(spec);
  SafetensorsWriter writer(to / "model.safetensors", specs);
  for (const auto& [spec, bytes] : tensors) writer.append(bytes);
  writer.finish();
}

std::string refusal(const fs::path& folder) {
  try {
    const HfFolder opened(folder);
  } catch (const Error& e) {
    CHECK_THAT(e.what(), Contains(" -> "));
    return e.what();
  }
  return "(nothing was refused)";
}

}  // namespace

TEST_CASE("a Hugging Face folder gives transformers' logits and loss, however it is sharded") {
  for (const char* name : kFolders) {
    const HfFolder folder(kGolden / name);
    const SafetensorsFile golden(kGolden / (std::string(name) + ".expected.safetensors"));
    for (const int ranks : {1, 2, 5}) {
      CAPTURE(name, ranks);
      const Logits found = logits_of(folder, golden, ranks);
      CHECK(relative(found.values, golden.values<float>("logits")) < 1e-5);
      CHECK(found.loss == Approx(golden.values<double>("loss")[0]).epsilon(1e-5));
    }
  }
}

TEST_CASE("what is exported is what was imported, byte for byte") {
  const TemporaryFolder out;
  for (const char* name : kFolders) {
    for (const std::uint64_t largest :
         {std::uint64_t{5'000'000'000}, std::uint64_t{20'000}, std::uint64_t{1}}) {
      CAPTURE(name, largest);
      const HfFolder folder(kGolden / name);
      HfExportOptions options;
      options.dtype = folder.dtype();
      options.largest_file = largest;
      const fs::path copy = out / (name + std::to_string(largest));
      export_hf(folder, copy, options);
      CHECK(tensors_of(copy) == tensors_of(kGolden / name));
      CHECK(HfFolder(copy).model() == folder.model());
      CHECK(fs::exists(copy / "model.safetensors.index.json") == (largest < 1'000'000));
      CHECK_FALSE(fs::exists(copy.string() + ".partial"));
      const auto files = std::count_if(fs::directory_iterator(copy), fs::directory_iterator(),
                                       [](const auto& e) { return e.path().extension() == ".safetensors"; });
      const auto parameters = static_cast<std::ptrdiff_t>(tensors_of(copy).size());
      if (largest == 1) CHECK(files == parameters);
      if (largest == 20'000) CHECK((files > 1 && files < parameters));
    }
  }
}

TEST_CASE("bf16 weights widen exactly and fp32 weights round to nearest") {
  const TemporaryFolder out;
  HfExportOptions options;
  export_hf(HfFolder(kGolden / "hf_sharded_bf16"), out / "wide", options);
  options.dtype = DType::bf16;
  export_hf(HfFolder(out / "wide"), out / "narrow", options);
  CHECK(tensors_of(out / "narrow") == tensors_of(kGolden / "hf_sharded_bf16"));

  const HfFolder fp32(kGolden / "hf_single_fp32");
  export_hf(fp32, out / "rounded", options);
  const HfFolder rounded(out / "rounded");
  CHECK(rounded.dtype() == DType::bf16);
  const auto& unit = fp32.units().at(1);
  const auto before = fp32.values(1, 0, unit.elements), after = rounded.values(1, 0, unit.elements);
  bool changed = false;
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(after[i] == to_float(to_bf16(before[i])));
    changed |= after[i] != before[i];
  }
  CHECK(changed);
}

TEST_CASE("half precision weights are read exactly") {
  const TemporaryFolder out;
  const HfFolder whole(kGolden / "hf_single_fp32");
  fs::copy_file(kGolden / "hf_single_fp32/config.json", out / "config.json");
  // A file as numpy and torch write it: every 16-bit pattern of a finite number in turn.
  std::string header = "{", data;
  unsigned bits = 0;
  for (const UnitSpec& unit : whole.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      const std::size_t begin = data.size();
      for (std::int64_t i = 0; i < p.count; ++i, bits = (bits + 1) % 0x7c00) {
        const auto pattern = static_cast<std::uint16_t>(i % 2 == 0 ? bits : bits | 0x8000);
        data.append(reinterpret_cast<const char*>(&pattern), sizeof pattern);
      }
      std::string shape = std::to_string(p.shape[0]);
      if (p.shape.size() == 2) shape += "," + std::to_string(p.shape[1]);
      header += (header.size() > 1 ? ",\"" : "\"") + p.name + R"(":{"dtype":"F16","shape":[)" + shape +
                R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
    }
  }
  header += "}";
  const std::uint64_t length = header.size();
  std::ofstream file(out / "model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header << data;
  file.close();

  const HfFolder half(out.path());
  CHECK(half.dtype() == DType::f32);
  bits = 0;
  for (std::size_t u = 0; u < half.units().size(); ++u) {
    for (const ParameterSpec& p : half.units()[u].parameters) {
      const auto values = half.values(static_cast<int>(u), p.offset, p.count);
      for (std::size_t i = 0; i < values.size(); ++i, bits = (bits + 1) % 0x7c00) {
        const unsigned exponent = bits >> 10, fraction = bits & 1023;
        const double magnitude = exponent == 0 ? std::ldexp(fraction, -24)
                                               : std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
        if (values[i] != (i % 2 == 0 ? magnitude : -magnitude)) FAIL(p.name << " element " << i);
      }
    }
  }
}

TEST_CASE("tensors that do not fit the configuration are refused by name") {
  const TemporaryFolder out;
  const fs::path single = kGolden / "hf_single_fp32", tied = kGolden / "hf_sharded_bf16";
  const fs::path broken = out / "broken";
  const auto with = [&](const fs::path& from, const std::function<void(Tensors&)>& change) {
    rewrite(from, broken, change);
    return refusal(broken);
  };
  const auto find = [](Tensors& all, const std::string& name) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& t) { return t.first.name == name; });
    REQUIRE(found != all.end());
    return found;
  };
  const std::string query = "model.layers.1.self_attn.q_proj.weight";
  CHECK(with(single, [](Tensors&) {}) == "(nothing was refused)");
  CHECK_THAT(with(single, [&](Tensors& t) { t.erase(find(t, query)); }),
             Contains("1 tensor(s)") && Contains(query));
  CHECK_THAT(
      with(single,
           [&](Tensors& t) {
             t.push_back({{"model.layers.2.mlp.up_proj.weight", DType::f32, {1}}, std::vector<std::byte>(4)});
           }),
      Contains("model.layers.2.mlp.up_proj.weight") && Contains("no part"));
  CHECK_THAT(
      with(single,
           [&](Tensors& t) { std::swap(find(t, query)->first.shape[0], find(t, query)->first.shape[1]); }),
      Contains(query) && Contains("[32, 128]") && Contains("[128, 32]"));
  CHECK_THAT(with(single, [&](Tensors& t) { find(t, query)->first.dtype = DType::i32; }),
             Contains(query) && Contains("int32"));
  // Old files hold rotary frequencies.
  CHECK(with(single, [&](Tensors& t) {
          t.push_back({{"model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {16}},
                       std::vector<std::byte>(64)});
        }) == "(nothing was refused)");
  // A tied model's output matrix may be there if it is the embedding.
  const auto add_output = [&](Tensors& t) {
    t.push_back(*find(t, "model.embed_tokens.weight"));
    t.back().first.name = "lm_head.weight";
  };
  CHECK(with(tied, add_output) == "(nothing was refused)");
  CHECK_THAT(with(tied,
                  [&](Tensors& t) {
                    add_output(t);
                    t.back().second[0] ^= std::byte{1};
                  }),
             Contains("lm_head.weight differs") && Contains("tie_word_embeddings"));
}

TEST_CASE("folders with a broken index, a file too few or another format are refused") {
  const TemporaryFolder out;
  const fs::path copy = out / "copy", index = copy / "model.safetensors.index.json";
  const auto fresh = [&] {
    fs::remove_all(copy);
    fs::copy(kGolden / "hf_sharded_bf16", copy);
  };
  const auto with_index = [&](const std::string& from, const std::string& to) {
    fresh();
    std::string text = text_of(index);
    replace(text, from, to);
    std::ofstream(index) << text;
    return refusal(copy);
  };
  fresh();
  CHECK(refusal(copy) == "(nothing was refused)");
  CHECK_THAT(with_index("\"model.norm.weight\"", "\"model.nrom.weight\""), Contains("model.norm.weight"));
  CHECK_THAT(with_index("model-00001-of", "../model-00001-of"), Contains("no file name"));
  CHECK_THAT(with_index("model-00001-of-00002", "model-00009-of-00002"), Contains("model-00009-of-00002"));
  CHECK_THAT(with_index("weight_map", "weight_mop"), Contains("weight_map"));
  fresh();
  fs::resize_file(copy / "model-00002-of-00002.safetensors", 100);
  CHECK_THAT(refusal(copy), Contains("model-00002-of-00002.safetensors"));
  fresh();
  fs::remove(index);
  CHECK_THAT(refusal(copy), Contains("model.safetensors.index.json") && Contains("safetensors format"));
  fs::remove(copy / "config.json");
  CHECK_THAT(refusal(copy), Contains("config.json"));
}

TEST_CASE("an export refuses what it would overwrite, and copies the tokenizer") {
  const TemporaryFolder out;
  const HfFolder folder(kGolden / "hf_single_fp32");
  fs::create_directories(out / "tokenizer");
  std::ofstream(out / "tokenizer/tokenizer.json") << "{}";
  std::ofstream(out / "tokenizer/notes.txt") << "not the tokenizer's";
  std::ofstream(out / "chat_template.jinja") << "{{ messages }}";
  HfExportOptions options;
  options.tokenizer = {out / "tokenizer", out / "chat_template.jinja"};
  fs::create_directories(out / "model");  // empty: may be filled
  export_hf(folder, (out / "model").string() + "/", options);
  CHECK(text_of(out / "model/tokenizer.json") == "{}");
  CHECK(fs::exists(out / "model/chat_template.jinja"));
  CHECK_FALSE(fs::exists(out / "model/notes.txt"));
  CHECK_THROWS_WITH(export_hf(folder, out / "model", options), Contains("not an empty folder"));
  options.tokenizer = {out / "nothing"};
  CHECK_THROWS_WITH(export_hf(folder, out / "other", options), Contains("nothing"));
  options.tokenizer = {out / "model/config.json"};
  CHECK_THROWS_WITH(export_hf(folder, out / "other", options), Contains("config.json"));
  CHECK_FALSE(fs::exists(out / "other"));
}

TEST_CASE("config.json says everything about the model, RoPE scaling included") {
  const TemporaryFolder out;
  for (const char* preset : {"llama3.1-8b", "llama3.2-1b", "llama-10m"}) {
    CAPTURE(preset);
    const LlamaConfig model = read_config(std::string(R"({"model": {"preset": ")") + preset +
                                              R"("}, "data": {"train": "t"}, "run_dir": "r"})",
                                          "test")
                                  .model;
    std::ofstream(out / "config.json") << hf_config(model, DType::bf16);
    CHECK(load_model_config((out / "config.json").string()) == model);
  }
  // The keys transformers itself writes, apart from its own bookkeeping and the place of the rotary settings.
  const auto written =
      nlohmann::json::parse(hf_config(HfFolder(kGolden / "hf_single_fp32").model(), DType::f32));
  auto theirs = nlohmann::json::parse(text_of(kGolden / "hf_single_fp32/config.json"));
  CHECK(written["rope_theta"] == theirs["rope_parameters"]["rope_theta"]);
  theirs["rope_parameters"].erase("rope_theta");
  CHECK(written["rope_scaling"] == theirs["rope_parameters"]);
  for (const char* key : {"transformers_version", "rope_parameters", "dtype", "use_cache", "pad_token_id",
                          "bos_token_id", "eos_token_id"})
    theirs.erase(key);
  for (const auto& [key, value] : theirs.items()) {
    CAPTURE(key);
    CHECK(written.at(key) == value);
  }
}

TEST_CASE("a checkpoint between aggregations asks which of its models is meant") {
  const TemporaryFolder out;
  const Config config = read_config(
      R"({"model": {"path": ")" + (kGolden / "hf_single_fp32/config.json").string() +
          R"("}, "data": {"train": "t", "sequence_length": 8}, "run_dir": "r", "precision": "fp32",
             "mesh": {"federate": 2, "shard": 2}})",
      "test");
  fs::path path;
  run_ranks(4, [&](World& world) {
    const auto device = make_cpu_device();
    const auto ops = make_cpu_ops(*device);
    const MeshGroups groups = make_groups(world, Mesh(config.mesh));
    Stream& compute = device->create_stream("compute", Device::StreamKind::compute);
    ShardingEngine engine(llama_units(config.model), groups, *device, *ops, compute,
                          EngineOptions::from(config));
    FederationScheduler federation(engine, groups, *device, *ops, compute, FederationOptions::from(config));
    engine.initialize(static_cast<std::uint64_t>(groups.at.federate));  // the seed makes two models
    federation.initialize();
    device->synchronize();
    CheckpointManifest state;
    state.step = 3, state.config = config;
    CheckpointSaver saver(world, groups, *device, compute, engine, federation, out.path(), 1);
    const fs::path saved = saver.save(state);
    if (world.rank() == 0) path = saved;
  });
  const Checkpoint checkpoint(path);
  REQUIRE(checkpoint.groups() == 2);
  CHECK_THROWS_WITH(CheckpointWeights(checkpoint, {}), Contains("--group 0 ... 1") && Contains("--average"));
  CHECK_THROWS_WITH(CheckpointWeights(checkpoint, {2, false}), Contains("groups 0 to 1"));
  CHECK_THROWS_WITH(CheckpointWeights(checkpoint, {0, true}), Contains("choose one"));
  const CheckpointWeights first(checkpoint, {0, false}), second(checkpoint, {1, false}),
      mean(checkpoint, {{}, true});
  bool differ = false;
  for (std::size_t u = 0; u < checkpoint.units().size(); ++u) {
    const int unit = static_cast<int>(u);
    const std::int64_t begin = 5, count = checkpoint.units()[u].elements - 7;
    const auto a = first.values(unit, begin, count), b = second.values(unit, begin, count),
               m = mean.values(unit, begin, count);
    for (std::size_t i = 0; i < a.size(); ++i) {
      differ |= a[i] != b[i];
      if (m[i] != static_cast<float>((static_cast<double>(a[i]) + b[i]) / 2))
        FAIL("unit " << u << " element " << i);
    }
    for (const ParameterSpec& p : checkpoint.units()[u].parameters)
      CHECK(second.values(unit, p.offset, p.count) == checkpoint.parameter(p.name, 1));
  }
  CHECK(differ);
  HfExportOptions options;
  export_hf(second, out / "hf", options);
  const HfFolder exported(out / "hf");
  CHECK(exported.values(1, 0, 100) == second.values(1, 0, 100));
  CHECK(exported.values(1, 0, 100) != first.values(1, 0, 100));
}
