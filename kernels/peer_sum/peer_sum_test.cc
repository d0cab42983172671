// Ranks as threads, each with a stream of its own on one device: the bits of sums in the order of ranks
// followed by AddRmsNorm, over many calls of changing size.
#include "kernels/peer_sum/peer_sum.h"

#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kMaxRows = 32;
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

HostMatrix<float> Product(int rank, int call, int64_t rows, int64_t cols) {
  return RandomMatrix<float>(rows, cols, static_cast<uint64_t>(100 * call + rank));
}

// As the activations of this backend.
HostMatrix<float> Rounded(const HostMatrix<float>& values, const Stream& stream) {
  return DeviceMatrix::Activations(values, stream).ToHost();
}

int64_t RowsOf(int call) { return 1 + (call * 7) % kMaxRows; }

struct CallResult {
  HostMatrix<float> residual{0, 0}, y{0, 0};
};

CallResult Expected(int size, int call, const HostMatrix<float>& residual, const HostMatrix<float>& weight,
                    const Stream& stream) {
  const int64_t rows = residual.rows, cols = residual.cols;
  HostMatrix<float> sum = Rounded(Product(0, call, rows, cols), stream);
  for (int rank = 1; rank < size; ++rank) {
    const HostMatrix<float> term = Rounded(Product(rank, call, rows, cols), stream);
    for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += term.values[i];
  }
  const DeviceMatrix h = DeviceMatrix::Activations(residual, stream);
  const DeviceMatrix delta = DeviceMatrix::Activations(sum, stream);  // rounded once
  const DeviceMatrix w = DeviceMatrix::Input(weight, stream);
  const DeviceMatrix y = DeviceMatrix::Output(rows, cols, ActivationDType(), stream);
  EXPECT_TRUE(
      AddRmsNorm(h.view(), delta.view(), w.view(), NormWeight::kOnePlus, kEps, y.view(), stream).ok());
  return {.residual = h.ToHost(), .y = y.ToHost()};
}

// Areas in this process, as every rank reaches them.
class Areas {
 public:
  Areas(int size, int64_t cols) : stream_(Stream::Create({.threads = 1}).value()), cols_(cols) {
    for (int rank = 0; rank < size; ++rank)
      buffers_.push_back(Buffer::Allocate(PeerAreas::Bytes(kMaxRows, cols), stream_).value());
    EXPECT_TRUE(stream_.Synchronize().ok());
  }
  PeerAreas Of(int rank) const {
    PeerAreas areas;
    areas.rank = rank;
    areas.size = static_cast<int>(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) areas.area[i] = buffers_[i].data();
    areas.max_rows = kMaxRows;
    areas.cols = cols_;
    return areas;
  }

 private:
  Stream stream_;
  int64_t cols_;
  std::vector<Buffer> buffers_;
};

class PeerSumTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PeerSumTest, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

TEST_P(PeerSumTest, GivesTheBitsOfSumAndNorm) {
  const int size = GetParam(), calls = 25;
  for (int64_t cols : {40, 256, 1029, 5120}) {
    SCOPED_TRACE(cols);
    const Areas areas(size, cols);
    const HostMatrix<float> weight = RandomMatrix<float>(1, cols, 3);
    std::vector<std::vector<CallResult>> results(static_cast<size_t>(size));
    std::vector<int32_t> late(static_cast<size_t>(size), -1);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const Stream stream = Stream::Create({.threads = 1}).value();
        DeviceArray<int32_t> late_on_device({0}, stream);
        const DeviceMatrix w = DeviceMatrix::Input(weight, stream);
        for (int call = 0; call < calls; ++call) {
          const int64_t rows = RowsOf(call);
          const DeviceMatrix product = DeviceMatrix::Activations(Product(rank, call, rows, cols), stream);
          const DeviceMatrix h = DeviceMatrix::Activations(RandomMatrix<float>(rows, cols, 7), stream);
          const DeviceMatrix y = DeviceMatrix::Output(rows, cols, ActivationDType(), stream, 8);
          const absl::Status status =
              PeerSumAddRmsNorm(areas.Of(rank), product.view(), h.view(), w.view(), NormWeight::kOnePlus,
                                kEps, y.view(), absl::Seconds(10), late_on_device.data(), stream);
          EXPECT_TRUE(status.ok()) << status;
          results[static_cast<size_t>(rank)].push_back({.residual = h.ToHost(), .y = y.ToHost()});
          EXPECT_TRUE(y.GuardsIntact());
        }
        late[static_cast<size_t>(rank)] = late_on_device.ToHost()[0];
      });
    }
    for (std::thread& thread : threads) thread.join();
    const Stream stream = Stream::Create({.threads = 1}).value();
    for (int call = 0; call < calls; ++call) {
      const CallResult expected =
          Expected(size, call, RandomMatrix<float>(RowsOf(call), cols, 7), weight, stream);
      for (const auto& of_rank : results) {
        EXPECT_EQ(of_rank[static_cast<size_t>(call)].residual.values, expected.residual.values) << call;
        EXPECT_EQ(of_rank[static_cast<size_t>(call)].y.values, expected.y.values) << call;
      }
    }
    for (int32_t rank : late) EXPECT_EQ(rank, 0);
  }
}

TEST(PeerSumErrorsTest, NamesTheRankThatDoesNotCome) {
  const Areas areas(2, 64);
  const Stream stream = Stream::Create({.threads = 1}).value();
  DeviceArray<int32_t> late({0}, stream);
  const DeviceMatrix product = DeviceMatrix::Activations(RandomMatrix<float>(3, 64, 1), stream);
  const DeviceMatrix y = DeviceMatrix::Output(3, 64, ActivationDType(), stream);
  const DeviceMatrix w = DeviceMatrix::Input(RandomMatrix<float>(1, 64, 2), stream);
  const DeviceMatrix h = DeviceMatrix::Activations(RandomMatrix<float>(3, 64, 1), stream);
  ASSERT_TRUE(PeerSumAddRmsNorm(areas.Of(0), product.view(), h.view(), w.view(), NormWeight::kOnePlus, kEps,
                                y.view(), absl::Milliseconds(20), late.data(), stream)
                  .ok());
  EXPECT_EQ(late.ToHost()[0], 2);
}

TEST(PeerSumErrorsTest, RefusesWhatDoesNotFit) {
  const Areas areas(1, 64);
  const Stream stream = Stream::Create({.threads = 1}).value();
  DeviceArray<int32_t> late({0}, stream);
  const auto run = [&](int64_t rows, int64_t cols, int32_t* late_pointer) {
    const DeviceMatrix product = DeviceMatrix::Activations(HostMatrix<float>(rows, cols), stream);
    const DeviceMatrix h = DeviceMatrix::Activations(HostMatrix<float>(rows, cols), stream);
    const DeviceMatrix y = DeviceMatrix::Output(rows, cols, ActivationDType(), stream);
    const DeviceMatrix w = DeviceMatrix::Input(HostMatrix<float>(1, cols), stream);
    return PeerSumAddRmsNorm(areas.Of(0), product.view(), h.view(), w.view(), NormWeight::kPlain, kEps,
                             y.view(), absl::Seconds(1), late_pointer, stream)
        .code();
  };
  EXPECT_EQ(run(kMaxRows, 64, late.data()), absl::StatusCode::kOk);
  EXPECT_EQ(run(0, 64, late.data()), absl::StatusCode::kOk);
  EXPECT_EQ(run(kMaxRows + 1, 64, late.data()), kBad);
  EXPECT_EQ(run(1, 65, late.data()), kBad);
  EXPECT_EQ(run(1, 64, nullptr), kBad);
}

}  // namespace
}  // namespace dflash
