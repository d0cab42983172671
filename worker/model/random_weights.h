// Which random numbers stand in for which tensor: docs/spec/random-weights.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/random_weights/random_element.h"

namespace dflash {

enum class ModelRole : uint8_t { kTarget, kDrafter };

// `name` is canonical (worker/model/checkpoint.h). The scale keeps activations where trained models have
// them: norms near their neutral weight, projections that keep the size of their input, decays between 0.7
// and 0.99.
RandomTensor RandomTensorOf(ModelRole role, std::string_view name, const std::vector<int64_t>& shape,
                            uint64_t seed);

// Sum over the elements of (bits + 1) * (2 * index + 1) modulo 2^64, bits as stored: equal for two
// implementations that make equal tensors. Extends `sum`, which covers the elements before `first_index`.
uint64_t TensorChecksum(const uint16_t* bits, int64_t count, int64_t first_index, uint64_t sum);

}  // namespace dflash
