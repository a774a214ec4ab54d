#pragma once
// Llama: forward and backward by hand, on leased weights.
//
// The model knows neither ranks nor storage: it asks a ParameterSource for one unit's weights at a time and
// for a place to put that unit's gradient, and enqueues all its work on the stream it is given. It never
// reads device memory. Gradients are sums over tokens, unscaled. After the constructor it allocates nothing.
#include <cstdint>
#include <vector>

#include "backend/device.h"
#include "backend/ops.h"
#include "backend/units.h"
#include "model/activations.h"

namespace strata {

class Llama {
 public:
  // Allocates the arena (Purpose::activations) and fills the rotary tables. Throws UsageError: check_setup.
  Llama(const LlamaSetup& setup, Device& device, Ops& ops);

  const LlamaSetup& setup() const { return setup_; }
  const std::vector<UnitSpec>& units() const { return units_; }

  // tokens, targets: (B*T) int32 in device memory, tokens in [0, V), targets < 0 masked. Adds the sum of the
  // token losses to *loss_sum (fp64 in device memory). forward_done is recorded after the last decoder layer:
  // the loss and its gradient are one piece of work, counted as backward.
  void forward_backward(Stream& stream, ParameterSource& source, const std::int32_t* tokens,
                        const std::int32_t* targets, double* loss_sum, Event* forward_done = nullptr);

  // Forward only: adds the sum of the token losses to *loss_sum.
  void evaluate(Stream& stream, ParameterSource& source, const std::int32_t* tokens,
                const std::int32_t* targets, double* loss_sum);

  // Forward only: out (N, V), compute dtype. For tests and inference; training never makes this matrix.
  void logits(Stream& stream, ParameterSource& source, const std::int32_t* tokens, Matrix out);

 private:
  struct DecoderTensors;  // a decoder unit's weights or gradients, as matrices
  struct EdgeTensors;     // the vocabulary's matrix and the final norm

  DecoderTensors decoder_tensors(const Lease& lease, int unit) const;
  EdgeTensors edge_tensors(const Lease& lease, int unit) const;

  // Embedding and decoder layers. Returns the root's lease of a tied model, nothing otherwise.
  Lease forward_layers(Stream&, ParameterSource&, const std::int32_t* tokens);
  void backward_layers(Stream&, ParameterSource&);
  void layer_forward(Stream&, const DecoderTensors& w, const LayerActivations& a, ConstMatrix x,
                     ConstMatrix residual);
  void layer_backward(Stream&, const DecoderTensors& w, const DecoderTensors& g, const LayerActivations& a);
  void linear_backward(Stream&, Matrix dx, Matrix dw, ConstMatrix dy, ConstMatrix x, ConstMatrix w,
                       bool accumulate);
  void final_norm(Stream&, const EdgeTensors& w);
  // Token losses, chunk by chunk; with g also its gradient down to the residual stream.
  void loss(Stream&, const EdgeTensors& w, const EdgeTensors* g, const std::int32_t* targets,
            double* loss_sum);

  bool tied() const { return setup_.config.tie_word_embeddings; }
  // Unit 0 holds the embedding. The last unit holds the head, unless the embedding does.
  int head_unit() const { return tied() ? 0 : static_cast<int>(units_.size()) - 1; }
  static int decoder_unit(std::size_t layer) { return static_cast<int>(layer) + 1; }

  LlamaSetup setup_;
  std::vector<UnitSpec> units_;
  Device& device_;
  Ops& ops_;
  Buffer arena_;
  Activations act_;
  float eps_;
};

}  // namespace strata
