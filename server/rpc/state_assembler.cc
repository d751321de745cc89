#include "server/rpc/state_assembler.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/rpc/convert.h"

namespace dmuon::server::rpc {
namespace {

std::string Quoted(const std::string& parameter) { return absl::StrCat("'", parameter, "'"); }

}  // namespace

absl::Status StateAssembler::Begin(const v1::StateChunk& chunk) {
  parameter_ = chunk.state().parameter();
  absl::StatusOr<StateKind> kind = FromProto(chunk.state().kind());
  if (!kind.ok()) return Annotate(kind.status(), Quoted(parameter_));
  kind_ = *kind;
  ASSIGN_OR_RETURN(total_, size_of_(parameter_, kind_));
  if (chunk.total_bytes() != total_) {
    return absl::InvalidArgumentError(absl::StrCat(Quoted(parameter_), ": total_bytes: expected ",
                                                   total_, ", given ", chunk.total_bytes()));
  }
  data_.clear();
  data_.reserve(total_);
  open_ = true;
  return absl::OkStatus();
}

absl::Status StateAssembler::Add(const v1::StateChunk& chunk) {
  if (open_ && chunk.has_state()) return Finish();
  if (!open_ && !chunk.has_state()) {
    return absl::InvalidArgumentError(
        "a chunk that begins a state must name it: expected 'state', given none");
  }
  if (!open_) RETURN_IF_ERROR(Begin(chunk));
  const std::string& bytes = chunk.data();
  if (bytes.size() > total_ - data_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(parameter_), ": data: expected ", total_, " bytes, given more"));
  }
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  data_.insert(data_.end(), begin, begin + bytes.size());
  if (data_.size() < total_) return absl::OkStatus();
  open_ = false;
  RETURN_IF_ERROR(write_(parameter_, kind_, data_));
  ++written_;
  return absl::OkStatus();
}

absl::Status StateAssembler::Finish() const {
  if (!open_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Quoted(parameter_), ": data: expected ", total_,
                                                 " bytes, given ", data_.size()));
}

}  // namespace dmuon::server::rpc
