// How much memory the system can still give, on machines that are described and not owned.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "../../csrc/arena/available.h"
#include "check.h"

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kKiB = 1024;

std::size_t available_with(const std::map<std::string, std::string>& files) {
  char name[] = "/tmp/memkit-available-XXXXXX";
  const fs::path root = mkdtemp(name);
  for (const auto& [path, text] : files) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  const std::size_t available = memkit::arena::available_memory(root.string());
  fs::remove_all(root);
  return available;
}

void check_available(const std::map<std::string, std::string>& files, std::size_t expected) {
  const std::size_t got = available_with(files);
  CHECK(got == expected, "expected %zu, got %zu", expected, got);
}

void test_machine() {
  const std::string machine = "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     600 kB\nSwapFree:  50 kB\n";
  check_available({}, SIZE_MAX);
  check_available({{"proc/meminfo", "nonsense"}}, SIZE_MAX);
  check_available({{"proc/meminfo", machine}}, 650 * kKiB);
  check_available({{"proc/meminfo", "MemAvailable: 7 kB\n"}}, 7 * kKiB);
}

void test_groups() {
  const std::string machine = "MemAvailable: 1000 kB\nSwapFree: 10 kB\n";
  std::map<std::string, std::string> files = {
      {"proc/meminfo", machine},
      {"proc/self/cgroup", "0::/outer/inner\n"},
      {"sys/fs/cgroup/outer/inner/memory.max", "max\n"},
      {"sys/fs/cgroup/outer/inner/memory.current", "4096\n"},
      {"sys/fs/cgroup/outer/memory.max", "409600\n"},
      {"sys/fs/cgroup/outer/memory.current", "307200\n"},
      {"sys/fs/cgroup/outer/memory.stat", "anon 1\nfile 99999\nactive_file 1024\nworkingset_x 5\ninactive_file 2048\n"},
  };
  check_available(files, 409600 - 307200 + 1024 + 2048 + 10 * kKiB);
  files["sys/fs/cgroup/outer/inner/memory.max"] = "8192\n";
  check_available(files, 4096 + 10 * kKiB);
  files["sys/fs/cgroup/outer/inner/memory.current"] = "9999\n";  // above its limit
  check_available(files, 10 * kKiB);
  files["proc/self/cgroup"] = "0::/elsewhere\n";  // another namespace's path
  check_available(files, 1010 * kKiB);

  check_available({{"proc/meminfo", machine},
                   {"proc/self/cgroup", "5:cpu:/a\n4:memory:/a\n0::/\n"},
                   {"sys/fs/cgroup/cpu/a/memory.limit_in_bytes", "1\n"},
                   {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
                   {"sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"},
                   {"sys/fs/cgroup/memory/a/memory.limit_in_bytes", "200000\n"},
                   {"sys/fs/cgroup/memory/a/memory.usage_in_bytes", "100000\n"},
                   {"sys/fs/cgroup/memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n"}},
                  101000 + 10 * kKiB);
}

}  // namespace

int main() {
  test_machine();
  test_groups();
  return finish("available");
}
