// trainer: command line -> one training run. Exit codes are those of base/error.h.
#include <CLI/CLI.hpp>
#include <exception>
#include <string>
#include <vector>

#include "base/log.h"
#include "config/load.h"
#include "train/trainer.h"

namespace {

int report(const strata::MpiSession& session, strata::ExitCode code, const std::string& message) {
  strata::log_error("{}", message);
  if (session.size() > 1) session.abort(static_cast<int>(code));
  return static_cast<int>(code);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"trainer: pre-trains Llama-class decoders"};
  std::string config;
  std::vector<std::string> sets;
  app.add_option("--config", config, "configuration file (JSON)")->required();
  app.add_option("--set", sets, "override a key: a.b.c=value; may be repeated");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : static_cast<int>(strata::ExitCode::usage);
  }
  try {
    strata::MpiSession session;
    try {
      return static_cast<int>(strata::run_training({strata::load_config(config, sets), ""}, session));
    } catch (const strata::Error& e) {
      return report(session, e.code(), e.what());
    } catch (const std::exception& e) {
      return report(session, strata::ExitCode::failure, e.what());
    }
  } catch (const strata::Error& e) {
    strata::log_error("{}", e.what());
    return static_cast<int>(e.code());
  }
}
