#include "tests/e2e/e2e_test_base.h"

#include <signal.h>

#include <cstdlib>
#include <filesystem>

#include "client/ctl/admin.h"

namespace dmuon::testing {
namespace {

constexpr char kBystander[] = "bystander";

// The whole suite runs on the backend that DMUON_TEST_BACKEND names.
std::vector<std::string> Flags(std::vector<std::string> flags) {
  const char* backend = std::getenv("DMUON_TEST_BACKEND");
  if (backend != nullptr) flags.push_back(std::string("--backend=") + backend);
  return flags;
}

}  // namespace

E2eTest::E2eTest(const Options& options)
    : options_(options),
      daemon_(std::make_unique<DaemonProcess>(Program("dmuond"), Flags(options.daemon_flags),
                                              options.shared)) {}

E2eTest::~E2eTest() = default;

bool E2eTest::OnDevice() {
  const char* backend = std::getenv("DMUON_TEST_BACKEND");
  return backend != nullptr && std::string(backend) != "cpu";
}

void E2eTest::SetUp() {
  if (!options_.bystander) return;
  // What the daemon makes once and keeps (threads, pools) is there after a first session.
  {
    auto first = Trainer::Start(endpoint(), {.job = "first"}, 0);
    ASSERT_TRUE(first.ok()) << first.status();
    ASSERT_TRUE((*first)->Train(1).ok());
    ASSERT_TRUE((*first)->Close().ok());
  }
  auto bystander = Trainer::Start(endpoint(), {.job = kBystander}, 0);
  ASSERT_TRUE(bystander.ok()) << bystander.status();
  bystander_ = *std::move(bystander);
  ASSERT_TRUE(bystander_->Train(2).ok());
  // The first trainer's descriptors go when the daemon has seen it leave.
  ASSERT_TRUE(Eventually([this] { return Sessions().size() == 1; }));
  before_ = daemon_->Use();
  Eventually([this] {
    const ProcessUse now = daemon_->Use();
    const bool settled = now.descriptors == before_.descriptors && now.mappings == before_.mappings;
    before_ = now;
    return settled;
  });
}

void E2eTest::TearDown() {
  if (daemon_ends_) return;
  ASSERT_EQ(kill(daemon_->pid(), 0), 0) << "the daemon is gone";
  if (bystander_ == nullptr) return;
  const absl::Status trained = bystander_->Train(2);
  EXPECT_TRUE(trained.ok()) << "the other session is harmed: " << trained;
  EXPECT_EQ(bystander_->session().step(), 4u);
  EXPECT_TRUE(Eventually([this] { return Sessions().size() == 1; })) << "a session is left over";
  ProcessUse now;
  const bool clean = Eventually(
      [&] {
        now = daemon_->Use();
        return now.descriptors <= before_.descriptors &&
               now.memfd_mappings <= before_.memfd_mappings;
      },
      absl::Seconds(10));
  EXPECT_TRUE(clean) << "descriptors: " << before_.descriptors << " before, " << now.descriptors
                     << " now; arena mappings: " << before_.memfd_mappings << " before, "
                     << now.memfd_mappings << " now\n"
                     << DescriptorsOf(daemon_->pid());
}

std::vector<v1::SessionSummary> E2eTest::Sessions() {
  auto admin = ctl::Admin::Connect(endpoint(), absl::Seconds(30));
  if (!admin.ok()) return {};
  const auto sessions = (*admin)->Sessions();
  if (!sessions.ok()) return {};
  return {sessions->sessions().begin(), sessions->sessions().end()};
}

v1::SessionSummary E2eTest::Summary(const std::string& name) {
  for (v1::SessionSummary& summary : Sessions()) {
    if (summary.name() == name) return summary;
  }
  return {};
}

// Copied to where every user can run it, whoever owns the build folder.
std::string E2eTest::HelperProgram() const {
  const std::string path = daemon_->directory() + "/trainer";
  std::error_code error;
  std::filesystem::copy_file(Program("e2e_trainer"), path,
                             std::filesystem::copy_options::skip_existing, error);
  return path;
}

ChildProcess E2eTest::Helper(const std::string& mode, const JobOptions& job, int rank,
                             const SpawnOptions& options) {
  return ChildProcess(
      {HelperProgram(), mode, endpoint(), job.job, std::to_string(job.world), std::to_string(rank)},
      options);
}

}  // namespace dmuon::testing
