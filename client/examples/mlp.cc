#include "client/examples/mlp.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace dmuon::examples {
namespace {

std::vector<float> Normal(size_t count, double scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

}  // namespace

double Mlp::Forward(const Batch& batch) {
  outputs_.resize(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const float* input = Input(batch, i);
    outputs_[i].resize(static_cast<size_t>(batch.rows * layer.out));
    for (int r = 0; r < batch.rows; ++r) {
      for (int o = 0; o < layer.out; ++o) {
        float sum = layer.bias[o];
        for (int k = 0; k < layer.in; ++k)
          sum += layer.weight[o * layer.in + k] * input[r * layer.in + k];
        outputs_[i][static_cast<size_t>(r * layer.out + o)] =
            i + 1 < layers_.size() ? std::tanh(sum) : sum;
      }
    }
  }
  const std::vector<float>& y = outputs_.back();
  delta_.resize(y.size());
  double loss = 0;
  for (size_t j = 0; j < y.size(); ++j) {
    const float error = y[j] - batch.y[j];
    loss += 0.5 * error * error;
    delta_[j] = error / static_cast<float>(y.size());
  }
  return loss / static_cast<double>(y.size());
}

double Mlp::Loss(const Batch& batch) { return Forward(batch); }

void Mlp::BackwardLayer(const Batch& batch, size_t i, const Layer& gradient) {
  const Layer& layer = layers_[i];
  const float* input = Input(batch, i);
  std::fill(gradient.weight, gradient.weight + layer.out * layer.in, 0.0f);
  std::fill(gradient.bias, gradient.bias + layer.out, 0.0f);
  std::vector<float> before(static_cast<size_t>(batch.rows * layer.in), 0.0f);
  for (int r = 0; r < batch.rows; ++r) {
    for (int o = 0; o < layer.out; ++o) {
      const float d = delta_[static_cast<size_t>(r * layer.out + o)];
      gradient.bias[o] += d;
      for (int k = 0; k < layer.in; ++k) {
        gradient.weight[o * layer.in + k] += d * input[r * layer.in + k];
        before[static_cast<size_t>(r * layer.in + k)] += d * layer.weight[o * layer.in + k];
      }
    }
  }
  // Through the tanh of the layer before, whose output is this one's input: 1 - tanh^2.
  for (size_t j = 0; j < before.size(); ++j) before[j] *= 1 - input[j] * input[j];
  delta_ = std::move(before);
}

Batch TeacherBatch(int rows, int inputs, int outputs, unsigned seed) {
  constexpr unsigned kTeacherSeed = 12345;
  const std::vector<float> teacher =
      Normal(static_cast<size_t>(outputs * inputs), 1.0 / std::sqrt(inputs), kTeacherSeed);
  Batch batch;
  batch.rows = rows;
  batch.x = Normal(static_cast<size_t>(rows * inputs), 1.0, seed);
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < outputs; ++o) {
      float sum = 0;
      for (int k = 0; k < inputs; ++k)
        sum += teacher[static_cast<size_t>(o * inputs + k)] *
               batch.x[static_cast<size_t>(r * inputs + k)];
      batch.y.push_back(std::sin(2 * sum) + 0.3f);
    }
  }
  return batch;
}

std::vector<float> InitialWeight(int out, int in, unsigned seed) {
  return Normal(static_cast<size_t>(out * in), 1.0 / std::sqrt(in), seed);
}

}  // namespace dmuon::examples
