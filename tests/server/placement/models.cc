#include "tests/server/placement/models.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace dmuon::server::testing {
namespace {

// config.json of meta-llama/Llama-3.1-8B: 32 layers, hidden 4096, 32 heads and 8 of keys and values of 128, ffn 14336,
// vocabulary 128256, head not tied.
Model Llama8B() {
  return {"Llama-3.1-8B",
          {{"layers",
            32,
            {{"q", {4096, 4096}},
             {"k", {1024, 4096}},
             {"v", {1024, 4096}},
             {"o", {4096, 4096}},
             {"gate", {14336, 4096}},
             {"up", {14336, 4096}},
             {"down", {4096, 14336}},
             {"input_norm", {4096}},
             {"post_attention_norm", {4096}}}}},
          {{"embed", {128256, 4096}}, {"lm_head", {128256, 4096}}, {"norm", {4096}}}};
}

// config.json of Qwen/Qwen2.5-7B: 28 layers, hidden 3584, 28 heads and 4 of keys and values of 128 with biases, ffn 18944,
// vocabulary 152064, head not tied.
Model Qwen7B() {
  return {"Qwen2.5-7B",
          {{"layers",
            28,
            {{"q", {3584, 3584}},
             {"k", {512, 3584}},
             {"v", {512, 3584}},
             {"o", {3584, 3584}},
             {"gate", {18944, 3584}},
             {"up", {18944, 3584}},
             {"down", {3584, 18944}},
             {"q_bias", {3584}},
             {"k_bias", {512}},
             {"v_bias", {512}},
             {"input_norm", {3584}},
             {"post_attention_norm", {3584}}}}},
          {{"embed", {152064, 3584}}, {"lm_head", {152064, 3584}}, {"norm", {3584}}}};
}

// config.json of allenai/OLMoE-1B-7B-0924: 16 layers, hidden 2048, 16 heads of keys and values too, 64 experts of ffn
// 1024, vocabulary 50304, head not tied.
constexpr int kOlmoeExperts = 64;

Model Olmoe(const char* name, const std::vector<Shape>& experts) {
  std::vector<Shape> layer = {
      {"q", {2048, 2048}},    {"k", {2048, 2048}},    {"v", {2048, 2048}},
      {"o", {2048, 2048}},    {"q_norm", {2048}},     {"k_norm", {2048}},
      {"router", {64, 2048}}, {"input_norm", {2048}}, {"post_attention_norm", {2048}}};
  layer.insert(layer.end(), experts.begin(), experts.end());
  return {name,
          {{"layers", 16, layer}},
          {{"embed", {50304, 2048}}, {"lm_head", {50304, 2048}}, {"norm", {2048}}}};
}

Model OlmoeInThreeDimensions() {
  return Olmoe("OLMoE-1B-7B, experts in one", {{"experts.gate", {kOlmoeExperts, 1024, 2048}},
                                               {"experts.up", {kOlmoeExperts, 1024, 2048}},
                                               {"experts.down", {kOlmoeExperts, 2048, 1024}}});
}

Model OlmoeInMatrices() {
  std::vector<Shape> experts;
  for (int e = 0; e < kOlmoeExperts; ++e) {
    experts.push_back({"expert.gate", {1024, 2048}});
    experts.push_back({"expert.up", {1024, 2048}});
    experts.push_back({"expert.down", {2048, 1024}});
  }
  return Olmoe("OLMoE-1B-7B, experts apart", experts);
}

std::vector<Shape> TransformerLayer(int64_t hidden, int64_t ffn) {
  return {{"q", {hidden, hidden}}, {"k", {hidden, hidden}}, {"v", {hidden, hidden}},
          {"o", {hidden, hidden}}, {"fc1", {ffn, hidden}},  {"fc2", {hidden, ffn}},
          {"q_bias", {hidden}},    {"k_bias", {hidden}},    {"v_bias", {hidden}},
          {"o_bias", {hidden}},    {"fc1_bias", {ffn}},     {"fc2_bias", {hidden}},
          {"norm1", {2, hidden}},  {"norm2", {2, hidden}}};
}

// config.json of openai/clip-vit-large-patch14: vision 24 layers, hidden 1024, ffn 4096, patches of 14; text 12 layers,
// hidden 768, ffn 3072, vocabulary 49408, 77 positions; projections to 768.
Model ClipLarge() {
  return {"CLIP ViT-L/14",
          {{"vision", 24, TransformerLayer(1024, 4096)},
           {"vision_patches", 1, {{"patch_embedding", {1024, 3, 14, 14}}}},
           {"text", 12, TransformerLayer(768, 3072)},
           {"projections", 1, {{"visual", {768, 1024}}, {"text", {768, 768}}}}},
          {{"token_embedding", {49408, 768}},
           {"text_positions", {77, 768}},
           {"vision_positions", {257, 1024}}}};
}

// config.json of google/siglip-so400m-patch14-384: both towers 27 layers, hidden 1152, ffn 4304; vocabulary 32000, 64
// positions of text and 729 of patches; an attention pool over the patches.
Model SiglipSo400m() {
  return {"SigLIP so400m",
          {{"vision", 27, TransformerLayer(1152, 4304)},
           {"vision_patches", 1, {{"patch_embedding", {1152, 3, 14, 14}}}},
           {"vision_head",
            1,
            {{"in_proj", {3456, 1152}},
             {"out_proj", {1152, 1152}},
             {"fc1", {4304, 1152}},
             {"fc2", {1152, 4304}}}},
           {"text", 27, TransformerLayer(1152, 4304)},
           {"text_head", 1, {{"head", {1152, 1152}}}}},
          {{"token_embedding", {32000, 1152}},
           {"text_positions", {64, 1152}},
           {"vision_positions", {729, 1152}}}};
}

// Norms are written {2, hidden}: weight and bias.
bool IsVector(const Shape& shape) {
  return shape.shape.size() == 1 || absl::string_view(shape.name).substr(0, 4) == "norm";
}

}  // namespace

std::vector<Model> PublishedModels() {
  return {Llama8B(),         Qwen7B(),    OlmoeInThreeDimensions(),
          OlmoeInMatrices(), ClipLarge(), SiglipSo400m()};
}

ParameterTable TableOf(const Model& model) {
  ParameterTable table;
  const auto add = [&](const std::string& boundary, const Shape& shape, Route route) {
    const int in = static_cast<int>(table.boundaries.size()) - 1;
    table.parameters.push_back(
        {absl::StrCat(boundary, ".", table.parameters.size(), ".", shape.name),
         shape.shape,
         route,
         BoundaryId(in),
         {}});
  };
  for (const Tower& tower : model.towers) {
    for (int layer = 0; layer < tower.layers; ++layer) {
      const std::string boundary = absl::StrCat(tower.name, ".", layer);
      table.boundaries.push_back({boundary, false});
      for (const Shape& shape : tower.of_each) {
        add(boundary, shape, IsVector(shape) ? Route::kAdamw : Route::kMuon);
      }
    }
  }
  if (!model.by_adamw.empty()) table.boundaries.push_back({"", true});
  for (const Shape& shape : model.by_adamw) add("root", shape, Route::kAdamw);
  const absl::Status status = CheckAndResolve(table);
  EXPECT_TRUE(status.ok()) << model.name << ": " << status;
  return table;
}

}  // namespace dmuon::server::testing
