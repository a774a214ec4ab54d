#include "train/metrics.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "checkpoint/folder.h"

namespace strata {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinity: a perplexity that overflows is written as null.
Json number(double x) {
  return std::isfinite(x) ? Json(x) : Json(nullptr);
}

std::vector<std::string> lines_up_to(const std::string& path, std::int64_t last_step) {
  std::vector<std::string> kept;
  std::ifstream in(path);
  for (std::string text; std::getline(in, text) && !in.eof();) {
    const auto json = nlohmann::json::parse(text, nullptr, false);
    if (json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
        json["step"].get<std::int64_t>() <= last_step) {
      kept.push_back(text);
    }
  }
  return kept;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::string& path, std::int64_t last_step) : path_(path) {
  if (last_step > 0) {
    const std::string part = path + ".part";
    std::ofstream out(part, std::ios::trunc);
    for (const std::string& text : lines_up_to(path, last_step)) out << text << '\n';
    out.close();
    if (!out)
      throw DataError("cannot write " + part + " -> check the run folder's permissions and free space");
    std::filesystem::rename(part, path);
  }
  file_.open(path, last_step > 0 ? std::ios::app : std::ios::trunc);
  if (!file_) throw DataError("cannot open " + path + " for writing -> check the run folder's permissions");
}

void MetricsWriter::line(const std::string& text) {
  if (path_.empty()) return;
  file_ << text << '\n' << std::flush;
  if (!file_) throw DataError("cannot write to " + path_ + " -> is the disk full?");
}

void MetricsWriter::sync() {
  if (!path_.empty()) sync_file(path_);
}

void MetricsWriter::write(const TrainRecord& r) {
  Json j;
  j["step"] = r.step;
  j["split"] = "train";
  j["loss"] = number(r.loss);
  j["perplexity"] = number(std::exp(r.loss));
  j["perplexity_rank_mean"] = number(r.perplexity_rank_mean);
  j["lr"] = r.lr;
  j["grad_norm"] = number(r.grad_norm);
  j["grad_norm_max"] = number(r.grad_norm_max);
  j["tokens"] = r.tokens;
  j["tokens_per_second"] = number(r.tokens_per_second);
  j["mfu"] = r.mfu ? number(*r.mfu) : Json(nullptr);
  j["time"] = {
      {"data", r.time.data},           {"forward", r.time.forward},         {"backward", r.time.backward},
      {"optimizer", r.time.optimizer}, {"aggregation", r.time.aggregation}, {"total", r.time.total}};
  j["aggregation_busy"] = r.aggregation_busy;
  j["bytes"] = {
      {"shard", {{"all_gather", r.bytes.shard_all_gather}, {"reduce_scatter", r.bytes.shard_reduce_scatter}}},
      {"replicate",
       {{"all_reduce", r.bytes.replicate_all_reduce}, {"broadcast", r.bytes.replicate_broadcast}}},
      {"federate", {{"all_reduce", r.bytes.federate_all_reduce}}}};
  j["aggregated"] = r.aggregated;
  j["memory"] = {{"peak_bytes", r.memory_peak_bytes}};
  line(j.dump());
}

void MetricsWriter::write(const ValidationRecord& r) {
  Json j;
  j["step"] = r.step;
  j["split"] = "validation";
  j["loss"] = number(r.loss);
  j["perplexity"] = number(std::exp(r.loss));
  j["loss_spread"] = r.loss_spread ? number(*r.loss_spread) : Json(nullptr);
  j["tokens"] = r.tokens;
  j["seconds"] = r.seconds;
  line(j.dump());
}

}  // namespace strata
