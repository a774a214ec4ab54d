#pragma once
// Training sequences from token shards, and the one global order in which all ranks read them.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/token_file.h"

namespace strata {

// The shards one after another. Sequence i is tokens [iT, iT + T], so T inputs and T targets: neighbours
// share one token, and a sequence may span documents and shards. Reading is const and safe from many threads.
class TokenDataset {
 public:
  // Each path is a shard file, a prefix (NAME for NAME.bin + NAME.idx) or a folder, whose shards are taken in
  // the order of their names. Every shard's header or index is validated here, ids when they are read. Throws
  // DataError; also when there is not one whole sequence, or when the description beside a shard (NAME.json,
  // from data_tools/prepare.py) tells of a larger vocabulary.
  TokenDataset(const std::vector<std::string>& paths, std::int64_t sequence_length, std::int64_t vocabulary);

  std::int64_t sequences() const { return (tokens() - 1) / sequence_length_; }
  std::int64_t tokens() const { return starts_.back(); }
  std::int64_t sequence_length() const { return sequence_length_; }
  const std::vector<TokenFile>& files() const { return files_; }

  // tokens, targets: T each. Targets equal to ignore_token become -1, which the loss masks.
  void read(std::int64_t sequence, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
            std::optional<std::int64_t> ignore_token) const;
  // Scans the ids of every shard.
  void validate() const;

 private:
  void read_run(std::int64_t begin, std::span<std::int32_t> out) const;

  std::vector<TokenFile> files_;
  std::vector<std::int64_t> starts_;  // files + 1: first token of each shard, then the total
  std::int64_t sequence_length_;
  std::int64_t vocabulary_;
};

// Position p of the global order is sequence permutation_epoch(p mod N), epoch = p div N: each sequence once
// an epoch, whatever the number of ranks; batches straddle epochs.
class Sampler {
 public:
  enum class Order { shuffled, in_order };  // in_order: validation
  Sampler(std::int64_t sequences, std::uint64_t seed, Order order = Order::shuffled)
      : sequences_(sequences), seed_(seed), order_(order) {}
  std::int64_t sequence_at(std::int64_t position) const;  // position >= 0
  std::int64_t epoch_at(std::int64_t position) const { return position / sequences_; }
  std::int64_t sequences() const { return sequences_; }

 private:
  std::int64_t sequences_;
  std::uint64_t seed_;
  Order order_;
};

// What the training loop reads: a dataset in a sampler's order.
class SequenceReader {
 public:
  SequenceReader(const TokenDataset& dataset, Sampler sampler, std::optional<std::int64_t> ignore_token)
      : dataset_(dataset), sampler_(sampler), ignore_token_(ignore_token) {}
  // Fills as many consecutive positions as fit: tokens and targets (B, T), B = tokens.size() / T.
  void read(std::int64_t position, std::span<std::int32_t> tokens, std::span<std::int32_t> targets) const;
  const Sampler& sampler() const { return sampler_; }

 private:
  const TokenDataset& dataset_;
  Sampler sampler_;
  std::optional<std::int64_t> ignore_token_;
};

}  // namespace strata
