// Sleep and wake: contents to a file, memory back to the system, addresses kept.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>
#include <utility>

#include "no_gil.h"
#include "pool.h"

namespace memkit {

using arena::Block;
using arena::BlockView;
using arena::ChunkView;

namespace {

arena::TagId known_tag(const arena::Arena& arena, const std::string& name) {
  const std::vector<std::string> names = arena.tag_names();
  const auto at = std::find(names.begin(), names.end(), name);
  std::string known;
  for (const std::string& one : names)
    if (!one.empty()) known += (known.empty() ? "'" : ", '") + one + "'";
  TORCH_CHECK_VALUE(at != names.end(), "Pool.sleep: expected a tag that this pool knows (",
                    known.empty() ? "so far none" : known, "), got '", name, "'");
  return static_cast<arena::TagId>(at - names.begin());
}

// Memory that is looked at stays, and is nobody else's, while it is written out and given back, or comes back.
class Stillness {
 public:
  Stillness(arena::Arena& arena, arena::Gate before) : arena_(arena), after_(before) { arena_.hold(); }
  ~Stillness() { arena_.let_go(after_); }
  Stillness(const Stillness&) = delete;
  Stillness& operator=(const Stillness&) = delete;
  void end_with(arena::Gate gate) { after_ = gate; }

 private:
  arena::Arena& arena_;
  arena::Gate after_;
};

arena::Gate gate_of(const Pool::Tag& tag) { return tag ? arena::Gate::shut_for(*tag) : arena::Gate::shut(); }

// The file for contents, emptied, and nobody else's until wake() or the pool's end.
int take_file(int file) {
  const int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
  TORCH_CHECK(own >= 0, "Pool.sleep: expected an open file, got ", file);
  if (flock(own, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {  // some file systems have no locks
    ::close(own);
    TORCH_CHECK(false, "Pool.sleep: expected a file of its own, got one that another pool sleeps in");
  }
  // A pipe or a device has nothing to empty.
  if (ftruncate(own, 0) == 0) lseek(own, 0, SEEK_SET);
  return own;
}

}  // namespace

std::size_t Pool::sleep(const std::string& name, int file) {
  check_own("Pool.sleep");  // first: a child may have inherited a mutex that is locked for good
  const std::lock_guard<std::mutex> guard(mutex_);
  check_open("Pool.sleep");
  TORCH_CHECK(!asleep(), "Pool.sleep: expected a pool that is awake, got one that sleeps already");
  const Tag tag = name.empty() ? Tag() : Tag(known_tag(*arena_, name));
  const char* blocker = device_->sleep_blocker(*arena_);
  TORCH_CHECK(!blocker, "Pool.sleep: expected memory that can be given back, got a pool that cannot: ", blocker);
  device_->finish();
  Stillness still(*arena_, arena::Gate::open());
  asleep_tag_ = tag;
  asleep_.store(true);
  std::vector<Sleeper> sleepers, idle;
  // What rounding added sleeps with the user's bytes, but canaries stay.
  const auto sleeper = [debug = debug_](const BlockView& block) -> Sleeper {
    char* const data = const_cast<char*>(static_cast<const char*>(block.data));
    const char* const end = static_cast<const char*>(block.address) + block.size;
    const bool guarded = debug && block.state == arena::State::live;
    return {data, guarded ? block.requested : static_cast<std::size_t>(end - data), block.tag};
  };
  // What is in the block of a replay has tags of its own.
  const std::vector<const void*> homes = arena_->homes();
  const auto named = [&](const BlockView& block) {
    return block.tag == *tag && std::find(homes.begin(), homes.end(), block.data) == homes.end();
  };
  arena_->visit([](const ChunkView&) {},
                [&](const BlockView& block) {
                  if (block.state == arena::State::live && (!tag || named(block)))
                    sleepers.push_back(sleeper(block));
                  else if (!tag && block.state == arena::State::free)
                    idle.push_back(sleeper(block));
                });
  // Without a tag the blocks that scopes and replays lie in sleep as wholes.
  if (tag)
    arena_->visit_guests([&](const BlockView& block) {
      if (block.tag == *tag) sleepers.push_back(sleeper(block));
    });
  int own = -1;
  try {
    own = take_file(file);
    for (const Sleeper& one : sleepers) device_->save(own, one.at, one.bytes);
  } catch (...) {
    if (own >= 0) ::close(own);
    asleep_.store(false);
    throw;
  }
  file_ = own;
  sleepers_ = sleepers;
  still.end_with(gate_of(tag));
  // Neighbours together, so that a page that they share goes, too.
  std::move(idle.begin(), idle.end(), std::back_inserter(sleepers));
  std::sort(sleepers.begin(), sleepers.end(), [](const Sleeper& a, const Sleeper& b) { return a.at < b.at; });
  std::size_t bytes = 0;
  for (auto next = sleepers.begin(); next != sleepers.end();) {
    char* const start = next->at;
    char* end = start;
    for (; next != sleepers.end() && next->at <= end; ++next) end = std::max(end, next->at + next->bytes);
    bytes += device_->discard(start, static_cast<std::size_t>(end - start));
  }
  return bytes;
}

void Pool::wait_until_awake(arena::TagId tag) {
  if (arena_->inherited()) return;  // the arena says so
  bool sleeps = false, whole = false;
  {
    const WithoutGil no_gil;
    const std::lock_guard<std::mutex> guard(mutex_);
    sleeps = !arena_->admits(tag);
    whole = !asleep_tag_;
  }
  TORCH_CHECK(!sleeps, "Pool: expected memory that is awake, got an allocation from ", whole ? "a pool" : "a tag",
              " that sleeps; call wake() first");
}

// What a tag sleeps in may have been freed since, and be another's now: its pages come back with it.
void Pool::wake_block(Block* block) {
  try {
    device_->restore(block->data(), block->requested);
  } catch (...) {
    arena::free(block);
    throw;
  }
}

void Pool::wake() {
  check_own("Pool.wake");
  const std::lock_guard<std::mutex> guard(mutex_);
  TORCH_CHECK(asleep(), "Pool.wake: expected a pool that sleeps, got one that is awake");
  // What was freed meanwhile stays out: its memory may be another tag's by now. Nobody can have got it for the tag that
  // sleeps, so a live block of that tag there is the same block.
  Stillness still(*arena_, gate_of(asleep_tag_));
  std::set<std::pair<const void*, arena::TagId>> alive;
  std::vector<Sleeper> chunks;
  arena_->visit(
      [&](const ChunkView& chunk) {
        chunks.push_back({const_cast<char*>(static_cast<const char*>(chunk.address)), chunk.size, 0});
      },
      [&](const BlockView& block) {
        if (block.state == arena::State::live) alive.emplace(block.data, block.tag);
      });
  if (asleep_tag_) arena_->visit_guests([&](const BlockView& block) { alive.emplace(block.data, block.tag); });
  // Of the dead, too: what comes next may get it. But not what went back to the system since.
  for (const Sleeper& chunk : chunks) {
    if (!asleep_tag_) {
      device_->restore(chunk.at, chunk.bytes);
      continue;
    }
    for (const Sleeper& one : sleepers_) {
      char* const from = std::max(one.at, chunk.at);
      char* const to = std::min(one.at + one.bytes, chunk.at + chunk.bytes);
      if (from < to) device_->restore(from, static_cast<std::size_t>(to - from));
    }
  }
  off_t position = 0;
  for (const Sleeper& one : sleepers_) {
    if (alive.count({one.at, one.tag})) {
      TORCH_CHECK(lseek(file_, position, SEEK_SET) == position, "Pool.wake: expected a file, got one closed");
      device_->load(file_, one.at, one.bytes);
    }
    position += static_cast<off_t>(one.bytes);
  }
  flock(file_, LOCK_UN);  // also where a child of this process still has it open
  ::close(file_);
  file_ = -1;
  sleepers_.clear();
  asleep_.store(false);
  still.end_with(arena::Gate::open());
}

}  // namespace memkit
