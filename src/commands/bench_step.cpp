#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <utility>

#include "commands/bench.h"
#include "commands/ranks.h"
#include "config/load.h"
#include "model/llama.h"
#include "model/parameter_table.h"
#include "optim/optimizer.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"
#include "train/backend_factory.h"
#include "train/plan.h"

namespace strata {
namespace {

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_seconds() {  // of all threads of the process
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The most memory that the process has had in RAM.
double resident_mebibytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

// What the dry run says a rank needs.
double planned_mebibytes(const Config& config) {
  const RunPlan plan = plan_run(config);
  return static_cast<double>(std::accumulate(plan.memory.begin(), plan.memory.end(), std::size_t{0})) /
         1048576;
}

using Clock = double (*)();

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Config bench_config(const BenchStepArguments& a) {
  std::vector<std::string> sets = a.sets;
  auto set = [&](const std::string& key, const std::string& value) { sets.push_back(key + "=" + value); };
  auto override_with = [&](const std::string& key, const auto& value) {
    if (value) set(key, fmt::format("{}", *value));
  };
  override_with("data.batch_size", a.batch);
  override_with("data.sequence_length", a.sequence);
  override_with("precision", a.precision);
  override_with("threads", a.threads);
  for (const char* size : {"mesh.federate", "mesh.replicate", "mesh.shard"}) set(size, "1");
  set("stream_order", "eager");
  if (!a.config.empty()) return load_config(a.config, sets);
  const nlohmann::json preset = {
      {"model", {{"preset", a.preset}}},
      {"data", {{"train", "random tokens"}, {"batch_size", 4}, {"sequence_length", 512}}},
      {"precision", "bf16"},
      {"run_dir", "not written"}};
  return read_config(preset.dump(), "--preset " + a.preset, sets);
}

// The training step of one process, as Trainer runs it, on random tokens.
class Step {
 public:
  Step(const Config& config, Backend& backend, Clock clock)
      : config_(config),
        clock_(clock),
        device_(*backend.device),
        groups_(make_groups(*backend.world, Mesh(config.mesh))),
        compute_(device_.create_stream("compute", Device::StreamKind::compute)),
        model_(llama_setup(config), device_, *backend.ops),
        engine_(model_.units(), groups_, device_, *backend.ops, compute_, EngineOptions::from(config)),
        optimizer_(engine_, groups_, device_, *backend.ops, compute_, OptimizerOptions::from(config)),
        host_(device_.allocate_host(bytes(), Purpose::data)),
        data_(device_.allocate(bytes(), Purpose::data)),
        sums_(device_.allocate(2 * sizeof(double), Purpose::data)),
        random_(config.seed) {
    engine_.initialize(config.seed);
    const auto targets = static_cast<double>(tokens());
    device_.copy_to_device(compute_, sums_.as<double>() + 1, &targets, sizeof(double));
    device_.synchronize();
  }

  Stream& compute() { return compute_; }
  const LlamaSetup& setup() const { return model_.setup(); }
  std::int64_t parameters() const { return parameter_count(engine_.units()); }
  std::int64_t micro_steps() const { return config_.gradient_accumulation; }
  std::int64_t tokens() const { return micro_steps() * model_.setup().tokens(); }  // in a step

  struct Times {
    double step = 0;  // by the clock asked for, without the drawing of its tokens
    double wall = 0, cpu = 0;
    double forward = 0, backward = 0, optimizer = 0;  // parts of wall
  };
  Times run() {
    draw_tokens();
    Times t;
    const double cpu = cpu_seconds(), wall = wall_seconds(), begin = clock_();
    Event last = device_.record(compute_), forward;
    engine_.begin_step(++step_);
    for (std::int64_t k = 0; k < micro_steps(); ++k) {
      const std::int32_t* tokens = data_.as<std::int32_t>() + 2 * k * model_.setup().tokens();
      engine_.begin_micro_step(static_cast<int>(k));
      model_.forward_backward(compute_, engine_, tokens, tokens + model_.setup().tokens(), sums_.as<double>(),
                              &forward);
      if (k + 1 == micro_steps()) engine_.finish_gradients();
      const Event backward = device_.record(compute_);
      device_.synchronize(backward);
      t.forward += device_.seconds_between(last, forward);
      t.backward += device_.seconds_between(forward, backward);
      last = backward;
    }
    optimizer_.step(step_, config_.optimizer.lr, sums_.as<double>() + 1);
    const Event end = device_.record(compute_);
    device_.synchronize();
    t.optimizer = device_.seconds_between(last, end);
    t.step = clock_() - begin;
    t.wall = wall_seconds() - wall;
    t.cpu = cpu_seconds() - cpu;
    return t;
  }

  // Mean token loss of the last step. Throws NonFiniteError.
  double loss() {
    double sum = 0;
    device_.copy_to_host(compute_, &sum, sums_.data(), sizeof(double));
    device_.synchronize();
    if (!std::isfinite(sum)) throw NonFiniteError("the loss is not finite -> try another precision");
    return sum / static_cast<double>(tokens());
  }

 private:
  // Tokens and targets of each micro-step in turn.
  std::size_t bytes() const { return static_cast<std::size_t>(2 * tokens()) * sizeof(std::int32_t); }

  void draw_tokens() {
    std::uniform_int_distribution<std::int32_t> any(0,
                                                    static_cast<std::int32_t>(config_.model.vocab_size - 1));
    for (std::int64_t i = 0; i < 2 * tokens(); ++i) host_.as<std::int32_t>()[i] = any(random_);
    device_.copy_to_device(compute_, data_.data(), host_.data(), bytes());
    device_.fill_zero(compute_, sums_.data(), sizeof(double));
    device_.synchronize();
  }

  const Config& config_;
  Clock clock_;
  Device& device_;
  MeshGroups groups_;
  Stream& compute_;
  Llama model_;
  ShardingEngine engine_;
  Optimizer optimizer_;
  Buffer host_, data_;
  Buffer sums_;  // fp64: loss, target tokens
  std::mt19937_64 random_;
  std::int64_t step_ = 0;
};

// A linear layer: w (out, in) on `rows` tokens, `times` times a step.
struct Linear {
  std::string name;
  std::int64_t rows, in, out, times;
};

std::vector<Linear> linears(const LlamaSetup& s, std::int64_t micro_steps) {
  const LlamaConfig& m = s.config;
  const std::int64_t q = m.num_attention_heads * m.head_dim, kv = m.num_key_value_heads * m.head_dim;
  const std::int64_t n = s.tokens(), chunk = loss_chunk_tokens(s), layers = m.num_hidden_layers * micro_steps;
  std::vector<Linear> all = {{"query, key, value", n, m.hidden_size, q + 2 * kv, layers},
                             {"attention output", n, q, m.hidden_size, layers},
                             {"gate, up", n, m.hidden_size, 2 * m.intermediate_size, layers},
                             {"down", n, m.intermediate_size, m.hidden_size, layers},
                             {"head", chunk, m.hidden_size, m.vocab_size, n / chunk * micro_steps}};
  if (n % chunk > 0) all.push_back({"head, last chunk", n % chunk, m.hidden_size, m.vocab_size, micro_steps});
  return all;
}

// The step's matrix products by themselves, each shape with operands of its own size.
class Products {
 public:
  Products(Device& device, Ops& ops, Stream& stream, const LlamaSetup& s, std::int64_t micro_steps,
           Clock clock)
      : device_(device),
        ops_(ops),
        stream_(stream),
        clock_(clock),
        setup_(s),
        linears_(linears(s, micro_steps)) {
    std::int64_t inputs = 0, outputs = 0, weights = 0;
    for (const Linear& l : linears_) {
      inputs = std::max(inputs, l.rows * l.in);
      outputs = std::max(outputs, l.rows * l.out);
      weights = std::max(weights, l.in * l.out);
    }
    x_ = operand(inputs, s.compute, 1), dx_ = operand(inputs, s.compute, 2);
    y_ = operand(outputs, s.compute, 3), dy_ = operand(outputs, s.compute, 4);
    w_ = operand(weights, s.compute, 5), dw_ = operand(weights, s.gradient, 6);
    seconds_.resize(linears_.size());
    device_.synchronize();
  }

  // Times each product of each shape once.
  void measure() {
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const Linear& l = linears_[i];
      const DType compute = setup_.compute;
      const Matrix x = matrix(x_.data(), compute, l.rows, l.in),
                   dx = matrix(dx_.data(), compute, l.rows, l.in);
      const Matrix y = matrix(y_.data(), compute, l.rows, l.out);
      const Matrix dy = matrix(dy_.data(), compute, l.rows, l.out);
      const Matrix w = matrix(w_.data(), compute, l.out, l.in);
      const Matrix dw = matrix(dw_.data(), setup_.gradient, l.out, l.in);
      time(seconds_[i][0], [&] { ops_.linear_forward(stream_, y, x, w); });
      time(seconds_[i][1], [&] { ops_.linear_backward_input(stream_, dx, dy, w, false); });
      time(seconds_[i][2], [&] { ops_.linear_backward_weight(stream_, dw, dy, x, false); });
    }
  }

  struct Shape {
    std::string name;
    double gflops;   // a second
    double seconds;  // a step
  };
  std::vector<Shape> shapes() const {
    const std::array<const char*, 3> kinds = {"forward", "input gradient", "weight gradient"};
    std::vector<Shape> out;
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const Linear& l = linears_[i];
      for (std::size_t k = 0; k < kinds.size(); ++k) {
        const double once = median(seconds_[i][k]);
        const double work = 2e-9 * static_cast<double>(l.rows) * static_cast<double>(l.in * l.out);
        out.push_back({l.name + ", " + kinds[k], work / once, once * static_cast<double>(l.times)});
      }
    }
    return out;
  }

 private:
  Buffer operand(std::int64_t elements, DType type, std::uint64_t key) {
    Buffer buffer = device_.allocate(static_cast<std::size_t>(elements) * size_of(type), Purpose::workspace);
    ops_.initialize_normal(stream_, {buffer.data(), type, elements}, 1.0f, {key, 0}, 0);
    return buffer;
  }
  template <class F>
  void time(std::vector<double>& seconds, F&& product) {
    const double begin = clock_();
    product();
    device_.synchronize();
    seconds.push_back(clock_() - begin);
  }

  Device& device_;
  Ops& ops_;
  Stream& stream_;
  Clock clock_;
  LlamaSetup setup_;
  std::vector<Linear> linears_;
  Buffer x_, dx_, y_, dy_, w_, dw_;
  std::vector<std::array<std::vector<double>, 3>> seconds_;  // by shape: forward, input and weight gradient
};

nlohmann::json report(const BenchStepArguments& arguments, const Config& config, Step& step,
                      const Products& products, const std::vector<Step::Times>& times, double resident) {
  auto all = [&](double Step::Times::*part) {
    std::vector<double> values(times.size());
    std::transform(times.begin(), times.end(), values.begin(),
                   [part](const Step::Times& t) { return t.*part; });
    return values;
  };
  const std::string& model = arguments.config.empty() ? arguments.preset : arguments.config;
  const std::vector<double> by_step = all(&Step::Times::step);
  const double seconds = median(by_step);
  double wall = 0, cpu = 0;
  for (const Step::Times& t : times) wall += t.wall, cpu += t.cpu;

  double gemm_seconds = 0, work = 0;
  nlohmann::json by_shape = nlohmann::json::object();
  const std::vector<Products::Shape> shapes = products.shapes();
  for (const Products::Shape& s : shapes) {
    gemm_seconds += s.seconds, work += s.gflops * s.seconds;
    by_shape[s.name] = s.gflops;
  }
  nlohmann::json result = {
      {"program", "strata"},
      {"model", model},
      {"parameters", step.parameters()},
      {"precision", config.precision},
      {"threads", config.threads},
      {"batch", config.data.batch_size},
      {"sequence", config.data.sequence_length},
      {"micro_steps", step.micro_steps()},
      {"tokens_per_second", static_cast<double>(step.tokens()) / seconds},
      {"gemm_gflops", work / gemm_seconds},
      {"gemm_share", gemm_seconds / seconds},
      {"gemm_seconds_per_step", gemm_seconds},
      {"gemm_gflops_by_shape", by_shape},
      {"clock", arguments.clock},
      {"step_seconds", by_step},
      {"forward_seconds", median(all(&Step::Times::forward))},
      {"backward_seconds", median(all(&Step::Times::backward))},
      {"optimizer_seconds", median(all(&Step::Times::optimizer))},
      {"cpu_share", cpu / wall / config.threads},
      {"memory_mebibytes", {{"planned", planned_mebibytes(config)}, {"resident", resident}}},
      {"loss", step.loss()}};
  fmt::print("{}: {} parameters, {}, {} thread(s), {} x {} x {} tokens a step\n", model, step.parameters(),
             config.precision, config.threads, step.micro_steps(), config.data.batch_size,
             config.data.sequence_length);
  fmt::print(
      "step                    {:9.4f} s, median of {} from {:.4f} to {:.4f}: forward {:.4f}, "
      "loss and backward {:.4f}, optimizer {:.4f}\n",
      seconds, by_step.size(), *std::min_element(by_step.begin(), by_step.end()),
      *std::max_element(by_step.begin(), by_step.end()), result["forward_seconds"].get<double>(),
      result["backward_seconds"].get<double>(), result["optimizer_seconds"].get<double>());
  fmt::print("tokens per second       {:9.1f}\n", result["tokens_per_second"].get<double>());
  fmt::print("matrix products alone   {:9.4f} s a step, {:.3f} of it, {:.1f} GFLOP/s\n", gemm_seconds,
             gemm_seconds / seconds, work / gemm_seconds);
  fmt::print("memory                  {:9.1f} MiB resident at most, {:.1f} MiB by the dry run\n", resident,
             result["memory_mebibytes"]["planned"].get<double>());
  for (const Products::Shape& s : shapes) {
    fmt::print("  {:<36} {:9.4f} s {:9.1f} GFLOP/s\n", s.name, s.seconds, s.gflops);
  }
  return result;
}

ExitCode bench_step(const BenchStepArguments& arguments, MpiSession& session) {
  const Config config = bench_config(arguments);
  if (arguments.clock == "cpu" && config.threads != 1) {
    throw UsageError(
        fmt::format("--clock cpu with {} threads would add up their times -> --threads 1, or --clock wall",
                    config.threads));
  }
  if (session.size() > 1) {
    throw UsageError(
        fmt::format("bench step was started as {} ranks -> start it without mpiexec", session.size()));
  }
  Backend backend = make_backend(config, session);
  const Clock clock = arguments.clock == "cpu" ? cpu_seconds : wall_seconds;
  Step step(config, backend, clock);
  for (int i = 0; i < arguments.warmup; ++i) step.run();
  const double resident = resident_mebibytes();  // before the products' operands come on top
  Products products(*backend.device, *backend.ops, step.compute(), step.setup(), step.micro_steps(), clock);
  products.measure();
  // Alternating, so that a machine that changes its speed changes both alike.
  std::vector<Step::Times> times;
  for (int i = 0; i < arguments.steps; ++i) {
    times.push_back(step.run());
    products.measure();
  }
  const nlohmann::json result = report(arguments, config, step, products, times, resident);
  fmt::print("{}\n", result.dump());
  return ExitCode::done;
}

}  // namespace

ExitCode bench_step_command(const BenchStepArguments& arguments) {
  return run_on_ranks([&arguments](MpiSession& session) { return bench_step(arguments, session); });
}

}  // namespace strata
