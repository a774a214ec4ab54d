// Checkpoints on threads as ranks: what is saved on one mesh is what every other mesh restores; damage is
// found and named; a failed save leaves what was there.
#include "checkpoint/checkpoint.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "backend/cpu/device.h"
#include "backend/cpu/ops.h"
#include "backend/random_key.h"
#include "base/error.h"
#include "checkpoint/checksum.h"
#include "checkpoint/folder.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "config/load.h"
#include "model/parameter_table.h"
#include "tests/support/catch.h"
#include "tests/support/thread_world.h"

using namespace strata;
using Catch::Matchers::Contains;
namespace fs = std::filesystem;

namespace {

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "strata-checkpoint-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// A vocabulary and widths that no mesh divides.
Config config(int F, int R, int S, const std::string& extra = "") {
  return read_config(R"({"model": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
      "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 31},
      "data": {"train": "t", "sequence_length": 8}, "run_dir": "r", "precision": "fp32",)" +
                         std::string(R"("schedule": {"steps": 40}, "mesh": {"federate": )") +
                         std::to_string(F) + R"(, "replicate": )" + std::to_string(R) + R"(, "shard": )" +
                         std::to_string(S) + "}" + extra + "}",
                     "test");
}
const std::string kDiloco = R"(, "federation": {"rule": "diloco", "dtype": "int8"})";

// One rank's engine and federation without a model.
struct Rank {
  Rank(World& w, const Config& c, const fs::path& folder)
      : world(w),
        device(make_cpu_device({CpuDeviceOptions::deferred, 3, true})),
        ops(make_cpu_ops(*device)),
        groups(make_groups(w, Mesh(c.mesh))),
        compute(device->create_stream("compute", Device::StreamKind::compute)),
        engine(llama_units(c.model), groups, *device, *ops, compute, EngineOptions::from(c)),
        federation(engine, groups, *device, *ops, compute, FederationOptions::from(c)),
        saver(w, groups, *device, compute, engine, federation, folder, c.checkpoint.keep) {
    engine.initialize(1);
    federation.initialize();
    device->synchronize();
  }

  // Numbers that tell kind, element of the unit and, where the groups differ, the group.
  static float number(const std::string& kind, int unit, std::int64_t element, int group) {
    return static_cast<float>(kind[0] % 16) + static_cast<float>(unit) * 0.125f +
           static_cast<float>(element) / 1024.0f + static_cast<float>(group) * 100.0f;
  }
  static bool differs(const std::string& kind, bool aggregated) {
    return kind == "m" || kind == "v" || kind == "error" || (kind == "parameter" && !aggregated);
  }
  void fill(bool aggregated) {
    for (const CheckpointTensor& t : checkpoint_tensors(engine, federation)) {
      const ElementRange range =
          shard_range(engine.shards()[static_cast<std::size_t>(t.unit)], groups.at.shard);
      const int group = differs(t.kind, aggregated) ? groups.at.federate : 0;
      for (std::int64_t i = 0; i < range.count; ++i)
        write_element(t.data.data, t.data.dtype, i, number(t.kind, t.unit, range.begin + i, group));
    }
    federation.set_host_state({groups.position + 1});
  }
  // The state as this rank holds it, padding included.
  std::vector<std::vector<float>> values() {
    device->synchronize();
    std::vector<std::vector<float>> all;
    for (const CheckpointTensor& t : checkpoint_tensors(engine, federation)) {
      all.emplace_back();
      for (std::int64_t i = 0; i < t.data.count; ++i)
        all.back().push_back(static_cast<float>(read_element(t.data.data, t.data.dtype, i)));
    }
    return all;
  }
  // What `values` is expected to be, when `groups_then` groups were saved.
  std::vector<std::vector<float>> expected(bool aggregated, int groups_then) {
    std::vector<std::vector<float>> all;
    const bool changed = groups_then != groups.mesh.federate();
    for (const CheckpointTensor& t : checkpoint_tensors(engine, federation)) {
      const ElementRange range =
          shard_range(engine.shards()[static_cast<std::size_t>(t.unit)], groups.at.shard);
      all.emplace_back(static_cast<std::size_t>(t.data.count), 0.0f);
      for (std::int64_t i = 0; i < range.count; ++i) {
        double sum = 0;
        for (int g = 0; g < groups_then; ++g)
          sum += number(t.kind, t.unit, range.begin + i, differs(t.kind, aggregated) ? g : 0);
        float value =
            number(t.kind, t.unit, range.begin + i, differs(t.kind, aggregated) ? groups.at.federate : 0);
        if (changed) value = t.kind == "error" ? 0.0f : static_cast<float>(sum / groups_then);
        all.back()[static_cast<std::size_t>(i)] = value;
      }
    }
    return all;
  }
  std::vector<std::string> restore_from(const Checkpoint& checkpoint) {
    return restore(checkpoint, groups, *device, compute, engine, federation);
  }

  World& world;
  std::unique_ptr<CpuDevice> device;
  std::unique_ptr<Ops> ops;
  MeshGroups groups;
  Stream& compute;
  ShardingEngine engine;
  FederationScheduler federation;
  CheckpointSaver saver;
};

CheckpointManifest state_of(const Config& c, std::int64_t step, bool aggregated) {
  CheckpointManifest m;
  m.step = step, m.sequences_consumed = 100 + step, m.tokens = 1000, m.data_sequences = 77;
  m.aggregated = aggregated;
  m.config = c;
  m.counters = {{"x", 5}};
  return m;
}

fs::path save(const Config& c, const fs::path& folder, std::int64_t step, bool aggregated) {
  fs::path path;
  run_ranks(Mesh(c.mesh).size(), [&](World& world) {
    Rank rank(world, c, folder);
    rank.fill(aggregated);
    const fs::path mine = rank.saver.save(state_of(c, step, aggregated));
    if (world.rank() == 0) path = mine;
  });
  return path;
}

struct Restored {
  bool equal = false;
  std::int64_t tokens = 0;
  std::vector<std::string> notes;
};
std::vector<Restored> restore_on(const Config& c, const fs::path& checkpoint, bool aggregated,
                                 int groups_then) {
  std::vector<Restored> out(static_cast<std::size_t>(Mesh(c.mesh).size()));
  run_ranks(Mesh(c.mesh).size(), [&](World& world) {
    Rank rank(world, c, checkpoint.parent_path());
    Restored& r = out[static_cast<std::size_t>(world.rank())];
    r.notes = rank.restore_from(Checkpoint(checkpoint));
    r.equal = rank.values() == rank.expected(aggregated, groups_then);
    r.tokens = rank.federation.host_state().at(0);
  });
  return out;
}

template <class E, class F>
std::string message_of(F&& action) {
  try {
    action();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

void flip_bit(const fs::path& file, std::int64_t at) {
  std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(at);
  const char c = static_cast<char>(f.get());
  f.seekp(at);
  f.put(static_cast<char>(c ^ 4));
}

std::string last_part(const fs::path& checkpoint) {
  std::string name;
  for (const auto& e : fs::directory_iterator(checkpoint))
    if (e.path().extension() == ".safetensors") name = std::max(name, e.path().filename().string());
  return name;
}

}  // namespace

TEST_CASE("a checkpoint of any mesh restores on any mesh with as many groups") {
  const std::vector<std::vector<int>> meshes = {{1, 1, 1}, {1, 2, 1}, {1, 1, 3}, {1, 2, 2}, {1, 1, 5}};
  for (const auto& from : meshes) {
    const Folder folder;
    const fs::path path = save(config(from[0], from[1], from[2]), folder.path(), 8, true);
    CHECK(path == folder.path() / "step_00000008");
    for (const auto& to : meshes)
      for (const Restored& r : restore_on(config(to[0], to[1], to[2]), path, true, 1)) {
        CHECK(r.equal);
        CHECK(r.notes.empty());
      }
  }
}

TEST_CASE("between aggregations every group finds its own model again, on any mesh") {
  const Folder folder;
  const fs::path path = save(config(2, 2, 2, kDiloco), folder.path(), 3, false);
  CHECK(Checkpoint(path).groups() == 2);
  for (const auto& c : {config(2, 2, 2, kDiloco), config(2, 1, 3, kDiloco), config(2, 1, 1, kDiloco)}) {
    std::int64_t tokens = 0;
    for (const Restored& r : restore_on(c, path, false, 2)) {
      CHECK(r.equal);
      tokens += r.tokens;
    }
    CHECK(tokens == 36);  // 1 + ... + 8: what the ranks have counted since the last aggregation
  }
}

TEST_CASE("another number of groups averages m and v, keeps the outer state and drops error feedback") {
  const Folder folder;
  const fs::path path = save(config(2, 1, 2, kDiloco), folder.path(), 8, true);
  CHECK(Checkpoint(path).groups() == 1);
  for (const int F : {1, 3}) {
    for (const Restored& r : restore_on(config(F, 1, 1, kDiloco), path, true, 2)) {
      CHECK(r.equal);
      REQUIRE(r.notes.size() == (F == 1 ? 1 : 2));  // one group exchanges nothing and keeps no error
      CHECK_THAT(r.notes.back(), Contains("mesh.federate was 2"));
    }
  }
  const fs::path between = save(config(2, 1, 1, kDiloco), folder.path(), 9, false);
  CHECK_THAT(message_of<DataError>([&] { restore_on(config(3, 1, 1, kDiloco), between, false, 2); }),
             Contains("holds 2 models, the run has 3"));
}

TEST_CASE("equal state is stored once and spread over those that hold it") {
  const Folder folder;
  const Config c = config(2, 2, 2, kDiloco);
  const CheckpointBytes plan = plan_checkpoint_bytes(c);
  const auto stored = [](const fs::path& path) {
    std::int64_t bytes = 0;
    const Checkpoint checkpoint(path);
    for (const auto& part : checkpoint.manifest().parts)
      for (const auto& piece : part.pieces) bytes += piece.count * 4;
    return bytes;
  };
  const fs::path at = save(c, folder.path(), 8, true), between = save(c, folder.path(), 9, false);
  CHECK(stored(at) == plan.aggregated);
  CHECK(stored(between) == plan.between);
  const Checkpoint checkpoint(at);
  CHECK(checkpoint.manifest().parts.size() == 8);
  std::uint64_t largest = 0;
  for (const auto& part : checkpoint.manifest().parts) largest = std::max(largest, part.bytes);
  CHECK(largest < checkpoint.bytes() / 4);
  checkpoint.verify();
}

TEST_CASE("whole parameters are read from the shards") {
  const Folder folder;
  const Config c = config(2, 1, 3, kDiloco);
  const Checkpoint checkpoint(save(c, folder.path(), 3, false));
  const auto units = llama_units(c.model);
  CHECK(checkpoint.step() == 3);
  CHECK(checkpoint.sequences_consumed() == 103);
  CHECK(checkpoint.model() == c.model);
  CHECK(checkpoint.parameters().size() == 2 * 9 + 3);
  for (std::size_t u = 0; u < units.size(); ++u)
    for (const ParameterSpec& p : units[u].parameters) {
      std::vector<float> one, mean;
      for (std::int64_t i = 0; i < p.count; ++i) {
        one.push_back(Rank::number("parameter", static_cast<int>(u), p.offset + i, 1));
        mean.push_back(static_cast<float>(
            (double{one.back()} + Rank::number("parameter", static_cast<int>(u), p.offset + i, 0)) / 2));
      }
      CHECK(checkpoint.parameter(p.name, 1) == one);
      CHECK(checkpoint.average_parameter(p.name) == mean);
    }
  CHECK_THAT(message_of<DataError>([&] { checkpoint.parameter("model.nothing"); }),
             Contains("model.nothing"));
}

TEST_CASE("damage is found and the file named") {
  const Folder folder;
  const fs::path path = save(config(1, 1, 2), folder.path(), 8, true);
  const fs::path part = path / last_part(path);
  const auto verify = [&] { return message_of<DataError>([&] { Checkpoint(path).verify(); }); };
  CHECK(verify() == "nothing was thrown");

  SECTION("a flipped bit") {
    const auto bytes = static_cast<std::int64_t>(fs::file_size(part));
    flip_bit(part, bytes - 100);
    CHECK_THAT(verify(), Contains(part.string()) && Contains("checksum") && Contains("tensor v."));
    flip_bit(part, bytes - 100);
    CHECK(verify() == "nothing was thrown");
  }
  SECTION("a shortened file") {
    fs::resize_file(part, fs::file_size(part) - 8);
    CHECK_THAT(verify(), Contains(part.string()) && Contains("bytes, the manifest says"));
  }
  SECTION("a missing file") {
    fs::remove(part);
    CHECK_THAT(verify(), Contains(part.string()) && Contains("cannot be opened"));
  }
  SECTION("a damaged header") {
    flip_bit(part, 30);
    CHECK_THAT(verify(), Contains(part.string()));
  }
  SECTION("a damaged manifest") {
    std::ifstream in(path / kManifestFile);
    std::string text((std::istreambuf_iterator<char>(in)), {});
    const auto at = text.find("\"step\":8");
    text[at + 7] = '9';
    std::ofstream(path / kManifestFile) << text;
    CHECK_THAT(verify(), Contains(kManifestFile) && Contains("is damaged"));
  }
  SECTION("no manifest") {
    fs::remove(path / kManifestFile);
    CHECK_THAT(verify(), Contains("is no checkpoint"));
  }
  SECTION("a piece is not listed") {
    Checkpoint whole(path);
    CheckpointManifest m = whole.manifest();
    m.parts[0].pieces.erase(m.parts[0].pieces.begin() + 1);
    std::ofstream(path / kManifestFile) << write_manifest(m);
    CHECK_THAT(verify(), Contains("do not cover"));
  }
}

TEST_CASE("the oldest checkpoints go, once the new one is there") {
  const Folder folder;
  const Config c = config(1, 1, 2, R"(, "checkpoint": {"keep": 2})");
  for (const int step : {2, 4, 6}) save(c, folder.path(), step, true);
  const auto left = list_checkpoints(folder.path());
  REQUIRE(left.size() == 2);
  CHECK(left[0].step == 4);
  CHECK(left[1].step == 6);
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 2);
}

TEST_CASE("a save that fails on one rank fails on all and leaves the last checkpoint alone") {
  const Folder folder;
  const Config c = config(1, 2, 2, R"(, "checkpoint": {"keep": 1})");
  const fs::path good = save(c, folder.path(), 2, true);
  std::vector<std::string> messages(4);
  run_ranks(4, [&](World& world) {
    Rank rank(world, c, folder.path());
    rank.fill(true);
    // A folder where this rank's part is to go: its file cannot be made.
    const fs::path in_the_way = folder.path() / "step_00000004.partial" / "part_00003.safetensors.partial";
    if (world.rank() == 3) {
      struct Spoiler final : World {
        World& w;
        fs::path path;
        int calls = 0;
        bool unnamed =
            false;  // an exchange whose report, should a rank never come, would not tell what it was
        Spoiler(World& world_in, fs::path p) : w(world_in), path(std::move(p)) {}
        int rank() const override { return w.rank(); }
        int size() const override { return w.size(); }
        std::unique_ptr<Communicator> group(const std::string& n, const std::vector<int>& r) override {
          return w.group(n, r);
        }
        void barrier(const CollectiveLabel& label) override { w.barrier(label); }
        std::vector<std::string> gather_strings(const CollectiveLabel& label,
                                                const std::string& mine) override {
          auto all = w.gather_strings(label, mine);
          if (label.unit != "checkpoint" || label.step != 4) unnamed = true;
          if (calls++ == 0) fs::create_directory(path);  // rank 0 has made the folder
          return all;
        }
      } spoiler(world, in_the_way);
      CheckpointSaver saver(spoiler, rank.groups, *rank.device, rank.compute, rank.engine, rank.federation,
                            folder.path(), 1);
      messages[3] = message_of<DataError>([&] { saver.save(state_of(c, 4, true)); });
      if (spoiler.unnamed) messages[3] += " in an exchange without a name";
    } else {
      messages[static_cast<std::size_t>(world.rank())] =
          message_of<DataError>([&] { rank.saver.save(state_of(c, 4, true)); });
    }
  });
  for (const std::string& m : messages)
    CHECK_THAT(m, Contains("rank 3: ") && Contains("part_00003") && Contains("cannot be created") &&
                      !Contains("without a name"));
  const auto left = list_checkpoints(folder.path());
  REQUIRE(left.size() == 1);
  CHECK(left[0].path == good);
  CHECK_FALSE(fs::exists(folder.path() / "step_00000004.partial"));
  Checkpoint(good).verify();
}

TEST_CASE("replicas that differ are not saved") {
  const Folder folder;
  const Config c = config(1, 2, 1);
  const std::string message = message_of<InternalError>([&] {
    run_ranks(2, [&](World& world) {
      Rank rank(world, c, folder.path());
      rank.fill(true);
      if (world.rank() == 1) static_cast<float*>(rank.engine.shards()[1].v.data)[3] += 1;
      rank.saver.save(state_of(c, 4, true));
    });
  });
  CHECK_THAT(message, Contains("v differs between the replicas at mesh positions 0 and 1"));
  CHECK(list_checkpoints(folder.path()).empty());
}

TEST_CASE("what may change between a checkpoint and its continuation") {
  const Config then = config(2, 1, 1, kDiloco);
  CheckpointManifest m = state_of(then, 8, true);
  CHECK(compatible_changes(m, then).empty());

  Config now = then;
  now.schedule.steps = 80, now.optimizer.lr = 1e-4, now.mesh.shard = 4, now.run_dir = "elsewhere";
  now.mesh.federate = 4;
  CHECK(compatible_changes(m, now) == std::vector<std::string>{"mesh.federate: 2 -> 4", "mesh.shard: 1 -> 4",
                                                               "optimizer.lr: 0.0003 -> 0.0001",
                                                               "run_dir: \"r\" -> \"elsewhere\"",
                                                               "schedule.steps: 40 -> 80"});
  m.aggregated = false;
  CHECK_THAT(message_of<UsageError>([&] { compatible_changes(m, now); }),
             Contains("mesh.federate was 2 and is 4") && Contains("mesh.federate=2") && Contains("export"));
  m.aggregated = true;

  const auto refused = [&](auto change) {
    Config changed = then;
    change(changed);
    return message_of<UsageError>([&] { compatible_changes(m, changed); });
  };
  CHECK_THAT(refused([](Config& c) { c.model.hidden_size = 48; }), Contains("model.hidden_size was 24"));
  CHECK_THAT(refused([](Config& c) { c.model.vocab_size = 32; }), Contains("model.vocab_size was 31"));
  CHECK_THAT(refused([](Config& c) { c.precision = "bf16"; }), Contains("precision was \"fp32\""));
  CHECK_THAT(refused([](Config& c) { c.seed = 1; }), Contains("seed was 42"));
  CHECK_THAT(refused([](Config& c) { c.data.sequence_length = 4; }), Contains("data.sequence_length was 8"));
  CHECK_THAT(refused([](Config& c) { c.optimizer.kind = "sgd"; }), Contains("optimizer.kind"));
}

TEST_CASE("only folders named as checkpoints are taken for checkpoints") {
  const Folder folder;
  for (const char* name : {"step_00000012", "step_00000004", "step_00000008.partial", "step_9",
                           "step_00000006.superseded", "other", "step_"})
    fs::create_directory(folder.path() / name);
  const auto found = list_checkpoints(folder.path());
  REQUIRE(found.size() == 2);
  CHECK(found[0].step == 4);
  CHECK(found[1].step == 12);
  CHECK(list_checkpoints(folder.path() / "absent").empty());
}

TEST_CASE("checksums are XXH3's") {
  CHECK(checksum(std::string()) == "2d06800538d394c2");  // the reference value of the empty input
  Checksum piecewise;
  const std::string text = "federate, replicate, shard";
  piecewise.add(std::as_bytes(std::span(text).first(5)));
  piecewise.add(std::as_bytes(std::span(text).subspan(5)));
  CHECK(piecewise.text() == checksum(text));
}
