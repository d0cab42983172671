// Test support: states and records of one layer, driven as an engine drives them. Works with every backend.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {

// The inputs of one layer for the positions of one sequence.
struct GatedDeltaNetSequence {
  GatedDeltaNetSequence(const GatedDeltaNetShape& shape, int64_t length, uint32_t seed, const Stream& stream,
                        float decay_low = -3, float decay_high = 3)
      : shape(shape),
        qkv(Rounded(RandomMatrix<float>(length, shape.QkvCols(), 10 * seed, -2, 2), stream)),
        beta(Rounded(RandomMatrix<float>(length, shape.value_heads, 10 * seed + 1, -3, 3), stream)),
        decay(Rounded(RandomMatrix<float>(length, shape.value_heads, 10 * seed + 2, decay_low, decay_high),
                      stream)),
        a_log(RandomMatrix<float>(1, shape.value_heads, 10 * seed + 3, -4, 1)),
        dt_bias(RandomMatrix<float>(1, shape.value_heads, 10 * seed + 4, -1, 1)) {}

  static HostMatrix<float> Rounded(const HostMatrix<float>& values, const Stream& stream) {
    return DeviceMatrix::Activations(values, stream).ToHost();
  }

  GatedDeltaNetShape shape;
  HostMatrix<float> qkv, beta, decay, a_log, dt_bias;
};

class GatedDeltaNetLayer {
 public:
  // Rows of the inputs are `extra_stride` elements further apart than they are long, of the outputs three
  // times as much.
  GatedDeltaNetLayer(const GatedDeltaNetShape& shape, int64_t slots, int64_t max_rows, const Stream& stream,
                     int64_t extra_stride = 1)
      : shape_(shape),
        stream_(stream),
        extra_stride_(extra_stride),
        states_(std::vector<float>(static_cast<size_t>(slots * shape.StateFloats())), stream),
        records_(std::vector<float>(static_cast<size_t>(slots * 2 * max_rows * shape.RecordFloats()),
                                    std::numeric_limits<float>::quiet_NaN()),
                 stream),
        buffer_(static_cast<size_t>(slots), 0),
        count_(static_cast<size_t>(slots), 0) {
    state_ = {states_.data(), records_.data(), slots, max_rows};
  }

  // Rows [first, first + rows) of the sequence as one verification, of which `accepted` are then committed.
  // Rejected rows hold NaNs: what was no part of the text must not be felt.
  HostMatrix<float> Verify(const GatedDeltaNetSequence& s, int32_t slot, int32_t first, int32_t rows,
                           int32_t accepted) {
    const HostMatrix<float> o = RunRows(s, slot, first, rows, accepted, /*prefill=*/false);
    buffer_[static_cast<size_t>(slot)] ^= 1;
    count_[static_cast<size_t>(slot)] = accepted;
    return o;
  }

  HostMatrix<float> Prefill(const GatedDeltaNetSequence& s, int32_t slot, int32_t first, int32_t rows) {
    return RunRows(s, slot, first, rows, rows, /*prefill=*/true);
  }

  void Fold(int32_t slot) {
    DeviceArray<int32_t> buffer(buffer_, stream_), count(count_, stream_), slots({slot}, stream_);
    EXPECT_TRUE(
        GatedDeltaNetFold(shape_, slots.data(), 1, {buffer.data(), count.data()}, state_, stream_).ok());
    count_[static_cast<size_t>(slot)] = 0;
  }

  HostMatrix<float> State(int64_t slot) {
    const std::vector<float> all = states_.ToHost();
    const auto first = all.begin() + slot * shape_.StateFloats();
    return HostMatrix<float>(1, shape_.StateFloats(),
                             std::vector<float>(first, first + shape_.StateFloats()));
  }

 private:
  HostMatrix<float> RunRows(const GatedDeltaNetSequence& s, int32_t slot, int32_t first, int32_t rows,
                            int32_t accepted, bool prefill) {
    const auto input = [&](const HostMatrix<float>& all) {
      HostMatrix<float> part = all.Rows(first, rows);
      for (int64_t r = accepted; r < rows; ++r)
        std::fill_n(part.Row(r), part.cols, std::numeric_limits<float>::quiet_NaN());
      return DeviceMatrix::Activations(part, stream_, extra_stride_);
    };
    const DeviceMatrix qkv = input(s.qkv), beta = input(s.beta), decay = input(s.decay);
    DeviceArray<float> a_log(s.a_log.values, stream_), dt_bias(s.dt_bias.values, stream_);
    const DeviceMatrix o = DeviceMatrix::Output(rows, shape_.value_heads * shape_.value_dim,
                                                ActivationDType(), stream_, 3 * extra_stride_);
    DeviceArray<Segment> segments({{slot, 0, rows, first}}, stream_);
    DeviceArray<int32_t> buffer(buffer_, stream_), count(count_, stream_);
    const GatedDeltaNetInput in = {qkv.view(), beta.view(), decay.view(), a_log.data(), dt_bias.data()};
    const SegmentList list = {segments.data(), 1};
    const absl::Status status = prefill ? GatedDeltaNetPrefill(shape_, in, list, state_, o.view(), stream_)
                                        : GatedDeltaNetVerify(shape_, in, list, {buffer.data(), count.data()},
                                                              state_, o.view(), stream_);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(o.GuardsIntact());
    return o.ToHost();
  }

  GatedDeltaNetShape shape_;
  const Stream& stream_;
  int64_t extra_stride_;
  DeviceArray<float> states_, records_;
  GatedDeltaNetState state_;
  std::vector<int32_t> buffer_, count_;
};

}  // namespace dflash
