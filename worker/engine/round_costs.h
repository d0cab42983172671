// What decode rounds cost, as measured: seconds by the rows of a block and the number of sequences.
#pragma once

#include <cstdint>
#include <map>

namespace dflash {

// Knows only what it was told, so that whoever plans with it is a pure function. Where nothing was measured
// it guesses low rather than high: a guess that makes something look good is tried and corrected, one that
// makes it look bad would stand for ever.
class RoundCosts {
 public:
  // A round of `sequences` sequences that had `block_rows` rows each took so long. Cells follow slowly,
  // upwards more slowly than downwards, and no further than from twice or half of what they say: a machine
  // that does other things too makes single rounds take any time, and what is compared is what undisturbed
  // ones take.
  void Observe(int64_t block_rows, int64_t sequences, double seconds);
  // The same from a round that was not quite one (of empty sequences): the first real one replaces it.
  void Assume(int64_t block_rows, int64_t sequences, double seconds);

  // Expected seconds; 0 when nothing at all is known. Along sequences a line through what was measured for
  // these block rows, along block rows one between the neighbours.
  double Estimate(int64_t block_rows, int64_t sequences) const;

  // Number of the observation that was the last one of this cell; 0: there was none.
  int64_t LastObserved(int64_t block_rows, int64_t sequences) const;

 private:
  struct Cell {
    double seconds = 0;
    int64_t count = 0;  // observations; 0: assumed
    int64_t last = 0;
  };
  using Curve = std::map<int64_t, Cell>;  // by sequences
  static double On(const Curve& curve, int64_t sequences);

  std::map<int64_t, Curve> curves_;  // by block rows; none is empty
  int64_t observations_ = 0;
};

}  // namespace dflash
