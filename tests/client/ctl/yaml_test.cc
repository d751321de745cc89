#include "client/ctl/yaml.h"

#include <gtest/gtest.h>

namespace dmuon::ctl {
namespace {

using Tree = nlohmann::ordered_json;

TEST(Yaml, NestsObjectsAndListsInBlockStyle) {
  const Tree tree = Tree::parse(R"({"name": "run", "mesh": {"shard": 2},
      "placement": [{"name": "a.weight", "shape": [3, 4], "empty": []}, {"name": "b"}], "none": [], "unset": null})");
  EXPECT_EQ(ToYaml(tree),
            "name: run\n"
            "mesh:\n"
            "  shard: 2\n"
            "placement:\n"
            "  - name: a.weight\n"
            "    shape: [3, 4]\n"
            "    empty: []\n"
            "  - name: b\n"
            "none: []\n"
            "unset: null\n");
}

TEST(Yaml, StringsThatLookLikeSomethingElseAreQuoted) {
  for (const char* text : {"", "true", "No", "null", "1e5", "0x10", "2024-01-01", "~", "- a",
                           "a: b", "a #b", "end ", "'x'", "*a", ".5", "inf", "a\nb"}) {
    const std::string yaml = ToYaml(Tree{{"key", text}});
    EXPECT_EQ(yaml, "key: " + Tree(text).dump() + "\n");
  }
  EXPECT_EQ(ToYaml(Tree{{"key", "layers.0/q proj"}}), "key: layers.0/q proj\n");
}

TEST(Yaml, BytesThatAreNoTextDoNotEndTheProgram) {
  EXPECT_FALSE(ToYaml(Tree{{"key", "\xff\xfe"}}).empty());
}

}  // namespace
}  // namespace dmuon::ctl
