#include "available.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>

namespace memkit::arena {
namespace {

std::string contents(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r"),
                                                             [](std::FILE* f) { return f ? std::fclose(f) : 0; });
  std::string text;
  char part[4096];
  while (file) {
    const std::size_t got = std::fread(part, 1, sizeof part, file.get());
    text.append(part, got);
    if (got < sizeof part) break;
  }
  return text;
}

// The number that a text begins with, behind spaces; `missing` where it begins with none.
std::size_t number_at(const char* text, std::size_t missing) {
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  return end == text ? missing : number;
}

// The number behind a name that starts a line, or 0.
std::size_t number_after(const std::string& text, const std::string& name) {
  const std::size_t at = ("\n" + text).find("\n" + name);
  return at == std::string::npos ? 0 : number_at(text.c_str() + at + name.size(), 0);
}

// SIZE_MAX: there is no such file, or no number in it ("max").
std::size_t number_in(const std::string& path) { return number_at(contents(path).c_str(), SIZE_MAX); }

struct GroupFiles {
  const char *limit, *used;
  std::initializer_list<const char*> droppable;  // in memory.stat
};
const GroupFiles kVersion1 = {
    "/memory.limit_in_bytes", "/memory.usage_in_bytes", {"total_inactive_file ", "total_active_file "}};
const GroupFiles kVersion2 = {
    "/memory.max", "/memory.current", {"inactive_file ", "active_file ", "slab_reclaimable "}};

std::size_t left_in(const std::string& group, const GroupFiles& files) {
  const std::size_t limit = number_in(group + files.limit), used = number_in(group + files.used);
  if (limit == SIZE_MAX || used == SIZE_MAX) return SIZE_MAX;
  const std::string stat = contents(group + "/memory.stat");
  std::size_t droppable = 0;
  for (const char* name : files.droppable) droppable += number_after(stat, name);
  const std::size_t needed = used - std::min(used, droppable);
  return limit - std::min(limit, needed);
}

// Of the process's groups and all above them.
std::size_t left_in_groups(const std::string& root) {
  std::size_t left = SIZE_MAX;
  const std::string lines = contents(root + "/proc/self/cgroup");
  for (std::size_t begin = 0, end; begin < lines.size(); begin = end + 1) {
    end = std::min(lines.find('\n', begin), lines.size());
    const std::string line = lines.substr(begin, end - begin);
    // "0::/path" of version 2, "4:memory:/path" of version 1
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string kinds = line.substr(first + 1, second - first - 1);
    if (!kinds.empty() && kinds != "memory") continue;
    const std::string base = root + "/sys/fs/cgroup" + (kinds.empty() ? "" : "/memory");
    std::string path = line.substr(second + 1);
    for (;;) {
      left = std::min(left, left_in(base + path, kinds.empty() ? kVersion2 : kVersion1));
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.erase(slash);
    }
  }
  return left;
}

}  // namespace

std::size_t available_memory(const std::string& root) {
  const std::string machine = contents(root + "/proc/meminfo");
  const std::size_t kib = number_after(machine, "MemAvailable:");
  const std::size_t left = std::min(kib ? kib * 1024 : SIZE_MAX, left_in_groups(root));
  const std::size_t swap = number_after(machine, "SwapFree:") * 1024;
  return left > SIZE_MAX - swap ? SIZE_MAX : left + swap;
}

}  // namespace memkit::arena
