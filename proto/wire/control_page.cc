#include "proto/wire/control_page.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "absl/strings/str_format.h"
#include "base/checked_math.h"
#include "proto/wire/futex.h"

namespace dmuon::wire {
namespace {

std::atomic<uint64_t>* PresenceWords(std::byte* base, const PageLayout& layout) {
  return reinterpret_cast<std::atomic<uint64_t>*>(base + layout.presence);
}

size_t PresenceCount(const PageLayout& layout) { return (layout.parameters + 63) / 64; }

}  // namespace

PageLayout PageLayout::For(uint32_t boundaries, uint32_t parameters, uint32_t groups) {
  PageLayout l;
  l.boundaries = boundaries;
  l.parameters = parameters;
  l.groups = groups;
  l.ring_capacity = std::bit_ceil(std::max<uint32_t>(4 * boundaries, 64));
  size_t at = AlignUp(sizeof(PageHeader), 64);
  const auto take = [&at](size_t bytes) {
    const size_t offset = at;
    at = AlignUp(at + bytes, 64);
    return offset;
  };
  l.ring = take(sizeof(Record) * l.ring_capacity);
  l.words = take(sizeof(BoundaryWords) * boundaries);
  l.hyper = take(sizeof(GroupHyper) * groups);
  l.presence = take(sizeof(uint64_t) * ((size_t{parameters} + 63) / 64));
  l.norms = take(sizeof(double) * parameters);
  l.bytes = AlignUp(at, 4096);
  return l;
}

ControlPage ControlPage::Create(std::byte* base, const PageLayout& layout, uint64_t table_digest) {
  auto* header = new (base) PageHeader;
  header->boundaries = layout.boundaries;
  header->parameters = layout.parameters;
  header->groups = layout.groups;
  header->ring_capacity = layout.ring_capacity;
  header->bytes = layout.bytes;
  header->table_digest = table_digest;
  return ControlPage(base, layout);
}

absl::StatusOr<ControlPage> ControlPage::Attach(std::byte* base, size_t bytes) {
  if (bytes < sizeof(PageHeader)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "control page: expected at least %d bytes, got %d", sizeof(PageHeader), bytes));
  }
  const auto& h = *reinterpret_cast<const PageHeader*>(base);
  if (h.magic != kControlPageMagic || h.version != kControlPageVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("control page: expected version %d, got magic %#x version %d: client and "
                        "daemon are of different releases",
                        kControlPageVersion, h.magic, h.version));
  }
  if (h.boundaries > kMaxBoundaries || h.parameters > kMaxParameters || h.groups > kMaxGroups) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "control page: counts out of range: %d boundaries, %d parameters, %d groups", h.boundaries,
        h.parameters, h.groups));
  }
  const PageLayout layout = PageLayout::For(h.boundaries, h.parameters, h.groups);
  if (layout.bytes != bytes || layout.ring_capacity != h.ring_capacity) {
    return absl::InvalidArgumentError(
        absl::StrFormat("control page: expected %d bytes, got %d", layout.bytes, bytes));
  }
  return ControlPage(base, layout);
}

void ControlPage::SetPresent(uint32_t parameter) const {
  PresenceWords(base_, layout_)[parameter / 64].fetch_or(uint64_t{1} << (parameter % 64),
                                                         std::memory_order_relaxed);
}

uint64_t ControlPage::PresenceWord(uint32_t word) const {
  return PresenceWords(base_, layout_)[word].load(std::memory_order_relaxed);
}

void ControlPage::ClearPresence() const {
  for (size_t i = 0; i < PresenceCount(layout_); ++i) {
    PresenceWords(base_, layout_)[i].store(0, std::memory_order_relaxed);
  }
}

bool ControlPage::Push(const Record& record) const {
  PageHeader& h = header();
  const uint64_t tail = h.ring_tail.load(std::memory_order_relaxed);
  if (tail - h.ring_head.load(std::memory_order_acquire) >= layout_.ring_capacity) return false;
  std::memcpy(base_ + layout_.ring + (tail & (layout_.ring_capacity - 1)) * sizeof(Record), &record,
              sizeof(Record));
  h.ring_tail.store(tail + 1, std::memory_order_release);
  RingDaemon();
  return true;
}

absl::StatusOr<std::optional<Record>> ControlPage::Pop() const {
  PageHeader& h = header();
  const uint64_t head = h.ring_head.load(std::memory_order_relaxed);
  const uint64_t waiting = h.ring_tail.load(std::memory_order_acquire) - head;
  if (waiting == 0) return std::nullopt;
  if (waiting > layout_.ring_capacity) {
    return absl::DataLossError(
        absl::StrFormat("ring: expected at most %d unread records, the tail says %d",
                        layout_.ring_capacity, waiting));
  }
  Record record;
  std::memcpy(&record, base_ + layout_.ring + (head & (layout_.ring_capacity - 1)) * sizeof(Record),
              sizeof(Record));
  h.ring_head.store(head + 1, std::memory_order_release);
  return record;
}

// The sleeper announces itself, then the kernel compares the doorbell once more: a bump between the two is seen by one
// of them. Both sides use sequentially consistent order for exactly this pair.
void ControlPage::RingDaemon() const {
  PageHeader& h = header();
  h.daemon_doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (h.daemon_sleeps.load(std::memory_order_seq_cst) != 0) FutexWakeAll(h.daemon_doorbell);
}

void ControlPage::RingTrainer() const {
  PageHeader& h = header();
  h.trainer_doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (h.trainer_sleeps.load(std::memory_order_seq_cst) != 0) FutexWakeAll(h.trainer_doorbell);
}

void ControlPage::DaemonWait(uint32_t seen, absl::Duration timeout) const {
  PageHeader& h = header();
  h.daemon_sleeps.store(1, std::memory_order_seq_cst);
  FutexWait(h.daemon_doorbell, seen, timeout);
  h.daemon_sleeps.store(0, std::memory_order_seq_cst);
}

void ControlPage::TrainerWait(uint32_t seen, absl::Duration timeout) const {
  PageHeader& h = header();
  h.trainer_sleeps.fetch_add(1, std::memory_order_seq_cst);
  FutexWait(h.trainer_doorbell, seen, timeout);
  h.trainer_sleeps.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace dmuon::wire
