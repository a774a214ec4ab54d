#include "cuda/emulation/symbolize.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace strata::emulation {

std::uint64_t address_in_file(const void* address) {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || map == nullptr) {
    return reinterpret_cast<std::uint64_t>(address);
  }
  return reinterpret_cast<std::uint64_t>(address) - map->l_addr;
}

std::string program_path() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : std::string();
}

namespace {

std::vector<std::string> output_lines(const std::string& command) {
  std::vector<std::string> lines;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), &pclose);
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe.get()) != nullptr) {
    lines.emplace_back(line);
    while (!lines.back().empty() && lines.back().back() == '\n') lines.back().pop_back();
  }
  return lines;
}

bool is_own_header(const std::string& place) {
  return place.find("cuda/emulation/kernel_") != std::string::npos ||
         place.find("cuda/kernels/gpu") != std::string::npos || place.find("cuda_bf16") != std::string::npos;
}

}  // namespace

std::string symbolize(const void* code_address) {
  char hex[32];
  std::snprintf(hex, sizeof hex, "0x%" PRIx64, address_in_file(code_address));
  std::string quoted = "'";
  for (const char c : program_path()) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  // -i lists the functions inlined at the address, innermost first, as pairs of lines: name, then file:line.
  const auto lines = output_lines("addr2line -f -C -i -e " + quoted + "' " + hex + " 2>/dev/null");
  for (std::size_t i = 0; i + 1 < lines.size(); i += 2) {
    std::string place = lines[i + 1].substr(0, lines[i + 1].find(" (discriminator"));
    if (place.starts_with("./")) place.erase(0, 2);
    if (place.empty() || place[0] == '?' || is_own_header(place)) continue;
    std::string function = lines[i];
    for (const std::string unnamed = "(anonymous namespace)::";
         function.find(unnamed) != std::string::npos;) {
      function.erase(function.find(unnamed), unnamed.size());
    }
    return place + " in " + function.substr(0, function.find('('));
  }
  return std::string("code address ") + hex;
}

}  // namespace strata::emulation
