#include "server/attach/attachments.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace dmuon::server {
namespace {

absl::StatusOr<Token> RandomToken() {
  Token token;
  // Up to 256 bytes come whole or not at all.
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  return token;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool ParseToken(absl::string_view hex, Token& token) {
  if (hex.size() != 2 * token.size()) return false;
  for (size_t i = 0; i < token.size(); ++i) {
    const int high = HexDigit(hex[2 * i]), low = HexDigit(hex[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    token[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

// Takes as long for tokens that differ in the first byte as for those that differ in the last.
bool SameToken(const Token& a, const Token& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= unsigned{a[i]} ^ unsigned { b[i] };
  return difference == 0;
}

}  // namespace

absl::StatusOr<Attachments::Added> Attachments::Add(uid_t uid, pid_t pid) {
  absl::StatusOr<Token> token = RandomToken();
  if (!token.ok()) return token.status();
  absl::MutexLock lock(&mu_);
  if (Alive() >= limits_.attachments) {
    return absl::ResourceExhaustedError(
        absl::StrCat("attachments: this daemon takes at most ", limits_.attachments));
  }
  const auto of_process = std::count_if(entries_.begin(), entries_.end(), [pid](const auto& e) {
    return e.second.trainer.pid == pid;
  });
  if (of_process >= limits_.per_process) {
    return absl::ResourceExhaustedError(
        absl::StrCat("attachments of one process: at most ", limits_.per_process));
  }
  const Trainer trainer{AttachmentId(++last_id_), uid, pid};
  entries_[trainer.attachment] = Entry{.trainer = trainer, .token = *token};
  return Added{trainer, *token};
}

bool Attachments::Remove(AttachmentId id) {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(id);
  if (it == entries_.end() || it->second.removed) return false;
  it->second.removed = true;
  if (it->second.calls == 0) entries_.erase(it);
  return true;
}

std::vector<AttachmentId> Attachments::RemovedWithCalls() const {
  absl::MutexLock lock(&mu_);
  std::vector<AttachmentId> ids;
  for (const auto& [id, entry] : entries_) {
    if (entry.removed) ids.push_back(id);
  }
  return ids;
}

absl::StatusOr<Trainer> Attachments::BeginCall(absl::string_view token_hex) {
  Token token;
  if (!ParseToken(token_hex, token)) {
    return absl::UnauthenticatedError(
        token_hex.empty() ? "no attach token: attach to the daemon first"
                          : "the attach token is malformed: expected 32 hex digits");
  }
  absl::MutexLock lock(&mu_);
  Entry* found = nullptr;
  for (auto& [id, entry] : entries_) {
    if (SameToken(entry.token, token) && !entry.removed) found = &entry;
  }
  if (found == nullptr) {
    return absl::UnauthenticatedError(
        "the attach token is stale or unknown: its process has ended, or the daemon was restarted");
  }
  if (found->calls >= limits_.calls_per_attachment) {
    return absl::ResourceExhaustedError(
        absl::StrCat("calls of one trainer: at most ", limits_.calls_per_attachment, " at once"));
  }
  ++found->calls;
  return found->trainer;
}

bool Attachments::EndCall(AttachmentId id) {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return false;
  --it->second.calls;
  if (!it->second.removed) return true;
  if (it->second.calls == 0) entries_.erase(it);
  return false;
}

void Attachments::Entered(AttachmentId id, SessionId session) {
  absl::MutexLock lock(&mu_);
  if (auto it = entries_.find(id); it != entries_.end()) it->second.sessions.insert(session);
}

void Attachments::Left(AttachmentId id, SessionId session) {
  absl::MutexLock lock(&mu_);
  if (auto it = entries_.find(id); it != entries_.end()) it->second.sessions.erase(session);
}

bool Attachments::InSession(AttachmentId id) const {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(id);
  return it != entries_.end() && !it->second.removed && !it->second.sessions.empty();
}

int Attachments::size() const {
  absl::MutexLock lock(&mu_);
  return Alive();
}

int Attachments::Alive() const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(),
                                        [](const auto& e) { return !e.second.removed; }));
}

}  // namespace dmuon::server
