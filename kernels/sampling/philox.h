// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the noise that is
// keyed by (request seed, absolute position, token id): so a token does not depend on the drafter, the round
// or the batch.
#pragma once
