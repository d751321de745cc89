// Parameter tables of published models, to place.
#ifndef DMUON_TESTS_SERVER_PLACEMENT_MODELS_H_
#define DMUON_TESTS_SERVER_PLACEMENT_MODELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/parameter/parameter.h"

namespace dmuon::server::testing {

struct Shape {
  const char* name;
  std::vector<int64_t> shape;
};

// Layers that are alike: matrices and three-dimensional experts by muon, vectors by adamw. A boundary each.
struct Tower {
  const char* name;
  int layers;
  std::vector<Shape> of_each;
};

struct Model {
  std::string name;
  std::vector<Tower> towers;
  std::vector<Shape> by_adamw;  // outside the layers: embeddings and heads
};

// Dense, mixture of experts (as one three-dimensional parameter a layer, and as matrices of their own), two towers.
std::vector<Model> PublishedModels();

ParameterTable TableOf(const Model& model);

}  // namespace dmuon::server::testing

#endif  // DMUON_TESTS_SERVER_PLACEMENT_MODELS_H_
