#pragma once
// What a training step keeps between forward and backward, and the scratch it needs: one arena, its size
// known before anything is allocated.
//
// N = B*T tokens, C hidden size, F intermediate size, Q = query heads * D, K = key/value heads * D, V
// vocabulary, L layers.
#include <cstdint>
#include <string>
#include <vector>

#include "backend/ops.h"
#include "backend/tensor.h"
#include "config/config.h"

namespace strata {

// What backward computes again instead of keeping it. Results are the same bit for bit.
enum class Recompute : std::uint8_t {
  none,
  selective,  // norm outputs and the SwiGLU output: N (2C + F) elements a layer for a few percent of the time
  full,       // all but the layer's input: N C elements a layer for one more forward
};
Recompute recompute_from(const std::string& name);  // throws UsageError

struct LlamaSetup {
  LlamaConfig config;
  std::int64_t batch = 1, sequence = 1;  // B, T of one micro-step
  DType compute = DType::f32;            // weights and activations: fp32 or bf16
  DType gradient = DType::f32;           // of weights: fp32 or bf16
  Recompute recompute = Recompute::none;
  std::int64_t logits_bytes = std::int64_t{64} << 20;  // how much of the logits may exist at once

  std::int64_t tokens() const { return batch * sequence; }
  AttentionShape attention() const {
    return {batch, sequence, config.num_attention_heads, config.num_key_value_heads, config.head_dim};
  }
};

// Throws UsageError: check_llama, and batch, sequence and dtypes.
void check_setup(const LlamaSetup& setup);

// Tokens whose logits exist at once: a multiple of 128 that logits_bytes hold, at least 128, at most all N.
std::int64_t loss_chunk_tokens(const LlamaSetup& setup);

// What Ops needs to know to size its scratch.
Workload workload(const LlamaSetup& setup);

struct ActivationPlan {
  struct Entry {
    std::string name;
    std::size_t bytes = 0;
  };
  std::vector<Entry> entries;  // padding included; they add up to `bytes`
  std::size_t bytes = 0;
  std::string text() const;  // a line an entry, for the dry run
};
ActivationPlan plan_activations(const LlamaSetup& setup);
inline std::size_t activation_bytes(const LlamaSetup& setup) {
  return plan_activations(setup).bytes;
}

// Kept from a layer's forward to its backward; with recomputation several layers share what is not kept.
struct LayerActivations {
  Matrix input;                         // (N, C) the residual stream as the layer finds it
  Matrix attention_in;                  // (N, C) input, normalised
  float* attention_rstd = nullptr;      // (N)
  Matrix qkv;                           // (N, Q + 2K) queries and keys rotated
  Matrix query_key, query, key, value;  // its columns: (N, Q + K), (N, Q), (N, K), (N, K)
  Matrix attended;                      // (N, Q) what the heads read
  float* lse = nullptr;                 // (B, Hq, T) log of the sum of exponentials
  Matrix middle;                        // (N, C) the residual stream after attention
  Matrix feed_forward_in;               // (N, C) middle, normalised
  float* feed_forward_rstd = nullptr;   // (N)
  Matrix gate_up;                       // (N, 2F)
  Matrix activated;                     // (N, F) silu(gate) * up
};

struct Activations {
  std::vector<LayerActivations> layers;
  Matrix output;                 // (N, C) the residual stream after the last layer
  Matrix normalized;             // (N, C) output, normalised; shares memory with `gradient`, which follows it
  float* output_rstd = nullptr;  // (N)
  Matrix branch;                 // (N, C) what a sub-layer is about to add to the residual stream; backward:
                                 // the gradient of a norm's output
  Matrix gradient;               // (N, C) of the residual stream, walking from the loss to the embedding
  float* losses = nullptr;       // (N) a loss a token

  // Scratch of which only one group is alive at a time.
  Matrix logits;                                // (chunk, V)
  Matrix d_activated, d_gate_up;                // (N, F), (N, 2F)
  Matrix d_attended, d_qkv;                     // (N, Q), (N, Q + 2K)
  Matrix d_query_key, d_query, d_key, d_value;  // columns of d_qkv

  float *cosine = nullptr, *sine = nullptr;  // (T, D/2)
};

// Places everything in an arena of activation_bytes(setup).
Activations place_activations(const LlamaSetup& setup, void* arena);

}  // namespace strata
