// What the exit status of dflashd or of a rank tells whoever started it: of a rank, a coordinator or a
// launcher.
#pragma once

namespace dflash {

enum ExitCode : int {
  kExitOk = 0,
  kExitBadFlags = 64,
  kExitBadModel = 65,
  kExitNoDevice = 69,
  kExitCannotListen = 74,
  kExitEngineFailed = 75,
  kExitRankLost = 76,  // another rank's fault; that one's exit status or log says which
  kExitCoordinatorLost = 77,
};

// Another start would meet the same.
constexpr bool IsPermanentExit(int code) {
  return code == kExitBadFlags || code == kExitBadModel || code == kExitNoDevice || code == kExitCannotListen;
}

}  // namespace dflash
