#include "data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/permutation.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

// The shards of a folder by name. An .idx without its .bin is listed too, so that it is refused, not skipped.
std::vector<std::string> shards_of(const std::string& folder) {
  std::vector<std::string> shards;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const fs::path& path = entry.path();
    if (path.extension() == ".bin") shards.push_back(path.string());
    if (path.extension() == ".idx" && !fs::exists(fs::path(path).replace_extension(".bin"))) {
      shards.push_back(path.string());
    }
  }
  if (error)
    throw DataError(fmt::format("{}: cannot list this folder: {} -> check it", folder, error.message()));
  if (shards.empty()) {
    throw DataError(folder + ": no .bin shards in this folder -> make them with data_tools/prepare.py");
  }
  std::sort(shards.begin(), shards.end());
  return shards;
}

// data_tools/prepare.py describes a shard in NAME.json. A vocabulary larger than the model's is refused from
// there, at once and not hours later when a step reads such a token. Other files of that name say nothing.
void require_vocabulary(const TokenFile& file, std::int64_t vocabulary) {
  constexpr std::uintmax_t kLargestDescription = 1 << 20;
  const fs::path path = fs::path(file.path()).replace_extension(".json");
  std::error_code missing;
  if (fs::file_size(path, missing) > kLargestDescription || missing) return;
  std::ifstream in(path);
  const auto description = nlohmann::json::parse(in, nullptr, false);
  if (!description.is_object() || description.value("format", nlohmann::json()) != "megatron") return;
  const auto size = description.value("vocab_size", nlohmann::json());
  if (!size.is_number_integer() || size.get<std::int64_t>() <= vocabulary) return;
  throw DataError(fmt::format(
      "{}: its tokens are of a vocabulary of {}, the model's has {} -> set model.vocab_size to at least {}",
      file.path(), size.get<std::int64_t>(), vocabulary, size.get<std::int64_t>()));
}

}  // namespace

TokenDataset::TokenDataset(const std::vector<std::string>& paths, std::int64_t sequence_length,
                           std::int64_t vocabulary)
    : starts_{0}, sequence_length_(sequence_length), vocabulary_(vocabulary) {
  if (sequence_length < 1) throw InternalError("a sequence needs at least one token");
  for (const std::string& path : paths) {
    std::error_code ignored;
    const bool folder = fs::is_directory(path, ignored);
    for (const std::string& shard : folder ? shards_of(path) : std::vector<std::string>{path}) {
      files_.emplace_back(shard);
      require_vocabulary(files_.back(), vocabulary);
      starts_.push_back(starts_.back() + files_.back().tokens());
    }
  }
  if (files_.empty())
    throw DataError("no token shards were given -> name them in data.train or data.validation");
  if (tokens() <= sequence_length) {
    throw DataError(
        fmt::format("{}: {} tokens in {} shard(s) are not one sequence of {} tokens and its last target "
                    "-> give more data or a smaller data.sequence_length",
                    files_.front().path(), tokens(), files_.size(), sequence_length));
  }
}

void TokenDataset::read_run(std::int64_t begin, std::span<std::int32_t> out) const {
  auto file =
      static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1);
  while (!out.empty()) {
    const std::int64_t available = starts_[file + 1] - begin;
    const std::size_t take = std::min(out.size(), static_cast<std::size_t>(available));
    files_[file].read(begin - starts_[file], out.first(take), vocabulary_);
    out = out.subspan(take);
    begin += static_cast<std::int64_t>(take), ++file;
  }
}

void TokenDataset::read(std::int64_t sequence, std::span<std::int32_t> tokens,
                        std::span<std::int32_t> targets, std::optional<std::int64_t> ignore_token) const {
  const auto length = static_cast<std::size_t>(sequence_length_);
  if (sequence < 0 || sequence >= sequences() || tokens.size() != length || targets.size() != length) {
    throw InternalError(fmt::format("sequence {} of {}, {} tokens and {} targets of {} were asked for",
                                    sequence, sequences(), tokens.size(), targets.size(), length));
  }
  const std::int64_t begin = sequence * sequence_length_;
  read_run(begin, tokens);
  std::copy(tokens.begin() + 1, tokens.end(), targets.begin());
  read_run(begin + sequence_length_, targets.last(1));
  if (ignore_token)
    std::replace(targets.begin(), targets.end(), static_cast<std::int32_t>(*ignore_token), -1);
}

void TokenDataset::validate() const {
  for (const TokenFile& file : files_) file.validate(vocabulary_);
}

std::int64_t Sampler::sequence_at(std::int64_t position) const {
  const std::int64_t within = position % sequences_;
  return order_ == Order::in_order ? within : Permutation(sequences_, seed_, epoch_at(position))(within);
}

void SequenceReader::read(std::int64_t position, std::span<std::int32_t> tokens,
                          std::span<std::int32_t> targets) const {
  const auto length = static_cast<std::size_t>(dataset_.sequence_length());
  if (tokens.size() != targets.size() || tokens.size() % length != 0) {
    throw InternalError(fmt::format("{} tokens and {} targets are not whole sequences of {}", tokens.size(),
                                    targets.size(), length));
  }
  for (std::size_t at = 0; at < tokens.size(); at += length, ++position) {
    dataset_.read(sampler_.sequence_at(position), tokens.subspan(at, length), targets.subspan(at, length),
                  ignore_token_);
  }
}

}  // namespace strata
