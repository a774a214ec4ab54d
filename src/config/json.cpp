#include "config/json.h"

#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "base/error.h"

namespace strata {
namespace {

constexpr std::size_t kDeepest = 32;  // the deepest configuration has 3 levels
constexpr std::size_t kLargestFile = std::size_t{1} << 20;

std::string line_and_column(std::string_view text, std::size_t position) {
  position = std::min(position, text.size());
  std::size_t line = 1, column = 1;
  for (char c : text.substr(0, position > 0 ? position - 1 : 0)) {
    if (c == '\n') {
      ++line, column = 1;
    } else {
      ++column;
    }
  }
  return fmt::format("line {}, column {}", line, column);
}

// First pass over the text: knows the path of every value, keeps nothing.
class Checker : public nlohmann::json_sax<Json> {
 public:
  Checker(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  bool null() override { return leave_value(); }
  bool boolean(bool) override { return leave_value(); }
  bool number_integer(number_integer_t) override { return leave_value(); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      refuse_integer(std::to_string(value));
    }
    return leave_value();
  }
  bool number_float(number_float_t, const string_t& raw) override {
    // An integer that does not fit 64 bits arrives here, already rounded.
    if (raw.find_first_of(".eE") == std::string::npos) refuse_integer(raw);
    return leave_value();
  }
  bool string(string_t&) override { return leave_value(); }
  bool binary(binary_t&) override { return leave_value(); }
  bool start_object(std::size_t) override { return enter(true); }
  bool start_array(std::size_t) override { return enter(false); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    Level& level = levels_.back();
    level.key = name;
    if (!level.seen.insert(name).second) {
      throw UsageError(fmt::format(
          "{}: {} is given twice; a key may stand once in an object -> remove one of them", source_, path()));
    }
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    // nlohmann's text starts with "[json.exception...] parse error at line ...: "; its end says what is
    // wrong.
    std::string what = e.what();
    if (const auto colon = what.find("] "); colon != std::string::npos) what = what.substr(colon + 2);
    if (const auto colon = what.find(": ");
        colon != std::string::npos && what.starts_with("parse error at")) {
      what = what.substr(colon + 2);
    }
    const std::string at = path();
    throw UsageError(fmt::format("{}: not valid JSON at {}{}{}: {} -> correct the text there", source_,
                                 line_and_column(text_, position), at.empty() ? "" : ", key ", at, what));
  }

 private:
  struct Level {
    bool object = false;
    std::string key;
    std::size_t index = 0;
    std::set<std::string> seen;
  };

  std::string path() const {
    std::string out;
    for (const Level& level : levels_) {
      if (!level.object) {
        out += fmt::format("[{}]", level.index);
      } else if (!level.key.empty()) {
        const std::string quoted = show(level.key);  // escapes what must not reach a terminal
        if (!out.empty()) out += '.';
        out.append(quoted, 1, quoted.size() - 2);
      }
    }
    return out;
  }
  bool enter(bool object) {
    if (levels_.size() == kDeepest) {
      throw UsageError(
          fmt::format("{}: nested deeper than {} levels; a configuration needs 3 -> correct the text",
                      source_, kDeepest));
    }
    levels_.push_back({object, {}, 0, {}});
    return true;
  }
  bool leave() {
    levels_.pop_back();
    return leave_value();
  }
  bool leave_value() {
    if (!levels_.empty() && !levels_.back().object) ++levels_.back().index;
    return true;
  }
  [[noreturn]] void refuse_integer(const std::string& raw) const {
    throw UsageError(fmt::format(
        "{}: {} is {}; allowed: integers from -2^63 to 2^63 - 1 -> give a smaller number", source_,
        path().empty() ? "the value" : path(), raw.size() > 60 ? raw.substr(0, 60) + "..." : raw));
  }

  std::string_view text_;
  const std::string& source_;
  std::vector<Level> levels_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& source) {
  Checker checker(text, source);
  Json::sax_parse(text, &checker);
  return Json::parse(text);
}

std::string read_text_file(const std::string& path, const std::string& what) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw UsageError(fmt::format("{}: cannot open this {} -> check the path", path, what));
  std::string text(kLargestFile + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) throw UsageError(fmt::format("{}: cannot read this {} -> is it a file?", path, what));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kLargestFile) {
    throw UsageError(
        fmt::format("{}: larger than {} bytes, so not a {} -> check the path", path, kLargestFile, what));
  }
  return text;
}

std::string show(const Json& value) {
  constexpr std::size_t kLongest = 80;
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() <= kLongest) return text;
  std::size_t cut = kLongest;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;  // not inside a character
  return text.substr(0, cut) + (value.is_string() ? "...\"" : "...");
}

}  // namespace strata
