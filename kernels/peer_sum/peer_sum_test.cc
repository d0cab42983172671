// Ranks as threads, each with a stream of its own on one device: the bits of sums in the order of ranks
// followed by AddRmsNorm, over many calls of changing size.
#include "kernels/peer_sum/peer_sum.h"

#include <cmath>
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
constexpr int64_t kMaxRows = 64;  // four ranks sum some calls in one step, some in two
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

HostMatrix<float> Product(int rank, int call, int64_t rows, int64_t cols) {
  return RandomMatrix<float>(rows, cols, static_cast<uint64_t>(100 * call + rank));
}

// As the activations of this backend.
HostMatrix<float> Rounded(const HostMatrix<float>& values, const Stream& stream) {
  return DeviceMatrix::Activations(values, stream).ToHost();
}

// Blocks of wide rows fill a GPU sooner.
int64_t RowsOf(int call, int64_t cols) {
  return 1 + (call * 7) % (cols > 2048 ? PeerAreas::kRowsOnSharedDevice / 4 : kMaxRows);
}

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
    const int64_t bytes = PeerAreas::Bytes(size, kMaxRows, cols);
    EXPECT_EQ(PeerAreas::RowsThatFit(size, bytes, cols), kMaxRows);
    EXPECT_EQ(PeerAreas::RowsThatFit(size, bytes - 1, cols), kMaxRows - 1);
    for (int rank = 0; rank < size; ++rank) {
      buffers_.push_back(Buffer::Allocate(bytes, stream_).value());
      EXPECT_TRUE(PreparePeerArea(buffers_.back().data(), bytes, size, stream_).ok());
    }
    EXPECT_TRUE(stream_.Synchronize().ok());
  }
  PeerAreas Of(int rank) const {
    PeerAreas areas;
    areas.rank = rank;
    areas.size = static_cast<int>(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) areas.area[i] = buffers_[i].data();
    areas.max_rows = kMaxRows;
    areas.cols = cols_;
    areas.shares_device = true;
    return areas;
  }

 private:
  Stream stream_;
  int64_t cols_;
  std::vector<Buffer> buffers_;
};

// One rank's inputs and outputs of all calls. Nothing is allocated, freed or launched for the first time
// while a rank waits for another: on a shared device that could wait for the waiting kernel.
struct RankWork {
  RankWork(int rank, int calls, int64_t cols, const HostMatrix<float>& weight)
      : stream(Stream::Create({.threads = 1}).value()),
        late({0}, stream),
        w(DeviceMatrix::Input(weight, stream)) {
    for (int call = 0; call < calls; ++call) {
      const int64_t rows = RowsOf(call, cols);
      products.push_back(DeviceMatrix::Activations(Product(rank, call, rows, cols), stream));
      residuals.push_back(DeviceMatrix::Activations(RandomMatrix<float>(rows, cols, 7), stream));
      ys.push_back(DeviceMatrix::Output(rows, cols, ActivationDType(), stream, 8));
    }
    // The kernel is loaded by a group of one.
    const Areas alone(1, cols);
    const DeviceMatrix h = DeviceMatrix::Activations(RandomMatrix<float>(1, cols, 7), stream);
    const DeviceMatrix y = DeviceMatrix::Output(1, cols, ActivationDType(), stream, 8);
    const DeviceMatrix product = DeviceMatrix::Activations(RandomMatrix<float>(1, cols, 7), stream);
    EXPECT_TRUE(Run(alone.Of(0), product, h, y).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
  }
  absl::Status Run(const PeerAreas& areas, const DeviceMatrix& product, const DeviceMatrix& h,
                   const DeviceMatrix& y) {
    return PeerSumAddRmsNorm(areas, product.view(), h.view(), w.view(), NormWeight::kOnePlus, kEps, y.view(),
                             patience(), stream);
  }
  PeerPatience patience() { return {.timeout = absl::Seconds(10), .late = late.data()}; }

  Stream stream;
  DeviceArray<int32_t> late;
  DeviceMatrix w;
  std::vector<DeviceMatrix> products, residuals, ys;
};

class PeerSumTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PeerSumTest, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

TEST_P(PeerSumTest, GivesTheBitsOfSumAndNorm) {
  const int size = GetParam(), calls = 25;
  for (int64_t cols : {40, 256, 1029, 5120}) {
    SCOPED_TRACE(cols);
    const Areas areas(size, cols);
    const HostMatrix<float> weight = RandomMatrix<float>(1, cols, 3);
    std::vector<std::unique_ptr<RankWork>> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.push_back(std::make_unique<RankWork>(rank, calls, cols, weight));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        RankWork& work = *ranks[static_cast<size_t>(rank)];
        for (size_t call = 0; call < static_cast<size_t>(calls); ++call) {
          const absl::Status status =
              work.Run(areas.Of(rank), work.products[call], work.residuals[call], work.ys[call]);
          EXPECT_TRUE(status.ok()) << status;
        }
        EXPECT_TRUE(work.stream.Synchronize().ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
    const Stream stream = Stream::Create({.threads = 1}).value();
    for (int call = 0; call < calls; ++call) {
      const auto at = static_cast<size_t>(call);
      const CallResult expected =
          Expected(size, call, RandomMatrix<float>(RowsOf(call, cols), cols, 7), weight, stream);
      for (const auto& rank : ranks) {
        ASSERT_EQ(rank->residuals[at].ToHost().values, expected.residual.values) << call;
        ASSERT_EQ(rank->ys[at].ToHost().values, expected.y.values) << call;
        EXPECT_TRUE(rank->ys[at].GuardsIntact());
      }
    }
    for (const auto& rank : ranks) EXPECT_EQ(rank->late.ToHost()[0], 0);
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
  const PeerPatience patience = {.timeout = absl::Milliseconds(20), .late = late.data()};
  const auto sum = [&] {
    return PeerSumAddRmsNorm(areas.Of(0), product.view(), h.view(), w.view(), NormWeight::kOnePlus, kEps,
                             y.view(), patience, stream);
  };
  ASSERT_TRUE(sum().ok());
  EXPECT_EQ(late.ToHost()[0], 2);
  // Nobody waits again, whatever the deadline.
  ASSERT_TRUE(
      PeerSum(areas.Of(0), product.view(), {.timeout = absl::Hours(1), .late = late.data()}, stream).ok());
  ASSERT_TRUE(PeerBroadcast(areas.Of(0), product.view().data, 8, 1,
                            {.timeout = absl::Hours(1), .late = late.data()}, stream)
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
                             y.view(), {.timeout = absl::Seconds(1), .late = late_pointer}, stream)
        .code();
  };
  EXPECT_EQ(run(kMaxRows, 64, late.data()), absl::StatusCode::kOk);
  EXPECT_EQ(run(0, 64, late.data()), absl::StatusCode::kOk);
  EXPECT_EQ(run(kMaxRows + 1, 64, late.data()), kBad);
  EXPECT_EQ(run(1, 65, late.data()), kBad);
  EXPECT_EQ(run(1, 64, nullptr), kBad);
  const PeerPatience patience = {.timeout = absl::Seconds(1), .late = late.data()};
  DeviceArray<uint32_t> words(std::vector<uint32_t>(4), stream);
  EXPECT_EQ(PeerBroadcast(areas.Of(0), words.data(), 16, 0, patience, stream).code(), absl::StatusCode::kOk);
  EXPECT_EQ(PeerBroadcast(areas.Of(0), words.data(), 16, 1, patience, stream).code(), kBad);
  EXPECT_EQ(PeerBroadcast(areas.Of(0), words.data(), 6, 0, patience, stream).code(), kBad);
  EXPECT_EQ(
      PeerGather(areas.Of(0), words.data(), words.data(), PeerAreas::kMaxMessageBytes + 4, patience, stream)
          .code(),
      kBad);
}

// What ranks send may be any bits: also those that mean something to the exchange.
TEST_P(PeerSumTest, CarriesNumbersThatAreNone) {
  const int size = GetParam(), calls = 6;
  const int64_t cols = 256;
  const Areas areas(size, cols);
  std::vector<std::unique_ptr<RankWork>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<RankWork>(rank, calls, cols, RandomMatrix<float>(1, cols, 3)));
    // Elements of all ones, alone and side by side, in one rank's rows.
    RankWork& work = *ranks.back();
    for (size_t call = 0; rank == size - 1 && call < static_cast<size_t>(calls); ++call) {
      const MatrixView rows = work.products[call].view();
      const std::vector<char> ones(static_cast<size_t>(3 * SizeOf(rows.dtype)), char(0xff));
      EXPECT_TRUE(CopyToDevice(static_cast<char*>(rows.data) + 5 * SizeOf(rows.dtype), ones.data(),
                               static_cast<int64_t>(ones.size()), work.stream)
                      .ok());
      EXPECT_TRUE(work.stream.Synchronize().ok());
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankWork& work = *ranks[static_cast<size_t>(rank)];
      for (size_t call = 0; call < static_cast<size_t>(calls); ++call)
        EXPECT_TRUE(work.Run(areas.Of(rank), work.products[call], work.residuals[call], work.ys[call]).ok());
      EXPECT_TRUE(work.stream.Synchronize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->late.ToHost()[0], 0);
    for (size_t call = 0; call < static_cast<size_t>(calls); ++call) {
      const std::vector<float> sums = rank->residuals[call].ToHost().values;
      for (size_t i = 0; i < sums.size(); ++i) ASSERT_EQ(std::isnan(sums[i]), i >= 5 && i < 8) << i;
    }
  }
}

// Messages of changing sizes, from one rank and from all, in every order of who is ahead.
TEST_P(PeerSumTest, MovesMessages) {
  const int size = GetParam(), calls = 60;
  const Areas areas(size, 64);
  struct Work {
    Stream stream = Stream::Create({.threads = 1}).value();
    DeviceArray<int32_t> late{{0}, stream};
    std::vector<DeviceArray<uint32_t>> messages;  // of a call, over all ranks
  };
  const auto words_of = [](int call) { return size_t{1} + static_cast<size_t>(call * call * 7 % 1500); };
  const auto word = [](int rank, int call, size_t i) {
    return static_cast<uint32_t>(rank * 1000003 + call * 7919) + static_cast<uint32_t>(i) * 2654435761u;
  };
  std::vector<std::unique_ptr<Work>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<Work>());
    for (int call = 0; call < calls; ++call) {
      std::vector<uint32_t> words(words_of(call) * static_cast<size_t>(size), 0xffffffffu);
      for (size_t i = 0; i < words_of(call); ++i)
        words[static_cast<size_t>(rank) * words_of(call) + i] = word(rank, call, i);
      ranks.back()->messages.emplace_back(words, ranks.back()->stream);
    }
    EXPECT_TRUE(ranks.back()->stream.Synchronize().ok());
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Work& work = *ranks[static_cast<size_t>(rank)];
      const PeerPatience patience = {.timeout = absl::Seconds(10), .late = work.late.data()};
      for (int call = 0; call < calls; ++call) {
        uint32_t* all = work.messages[static_cast<size_t>(call)].data();
        const size_t words = words_of(call);
        const auto bytes = static_cast<int64_t>(words * sizeof(uint32_t));
        // Three of four are broadcasts, whose root may run ahead of the others.
        const int root = call / 5 % size;
        EXPECT_TRUE((call % 4 == 3 ? PeerGather(areas.Of(rank), all + static_cast<size_t>(rank) * words, all,
                                                bytes, patience, work.stream)
                                   : PeerBroadcast(areas.Of(rank), all + static_cast<size_t>(root) * words,
                                                   bytes, root, patience, work.stream))
                        .ok());
      }
      EXPECT_TRUE(work.stream.Synchronize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    Work& work = *ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(work.late.ToHost()[0], 0);
    for (int call = 0; call < calls; ++call) {
      const std::vector<uint32_t> got = work.messages[static_cast<size_t>(call)].ToHost();
      for (int from = 0; from < size; ++from) {
        const bool sent = call % 4 == 3 || from == rank || from == call / 5 % size;
        for (size_t i = 0; i < words_of(call); ++i) {
          ASSERT_EQ(got[static_cast<size_t>(from) * words_of(call) + i],
                    sent ? word(from, call, i) : 0xffffffffu)
              << "call " << call << " from " << from << " word " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dflash
