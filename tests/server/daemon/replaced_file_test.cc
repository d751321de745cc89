#include "server/daemon/replaced_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kRoom = 8192;

class ReplacedFileTest : public ::testing::Test {
 protected:
  std::string At(absl::string_view name) const {
    return absl::StrCat(directory_.path(), "/", name);
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_.path()))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  static absl::Status Write(const std::string& path, absl::string_view text) {
    absl::StatusOr<ReplacedFile> file = ReplacedFile::Open(path, kRoom);
    return file.ok() ? file->Replace(text) : file.status();
  }
  static std::string TextOf(const std::string& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  testing::TemporaryDirectory directory_;
};

TEST_F(ReplacedFileTest, HasTheNewTextAloneAndAModeThatOthersCanRead) {
  std::ofstream(At("file")) << "a longer text that was there before";
  ASSERT_EQ(Write(At("file"), "new"), absl::OkStatus());
  EXPECT_EQ(TextOf(At("file")), "new");
  EXPECT_THAT(Names(), ElementsAre("file"));
  EXPECT_EQ(fs::status(At("file")).permissions(), fs::perms(0644));
}

TEST_F(ReplacedFileTest, ThatIsNotReplacedLeavesEverythingAsItWas) {
  std::ofstream(At("file")) << "as it was";
  {
    const auto file = ReplacedFile::Open(At("file"), kRoom);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(Names().size(), 2u);
    const auto elsewhere = ReplacedFile::Open(At("made/file"), kRoom);
    ASSERT_TRUE(elsewhere.ok()) << elsewhere.status();
    EXPECT_TRUE(fs::exists(At("made")));
  }
  EXPECT_EQ(TextOf(At("file")), "as it was");
  EXPECT_THAT(Names(), ElementsAre("file"));
}

TEST_F(ReplacedFileTest, WhatIsNoRegularFileIsRefusedByItsKindAndStays) {
  const auto refused = [&](const std::string& path, const char* kind) {
    const absl::Status status = ReplacedFile::Open(path, kRoom).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(status.message(),
              absl::StrCat(path, ": expected a regular file or nothing, given ", kind));
  };
  fs::create_directory(At("directory"));
  refused(At("directory"), "a directory");
  ASSERT_EQ(mkfifo(At("pipe").c_str(), 0600), 0);
  refused(At("pipe"), "a pipe");
  fs::create_symlink("/dev/null", At("link"));
  refused(At("link"), "a character device");
  refused("/dev/null", "a character device");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THAT(Names(), ElementsAre("directory", "link", "pipe"));
}

TEST_F(ReplacedFileTest, WhatHasComeThereMeanwhileIsRefusedToo) {
  auto file = ReplacedFile::Open(At("file"), kRoom);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(mkfifo(At("file").c_str(), 0600), 0);
  EXPECT_THAT(std::string(file->Replace("new").message()), HasSubstr("given a pipe"));
  EXPECT_TRUE(fs::is_fifo(At("file")));
}

TEST_F(ReplacedFileTest, ALinkStaysAndWhatItPointsAtIsReplaced) {
  fs::create_directory(At("real"));
  std::ofstream(At("real/file")) << "old";
  fs::create_symlink("real/file", At("link"));
  fs::create_symlink(At("link"), At("absolute"));
  fs::create_symlink("real/not_yet", At("dangling"));
  ASSERT_EQ(Write(At("absolute"), "new"), absl::OkStatus());
  ASSERT_EQ(Write(At("dangling"), "made"), absl::OkStatus());
  EXPECT_TRUE(fs::is_symlink(At("link")) && fs::is_symlink(At("absolute")));
  EXPECT_TRUE(fs::is_symlink(At("dangling")));
  EXPECT_EQ(TextOf(At("real/file")), "new");
  EXPECT_EQ(TextOf(At("real/not_yet")), "made");
  fs::create_symlink("loop", At("loop"));
  EXPECT_FALSE(ReplacedFile::Open(At("loop"), kRoom).ok());
}

TEST_F(ReplacedFileTest, WhatAKilledProcessLeftIsTakenOver) {
  std::ofstream(At("file")) << "as it was";
  const pid_t child = fork();
  if (child == 0) {
    const auto file = ReplacedFile::Open(At("file"), kRoom);
    kill(getpid(), SIGKILL);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_THAT(Names(), ElementsAre("file", "file.new"));
  EXPECT_EQ(TextOf(At("file")), "as it was");
  ASSERT_EQ(Write(At("file"), "new"), absl::OkStatus());
  EXPECT_THAT(Names(), ElementsAre("file"));
  EXPECT_EQ(TextOf(At("file")), "new");
}

TEST_F(ReplacedFileTest, TwoAtOnceDoNotMix) {
  auto first = ReplacedFile::Open(At("file"), kRoom);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = ReplacedFile::Open(At("file"), kRoom).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("another process is writing it"));
  ASSERT_EQ(first->Replace("first"), absl::OkStatus());
  ASSERT_EQ(Write(At("file"), "second"), absl::OkStatus());
  EXPECT_EQ(TextOf(At("file")), "second");
}

TEST_F(ReplacedFileTest, WhatOthersHaveAtThatNameStaysAsItIs) {
  std::ofstream(At("precious")) << "precious";
  fs::create_hard_link(At("precious"), At("file.new"));
  EXPECT_THAT(std::string(Write(At("file"), "new").message()), HasSubstr("expected nothing, or"));
  fs::create_symlink(At("precious"), At("link.new"));
  EXPECT_FALSE(Write(At("link"), "new").ok());
  ASSERT_EQ(mkfifo(At("pipe.new").c_str(), 0600), 0);
  EXPECT_FALSE(Write(At("pipe"), "new").ok());
  EXPECT_EQ(TextOf(At("precious")), "precious");
}

TEST_F(ReplacedFileTest, AFileThatCannotBeMadeOrFilledIsKnownAtOnce) {
  for (const char* path : {"/proc/no/such/place", "/proc/calibration.json"}) {
    const absl::Status status = ReplacedFile::Open(path, kRoom).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
  // A limit on the size of files stands for a full disk.
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {kRoom / 2, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = ReplacedFile::Open(At("file"), kRoom).status();
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("taking 8192 bytes"));
  EXPECT_THAT(Names(), IsEmpty());
}

}  // namespace
}  // namespace dmuon::server
