#include "model/llama.h"

#include <algorithm>
#include <utility>

#include "model/parameter_table.h"
#include "model/rope.h"

namespace strata {

using Pass = ParameterSource::Pass;

struct Llama::DecoderTensors {
  Matrix qkv;                              // (Q + 2K, C)
  Matrix output;                           // (C, Q)
  Matrix gate_up;                          // (2F, C)
  Matrix down;                             // (C, F)
  Flat attention_norm, feed_forward_norm;  // (C)
  bool accumulate;
};

struct Llama::EdgeTensors {
  Matrix vocabulary;  // (V, C)
  Flat norm;          // (C); empty in the embedding of an untied model
  bool accumulate;
};

namespace {

// Parameters first .. last of a unit, which follow each other, as one matrix.
Matrix stacked(Flat unit, const UnitSpec& spec, int first, int last) {
  const ParameterSpec& top = spec.parameters[first];
  std::int64_t rows = 0;
  for (int p = first; p <= last; ++p) rows += spec.parameters[p].shape[0];
  return matrix(unit.at(top.offset), unit.dtype, rows, top.shape[1]);
}

}  // namespace

Llama::Llama(const LlamaSetup& setup, Device& device, Ops& ops)
    : setup_(setup),
      units_(llama_units(setup.config)),
      device_(device),
      ops_(ops),
      arena_(device.allocate(activation_bytes(setup), Purpose::activations)),
      act_(place_activations(setup, arena_.data())),
      eps_(static_cast<float>(setup.config.rms_norm_eps)) {
  const RopeTables tables = rope_tables(setup_.config, setup_.sequence);
  Stream& stream = device_.create_stream("model set-up", Device::StreamKind::compute);
  device_.copy_to_device(stream, act_.cosine, tables.cosine.data(), tables.cosine.size() * sizeof(float));
  device_.copy_to_device(stream, act_.sine, tables.sine.data(), tables.sine.size() * sizeof(float));
  device_.synchronize(device_.record(stream));
}

void Llama::forward_backward(Stream& s, ParameterSource& source, const std::int32_t* tokens,
                             const std::int32_t* targets, double* loss_sum, Event* forward_done) {
  Lease edge = forward_layers(s, source, tokens);
  if (forward_done != nullptr) *forward_done = device_.record(s);

  if (!tied()) edge = source.weights(head_unit(), Pass::forward);
  Lease gradient = source.gradient(head_unit());
  const EdgeTensors g = edge_tensors(gradient, head_unit());
  loss(s, edge_tensors(edge, head_unit()), &g, targets, loss_sum);
  if (!tied()) gradient.release(), edge.release();

  backward_layers(s, source);

  if (!tied()) gradient = source.gradient(0);
  const EdgeTensors e = edge_tensors(gradient, 0);
  ops_.embedding_backward(s, e.vocabulary, act_.gradient, tokens, tied() || e.accumulate);
}

void Llama::evaluate(Stream& s, ParameterSource& source, const std::int32_t* tokens,
                     const std::int32_t* targets, double* loss_sum) {
  Lease edge = forward_layers(s, source, tokens);
  if (!tied()) edge = source.weights(head_unit(), Pass::forward);
  loss(s, edge_tensors(edge, head_unit()), nullptr, targets, loss_sum);
}

void Llama::logits(Stream& s, ParameterSource& source, const std::int32_t* tokens, Matrix out) {
  Lease edge = forward_layers(s, source, tokens);
  if (!tied()) edge = source.weights(head_unit(), Pass::forward);
  const EdgeTensors w = edge_tensors(edge, head_unit());
  final_norm(s, w);
  ops_.linear_forward(s, out, act_.normalized, w.vocabulary);
}

Lease Llama::forward_layers(Stream& s, ParameterSource& source, const std::int32_t* tokens) {
  Lease edge = source.weights(0, Pass::forward);
  ops_.embedding_forward(s, act_.layers.front().input, edge_tensors(edge, 0).vocabulary, tokens);
  if (!tied()) edge.release();

  // Each layer adds the branch that the one before it left, as part of its first norm.
  ConstMatrix x = act_.layers.front().input, branch;
  for (std::size_t i = 0; i < act_.layers.size(); ++i) {
    const Lease lease = source.weights(decoder_unit(i), Pass::forward);
    const DecoderTensors w = decoder_tensors(lease, decoder_unit(i));
    layer_forward(s, w, act_.layers[i], x, branch);
    ops_.linear_forward(s, act_.branch, act_.layers[i].activated, w.down);
    x = act_.layers[i].middle, branch = act_.branch;
  }
  return edge;
}

void Llama::backward_layers(Stream& s, ParameterSource& source) {
  for (std::size_t i = act_.layers.size(); i-- > 0;) {
    const int unit = decoder_unit(i);
    Lease weights = source.weights(unit, Pass::backward);
    Lease gradient = source.gradient(unit);
    layer_backward(s, decoder_tensors(weights, unit), decoder_tensors(gradient, unit), act_.layers[i]);
    gradient.release();  // first: its reduction can start
  }
}

// All of a decoder layer but its last matrix: backward, computing a layer again, has no use for that one.
void Llama::layer_forward(Stream& s, const DecoderTensors& w, const LayerActivations& a, ConstMatrix x,
                          ConstMatrix residual) {
  const Matrix input = residual ? a.input : Matrix{};
  ops_.rmsnorm_forward(s, a.attention_in, a.attention_rstd, input, x, residual, w.attention_norm, eps_);
  ops_.linear_forward(s, a.qkv, a.attention_in, w.qkv);
  ops_.rope(s, a.query_key, setup_.config.head_dim, setup_.sequence, act_.cosine, act_.sine, false);
  ops_.attention_forward(s, setup_.attention(), a.attended, a.lse, a.query, a.key, a.value);
  ops_.linear_forward(s, act_.branch, a.attended, w.output);

  ops_.rmsnorm_forward(s, a.feed_forward_in, a.feed_forward_rstd, a.middle, a.input, act_.branch,
                       w.feed_forward_norm, eps_);
  ops_.linear_forward(s, a.gate_up, a.feed_forward_in, w.gate_up);
  ops_.swiglu_forward(s, a.activated, a.gate_up);
}

void Llama::layer_backward(Stream& s, const DecoderTensors& w, const DecoderTensors& g,
                           const LayerActivations& a) {
  const Matrix d = act_.gradient, d_branch = act_.branch;
  const bool again = setup_.recompute == Recompute::selective;
  // The last layer's activations are still there: nothing overwrote them since its forward.
  const bool gone = setup_.recompute == Recompute::full && &a != &act_.layers.back();
  if (gone) layer_forward(s, w, a, a.input, {});

  if (again) ops_.swiglu_forward(s, a.activated, a.gate_up);
  linear_backward(s, act_.d_activated, g.down, d, a.activated, w.down, g.accumulate);
  ops_.swiglu_backward(s, act_.d_gate_up, act_.d_activated, a.gate_up);
  if (again)
    ops_.rmsnorm_forward(s, a.feed_forward_in, a.feed_forward_rstd, {}, a.middle, {}, w.feed_forward_norm,
                         eps_);
  linear_backward(s, d_branch, g.gate_up, act_.d_gate_up, a.feed_forward_in, w.gate_up, g.accumulate);
  ops_.rmsnorm_backward(s, d, g.feed_forward_norm, d_branch, d, a.middle, w.feed_forward_norm,
                        a.feed_forward_rstd, g.accumulate);

  linear_backward(s, act_.d_attended, g.output, d, a.attended, w.output, g.accumulate);
  ops_.attention_backward(s, setup_.attention(), act_.d_query, act_.d_key, act_.d_value, act_.d_attended,
                          a.attended, a.lse, a.query, a.key, a.value);
  ops_.rope(s, act_.d_query_key, setup_.config.head_dim, setup_.sequence, act_.cosine, act_.sine, true);
  if (again)
    ops_.rmsnorm_forward(s, a.attention_in, a.attention_rstd, {}, a.input, {}, w.attention_norm, eps_);
  linear_backward(s, d_branch, g.qkv, act_.d_qkv, a.attention_in, w.qkv, g.accumulate);
  ops_.rmsnorm_backward(s, d, g.attention_norm, d_branch, d, a.input, w.attention_norm, a.attention_rstd,
                        g.accumulate);
}

void Llama::linear_backward(Stream& s, Matrix dx, Matrix dw, ConstMatrix dy, ConstMatrix x, ConstMatrix w,
                            bool accumulate) {
  ops_.linear_backward_weight(s, dw, dy, x, accumulate);
  ops_.linear_backward_input(s, dx, dy, w, false);
}

void Llama::final_norm(Stream& s, const EdgeTensors& w) {
  ops_.rmsnorm_forward(s, act_.normalized, act_.output_rstd, act_.output, act_.layers.back().middle,
                       act_.branch, w.norm, eps_);
}

void Llama::loss(Stream& s, const EdgeTensors& w, const EdgeTensors* g, const std::int32_t* targets,
                 double* loss_sum) {
  final_norm(s, w);
  const std::int64_t tokens = setup_.tokens(), hidden = setup_.config.hidden_size;
  for (std::int64_t begin = 0; begin < tokens; begin += act_.logits.rows) {
    const std::int64_t rows = std::min(act_.logits.rows, tokens - begin);
    const Matrix logits = act_.logits.block(0, 0, rows, act_.logits.cols);
    const Matrix x = act_.normalized.block(begin, 0, rows, hidden);
    ops_.linear_forward(s, logits, x, w.vocabulary);
    ops_.cross_entropy(s, logits, act_.losses + begin, targets + begin, g != nullptr);
    if (g == nullptr) continue;
    linear_backward(s, act_.branch.block(begin, 0, rows, hidden), g->vocabulary, logits, x, w.vocabulary,
                    g->accumulate || begin > 0);
  }
  ops_.sum(s, loss_sum, act_.losses, tokens, true);
  if (g == nullptr) return;
  ops_.rmsnorm_backward(s, act_.gradient, g->norm, act_.branch, {}, act_.output, w.norm, act_.output_rstd,
                        g->accumulate);
}

Llama::DecoderTensors Llama::decoder_tensors(const Lease& lease, int unit) const {
  const UnitSpec& spec = units_[unit];
  const Flat flat = lease.flat();
  return {stacked(flat, spec, kQuery, kValue),
          stacked(flat, spec, kOutput, kOutput),
          stacked(flat, spec, kGate, kUp),
          stacked(flat, spec, kDown, kDown),
          lease.parameter(spec.parameters[kAttentionNorm]),
          lease.parameter(spec.parameters[kFeedForwardNorm]),
          lease.accumulate()};
}

Llama::EdgeTensors Llama::edge_tensors(const Lease& lease, int unit) const {
  const UnitSpec& spec = units_[unit];
  return {stacked(lease.flat(), spec, kVocabularyMatrix, kVocabularyMatrix),
          spec.kind == UnitKind::embedding ? Flat{} : lease.parameter(spec.parameters[kFinalNorm]),
          lease.accumulate()};
}

}  // namespace strata
