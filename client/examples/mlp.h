// A small multi-layer perceptron in plain C++: what train_mlp trains.
#ifndef DMUON_CLIENT_EXAMPLES_MLP_H_
#define DMUON_CLIENT_EXAMPLES_MLP_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace dmuon::examples {

// One layer's memory, wherever it lies: weight is out x in, row-major, as in PyTorch's Linear.
struct Layer {
  int in = 0, out = 0;
  float* weight = nullptr;
  float* bias = nullptr;
};

struct Batch {
  int rows = 0;
  std::vector<float> x, y;  // rows x (inputs, outputs)
};

// y = W3 tanh(W2 tanh(W1 x + b1) + b2) + b3 for layers of any number and size.
class Mlp {
 public:
  explicit Mlp(std::vector<Layer> layers) : layers_(std::move(layers)) {}

  // Half the mean squared error over the batch.
  double Loss(const Batch& batch);
  // The same, and its gradient into `gradients`, which has the layers' shapes; calls done(layer), last layer first, when
  // that layer's part is complete.
  template <typename Done>
  double LossAndGradient(const Batch& batch, const std::vector<Layer>& gradients, Done done) {
    const double loss = Forward(batch);
    for (size_t i = layers_.size(); i-- > 0;) {
      BackwardLayer(batch, i, gradients[i]);
      done(i);
    }
    return loss;
  }

 private:
  double Forward(const Batch& batch);
  void BackwardLayer(const Batch& batch, size_t i, const Layer& gradient);
  const float* Input(const Batch& batch, size_t i) const {
    return i == 0 ? batch.x.data() : outputs_[i - 1].data();
  }

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> outputs_;  // of each layer, after tanh for all but the last
  std::vector<float> delta_;                 // d loss / d (pre-activation) of the layer at hand
};

// Inputs from a normal distribution, outputs from a fixed random teacher.
Batch TeacherBatch(int rows, int inputs, int outputs, unsigned seed);

// Values of a layer to begin with: normal, scaled by 1 / sqrt(in).
std::vector<float> InitialWeight(int out, int in, unsigned seed);

}  // namespace dmuon::examples

#endif  // DMUON_CLIENT_EXAMPLES_MLP_H_
