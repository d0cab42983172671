#include "kernels/bench/cuda/energy_meter.h"

#include <dlfcn.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/device/graph.h"

namespace dflash::bench {
namespace {

constexpr char kLibrary[] = "libnvidia-ml.so.1";
constexpr int kMultiprocessorClock = 1;  // NVML_CLOCK_SM
constexpr double kSettleSeconds = 0.5, kCountedSeconds = 1;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

absl::StatusOr<EnergyMeter> EnergyMeter::Open() {
  // Stays open: the program ends soon after the last measurement.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::UnavailableError(dlerror());
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto handle =
      reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
  EnergyMeter meter;
  meter.counter_ = reinterpret_cast<Counter>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
  meter.clock_ = reinterpret_cast<Clock>(dlsym(library, "nvmlDeviceGetClockInfo"));
  if (init == nullptr || handle == nullptr || meter.counter_ == nullptr || meter.clock_ == nullptr) {
    return absl::UnavailableError(absl::StrCat(kLibrary, " lacks what is needed"));
  }
  unsigned long long millijoules = 0;
  if (init() != 0 || handle(0, &meter.device_) != 0 || meter.counter_(meter.device_, &millijoules) != 0) {
    return absl::UnavailableError("the device does not count its energy");
  }
  return meter;
}

double EnergyMeter::Joules() const {
  unsigned long long millijoules = 0;
  if (counter_(device_, &millijoules) != 0) Require(absl::UnavailableError("energy counter"));
  return 1e-3 * static_cast<double>(millijoules);
}

Energy EnergyMeter::Measure(const Stream& stream, const std::function<absl::Status()>& body) const {
  const Graph graph = Value(Graph::Capture(stream, body));
  // Two replays at a time, so that the device never waits for the host.
  const auto replay = [&](double seconds) {
    const double begin = Now();
    int64_t replays = 0;
    for (; Now() - begin < seconds; replays += 2) {
      Require(graph.Launch(stream));
      Require(graph.Launch(stream));
      Require(stream.Synchronize());
    }
    return replays;
  };
  replay(kSettleSeconds);
  const double begin = Now(), joules = Joules();
  const auto replays = static_cast<double>(replay(kCountedSeconds));
  Energy energy = {.milliseconds = 1e3 * (Now() - begin) / replays, .joules = (Joules() - joules) / replays};
  constexpr int kReadings = 8;
  for (int i = 0; i < kReadings; ++i) {
    unsigned megahertz = 0;
    Require(graph.Launch(stream));
    Require(graph.Launch(stream));
    if (clock_(device_, kMultiprocessorClock, &megahertz) != 0) Require(absl::UnavailableError("clock"));
    Require(stream.Synchronize());
    energy.megahertz += static_cast<double>(megahertz) / kReadings;
  }
  return energy;
}

}  // namespace dflash::bench
